"""What people would use in place of ours, and ours beside it: a part of `beside.py` each."""
