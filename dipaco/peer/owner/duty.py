"""How long a peer rests after an inner step (`--duty`)."""

from __future__ import annotations


def rest_s(worked_s: float, duty_percent: float) -> float:
    """Return the seconds of rest after which `worked_s` is `duty_percent` of the time."""
    return worked_s * (100.0 / duty_percent - 1.0)
