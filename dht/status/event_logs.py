"""What a swarm was like, told from the event logs of its peers: for swarms that are gone.

Each log is what `--log-json` of one node wrote. The events of all are played in the order of their
times. At every moment the records that the peers would have published are made again, and the
status of that moment from those, by the same code that shows a swarm that runs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dipaco.dht.manifest import SignedManifest
from dipaco.dht.records import (
    Claim,
    Holding,
    PeerRecord,
    ProgressEntry,
    ProgressRecord,
    clean_text,
    record_life_s,
    refresh_period_s,
)
from dipaco.dht.view import SwarmView, build_view
from dipaco.modules.errors import RunSelectionError
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan

from .log_files import HOMELESS, MALFORMED, Event, Reading, Runs, Unread, events_of_file, log_files
from .summary import status_of

MOST_MOMENTS = 2000
# A peer that trains and says nothing for so long, or for so many of its steps, is gone.
SILENT_S = 20.0
SILENT_STEPS = 5
# Of each module, the newest of what peers have held is remembered.
MOST_STATES_OF_A_MODULE = 64


Update = Callable[[float, float], None]
"""Gets the bytes that were read, and those of all logs."""


def _untold(done: float, total: float) -> None:
    """Tell nobody."""


@dataclass
class _Teller:
    """One peer, as its log has told so far."""

    record: PeerRecord
    last_s: float
    step_s: float = 0.0
    held: dict[str, Holding] = field(default_factory=dict)
    begun: dict[tuple[str, int], int] = field(default_factory=dict)
    """Own tokens in an outer round, by module and round."""

    def is_there(self, now_s: float, life_s: float, round_s: float) -> bool:
        if self.record.state == "leaving":
            return False
        if self.record.state in ("serving", "paused"):
            # These have nothing to tell.
            return True
        patience_s = max(life_s, SILENT_S, SILENT_STEPS * self.step_s)
        if self.record.waits_for or self.record.state == "joining":
            patience_s += round_s
        return now_s - self.last_s <= patience_s

    def hold(self, state: Holding) -> None:
        """Have a copy of a state that another has."""
        self.held[state.module] = state.model_copy(update={"peer_id": self.record.peer_id})

    def change(self, **values: Any) -> None:
        """Take new values over; raises ValueError for those that no record can have."""
        self.record = PeerRecord.model_validate({**self.record.model_dump(), **values})


class _States:
    """The newest states of every module that peers have told of, by digest and by version."""

    def __init__(self) -> None:
        self._of_module: dict[str, dict[str, Holding]] = {}
        self._module_of: dict[str, str] = {}

    def add(self, state: Holding) -> None:
        """Remember a state, and forget the one of its module that was told of the longest ago."""
        known = self._of_module.setdefault(state.module, {})
        known.pop(state.digest, None)
        known[state.digest] = state
        self._module_of[state.digest] = state.module
        if len(known) > MOST_STATES_OF_A_MODULE:
            oldest = next(iter(known))
            del known[oldest]
            self._module_of.pop(oldest, None)

    def get(self, digest: Any) -> Holding | None:
        """Return the state of a digest, if it is remembered."""
        module = self._module_of.get(digest)
        return None if module is None else self._of_module[module].get(digest)

    def newest(self, module: Any, version: Any) -> Holding | None:
        """Return the state of a version that was told of last."""
        states = reversed(self._of_module.get(module, {}).values())
        return next((state for state in states if state.version == version), None)


class Replayed:
    """A run as its logs tell it, up to the event that was taken last."""

    def __init__(self, plan: RunPlan, operator: str) -> None:
        self.manifest = SignedManifest(plan, operator, b"")
        self.grid = Grid(plan.model, plan.grid, plan.rounds.level_offsets)
        self._tellers: dict[str, _Teller] = {}
        self._states = _States()
        self._progress: dict[int, ProgressEntry] = {}

    def take(self, peer: str, event: Event) -> None:
        """Take the next event of a peer. Raises one of `MALFORMED` for what no peer tells."""
        kind, now_s = event["event"], float(event["time_s"])
        if kind == "run":
            record = PeerRecord(
                peer_id=peer,
                state="joining",
                path=None,
                round=0,
                reachable="unknown",
                protocol=self.manifest.plan.protocol_version,
                software=event["software"],
                device=event["device"],
                name=event["name"],
                tokens_per_s=0.0,
                addresses=(),
                bytes_up=0,
                bytes_down=0,
            )
            self._tellers[peer] = _Teller(record, now_s)
            return
        teller = self._tellers[peer]
        # A clock that was set back makes nobody silent.
        now_s = max(now_s, teller.last_s)
        known = getattr(self, f"_take_{kind}", None)
        if known is not None:
            known(teller, event, now_s)
        teller.last_s = now_s
        if kind == "waiting":
            teller.change(waits_for=clean_text(event["what"]))
        elif teller.record.waits_for and kind in ("inner", "paused", "leaving"):
            teller.change(waits_for="")

    def view(self, now_s: float) -> SwarmView:
        """Return the swarm as a reader of its records would have seen it."""
        plan = self.manifest.plan
        life_s = record_life_s(refresh_period_s(plan.rounds))
        there = [
            teller
            for teller in self._tellers.values()
            if teller.is_there(now_s, life_s, plan.rounds.duration_s)
        ]
        records = [teller.record for teller in there]
        held: dict[str, list[Holding]] = {module: [] for module in self.grid.modules()}
        for teller in there:
            for module, holding in teller.held.items():
                held[module].append(holding)
        claims = [record.claim for record in records]
        return build_view(
            now_s=now_s,
            plan=plan,
            grid=self.grid,
            claims=[claim for claim in claims if isinstance(claim, Claim)],
            peers=records,
            holdings=held,
            progress=[
                ProgressRecord(peer_id=peer, entries=(entry,))
                for peer in list(self._tellers)[:1]
                for entry in self._progress.values()
            ],
        )

    def status(self, now_s: float) -> dict[str, Any]:
        """Return the status at a moment."""
        return status_of(self.view(now_s), self.manifest, self.grid)

    # -- events

    def _take_claimed(self, teller: _Teller, event: Event, now_s: float) -> None:
        teller.change(state="joining", path=self._path(event["path"]), since_s=now_s)

    def _take_training(self, teller: _Teller, event: Event, now_s: float) -> None:
        path = self._path(event["path"])
        stays = teller.record.path == path and teller.record.state == "training"
        since_s = teller.record.since_s if stays else now_s
        teller.change(state="training", path=path, since_s=since_s, round=event["round"])

    def _take_inner(self, teller: _Teller, event: Event, now_s: float) -> None:
        teller.step_s = float(event["seconds"])
        teller.change(tokens_per_s=float(event["tokens_per_s"]))

    def _take_reachable(self, teller: _Teller, event: Event, now_s: float) -> None:
        teller.change(reachable=event["how"], addresses=tuple(event["addresses"][:4]))

    def _take_outer_round(self, teller: _Teller, event: Event, now_s: float) -> None:
        teller.begun[event["module"], event["round"]] = event["tokens"]
        for old in list(teller.begun)[:-256]:
            del teller.begun[old]

    def _take_commit(self, teller: _Teller, event: Event, now_s: float) -> None:
        holding = self._hold(teller, event, event["round"])
        path = teller.record.path
        own = teller.begun.pop((holding.module, holding.round), 0)
        if path is None or path not in event["paths"]:
            return
        # Each level counts the same work; the first module of a path stands for all.
        is_first = self.grid.modules_of_path(path)[0] == holding.module
        self._advance(path, holding.round, own if is_first else 0)

    def _take_adopt(self, teller: _Teller, event: Event, now_s: float) -> None:
        known = self._states.get(event["digest"])
        round_index = known.round if known else max(0, event["version"] - 1, teller.record.round)
        self._hold(teller, event, round_index)

    def _take_kept(self, teller: _Teller, event: Event, now_s: float) -> None:
        known = self._states.newest(event["module"], event["version"])
        if known is not None:
            teller.hold(known)

    def _take_round(self, teller: _Teller, event: Event, now_s: float) -> None:
        teller.change(round=event["round"] + 1)
        for module, digest in event["digests"].items():
            known = self._states.get(digest)
            if known is not None and known.module == module:
                teller.hold(known)

    def _take_validation(self, teller: _Teller, event: Event, now_s: float) -> None:
        path, tokens = self._path(event["path"]), int(event["tokens"])
        self._advance(path, event["round"], 0)
        self._progress[path] = ProgressEntry.model_validate(
            {
                **self._progress[path].model_dump(),
                "validation_nll": float(event["loss"]) * tokens,
                "validation_tokens": tokens,
            }
        )

    def _take_move(self, teller: _Teller, event: Event, now_s: float) -> None:
        teller.change(state="joining", path=self._path(event["to_path"]), since_s=now_s)

    def _take_paused(self, teller: _Teller, event: Event, now_s: float) -> None:
        teller.change(state="paused", path=None, tokens_per_s=0.0)

    def _take_serving(self, teller: _Teller, event: Event, now_s: float) -> None:
        teller.change(state="serving", path=None, addresses=tuple(event["addresses"][:4]))

    def _take_leaving(self, teller: _Teller, event: Event, now_s: float) -> None:
        teller.change(state="leaving")

    def _path(self, path: Any) -> int:
        if not isinstance(path, int) or not 0 <= path < self.grid.path_count:
            raise ValueError(f"there is no path {path!r}")
        return path

    def _hold(self, teller: _Teller, event: Event, round_index: int) -> Holding:
        if not self.grid.has_module(event["module"]):
            raise ValueError(f"there is no module {event['module']!r}")
        holding = Holding(
            peer_id=teller.record.peer_id,
            module=event["module"],
            version=event["version"],
            digest=event["digest"],
            tokens=event["tokens"],
            round=round_index,
            bytes=0,
        )
        teller.held[holding.module] = holding
        self._states.add(holding)
        return holding

    def _advance(self, path: int, round_index: int, tokens: int) -> None:
        known = self._progress.get(path)
        entry = {
            "path": path,
            "last_round": max(round_index, known.last_round if known else 0),
            "tokens": tokens + (known.tokens if known else 0),
            "validation_nll": known.validation_nll if known else 0.0,
            "validation_tokens": known.validation_tokens if known else 0,
            "train_loss": 0.0,
        }
        self._progress[path] = ProgressEntry.model_validate(entry)


@dataclass(frozen=True)
class EventLogs:
    """The logs of the nodes of one run."""

    files: tuple[Path, ...]
    plan: RunPlan
    operator: str
    begin_s: float
    end_s: float
    unread: Mapping[Path, Unread]

    @classmethod
    def open(cls, places: Sequence[Path], run: str | None, update: Update = _untold) -> EventLogs:
        """Find the logs and the run that they are of; reads them once.

        Raises StorageError and RunSelectionError, each with what to do.
        """
        files = log_files(places)
        reading = Reading(files, update)
        runs: Runs = {}
        spans: dict[str, list[float]] = {}
        unread = {file: Unread(file) for file in files}
        for file in files:
            for run_id, _, event in events_of_file(file, unread[file], runs, reading):
                span = spans.setdefault(run_id, [math.inf, -math.inf])
                span[0], span[1] = (
                    min(span[0], event["time_s"]),
                    max(span[1], event["time_s"]),
                )
        chosen = [i for i, (plan, _) in runs.items() if run is None or _is_named(run, i, plan)]
        if len(chosen) != 1:
            listed = ", ".join(f"{run_id} ({plan.name})" for run_id, (plan, _) in runs.items())
            what = f"the logs are of these runs: {listed}; choose one with --run"
            if not runs:
                homeless = sum(lines.reason == HOMELESS for lines in unread.values())
                what = (
                    f"{homeless} of {len(files)} files hold events, but none says which run they "
                    "are of, as versions before the 'run' event wrote them; such logs cannot be "
                    "replayed"
                    if homeless
                    else f"none of {len(files)} files says which run it is of; event logs are what "
                    "--log-json writes"
                )
            raise RunSelectionError(f"--replay: {what}")
        plan, operator = runs[chosen[0]]
        begin_s, end_s = spans[chosen[0]]
        return cls(tuple(files), plan, operator, begin_s, end_s, unread)

    def last_status(self, update: Update = _untold) -> dict[str, Any]:
        """Return the status of the last moment."""
        *_, status = self.statuses(2, update)
        return status

    def statuses(
        self, most: int = MOST_MOMENTS, update: Update = _untold
    ) -> Iterator[dict[str, Any]]:
        """Yield the status of one moment after the other, evenly through the time of the logs.

        Reads them once more; raises StorageError when that fails.
        """
        swarm = Replayed(self.plan, self.operator)
        span_s = self.end_s - self.begin_s
        step_s = max(1.0, min(60.0, self.plan.rounds.duration_s / 8), span_s / max(1, most - 1))
        moments = [self.begin_s + step_s * n for n in range(math.ceil(span_s / step_s))]
        reading = Reading(self.files, update)
        logs = [self._own_events(index, file, reading) for index, file in enumerate(self.files)]
        following = iter([*moments[1:], self.end_s])
        next_s = next(following)
        for time_s, index, peer, line, event in heapq.merge(*logs, key=lambda e: e[:2]):
            while time_s > next_s:
                yield swarm.status(next_s)
                next_s = next(following)
            try:
                swarm.take(peer, event)
            except MALFORMED as error:
                self.unread[self.files[index]].add(line, error)
        yield swarm.status(next_s)
        for next_s in following:
            yield swarm.status(next_s)

    def _own_events(
        self, index: int, file: Path, reading: Reading
    ) -> Iterator[tuple[float, int, str, int, Event]]:
        latest_s = -math.inf
        peer, own_run_id = "", self.plan.run_id
        for run_id, line, event in events_of_file(file, None, {}, reading):
            if event["event"] == "run":
                peer = str(event["peer_id"])
            # A clock that was set back must not bring events of a file out of their order.
            latest_s = max(latest_s, event["time_s"])
            if run_id == own_run_id:
                yield min(latest_s, self.end_s), index, peer, line, event


def _is_named(run: str, run_id: str, plan: RunPlan) -> bool:
    return run == plan.name or run_id.startswith(run)
