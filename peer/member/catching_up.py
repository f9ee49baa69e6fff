"""With fixed steps: the boundaries whose steps others took without this peer."""

from __future__ import annotations

from .adoption import Adoption
from .knowledge import Knowledge
from .round_under_way import RoundUnderWay
from .rounds import RoundPosition


class CatchingUp:
    """Boundaries that stay open until the state is here that the others committed there.

    The others wait for this peer at their next boundary, and it cannot meet them before it stands
    on their state. Used by `OuterRounds`.
    """

    def __init__(self) -> None:
        self._ended: dict[str, RoundUnderWay] = {}

    @property
    def levels(self) -> str:
        """The levels that wait, for a line of text."""
        return ", ".join(sorted(self._ended))

    def add(self, ended: RoundUnderWay) -> None:
        """Keep open the boundary of a round that ended because others had committed."""
        self._ended[ended.boundary.level] = ended

    def clear(self) -> None:
        """Forget all of them: their path is left."""
        self._ended.clear()

    def go_on(self, known: Knowledge, adoption: Adoption, position: RoundPosition) -> None:
        """Close the boundaries whose states came; where another state came, meet there again."""
        for level, ended in list(self._ended.items()):
            if adoption.is_fetching(ended.module):
                continue
            del self._ended[level]
            anchor = known.anchors[ended.module]
            stays = anchor.digest == ended.anchor
            if stays or anchor.last_round >= ended.boundary.round_index:
                position.closed(ended.boundary)
            else:
                position.again(ended.boundary)
