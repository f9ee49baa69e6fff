"""Programs that are run, and what happens to them."""
