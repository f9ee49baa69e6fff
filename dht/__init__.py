"""What the swarm publishes and how a peer reads it: manifest, records, view, policy, status."""
