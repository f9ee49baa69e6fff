"""What several benchmarks share, or one is too long without."""
