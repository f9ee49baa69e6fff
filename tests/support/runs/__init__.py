"""Runs, plans, models and texts that tests stand on."""
