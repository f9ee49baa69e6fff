"""Attack 12: files that drip."""

from __future__ import annotations

from itertools import islice
from typing import Any

from dipaco.protocol.chain import Row
from dipaco.protocol.member.actions import Publish

from ..network import DRIPS
from .insider import Insider, Place

# Rows of three rounds stand on so many heads: eight beside the honest one.
HEADS = 3
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
        book, now = self.world.book, action.round_index
        rows: list[Row] = []
        # Of a peer one row counts for each round and head.
        for link in islice(book.back_from(action.parent), HEADS):
            for round_index in (now - 1, now, now + 1):
                place: Place = action.module, round_index, link.name
                if place != (action.module, now, action.parent) and round_index >= 0:
                    rows.append(self.make_row(place, self.world.head(link.name).digest))
        self._dripping.update(row.file for row in rows)
        self.tell(action.module, rows=tuple(rows))

    def serve(self, caller: str, verb: str, content: Any) -> tuple[Any, int]:
        """Answer a call; of a dripping file nothing arrives."""
        if verb == "get" and content in self._dripping:
            return None, DRIPS
        return super().serve(caller, verb, content)
