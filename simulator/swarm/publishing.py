"""What a machine publishes: as `dipaco.peer.publisher` and `dipaco.dht.directory` do it.

What stands there and is hardly older is not written again.
"""

from __future__ import annotations

from typing import Any

from dipaco.dht.chain import Head
from dipaco.dht.coverage import bucket_count, home_bucket
from dipaco.dht.records import (
    PROGRESS_LIFE_S,
    RENEWED_AFTER,
    HeldState,
    ModuleRecord,
    PeerRecord,
    ProgressEntry,
    ProgressRecord,
    record_life_s,
    refresh_period_s,
)

from .world import World

WITHDRAWN_S = 60.0

Standing = dict[str, Any]
"""What records of both kinds say."""


def peer_record(peer: str, standing: Standing) -> PeerRecord:
    """Return what a peer says of itself."""
    return PeerRecord.model_construct(
        peer_id=peer,
        protocol=0,
        software="simulated",
        device="cpu",
        **standing,
        tokens_per_s=1.0,
        addresses=(),
        bytes_up=0,
        bytes_down=0,
    )


def module_record(peer: str, module: str, standing: Standing, held: Head | None) -> ModuleRecord:
    """Return what a peer says under the key of a module."""
    said = None
    if held is not None:
        said = HeldState.model_construct(
            step=held.step,
            version=held.version,
            weight=held.weight,
            round=max(0, held.round_index),
            digest=held.digest,
            bytes=held.bytes,
        )
    return ModuleRecord.model_construct(peer_id=peer, module=module, **standing, held=said)


class Publishing:
    """The records of one peer."""

    def __init__(self, world: World, peer: str) -> None:
        self._world, self._peer = world, peer
        self._buckets = bucket_count(world.grid.path_count)
        self._life_s = record_life_s(refresh_period_s(world.plan.rounds))
        self._said: dict[str, tuple[Any, Any, float]] = {}
        """By key: what the record says, the record, and when it was written."""

    def publish(
        self, standing: Standing, held: dict[str, Head], progress: dict[int, ProgressEntry]
    ) -> None:
        """Write all records that say something new or have grown old."""
        state, path, grid = standing["state"], standing["path"], self._world.grid
        modules = set(held)
        if path is not None and state in ("joining", "training"):
            modules.update(grid.modules_of_path(path))
        said: dict[str, Any] = {
            f"peers/{home_bucket(self._peer, path, self._buckets)}": standing,
            **{f"modules/{m}": (standing, held.get(m)) for m in sorted(modules)},
        }
        for key, content in said.items():
            self._write(key, content, self._life_s)
        for key in [key for key in self._said if key not in said and key[:9] != "progress/"]:
            self._say_goodbye(key)
        entries: dict[str, list[ProgressEntry]] = {}
        for trained, entry in sorted(progress.items()):
            entries.setdefault(f"progress/{trained % self._buckets}", []).append(entry)
        for key, found in entries.items():
            self._write(key, tuple(found), PROGRESS_LIFE_S)

    def _write(self, key: str, content: Any, life_s: float) -> None:
        now_s = self._world.now_s
        before, record, written_s = self._said.get(key, (None, None, 0.0))
        if before != content:
            record = self._record(key, content)
        elif now_s - written_s < RENEWED_AFTER * life_s:
            return
        self._said[key] = content, record, now_s
        self._world.directory.write(self._peer, key, record, life_s)

    def _record(self, key: str, content: Any) -> Any:
        kind, item = key.split("/")
        if kind == "peers":
            return peer_record(self._peer, content)
        if kind == "modules":
            return module_record(self._peer, item, *content)
        return ProgressRecord.model_construct(peer_id=self._peer, entries=content)

    def _say_goodbye(self, key: str) -> None:
        """A reader learns that this peer did not crash; what it only held is withdrawn."""
        _, record, _ = self._said.pop(key)
        gone, life_s = None, WITHDRAWN_S
        if isinstance(record, PeerRecord):
            gone, life_s = record.model_copy(update={"state": "leaving"}), self._life_s
        elif record.state in ("joining", "training"):
            gone = record.model_copy(update={"state": "leaving", "held": None})
            life_s = self._life_s
        self._world.directory.write(self._peer, key, gone, life_s)

    def withdraw(self) -> None:
        """Leave, and say so in every record: how far paths are stays."""
        for key, (_, record, _) in self._said.items():
            if not key.startswith("progress/"):
                self._world.directory.write(self._peer, key, record.goodbye(), self._life_s)
        self._said.clear()
