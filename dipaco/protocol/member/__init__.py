"""What a peer decides: one pure state machine (design 4.11, pure machine)."""
