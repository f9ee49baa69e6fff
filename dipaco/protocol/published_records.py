"""What a peer publishes about itself, and how it takes back what is no longer true. Pure.

Its own record stands in its bucket. There is another one under each of its modules, and how far its
paths are stands in the buckets of the paths. A real peer writes these records into the DHT, a
simulated one into a simulated directory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .chain.steps import Head
from .coverage import bucket_count, home_bucket
from .grid import Grid
from .records import (
    MAX_ENTRIES,
    PROGRESS_LIFE_S,
    HeldState,
    ModuleRecord,
    PeerRecord,
    ProgressEntry,
    ProgressRecord,
)


@dataclass(frozen=True)
class Publication:
    """A record, where it is to stand, and for how long it counts."""

    kind: str
    """"peers", "modules" or "progress": see `record_keys.KINDS`."""
    item: str
    """A bucket, or a module."""
    record: PeerRecord | ModuleRecord | ProgressRecord | None
    """None if what stands there is withdrawn."""
    life_s: float


class PublishedRecords:
    """The records of one peer, in one life of its process.

    :param life_s: how long a record counts that is not renewed, except one of progress
    """

    def __init__(self, grid: Grid, life_s: float) -> None:
        self._grid, self._life_s = grid, life_s
        self._buckets = bucket_count(grid.path_count)
        self._said: dict[tuple[str, str], PeerRecord | ModuleRecord] = {}
        """The records of this peer that stand in the DHT, by kind and item, without those of
        progress."""

    def publish(
        self, record: PeerRecord, held: Iterable[Head], progress: Iterable[ProgressEntry]
    ) -> Iterator[Publication]:
        """Yield everything that the peer has to say now, including what it said before.

        :param held: the states that it can serve
        :param progress: how far the paths are that were trained here
        """
        said = dict(self._standing(record, {head.module: head for head in held}))
        for (kind, item), found in said.items():
            yield Publication(kind, item, found, self._life_s)
        for place in [place for place in self._said if place not in said]:
            yield self._taken_back(*place)
        self._said |= said
        yield from self._progress(record.peer_id, progress)

    def goodbyes(self) -> Iterator[Publication]:
        """Yield the records of a peer after it has left. Its progress records stay as they are."""
        for (kind, item), record in self._said.items():
            yield Publication(kind, item, record.goodbye(), self._life_s)

    def _standing(
        self, record: PeerRecord, held: dict[str, Head]
    ) -> Iterator[tuple[tuple[str, str], PeerRecord | ModuleRecord]]:
        """Yield what the peer does, in its bucket and under the key of each of its modules."""
        home = home_bucket(record.peer_id, record.path, self._buckets)
        yield ("peers", str(home)), record
        modules = set(held)
        if record.path is not None and record.state in ("joining", "training"):
            modules.update(self._grid.modules_of_path(record.path))
        both = PeerRecord.model_fields.keys() & ModuleRecord.model_fields.keys()
        standing = {name: getattr(record, name) for name in both}
        for module in sorted(modules):
            # These values were validated in the peer's record, or are of a state that is held.
            state = HeldState.of(held[module]) if module in held else None
            found = ModuleRecord.model_construct(module=module, held=state, **standing)
            yield ("modules", module), found

    def _taken_back(self, kind: str, item: str) -> Publication:
        """Return what takes the place of a record that is no longer true.

        A goodbye tells readers that this peer was not lost. A copy that it held is withdrawn.
        """
        record = self._said.pop((kind, item))
        gone: PeerRecord | ModuleRecord | None = None
        if isinstance(record, PeerRecord):
            gone = record.model_copy(update={"state": "leaving"})
        elif record.state in ("joining", "training"):
            gone = record.model_copy(update={"state": "leaving", "held": None})
        return Publication(kind, item, gone, self._life_s)

    def _progress(self, peer: str, entries: Iterable[ProgressEntry]) -> Iterator[Publication]:
        newest = sorted(entries, key=lambda entry: (-entry.last_round, entry.path))[:MAX_ENTRIES]
        by_bucket: dict[int, list[ProgressEntry]] = {}
        for entry in newest:
            bucket = home_bucket(peer, entry.path, self._buckets)
            by_bucket.setdefault(bucket, []).append(entry)
        for bucket, found in sorted(by_bucket.items()):
            record = ProgressRecord.model_construct(peer_id=peer, entries=tuple(found))
            yield Publication("progress", str(bucket), record, PROGRESS_LIFE_S)
