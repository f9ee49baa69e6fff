"""How a run begins: planning and preparing it, inviting peers, and the bootstrap node."""
