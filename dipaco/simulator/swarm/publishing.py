"""What a machine publishes: as `dipaco.peer.presence.own_records` and `dipaco.dht.directory` do it.

What stands there and is hardly older is not written again.
"""

from __future__ import annotations

from typing import Any

from dipaco.protocol.coverage import bucket_count, home_bucket
from dipaco.protocol.records import (
    PROGRESS_LIFE_S,
    RENEWED_AFTER,
    HeldState,
    ModuleRecord,
    PeerRecord,
    ProgressEntry,
    ProgressRecord,
    record_life_s,
)

# `machine.Machine`, which stands on this file.
Machine = Any
WITHDRAWN_S = 60.0


class Publishing:
    """The records of one life of a machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._world, self._peer = machine, machine.world, machine.peer
        self._buckets = bucket_count(self._world.grid.path_count)
        self._life_s = record_life_s(machine.refresh_period_s)
        self._said: dict[str, tuple[Any, Any, float]] = {}
        """By key: what the record says, the record, and when it was written."""

    def publish(self) -> None:
        """Write all records that say something new or have grown old."""
        machine, standing = self._machine, self._standing()
        held = {m: head for m, head in machine.store.held.items() if head.version}
        modules, path = set(held), standing["path"]
        if path is not None and standing["state"] in ("joining", "training"):
            modules.update(self._world.grid.modules_of_path(path))
        said: dict[str, Any] = {
            f"peers/{home_bucket(self._peer, path, self._buckets)}": standing,
            **{f"modules/{m}": (standing, held.get(m)) for m in sorted(modules)},
        }
        for key, content in said.items():
            self._write(key, content, self._life_s)
        for key in [key for key in self._said if key not in said and key[:9] != "progress/"]:
            self._say_goodbye(key)
        entries: dict[str, list[ProgressEntry]] = {}
        for trained, entry in sorted(machine.progress.items()):
            entries.setdefault(f"progress/{trained % self._buckets}", []).append(entry)
        for key, found in entries.items():
            self._write(key, tuple(found), PROGRESS_LIFE_S)

    def _standing(self) -> dict[str, Any]:
        """Return what records of both kinds say."""
        machine, schedule, claim = self._machine, self._world.schedule, self._machine.claim
        now_round = machine.round_index
        if not schedule.fixed_steps:
            now_round = max(0, schedule.round_at(machine.believed_s))
        return {
            "state": claim.state,
            "path": claim.path,
            "since_s": claim.since_s,
            "round": now_round,
            "pinned": claim.pinned,
            "reachable": "direct" if machine.link.can_be_called else "outgoing",
        }

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
        """Return the record of a key: unchecked, as peers have short names here."""
        kind, item = key.split("/")
        if kind == "peers":
            return PeerRecord.model_construct(peer_id=self._peer, addresses=(), **content)
        if kind == "modules":
            standing, head = content
            held = None if head is None else HeldState.of(head)
            return ModuleRecord.model_construct(
                peer_id=self._peer, module=item, held=held, **standing
            )
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
