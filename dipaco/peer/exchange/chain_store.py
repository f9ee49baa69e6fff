"""The chains that this peer serves to others, kept over restarts.

The member decides which chain is served, and hands over its steps. They are in the index of the
store, from which old ones are read page by page; only steps that the disk has not taken yet are in
memory. Recent rows are served too, from memory alone.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from dipaco.base.errors import StorageError
from dipaco.base.index import Index
from dipaco.base.waits import BriefLock
from dipaco.protocol.chain.round_rows import RoundRows
from dipaco.protocol.chain.steps import (
    Head,
    Row,
    Step,
    genesis_name,
    pack_row,
    unpack_step,
)
from dipaco.protocol.chain.trunk import Trunk
from dipaco.protocol.record_errors import RecordError

# Most rows in the steps of an answer, which has at least one step, and most rows beside them.
ANSWERED_STEP_ROWS, ANSWERED_ROWS, ANSWERED_STEPS = 320, 96, 256
# Steps that are read from the disk at once.
_PAGE_STEPS = 64
# Names of steps that are read from the disk at once.
PAGE_NAMES = 1024
# Admissions beside those of peers in the chains and rows that are told.
MAX_KEPT_ADMISSIONS = 50_000
# Steps of a module that are kept although no served chain has them any more.
KEPT_SIDE_STEPS = 64


@dataclass(frozen=True)
class Answer:
    """A peer's answer to a request for a module."""

    steps: tuple[Step, ...] = ()
    rows: tuple[Row, ...] = ()
    has_more: bool = False
    held: Head | None = None


@dataclass
class _Module:
    """The part of one module's chain that is in memory. The chain is the first `safe` steps that
    the index tells, and behind them the `unsafe` ones."""

    name: str
    told: str
    """Name of the step at the end of the chain."""
    safe: int = 0
    unsafe: tuple[Step, ...] = ()
    """Oldest first; some only while they are written, or the disk is full."""
    is_written: bool = True
    """The index tells this chain, and no longer one."""
    held: Head | None = None
    rows: RoundRows = field(default_factory=RoundRows)


