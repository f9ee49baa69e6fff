"""The first part of a chain, on which everything stands that a peer knows of a module.

Of its steps only the names, the rounds and the contributors are here: 36 bytes a step and 4 a row.
The steps themselves lie in the index of the store. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection

from .steps import NAME_BYTES


class Trunk:
    """Steps 1 to `len` of a module, the oldest first; there is no branch among them."""

    def __init__(self) -> None:
        self._names = bytearray()
        self._rounds = array("i")
        self._weights = array("q", [0])
        """Rows up to a step, after that many steps: they say whose contributors are where, too."""
        self._contributors = array("i")
        """The number of the peer of each row."""
        self._peers: list[str] = []
        self._number: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._rounds)

    def append(self, name: str, round_index: int, peers: Collection[str]) -> None:
        """Put a step on top, with the peers whose rows are in it."""
        for peer in peers:
            number = self._number.setdefault(peer, len(self._peers))
            if number == len(self._peers):
                self._peers.append(peer)
            self._contributors.append(number)
        self._names += bytes.fromhex(name)
        self._rounds.append(round_index)
        self._weights.append(len(self._contributors))

    def cut(self, version: int) -> None:
        """Take off all steps above a version."""
        del self._names[NAME_BYTES * version :], self._rounds[version:]
        del self._weights[version + 1 :], self._contributors[self._weights[version] :]

    def version(self, name: str) -> int | None:
        """Return the number of the step with a name; None if no step has it."""
        wanted, place = bytes.fromhex(name), -1
        while (place := self._names.find(wanted, place + 1)) >= 0:
            if place % NAME_BYTES == 0:
                return place // NAME_BYTES + 1
        return None

    def name(self, version: int) -> str:
        """Return the name of a step."""
        return self._names[NAME_BYTES * (version - 1) : NAME_BYTES * version].hex()

    def round_index(self, version: int) -> int:
        """Return the round of a step."""
        return self._rounds[version - 1]

    def weight(self, version: int) -> int:
        """Return how many rows there are up to a step."""
        return self._weights[version]

    def peers(self, version: int) -> frozenset[str]:
        """Return the peers whose rows are in a step."""
        numbers = self._contributors[self._weights[version - 1] : self._weights[version]]
        return frozenset(self._peers[number] for number in numbers)
