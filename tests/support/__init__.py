"""What several tests and benchmarks need: runs, nodes, swarms, faults, a transport in memory."""
