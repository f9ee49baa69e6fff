"""Insiders for simulated swarms: admitted peers that lie, or that want to steer or to stop the others.

Nobody can sign for another or make bytes that have a given hash, and no member hears of what is not of an admitted
peer; so these are the lies that are left. `docs/results/attacks.md` has the attacks by their numbers.
"""
