"""Swarms: real ones, simulated ones, and some that are only shown."""
