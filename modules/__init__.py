"""The modular model in pure PyTorch: grid and paths, states and digests, inner and outer steps."""
