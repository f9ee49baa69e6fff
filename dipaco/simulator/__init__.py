"""What would happen: the reference in one process, and the whole network in one process."""
