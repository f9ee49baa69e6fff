"""Who made reduces fail, remembered over rounds: one slow or broken peer stops a module once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

# Who made so many rounds fail lately is not admitted by a peer that leads, for so many rounds.
GREATEST_FAILURES, EXCLUDED_ROUNDS = 2, 4
REMEMBERED = 256


@dataclass
class _Record:
    failures: int = 0
    last_round: int = -1


class Culprits:
    """What a member remembers of failed reduces."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def blame(self, peers: Collection[str], round_index: int) -> None:
        """Note who made a reduce of a round fail."""
        for peer in sorted(peers):
            record = self._records.setdefault(peer, _Record())
            if round_index - record.last_round > EXCLUDED_ROUNDS:
                record.failures = 0
            record.failures += record.last_round != round_index
            record.last_round = round_index
        while len(self._records) > REMEMBERED:
            del self._records[next(iter(self._records))]

    def excluded(self, round_index: int, also: Collection[str]) -> tuple[str, ...]:
        """Return who is not admitted in a round: those lately blamed, and `also`."""
        found = set(also)
        for peer, record in self._records.items():
            is_recent = round_index - record.last_round <= EXCLUDED_ROUNDS
            if is_recent and record.failures >= GREATEST_FAILURES:
                found.add(peer)
        return tuple(sorted(found))
