"""Writing what a run has learned as files that other programs open."""