class ChainStore:
    """Chains and states that are told, recent rows and admissions of a run's modules. Thread-safe.

    What others ask waits for no other thread's writing. `serve` waits for the disk.

    :param index: where chains and admissions lie
    :param owner: whose chains they are: several peers of one machine can have one index
    :param has_contributed: tells which peers' rows have room before those of others
    :param on_served: called with the last step of the served chain and the admissions of its peers,
        each time that it changes
    """

    def __init__(
        self,
        run_id: str,
        modules: Iterable[str],
        index: Index,
        owner: str = "",
        *,
        has_contributed: Callable[[str], bool] = lambda peer: False,
        on_served: Callable[[Step, Mapping[str, bytes]], None] = lambda step, admissions: None,
    ) -> None:
        """Look up what an earlier process served. Raises `StorageError`."""
        self._index, self._owner = index, owner
        self._has_contributed, self._on_served = has_contributed, on_served
        self._lock = BriefLock()
        """Guards what is in memory. It is never held during a wait for the disk."""
        self._serving = threading.Lock()
        """Held while a chain is written, so that chains are written one at a time."""
        self._genesis = {name: genesis_name(run_id, name) for name in modules}
        self._modules = {name: _Module(name, told) for name, told in self._genesis.items()}
        kept = index.read("SELECT peer, admission FROM admissions")
        self._admissions: dict[str, bytes] = dict(kept)
        self._in_chains = set(self._admissions)
        """Peers whose admissions are in the index."""
        self._enough_admissions = MAX_KEPT_ADMISSIONS
        """When there are more, some are forgotten."""
        for module in self._modules.values():
            self._take_up(module)

    def _take_up(self, module: _Module) -> None:
        last = self._index.read(
            "SELECT told.version, name FROM told JOIN steps ON steps.id = step"
            " WHERE owner = ? AND told.module = ? ORDER BY told.version DESC LIMIT 1",
            (self._owner, module.name),
        )
        for version, name in last:
            module.safe, module.told = version, name.hex()

    @property
    def modules(self) -> tuple[str, ...]:
        """All modules of the run."""
        return tuple(self._modules)

    # -- what is learned

    def note_rows(self, rows: Iterable[Row]) -> None:
        """Take in checked rows. Of a peer's rows of one round and parent the first counts."""
        with self._lock:
            for row in rows:
                kept = self._modules.get(row.module)
                if kept is not None:
                    kept.rows.note(row, self._has_contributed)

    def note_admissions(self, admissions: Mapping[str, bytes]) -> None:
        """Keep checked admissions of peers whose rows are here: they travel with the rows."""
        with self._lock:
            self._admissions.update(admissions)
            if len(self._admissions) > self._enough_admissions:
                self._forget_admissions()

    def _forget_admissions(self) -> None:
        """Forget the older half of the admissions whose peers have nothing served here, so
        inventions of others do not displace those of the chain."""
        told = set(self._in_chains)
        for kept in self._modules.values():
            told.update(row.peer for row in kept.rows.all())
            told.update(*(step.peers for step in kept.unsafe))
        others = [peer for peer in self._admissions if peer not in told]
        for peer in others[: -(-len(others) // 2)]:
            del self._admissions[peer]
        self._enough_admissions = MAX_KEPT_ADMISSIONS + len(told)

    def admissions_of(self, peers: Iterable[str]) -> dict[str, bytes]:
        """Return the admissions of those peers whose admission is known."""
        with self._lock:
            return {peer: self._admissions[peer] for peer in peers if peer in self._admissions}

    # -- what is told

    def served(self, module: str) -> tuple[str, Head | None]:
        """Return what `serve` was given last, the step even if an earlier process was given it; the
        genesis if there was none."""
        with self._lock:
            kept = self._modules[module]
            return kept.told, kept.held

    def hold(self, module: str, head: Head | None) -> None:
        """Say from now on that this state is held of the chain that is told; None for no state."""
        with self._lock:
            self._modules[module].held = head

    def serve(
        self, module: str, step: str, steps: Sequence[Step] = (), head: Head | None = None
    ) -> None:
        """Answer with the chain to `step` from now on, in place of another.

        `steps`, oldest first, are those of the chain that were not served before. `head` is the
        state that is held of it, None for a mailbox, which has none. Raises KeyError for steps that
        stand on nothing known here, and `StorageError` when the disk has not taken the chain: then
        it is served from memory, and written with the next one.
        """
        kept = self._modules[module]
        if any(new.module != module for new in steps):
            raise KeyError(step)
        with self._serving:
            safe, unsafe = self._path_to(kept, step, steps)
            newest = unsafe[-1] if unsafe else self._stored(step)
            with self._lock:
                is_new = kept.told != step
                kept.told, kept.held = step, head
                kept.safe, kept.unsafe = safe, unsafe
                kept.is_written = kept.is_written and not is_new
                if newest is not None:
                    kept.rows.forget_before(newest.round_index)
            if is_new and newest is not None:
                self._on_served(newest, self.admissions_of(newest.peers))
            if not kept.is_written:
                self._write(kept)

    def _path_to(
        self, kept: _Module, step: str, steps: Sequence[Step]
    ) -> tuple[int, tuple[Step, ...]]:
        """Return the chain to a step: how many of the steps that are told now are in it, and those
        behind them. Raises KeyError."""
        known = {found.name: found for found in (*kept.unsafe, *steps)}
        path: list[Step] = []
        name = step
        while (place := self._place(kept, [name])) is None:
            found = known.get(name) or self._stored(name)
            if found is None or found.module != kept.name:
                raise KeyError(name)
            path.append(found)
            name = found.parent
        return place, tuple(reversed(path))

    def _place(self, kept: _Module, names: Sequence[str]) -> int | None:
        """Return the place of the latest of these steps on the safe part of a chain; 0 for the
        genesis, None if none is there."""
        if kept.told in names and not kept.unsafe:
            return kept.safe  # This is the usual case, in which the disk need not be read.
        marks = ", ".join("?" * len(names))
        [[place]] = self._index.read(
            f"SELECT MAX(steps.version) FROM steps JOIN told ON told.step = steps.id"
            f" AND told.version = steps.version AND told.module = steps.module"
            f" WHERE owner = ? AND steps.module = ? AND steps.version <= ? AND name IN ({marks})",
            (self._owner, kept.name, kept.safe, *map(bytes.fromhex, names)),
        )
        if place is None and self._genesis[kept.name] in names:
            return 0
        return None if place is None else int(place)

    def _stored(self, name: str) -> Step | None:
        """Return a step that is in the index."""
        found = self._index.read(
            f"SELECT {_STEP} FROM steps WHERE name = ?", (bytes.fromhex(name),)
        )
        return self._unpacked(found[0]) if found else None

    def _unpacked(self, packed: tuple[Any, ...]) -> Step:
        """Return a step that is in the index. Raises `StorageError` for what cannot have been
        written so."""
        name, *place, rows = packed
        try:
            step = unpack_step([[*place, *row] for row in msgpack.unpackb(rows, raw=False)])
        except (RecordError, ValueError, TypeError):
            raise self._damaged(packed[1]) from None
        if step.name != name.hex():
            raise self._damaged(packed[1])
        return step

    def _damaged(self, module: str) -> StorageError:
        """Have the index made anew, and return the error that says so."""
        self._index.condemn()
        return StorageError(f"the chain of {module} is damaged on this disk; start again")

    def _write(self, kept: _Module) -> None:
        """Write to the index what is served. Raises `StorageError`."""
        unsafe, version = kept.unsafe, kept.safe
        peers = set[str]().union(*(step.peers for step in unsafe)) - self._in_chains
        admissions = self.admissions_of(peers)
        with self._index.transaction() as writer:
            chain = (self._owner, kept.name)
            left = writer.execute(
                "DELETE FROM told WHERE owner = ? AND module = ? AND version > ?", (*chain, version)
            )
            weight = writer.execute(
                "SELECT weight FROM told JOIN steps ON steps.id = step"
                " WHERE owner = ? AND told.module = ? AND told.version = ?",
                (*chain, version),
            ).fetchall()
            total = weight[0][0] if weight else 0
            for step in unsafe:
                version, total = version + 1, total + len(step.rows)
                _insert(writer, step, version, total)
                writer.execute(
                    "INSERT INTO told SELECT ?, ?, ?, id FROM steps WHERE name = ?",
                    (*chain, version, bytes.fromhex(step.name)),
                )
            writer.executemany(
                "INSERT OR REPLACE INTO admissions VALUES (?, ?)", admissions.items()
            )
            if left.rowcount:
                _forget_branches(writer, kept.name)
        with self._lock:
            kept.safe, kept.unsafe, kept.is_written = version, (), True
            self._in_chains |= admissions.keys()

    def answer(self, module: str, locator: Sequence[str]) -> Answer:
        """Return what fits in one answer to somebody whose chain has these names."""
        kept = self._modules.get(module)
        if kept is None:
            return Answer()
        with self._lock:
            safe, unsafe, held = kept.safe, kept.unsafe, kept.held
            rows = kept.rows.newest(ANSWERED_ROWS)
        known = [n for n, step in enumerate(unsafe, safe + 1) if step.name in locator]
        begin = max(known) if known else self._place(kept, locator) or 0
        steps = list[Step]()
        has_more, left = False, ANSWERED_STEP_ROWS
        for step in self._steps(kept, begin, safe, unsafe):
            left -= len(step.rows)
            if steps and (left < 0 or len(steps) == ANSWERED_STEPS):
                has_more = True
                break
            steps.append(step)
        return Answer(tuple(steps), rows, has_more, held)

    # -- reading

    def chain(self, module: str) -> tuple[Step, ...]:
        """Return the steps of the told chain, oldest first."""
        return tuple(self.steps(module))

    def steps(self, module: str, newest: int | None = None) -> Iterator[Step]:
        """Yield the steps of the told chain, or the `newest` so many, oldest first; few of them are
        in memory at a time. Raises `StorageError`."""
        kept = self._modules[module]
        with self._lock:
            safe, unsafe = kept.safe, kept.unsafe
        begin = 0 if newest is None else max(0, safe + len(unsafe) - newest)
        return self._steps(kept, begin, safe, unsafe)

    def remembered(self, module: str, newest: int) -> tuple[Trunk, tuple[Step, ...]]:
        """Return the served chain: its `newest` steps, and the names of those before them. Raises
        `StorageError`."""
        kept, trunk, last = self._modules[module], Trunk(), self._genesis[module]
        with self._lock:
            safe, unsafe = kept.safe, kept.unsafe
        end = min(safe, max(0, safe + len(unsafe) - newest))
        while len(trunk) < end:
            page = self._page(kept, _NAMES, len(trunk), min(end, len(trunk) + PAGE_NAMES))
            if not page:
                break  # Another chain has taken its place meanwhile.
            for name, parent, weight, round_index, rows in page:
                try:
                    peers = [str(peer) for _, peer, *_ in msgpack.unpackb(rows, raw=False)]
                except (ValueError, TypeError):
                    raise self._damaged(module) from None
                trunk.append(name.hex(), round_index, peers)
                if (parent.hex(), weight) != (last, trunk.weight(len(trunk))):
                    raise self._damaged(module)
                last = name.hex()
        return trunk, tuple(self._steps(kept, len(trunk), safe, unsafe))

    def _page(self, kept: _Module, what: str, begin: int, end: int) -> list[tuple[Any, ...]]:
        """Return so much of the steps of the safe part of a chain behind the first `begin`."""
        return self._index.read(
            f"SELECT {what} FROM told JOIN steps ON steps.id = step"
            " WHERE owner = ? AND told.module = ? AND told.version > ? AND told.version <= ?"
            " ORDER BY told.version",
            (self._owner, kept.name, begin, end),
        )

    def _steps(
        self, kept: _Module, begin: int, safe: int, unsafe: tuple[Step, ...]
    ) -> Iterator[Step]:
        """Yield the steps of a chain behind the first `begin`."""
        while begin < safe:
            page = self._page(kept, _STEP, begin, min(safe, begin + _PAGE_STEPS))
            if not page:
                return  # Another chain has taken its place meanwhile.
            yield from (self._unpacked(packed) for packed in page)
            begin += len(page)
        yield from unsafe[begin - safe :]


def tellers(index: Index) -> tuple[str, ...]:
    """Return the peers of this machine whose chains an index has."""
    return tuple(peer for (peer,) in index.read("SELECT DISTINCT owner FROM told"))


def _insert(writer: sqlite3.Connection, step: Step, version: int, weight: int) -> None:
    """Write a step, unless it is there."""
    # The row is without module, round, parent and state, which are those of the step.
    rows = [pack_row(row)[4:] for row in step.rows]
    writer.execute(
        "INSERT OR IGNORE INTO steps(name, module, parent, state, version, weight, round, rows)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            bytes.fromhex(step.name),
            step.module,
            bytes.fromhex(step.parent),
            bytes.fromhex(step.state),
            version,
            weight,
            step.round_index,
            msgpack.packb(rows, use_bin_type=True),
        ),
    )


_NAMES = "name, parent, weight, round, rows"
_STEP = "name, steps.module, round, parent, state, rows"


def _forget_branches(writer: sqlite3.Connection, module: str) -> None:
    """Forget the steps that no chain has any more, but the last of them."""
    writer.execute(
        "DELETE FROM steps WHERE id IN (SELECT id FROM steps WHERE module = ?"
        " AND id NOT IN (SELECT step FROM told WHERE module = ?)"
        " ORDER BY id DESC LIMIT -1 OFFSET ?)",
        (module, module, KEPT_SIDE_STEPS),
    )
