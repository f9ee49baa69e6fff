"""The modular model in pure PyTorch: layouts, paths, adapters, states and digests, outer steps."""
