"""The rows of others, and how their files come (design 4.3, gather and step)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dipaco.protocol.chain.steps import Row, Step

from .actions import Gather
from .asking import Asking
from .group import MAILBOXES, Group
from .situation import Role, Situation


class Gathering:
    """The files of one module's rows. It changes the rows, and notes steps that lack files."""

    def __init__(self, situation: Situation, group: Group, asking: Asking) -> None:
        self._at, self._group, self._asking = situation, group, asking
        self._known, self._rows = situation.known, situation.rows

    def hear_rows(self, rows: Iterable[Row], teller: str) -> None:
        """Take in rows of others, and get the files of those that count."""
        has_room_first, wanted = self._room_first(), list[Row]()
        for row in sorted(rows, key=lambda row: (row.round_index, row.path, row.peer)):
            is_old = row.round_index < self._at.link.round_index
            if is_old or not self._rows.note(row, has_room_first):
                continue
            if row.parent in self._at.book:
                wanted.append(row)
            elif teller:
                self._asking.ask(teller)
        self._gather(wanted, (teller,) if teller else ())

    def _room_first(self) -> Callable[[str], bool]:
        """Return a function that tells whose rows have room before those of others."""
        recent, trainers = self._at.recent(), self._known.trainers(self._at.module)
        return lambda peer: peer in recent or peer in trainers

    def hear_rows_of(self, step: Step) -> None:
        """Take in the rows of a step that might be taken next, and get their files.

        So a peer that keeps its row back until it tells a step with it shuts nobody out: the fuller
        step has its row too.
        """
        has_room_first = self._room_first()
        for row in step.rows:
            self._rows.note(row, has_room_first)
        self._gather_early(self._rows.missing(step), step.name)

    def see_what_lacks_files(self) -> None:
        """Note the steps that might be taken next and cannot be had now: those that lack the file
        of a peer that keeps files back. A mailbox computes nothing, so of it a step counts once all
        its files are here."""
        over, is_mailbox = self._group.passed_over(), self._at.role is Role.ONLY_MAILBOX
        if not over and not is_mailbox:
            return
        for link in self._at.near():
            missing = self._rows.missing(link.step)
            missing = tuple(row for row in missing if is_mailbox or row.peer in over)
            if missing and link.name not in self._at.notes.absent:
                self._at.notes.leave(link.name)
                self._gather_early(missing, link.name)

    def _gather(self, rows: Iterable[Row], others: tuple[str, ...]) -> None:
        """Have files fetched that are not here: from their owners, mailboxes and `others`."""
        known = self._known
        missing = self._rows.to_gather(rows, known.now_s, known.gather_s)
        if missing:
            boxes = self._group.mailboxes()[: 2 * MAILBOXES]
            others = tuple(p for p in dict.fromkeys((*others, *boxes)) if p != known.me)
            known.do(Gather(self._at.module, missing, others))

    def _gather_early(self, rows: Iterable[Row], step: str) -> None:
        """Have files fetched of a step that is not being taken: of somebody who tells steps without
        end those of a few."""
        if may := tuple(filter(self._rows.spend_fetch, rows)):
            self.gather_for(may, step)

    def gather_for(self, rows: Iterable[Row], step: str, target: str = "") -> None:
        """Have files fetched that a step needs, also if they are on their way: peers that told of
        it, or are in it, have them, while an owner may give its own to a few only.

        :param target: the step that is being taken, if one is
        """
        link = self._at.book.link(step)
        peers = link.step.peers - {self._known.me} if link.step is not None else ()
        sources = dict.fromkeys((*self._asking.sources(link, target), *sorted(peers)))
        self._known.do(Gather(self._at.module, tuple(rows), tuple(sources)))

    def came(self, row: Row) -> None:
        """The file of a row is here, and is a contribution."""
        self._rows.came(row)
        self._group.gave(row.peer)
        self._at.files_came(self._rows.here)

    def failed(self, row: Row, *, is_refused: bool) -> None:
        """Nobody gave a file, or the disk lost it, and it may be asked for again; or it is no
        contribution."""
        self._rows.gather_failed(row, is_refused=is_refused)
        if is_refused:
            self._at.refuse_file(row)
