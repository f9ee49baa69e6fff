"""What is put in front of a peer's program: a clock that is off, a count of its DHT's records."""

from __future__ import annotations

from pathlib import Path

_CLOCK_OFF = """
import time
right = time.time
time.time = lambda: right() + {seconds!r}
"""
# Processes forked from a peer have it too, so the one with the DHT has.
_COUNTS_RECORDS = """
import os, time
from dipaco.dht.quotas import HeldRecords
store, told_s = HeldRecords.store_subkey, [0.0]
def store_and_tell(held, *record):
    stored = store(held, *record)
    if time.monotonic() - told_s[0] >= 5.0:
        told_s[0] = time.monotonic()
        with open({file!r} + ".new", "w") as file:
            file.write(str(held.record_count))
        os.replace({file!r} + ".new", {file!r})
    return stored
HeldRecords.store_subkey = store_and_tell
"""


def clock_off(seconds: float) -> str:
    """Return Python that puts a peer's clock ahead, as its machine's would be."""
    return _CLOCK_OFF.format(seconds=seconds) if seconds else ""


def counts_records(file: Path) -> str:
    """Return Python that writes into `file` how many records of others and own a node stores."""
    return _COUNTS_RECORDS.format(file=str(file.resolve()))


def records_counted(file: Path) -> float:
    """Return what was written last; not a number before."""
    try:
        return float(file.read_text())
    except OSError:
        return float("nan")
