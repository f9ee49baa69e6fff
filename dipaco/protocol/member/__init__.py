"""What a peer decides, as one pure state machine (design 4.11, pure machine)."""
