"""Attack 13: rows of revoked identities in a step."""

from __future__ import annotations

from typing import Any

from dipaco.protocol.chain import Row, Step

from .insider import Insider, Place, names


class Revoked(Insider):
    """It tells steps of its own row and of rows of its owner's revoked identities, of more rows
    than there are honest peers, as soon as a round begins."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._peers: tuple[str, ...] = ()

    def start(self) -> None:
        """Begin, with as many revoked identities as there are peers."""
        super().start()
        self._peers = names("v", len(self.world.machines))
        self.world.revoked.update(self._peers)
        self.add_identities(self._peers)

    def on_rows(self, place: Place, rows: dict[str, Row]) -> None:
        """Propose without anybody else."""
        if set(rows) != {self.peer}:
            return
        own = rows[self.peer]
        revoked = [self.make_row(place, own.state, peer=peer) for peer in self._peers]
        self.tell(place[0], steps=(Step.of((own, *revoked)),))
