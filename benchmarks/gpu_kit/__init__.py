"""Everything that is to be measured on a GPU, for a machine that is to be had for ten minutes."""
