"""What a trained swarm is for: evaluating it, generating text, exporting and serving it."""
