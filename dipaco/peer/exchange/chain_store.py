"""What this peer tells others of its modules, kept over restarts.

Which chain is *served* is the member's decision; it hands the steps over, and they lie here and in
a log on disk, one of each module, to which is only appended: admissions of the peers in the steps,
the steps, and which head is held. A log that was damaged, or half written when the power failed, is
cut at its last whole entry. Beside the chain recent rows are told, which are in memory alone.
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgpack

from dipaco.base.files import storage_errors
from dipaco.protocol.chain import Head, Row, Step, genesis_name, pack_step, unpack_step
from dipaco.protocol.record_errors import RecordError
from dipaco.protocol.round_rows import RoundRows

logger = logging.getLogger("dipaco.peer.exchange.chain_store")

# Of an answer: rows in its steps, of which one step always goes, and rows beside them.
ANSWERED_STEP_ROWS, ANSWERED_ROWS, ANSWERED_STEPS = 320, 96, 256
# Admissions beside those of peers in the chains and rows that are told.
MAX_KEPT_ADMISSIONS = 50_000
KEPT_HEADS = 8
_HEAD_BYTES = 8
_MAX_ENTRY_BYTES = 2**16


@dataclass(frozen=True)
class Answer:
    """A peer's answer to a request for a module."""

    steps: tuple[Step, ...] = ()
    rows: tuple[Row, ...] = ()
    has_more: bool = False
    held: Head | None = None


@dataclass
class _Module:
    """What is kept of one module."""

    genesis: str
    served: str
    """Name of the step to which the chain is told."""
    steps: dict[str, Step] = field(default_factory=dict)
    """By name, those of the chain, and of the chains to `heads`."""
    chain: list[Step] = field(default_factory=list)
    """What is told, oldest first."""
    places: dict[str, int] = field(default_factory=dict)
    """Of the steps of the chain, from 1; the genesis has 0."""
    held: Head | None = None
    heads: deque[Head] = field(default_factory=lambda: deque(maxlen=KEPT_HEADS))
    rows: RoundRows = field(default_factory=RoundRows)
    saved: set[str] = field(default_factory=set)
    """Steps and peers that are in the log."""
    log_bytes: int = 0
    """Of whole entries in the log."""

    def peers(self) -> set[str]:
        """Return whose rows are in what is told."""
        steps = (step.peers for step in self.steps.values())
        return {row.peer for row in self.rows.all()}.union(*steps)

    def check(self, name: str) -> None:
        """Raise KeyError for a step that was never served."""
        if name != self.genesis and name not in self.steps:
            raise KeyError(name)

    def back_from(self, name: str) -> Iterator[Step]:
        """Yield the chain that ends in a step, the newest first. Raises KeyError."""
        while name != self.genesis:
            step = self.steps[name]
            yield step
            name = step.parent

    def add(self, steps: Iterable[Step]) -> None:
        """Take in steps, oldest first. Raises KeyError for one that stands on nothing here."""
        for step in steps:
            self.check(step.parent)
            self.steps[step.name] = step

    def serve(self, step: str, head: Head | None) -> None:
        """Tell of the chain to a step. Raises KeyError for one that is not here."""
        self.check(step)
        new = list(takewhile(lambda found: found.name not in self.places, self.back_from(step)))
        parted = self.places.get(new[-1].parent if new else step, 0)
        left = self.chain[parted:]
        del self.chain[parted:]
        for found in left:
            del self.places[found.name]
        for found in reversed(new):
            self.chain.append(found)
            self.places[found.name] = len(self.chain)
        self.served, self.held = step, head
        if head is not None and head not in self.heads:
            self.heads.append(head)
        if left:
            self._forget_branches()

    def _forget_branches(self) -> None:
        """Forget the steps that are of none of these chains. The log gets them anew if need be."""
        kept = dict(self.places)
        for head in self.heads:
            branch = takewhile(lambda found: found.name not in kept, self.back_from(head.step))
            kept.update({found.name: 0 for found in tuple(branch)})
        self.saved -= self.steps.keys() - kept.keys()
        self.steps = {name: found for name, found in self.steps.items() if name in kept}


