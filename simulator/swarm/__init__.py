"""The network in one process: members under faults, on a virtual clock (design 4.10)."""
