"""What happens between boundaries: inner optimizers, the loop, the trainer of a path, scoring."""
