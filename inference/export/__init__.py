"""Writing what a run has learnt as files that other programs open."""
