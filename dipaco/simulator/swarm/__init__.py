"""The swarm in one process: real decisions, virtual time, and everything that goes wrong."""