class ChainStore:
    """Served chains and heads, recent rows and admissions of a run's modules. Thread-safe.

    :param folder: where a log of every module is; None: in memory only, for readers
    :param only_reads: the folder is another process's: nothing in it is mended or written
    """

    def __init__(
        self, run_id: str, modules: Iterable[str], folder: Path | None, *, only_reads: bool = False
    ) -> None:
        """Load what is on disk. Raises `StorageError`."""
        self._lock = threading.RLock()
        self._folder, self._only_reads = folder, only_reads
        names = {name: genesis_name(run_id, name) for name in modules}
        self._modules = {name: _Module(genesis, genesis) for name, genesis in names.items()}
        self._admissions: dict[str, bytes] = {}
        self._enough_admissions = MAX_KEPT_ADMISSIONS
        """With more of them some are forgotten."""
        self.on_served: Callable[[Step], None] = lambda step: None
        """Hears which step stands at the end of a served chain, each time that another does."""
        self.has_contributed: Callable[[str], bool] = lambda peer: False
        """Tells whose rows have room before those of others."""
        if folder is not None:
            with storage_errors(folder):
                if not only_reads:
                    folder.mkdir(parents=True, exist_ok=True)
                for name in names:
                    if self._path(name).exists():
                        self._load(name)

    @property
    def modules(self) -> tuple[str, ...]:
        """All of the run."""
        return tuple(self._modules)

    # -- what is learned

    def note_rows(self, rows: Iterable[Row]) -> None:
        """Take in checked rows. Of a peer's rows of one round and parent the first counts."""
        with self._lock:
            for row in rows:
                kept = self._modules.get(row.module)
                if kept is not None:
                    kept.rows.note(row, self.has_contributed)

    def note_admissions(self, admissions: Mapping[str, bytes]) -> None:
        """Keep checked admissions of peers whose rows are here: they travel with the rows."""
        with self._lock:
            self._admissions.update(admissions)
            if len(self._admissions) > self._enough_admissions:
                self._forget_admissions()

    def _forget_admissions(self) -> None:
        """Forget the older half of those of which nothing is told here: what others invent leaves
        the chain its own."""
        told = set[str]().union(*(kept.peers() for kept in self._modules.values()))
        others = [peer for peer in self._admissions if peer not in told]
        for peer in others[: -(-len(others) // 2)]:
            del self._admissions[peer]
        self._enough_admissions = MAX_KEPT_ADMISSIONS + len(told)

    # -- what is served

    def serve(
        self, module: str, step: str, steps: Sequence[Step] = (), head: Head | None = None
    ) -> None:
        """Answer with the chain to `step` from now on, in place of another.

        `steps`, oldest first, are those of it that were never served; `head` is the state that is
        held of it, None for a mailbox, which has none. Raises KeyError for steps that stand on
        nothing that was served, and `StorageError` when it is told from memory alone, because the
        disk is full.
        """
        with self._lock:
            kept = self._modules[module]
            if any(new.module != module for new in steps):
                raise KeyError(step)
            is_new = kept.served != step
            kept.add(steps)
            kept.serve(step, head)
            newest = kept.steps.get(step)
            if newest is not None:
                kept.rows.forget_before(newest.round_index)
        if is_new and newest is not None:
            self.on_served(newest)
        with self._lock:
            self._save(module, kept)

    def served(self, module: str) -> tuple[str, Head | None]:
        """Return what `serve` said last, also in an earlier life; the genesis before that."""
        with self._lock:
            kept = self._modules[module]
            return kept.served, kept.held

    def head_of(self, module: str, digest: str) -> Head | None:
        """Return which head a state on this disk is, by its digest, if it was served lately."""
        with self._lock:
            heads = self._modules[module].heads
            return next((head for head in heads if head.digest == digest), None)

    def answer(self, module: str, locator: Sequence[str]) -> Answer:
        """Return what fits in one answer to somebody whose chain has these names."""
        with self._lock:
            kept = self._modules.get(module)
            if kept is None:
                return Answer()
            begin = max((kept.places.get(name, 0) for name in locator), default=0)
            steps = kept.chain[begin : begin + ANSWERED_STEPS]
            fitting, left = 0, ANSWERED_STEP_ROWS
            for step in steps:
                left -= len(step.rows)
                if fitting and left < 0:
                    break
                fitting += 1
            rows = kept.rows.newest(ANSWERED_ROWS)
            has_more = begin + fitting < len(kept.chain)
            return Answer(tuple(steps[:fitting]), rows, has_more, kept.held)

    def admissions_of(self, peers: Iterable[str]) -> dict[str, bytes]:
        """Return the admissions of those peers whose admission is known."""
        with self._lock:
            return {peer: self._admissions[peer] for peer in peers if peer in self._admissions}

    # -- reading

    def chain(self, module: str) -> tuple[Step, ...]:
        """Return the steps of the served chain, oldest first."""
        with self._lock:
            return tuple(self._modules[module].chain)

    # -- the log

    def _path(self, module: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{module}.log"

    def _save(self, module: str, kept: _Module) -> None:
        """Append what the log has not of the chain that is served, and which head is held."""
        if self._folder is None or self._only_reads:
            return
        new = list(takewhile(lambda s: s.name not in kept.saved, kept.back_from(kept.served)))
        entries: list[Any] = []
        peers = sorted({peer for found in new for peer in found.peers} - kept.saved)
        known = self.admissions_of(peers)
        entries += [["a", peer, admission] for peer, admission in known.items()]
        entries += [["s", pack_step(found)] for found in reversed(new)]
        head, held = kept.held, None
        if head is not None:
            place = [head.version, head.weight, head.round_index]
            held = [*place, bytes.fromhex(head.digest), head.bytes]
        entries.append(["h", bytes.fromhex(kept.served), held])
        with storage_errors(self._folder), self._path(module).open("ab") as file:
            # Nothing would be read behind a part, which is what a full disk takes of an entry.
            file.truncate(min(kept.log_bytes, file.tell()))
            file.write(b"".join(map(_frame, entries)))
            file.flush()
            # A state that is on the disk is of no use without the name of its step.
            os.fsync(file.fileno())
            log_bytes = file.tell()
        kept.log_bytes = log_bytes
        kept.saved |= {found.name for found in new} | known.keys()

    def _load(self, module: str) -> None:
        path, kept = self._path(module), self._modules[module]
        data = path.read_bytes()
        good = 0
        for end, entry in _entries(data):
            try:
                self._take_entry(module, kept, entry)
            except (RecordError, ValueError, KeyError, TypeError, IndexError):
                break
            good = end
        kept.log_bytes = good
        if good < len(data) and not self._only_reads:
            logger.warning(
                "the log of %s was damaged: %d of %d bytes are left", module, good, len(data)
            )
            os.truncate(path, good)

    def _take_entry(self, module: str, kept: _Module, entry: Any) -> None:
        if entry[0] == "a":
            self._admissions[entry[1]] = entry[2]
            kept.saved.add(entry[1])
        elif entry[0] == "s":
            step = unpack_step(entry[1])
            if step.module != module:
                raise ValueError("a step of another module")
            kept.add([step])
            kept.saved.add(step.name)
        elif entry[0] == "h":
            name, head = entry[1].hex(), None
            if entry[2] is not None:
                version, weight, round_index, digest, size = entry[2]
                head = Head(module, name, version, weight, round_index, digest.hex(), size)
            kept.serve(name, head)
        else:
            raise ValueError("another kind of entry")


def _frame(entry: Any) -> bytes:
    body: bytes = msgpack.packb(entry, use_bin_type=True)
    return len(body).to_bytes(4, "big") + zlib.crc32(body).to_bytes(4, "big") + body


def _entries(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the whole entries of a log, each with where it ends."""
    begin = 0
    while begin + _HEAD_BYTES <= len(data):
        size = int.from_bytes(data[begin : begin + 4], "big")
        end = begin + _HEAD_BYTES + size
        body = data[begin + _HEAD_BYTES : end]
        if size > _MAX_ENTRY_BYTES or len(body) < size:
            return
        if zlib.crc32(body) != int.from_bytes(data[begin + 4 : begin + 8], "big"):
            return
        try:
            entry = msgpack.unpackb(body, raw=False)
        except Exception:  # msgpack has no common base class for what it raises
            return
        yield end, entry
        begin = end
