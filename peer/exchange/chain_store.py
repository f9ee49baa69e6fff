"""The chains that this peer can tell others, kept over restarts.

What others tell is held in memory, bounded; the chain that is *served* is on disk too, in a log of
each module to which it is appended: admissions of its peers, its steps, and which head is held. A
log that was damaged, or half written when the power failed, is cut at its last whole entry.
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from dipaco.base.files import storage_errors
from dipaco.protocol.chain import Head, Row, Step, pack_step, unpack_step
from dipaco.protocol.chain_book import ChainBook
from dipaco.protocol.record_errors import RecordError
from dipaco.protocol.round_rows import RoundRows

logger = logging.getLogger("dipaco.peer.exchange.chain_store")

# Of an answer: rows in its steps, of which one step always goes, and rows beside them.
ANSWERED_STEP_ROWS, ANSWERED_ROWS, ANSWERED_STEPS = 320, 96, 256
MOST_ADMISSIONS = 50_000
# Branches that parted earlier than this are forgotten.
FORK_DEPTH = 64
KEPT_HEADS = 8
_HEAD_BYTES = 8
_MOST_ENTRY_BYTES = 2**16


@dataclass(frozen=True)
class Answer:
    """What a peer says to somebody who asks for a module."""

    steps: tuple[Step, ...] = ()
    rows: tuple[Row, ...] = ()
    has_more: bool = False
    held: Head | None = None


@dataclass
class _Module:
    """What is kept of one module beside its chains."""

    served: str
    held: Head | None = None
    heads: deque[Head] = field(default_factory=lambda: deque(maxlen=KEPT_HEADS))
    rows: RoundRows = field(default_factory=RoundRows)
    saved: set[str] = field(default_factory=set)
    """Steps and peers that are in the log."""


class ChainStore:
    """Chains, recent rows and served heads of a run's modules. Thread-safe.

    :param folder: where a log of every module is; None: in memory only, for readers
    :param only_reads: the folder is another process's: nothing in it is mended or written
    """

    def __init__(
        self, run_id: str, modules: Iterable[str], folder: Path | None, *, only_reads: bool = False
    ) -> None:
        """Load what is on disk. Raises `StorageError`."""
        self._lock = threading.RLock()
        self._folder, self._only_reads = folder, only_reads
        names = tuple(modules)
        self._book = ChainBook(run_id, names)
        self._modules = {name: _Module(self._book.genesis(name)) for name in names}
        self._admissions: OrderedDict[str, bytes] = OrderedDict()
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

    def add_verified(self, steps: Iterable[Step]) -> None:
        """Take in steps whose rows were checked; those that cannot stand here are left out."""
        with self._lock:
            for step in steps:
                known = step.name in self._book
                try:
                    if known or step.module not in self._modules or not self._book.add(step):
                        continue
                except ValueError as error:
                    logger.debug("a step of %s: %s", step.module, error)
                    continue
                self._book.trim(step.module, {self._modules[step.module].served})

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
            while len(self._admissions) > MOST_ADMISSIONS:
                self._admissions.popitem(last=False)

    # -- what is served

    def serve(self, module: str, step: str, head: Head | None = None) -> None:
        """Answer with the chain to `step` from now on, in place of another.

        `head` is the state that is held of it; None for a mailbox, which has none. Raises KeyError
        for a step that is not known, and `StorageError`.
        """
        with self._lock:
            kept = self._modules[module]
            if self._book.link(step).module != module:
                raise KeyError(step)
            is_new = kept.served != step
            self._save(module, step, head)
            self._set_served(kept, step, head)
            kept.rows.forget_before(self._book.link(step).round_index)
            self._book.prune(module, step, FORK_DEPTH)
            newest = self._book.link(step).step
        if is_new and newest is not None:
            self.on_served(newest)

    def _set_served(self, kept: _Module, step: str, head: Head | None) -> None:
        kept.served, kept.held = step, head
        if head is not None and head not in kept.heads:
            kept.heads.append(head)

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
            steps, has_more = self._book.after(locator, kept.served, ANSWERED_STEPS)
            fitting, left = 0, ANSWERED_STEP_ROWS
            for step in steps:
                left -= len(step.rows)
                if fitting and left < 0:
                    break
                fitting += 1
            rows = kept.rows.newest(ANSWERED_ROWS)
            return Answer(steps[:fitting], rows, has_more or fitting < len(steps), kept.held)

    def admissions_of(self, peers: Iterable[str]) -> dict[str, bytes]:
        """Return the admissions of those peers whose admission is known."""
        with self._lock:
            return {peer: self._admissions[peer] for peer in peers if peer in self._admissions}

    # -- reading

    def chain(self, module: str) -> tuple[Step, ...]:
        """Return the steps of the served chain, oldest first."""
        return self.steps_to(module, self.served(module)[0])

    def steps_to(self, module: str, step: str) -> tuple[Step, ...]:
        """Return the steps from the genesis to `step`, oldest first. Raises KeyError."""
        with self._lock:
            if step not in self._book:
                raise KeyError(step)
            return self._book.steps_between(self._book.genesis(module), step)

    def locator(self, module: str, step: str | None = None) -> tuple[str, ...]:
        """Return some names of the chain to `step`, or of the heaviest known."""
        with self._lock:
            return self._book.locator(step or self._book.heaviest(module).name)

    def weight(self, step: str) -> tuple[int, int, int]:
        """Return version, weight and round of a known step. Raises KeyError."""
        with self._lock:
            link = self._book.link(step)
            return link.version, link.weight, link.round_index

    # -- the log

    def _path(self, module: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{module}.log"

    def _save(self, module: str, step: str, head: Head | None) -> None:
        """Append what the log has not of the chain to `step`, and which head is served."""
        if self._folder is None or self._only_reads:
            return
        kept = self._modules[module]
        new: list[Step] = []
        for link in self._book.back_from(step):
            if link.step is None or link.name in kept.saved:
                break
            new.append(link.step)
        entries: list[Any] = []
        peers = sorted({peer for found in new for peer in found.peers} - kept.saved)
        known = self.admissions_of(peers)
        entries += [["a", peer, admission] for peer, admission in known.items()]
        entries += [["s", pack_step(found)] for found in reversed(new)]
        held: list[Any] | None = None
        if head is not None:
            held = [head.version, head.weight, head.round_index]
            held += [bytes.fromhex(head.digest), head.bytes]
        entries.append(["h", bytes.fromhex(step), held])
        with storage_errors(self._folder), self._path(module).open("ab") as file:
            file.write(b"".join(map(_frame, entries)))
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
        if good < len(data) and not self._only_reads:
            logger.warning(
                "the log of %s was damaged: %d of %d bytes are left", module, good, len(data)
            )
            os.truncate(path, good)
        self._book.prune(module, kept.served, FORK_DEPTH)

    def _take_entry(self, module: str, kept: _Module, entry: Any) -> None:
        if entry[0] == "a":
            self._admissions[entry[1]] = entry[2]
            kept.saved.add(entry[1])
        elif entry[0] == "s":
            step = unpack_step(entry[1])
            if step.module != module or not self._book.add(step):
                raise ValueError("it does not stand on what is before it")
            kept.saved.add(step.name)
        elif entry[0] == "h":
            name = entry[1].hex()
            link, head = self._book.link(name), None
            if link.module != module:
                raise ValueError("a step of another module")
            if entry[2] is not None:
                version, weight, round_index, digest, size = entry[2]
                head = Head(module, name, version, weight, round_index, digest.hex(), size)
            self._set_served(kept, name, head)
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
        if size > _MOST_ENTRY_BYTES or len(body) < size:
            return
        if zlib.crc32(body) != int.from_bytes(data[begin + 4 : begin + 8], "big"):
            return
        try:
            entry = msgpack.unpackb(body, raw=False)
        except Exception:  # msgpack has no common base class for what it raises
            return
        yield end, entry
        begin = end
