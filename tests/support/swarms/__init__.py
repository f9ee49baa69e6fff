"""Swarms: real ones, simulated ones, and such as are only shown."""
