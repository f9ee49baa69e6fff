"""What a machine publishes: as `dipaco.peer.publisher` and `dipaco.dht.directory` do it.

What stands there and is hardly older is not written again.
"""

from __future__ import annotations

from typing import Any

from dipaco.dht.coverage import bucket_count, home_bucket
from dipaco.dht.records import (
    MAX_ENTRIES,
    PROGRESS_LIFE_S,
    RENEWED_AFTER,
    ClaimState,
    HeldState,
    ModuleRecord,
    PeerRecord,
    ProgressEntry,
    ProgressRecord,
    Reachability,
    record_life_s,
    refresh_period_s,
)
from dipaco.modules.state import StateReference

from .world import Body, World

WITHDRAWN_S = 60.0

Standing = dict[str, Any]
"""What records of both kinds say."""


def make_standing(
    state: ClaimState,
    path: int | None,
    since_s: float,
    round_index: int,
    *,
    pinned: bool,
    reachable: Reachability = "direct",
) -> Standing:
    """Return what a peer says that it does."""
    return {
        "state": state,
        "path": path,
        "since_s": since_s,
        "round": round_index,
        "pinned": pinned,
        "reachable": reachable,
    }


def peer_record(world: World, peer: str, standing: Standing, tokens_per_s: float) -> PeerRecord:
    """Return what a peer says of itself."""
    return PeerRecord.model_construct(
        peer_id=peer,
        protocol=world.plan.protocol_version,
        software="simulated",
        device="cpu",
        **standing,
        tokens_per_s=tokens_per_s,
        addresses=(),
        bytes_up=0,
        bytes_down=0,
    )


def module_record(
    peer: str, module: str, standing: Standing, held: StateReference | None
) -> ModuleRecord:
    """Return what a peer says under the key of a module."""
    said = None
    if held is not None:
        said = HeldState.model_construct(
            version=held.version,
            digest=held.digest,
            tokens=held.tokens,
            round=max(0, held.last_round),
            bytes=held.bytes,
        )
    return ModuleRecord.model_construct(peer_id=peer, module=module, **standing, held=said)


class Publishing:
    """Of one life of one machine."""

    def __init__(self, machine: Body) -> None:
        self._machine = machine
        self._world = machine.world
        self._buckets = bucket_count(machine.world.grid.path_count)
        self._said: dict[str, tuple[Any, Any, float]] = {}
        """By key: what the record says, the record, and when it was written."""

    @property
    def _standing(self) -> Standing:
        machine, claim, plan = self._machine, self._machine.claim, self._world.plan
        now_round = machine.round_index
        if not plan.rounds.inner_steps:
            now_round = max(0, plan.rounds.round_at(machine.believed_s - plan.start_s))
        link = machine.link
        otherwise: Reachability = "relayed" if link.is_relayed else "outgoing"
        reachable: Reachability = "direct" if link.can_be_called else otherwise
        return make_standing(
            claim.state,
            claim.path,
            claim.since_s,
            now_round,
            pinned=claim.pinned,
            reachable=reachable,
        )

    def publish(self) -> None:
        """Write all records that say something new or have grown old."""
        machine, world = self._machine, self._world
        life_s = record_life_s(refresh_period_s(world.plan.rounds))
        standing = self._standing
        state, path = machine.claim.state, machine.claim.path
        keys = {f"peers/{home_bucket(machine.peer, path, self._buckets)}": standing}
        held = {m: s.reference for m, s in machine.served.items() if s.reference.version}
        modules = set(held)
        if path is not None and state in ("joining", "training"):
            modules.update(world.grid.modules_of_path(path))
        said: dict[str, Any] = {f"modules/{m}": (standing, held.get(m)) for m in sorted(modules)}
        for key, content in {**keys, **said}.items():
            self._write(key, content, life_s)
        gone = [key for key in self._said if key not in keys and key not in said]
        for key in gone:
            if not key.startswith("progress/"):
                self._say_goodbye(key, life_s)
        self._publish_progress()

    def _write(self, key: str, content: Any, life_s: float) -> None:
        now_s = self._world.now_s
        before, record, written_s = self._said.get(key, (None, None, 0.0))
        if before != content:
            record = self._record(key, content)
        elif now_s - written_s < RENEWED_AFTER * life_s:
            return
        self._said[key] = content, record, now_s
        self._world.directory.write(self._machine.peer, key, record, life_s)

    def _record(self, key: str, content: Any) -> Any:
        machine = self._machine
        kind, item = key.split("/")
        if kind == "peers":
            rate = self._world.tokens_per_step / machine.step_s
            return peer_record(self._world, machine.peer, content, rate)
        if kind == "modules":
            return module_record(machine.peer, item, *content)
        return ProgressRecord.model_construct(peer_id=machine.peer, entries=content)

    def _say_goodbye(self, key: str, life_s: float) -> None:
        """Who looks there learns that this peer did not crash; what it only held is withdrawn."""
        _, record, _ = self._said.pop(key)
        directory, me = self._world.directory, self._machine.peer
        if isinstance(record, PeerRecord):
            directory.write(me, key, record.model_copy(update={"state": "leaving"}), life_s)
        elif record.state in ("joining", "training"):
            goodbye = record.model_copy(update={"state": "leaving", "held": None})
            directory.write(me, key, goodbye, life_s)
        else:
            directory.write(me, key, None, WITHDRAWN_S)

    def _publish_progress(self) -> None:
        entries = sorted(self._machine.progress.values(), key=lambda entry: -entry.last_round)
        by_bucket: dict[int, list[ProgressEntry]] = {}
        for entry in entries[:MAX_ENTRIES]:
            bucket = home_bucket(self._machine.peer, entry.path, self._buckets)
            by_bucket.setdefault(bucket, []).append(entry)
        for bucket, found in sorted(by_bucket.items()):
            self._write(f"progress/{bucket}", tuple(found), PROGRESS_LIFE_S)

    def withdraw(self) -> None:
        """Leave, and say so in every record: how far paths are stays."""
        life_s = record_life_s(refresh_period_s(self._world.plan.rounds))
        for key, (_, record, _) in self._said.items():
            if not key.startswith("progress/"):
                self._world.directory.write(self._machine.peer, key, record.goodbye(), life_s)
        self._said.clear()
