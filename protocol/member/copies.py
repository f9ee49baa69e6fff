"""Copies of states, so that each lives on several peers (design 4.6, copies).

One peer looks after the copies of a module: its trainer with the oldest claim, or, where nobody
trains it, the holder that rendezvous hashing names. It asks the next peers in rendezvous order to
keep a copy until enough announce one. A keeper follows the steps that it is told of.
"""

from __future__ import annotations

from collections.abc import Collection

from dipaco.protocol.keeping import keepers
from dipaco.protocol.policy import seniority
from dipaco.protocol.records import refresh_period_s

from .actions import Drop, Tell
from .knowledge import Knowledge
from .outer_round import Role
from .taking import Strand

# A peer that was asked and does not announce a copy is passed over for so many refresh periods.
ASKED_PERIODS = 3
# Beyond this many times the copies in rendezvous order a copy is dropped, if others have enough.
GREATEST_PLACE = 4
# Of one peer, so many modules at most are kept for others.
MOST_KEPT = 64
# A copy counts as one as long as it is so many rounds behind.
ROUNDS_BEHIND = 2


class Copies:
    """Has copies made, and drops those that are needed no more."""

    def __init__(self, known: Knowledge, strands: dict[str, Strand]) -> None:
        self._known, self._strands = known, strands
        self._asked: dict[tuple[str, str], float] = {}

    def on_view(self) -> None:
        """See whether enough copies are announced."""
        held = [strand for _, strand in sorted(self._strands.items()) if strand.head is not None]
        for strand in held:
            if self._is_mine_to_care_for(strand):
                self._look_after(strand)
        self._drop_one([strand for strand in held if strand.role is Role.KEEPER])

    def _is_mine_to_care_for(self, strand: Strand) -> bool:
        known, view = self._known, self._known.view
        if strand.link.version == 0 or not view.covers_module(strand.module):
            return False
        trainers = known.trainers(strand.module)
        if trainers:
            first = min(trainers, key=lambda peer: seniority(view, known.me, peer))
            return first == known.me
        here = {*known.holders(strand.module), known.me}
        return keepers(strand.module, filter(known.is_callable, here), 1) == (known.me,)

    def _copies(self, strand: Strand) -> set[str]:
        """Return who announces a state that is hardly older and can be called, or trains."""
        known, trainers = self._known, self._known.trainers(strand.module)
        oldest = strand.link.round_index - ROUNDS_BEHIND
        found = {
            holding.peer_id
            for holding in known.view.holdings.get(strand.module, ())
            if holding.head.round_index >= oldest or holding.peer_id in trainers
        }
        return {peer for peer in found | {known.me} if known.is_callable(peer)}

    def _look_after(self, strand: Strand) -> None:
        known = self._known
        has = self._copies(strand)
        missing = known.plan.rounds.copies - len(has)
        if missing <= 0:
            return
        patience_s = ASKED_PERIODS * refresh_period_s(known.plan.rounds)
        self._asked = {k: s for k, s in self._asked.items() if known.now_s - s < patience_s}
        pending = sum(module == strand.module for module, _ in self._asked)
        order = known.keepers(strand.module, GREATEST_PLACE * known.plan.rounds.copies)
        peers = [
            peer
            for peer in order
            if peer not in has and peer != known.me and (strand.module, peer) not in self._asked
        ]
        chosen = tuple(peers[: max(0, missing - pending)])
        if chosen:
            self._asked.update(((strand.module, peer), known.now_s) for peer in chosen)
            known.do(Tell(chosen, strand.module, steps=strand.last_step(), keep=True))

    def asked_to_keep(self, strand: Strand) -> None:
        """Another peer wants a copy to be kept here."""
        known = self._known
        kept = sum(s.role is Role.KEEPER for s in self._strands.values())
        most = GREATEST_PLACE * known.plan.rounds.copies
        is_near = known.me in known.keepers(strand.module, most)
        if is_near and kept < MOST_KEPT and known.can_be_called:
            strand.keep()

    def _drop_one(self, kept: Collection[Strand]) -> None:
        """Drop a copy that others have and that is not this peer's to keep."""
        known, copies = self._known, self._known.plan.rounds.copies
        for strand in kept:
            if strand.is_wanted or not known.view.covers_module(strand.module):
                continue
            if known.me in known.keepers(strand.module, GREATEST_PLACE * copies):
                continue
            if len(self._copies(strand) - {known.me}) >= copies:
                known.do(Drop(strand.module))
                strand.follow(Role.MAILBOX)
                return

    def hand_over(self) -> bool:
        """Have what nobody else announces kept by others; returns whether there is something."""
        known, is_wanted = self._known, False
        for module, strand in sorted(self._strands.items()):
            others = set(known.view.holders(module, strand.stand)) - {known.me}
            order = known.keepers(module, known.plan.rounds.copies + 1)
            asked = tuple(peer for peer in order if peer != known.me)
            if strand.head is not None and strand.link.version and asked and not others:
                known.do(Tell(asked, module, steps=strand.last_step(), keep=True))
                is_wanted = True
        return is_wanted
