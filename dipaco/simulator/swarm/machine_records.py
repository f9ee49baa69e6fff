"""What a machine publishes: the records of a real peer, in a simulated directory."""

from __future__ import annotations

from typing import Any

from dipaco.protocol.published_records import Publication, PublishedRecords
from dipaco.protocol.records import RENEWED_AFTER, PeerRecord, record_life_s

# `machine.Machine`, which stands on this file.
Machine = Any
_WITHDRAWN_S = 60.0


class MachineRecords:
    """The records of one life of a machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._world = machine, machine.world
        self._records = PublishedRecords(self._world.grid, record_life_s(machine.refresh_period_s))
        self._written: dict[str, tuple[Any, float]] = {}
        """By key: the record that was written last, and when."""

    def publish(self) -> None:
        """Write all records that say something new or have grown old."""
        machine = self._machine
        held = [head for head in machine.store.held.values() if head.version]
        for found in self._records.publish(self._record(), held, machine.progress.values()):
            record, written_s = self._written.get(f"{found.kind}/{found.item}", (None, 0.0))
            is_old = self._world.now_s - written_s >= RENEWED_AFTER * found.life_s
            if record != found.record or is_old:
                self._write(found)

    def withdraw(self) -> None:
        """Say in every record that this peer leaves."""
        for found in self._records.goodbyes():
            self._write(found)

    def _record(self) -> PeerRecord:
        """Return the peer's own record. It is not validated: simulated peers have short names."""
        machine, schedule, claim = self._machine, self._world.schedule, self._machine.claim
        now_round = machine.round_index
        if not schedule.fixed_steps:
            now_round = max(0, schedule.round_at(machine.believed_s))
        said: dict[str, Any] = {
            "peer_id": machine.peer,
            "state": claim.state,
            "path": claim.path,
            "since_s": claim.since_s,
            "round": now_round,
            "pinned": claim.pinned,
            "reachable": "direct" if machine.link.can_be_called else "outgoing",
            "addresses": (),
        }
        return PeerRecord.model_construct(**said)

    def _write(self, found: Publication) -> None:
        key = f"{found.kind}/{found.item}"
        self._written[key] = found.record, self._world.now_s
        life_s = _WITHDRAWN_S if found.record is None else found.life_s
        self._world.directory.write(self._machine.peer, key, found.record, life_s)
