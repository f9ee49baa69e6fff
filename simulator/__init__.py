"""The same algorithm in one process: the reference of the tests and a tool for research."""
