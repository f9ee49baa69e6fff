"""What is signed, and decided: identity, admission, manifest, rows and chains, records, policy."""
