"""What a trained swarm is for: evaluating it and generating text."""
