"""`dipaco-status`: what a swarm is doing, and what is wrong with it, for people."""
