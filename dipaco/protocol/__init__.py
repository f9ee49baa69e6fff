"""What is signed, and decided: plan, identity, admission, rows and chains, records, policy."""
