"""What several tests and benchmarks need: runs, nodes, swarms, faults, an all-reduce in memory."""
