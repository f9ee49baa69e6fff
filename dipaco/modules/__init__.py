"""The modular model in pure PyTorch: plan, grid, paths, states and digests, outer steps."""
