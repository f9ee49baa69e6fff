"""A run as others see it here: what they are answered, and what is accepted from them.

All that a peer says of rows and steps, unasked or in an answer, passes through `_take_in` once. The
good part becomes one event for the member, which decides what is served of it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dipaco.peer.exchange.contact.known_contributors import KnownContributors
from dipaco.peer.exchange.files.content import ContentSource, Parts
from dipaco.peer.exchange.files.contribution_files import ContributionFiles
from dipaco.peer.exchange.streams.messages import AskReply, AskRequest, PutRequest, TellRequest
from dipaco.protocol.chain.steps import Row, Step, pack_row, pack_step, unpack_row, unpack_step
from dipaco.protocol.member.events import Answered, Told
from dipaco.protocol.record_errors import RecordError
from dipaco.protocol.records import HeldState

from .chain_store import ChainStore
from .verify import RowCheck

logger = logging.getLogger("dipaco.peer.exchange.served_run")

NO_ANSWER = AskReply(steps=[], rows=[], has_more=False, held=None, admissions={})


@dataclass(frozen=True)
class ServedRun:
    """What others are answered about a run, and what their answers are checked by. Thread-safe."""

    run_id: str
    content: ContentSource
    """States and blobs by hash. Contributions are looked up beside it."""
    chains: ChainStore
    check: RowCheck
    contributions: ContributionFiles | None = None
    """None: nothing is taken from others (`put` is refused)."""
    admission: bytes | None = None
    """This peer's own; None for a process that only reads."""
    trains: Callable[[str], bool] = lambda module: False
    """Whether this peer trains a module."""
    contributors: KnownContributors = field(default_factory=KnownContributors)
    """Peers with rows in the last steps, who have room before others."""

    # -- what others are answered

    def lookup(self, sha256: str) -> Path | Parts | None:
        """Return what is served by hash."""
        if self.contributions is not None:
            found = self.contributions.find(sha256)
            if found is not None:
                return found
        return self.content.lookup(sha256)

    def answer(self, request: AskRequest) -> AskReply:
        """Return which steps come after those that the asker has, and which rows are here."""
        if request.run != self.run_id or request.module not in self.check.modules:
            return NO_ANSWER
        known = self.chains.answer(request.module, [name.hex() for name in request.locator])
        return AskReply(
            steps=[pack_step(step) for step in known.steps],
            rows=[pack_row(row) for row in known.rows],
            has_more=known.has_more,
            held=HeldState.of(known.held) if known.held is not None else None,
            trains=self.trains(request.module),
            admissions=self.chains.admissions_of(peers_of(known.rows, known.steps)),
        )

    # -- what others say

    def told(self, peer: str, request: TellRequest) -> Told | None:
        """Take in what a peer tells unasked, and return the good part of it. A stranger is not
        heard. None if nothing is good.
        """
        if request.run != self.run_id:
            return None
        if not self.check.is_in(peer):
            logger.debug("%s tells of %s and is not admitted", peer, request.module)
            return None
        rows, steps = self._take_in(request.module, request)
        if not rows and not steps:
            return None
        keep = request.keep and len(steps) == len(request.steps)
        return Told(peer, request.module, rows, steps, keep)

    def answered(self, peer: str, module: str, reply: AskReply) -> Answered:
        """Take in what a peer answers, and return the good part of it."""
        rows, steps = self._take_in(module, reply)
        held = reply.held.head(module) if reply.held is not None else None
        if held is not None and not self.check.is_plausible_head(held):
            held = None
        has_more = reply.has_more and len(steps) == len(reply.steps)
        return Answered(peer, module, steps, rows, has_more, held, reply.trains)

    def row_to_store(self, peer: str, request: PutRequest) -> Row | None:
        """Return the row of a put if its file may be stored: the peer that puts it owns the row and
        is admitted."""
        if request.run != self.run_id:
            return None
        try:
            row = unpack_row(request.row)
        except RecordError as error:
            logger.debug("a put of %s: %s", peer, error)
            return None
        if row.peer != peer:
            return None
        good = self.check.good_rows(row.module, (row,), request.admissions)
        self._keep(peers_of(good, ()), good, request.admissions)
        return good[0] if good else None

    def _take_in(
        self, module: str, said: TellRequest | AskReply
    ) -> tuple[tuple[Row, ...], tuple[Step, ...]]:
        """Return the good rows and steps of what a peer says of a module; the rows, and the
        admissions of all, are told others."""
        if module not in self.check.modules:
            return (), ()
        rows = self.check.good_rows(module, _unpack_rows(said.rows), said.admissions)
        steps = self.check.good_steps(module, _unpack_steps(said.steps), said.admissions)
        self._keep(peers_of(rows, steps), rows, said.admissions)
        return rows, steps

    def _keep(
        self, peers: set[str], rows: tuple[Row, ...], admissions: Mapping[str, bytes]
    ) -> None:
        self.chains.note_admissions({p: a for p, a in admissions.items() if p in peers})
        self.chains.note_rows(rows)


def peers_of(rows: Iterable[Row], steps: Iterable[Step]) -> set[str]:
    """Return whose rows these are, or are in these steps."""
    return {row.peer for row in rows}.union(*(step.peers for step in steps))


def _unpack_rows(values: list[object]) -> tuple[Row, ...]:
    """Read rows that came from elsewhere, leaving out what is no row."""
    found = []
    for value in values:
        with contextlib.suppress(RecordError):
            found.append(unpack_row(value))
    return tuple(found)


def _unpack_steps(values: list[object]) -> tuple[Step, ...]:
    """Read steps that came from elsewhere, up to the first that is none."""
    found = []
    for value in values:
        try:
            found.append(unpack_step(value))
        except RecordError:
            break
    return tuple(found)
