"""Attack 12: files that drip."""

from __future__ import annotations

from typing import Any

from dipaco.protocol.chain import Row
from dipaco.protocol.member.actions import Publish
from dipaco.simulator.swarm.network import DRIPS

from .insider import Insider, Place

FILES = 8
# Of a real peer's exchange: downloads at once, and from one source.
AT_ONCE, FROM_ONE = 8, 2


class Drips(Insider):
    """Just before every boundary it tells eight rows whose files it begins to send, and never
    ends, so that downloads of honest files wait for them."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.world.downloads_at_once = AT_ONCE, FROM_ONE
        self._dripping: set[str] = set()

    def on_boundary(self, action: Publish) -> None:
        """Tell of the files."""
        head = self.store.held[action.module]
        rows: list[Row] = []
        for number in range(FILES):
            # Of a peer one row counts for each round and head.
            place: Place = action.module, action.round_index - number % 4, action.parent
            peer = f"d{number // 4}"
            rows.append(self.make_row(place, head.digest, peer=peer))
            self._dripping.add(rows[-1].file)
        self.add_identities({row.peer for row in rows})
        self.tell(action.module, rows=tuple(rows))

    def serve(self, caller: str, verb: str, content: Any) -> tuple[Any, int]:
        """Answer a call; of a dripping file nothing arrives."""
        if verb == "get" and content in self._dripping:
            return None, DRIPS
        return super().serve(caller, verb, content)
