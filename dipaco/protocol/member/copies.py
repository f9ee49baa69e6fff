"""Copies of states, so that each lives on several peers (design 4.6, copies).

One peer looks after the copies of a module: its trainer with the oldest claim, or, where nobody
trains it, the holder that rendezvous hashing names. It asks the next peers in rendezvous order to
keep a copy until enough announce one. A keeper follows the steps that it is told of. Where copies
are missing for a round, the next one looks after them too: the first may only say that it is there.
"""

from __future__ import annotations

from collections.abc import Collection

from dipaco.protocol.keeping import keepers
from dipaco.protocol.policy import seniority
from dipaco.protocol.records import refresh_period_s

from .actions import Drop, Tell
from .followed_module import FollowedModule
from .knowledge import Knowledge
from .situation import Role

# A peer that was asked and does not announce a copy is passed over for so many refresh periods.
_ASKED_PERIODS = 3
# Beyond this many times the copies in rendezvous order a copy is dropped, if others have enough.
_MAX_PLACE = 4
# At most so many modules are kept for others by one peer.
_MAX_KEPT = 64
# A copy counts as long as it is no more rounds behind than this.
_ROUNDS_BEHIND = 2


class Copies:
    """Has copies made, and drops those that are no longer needed."""

    def __init__(self, known: Knowledge, modules: dict[str, FollowedModule]) -> None:
        self._known, self._modules = known, modules
        self._asked: dict[tuple[str, str], float] = {}
        self._short_since_s: dict[str, float] = {}
        """Since when copies of each module are missing."""

    def on_view(self) -> None:
        """See whether enough copies are announced."""
        held = [of for _, of in sorted(self._modules.items()) if of.head is not None]
        for followed in held:
            place = self._place(followed)
            if place is not None:
                self._look_after(followed, place)
        self._drop_one([followed for followed in held if followed.role is Role.KEEPER])

    def _place(self, followed: FollowedModule) -> int | None:
        """Return this peer's place among those who look after the copies of a module, if any."""
        known, view = self._known, self._known.view
        if followed.link.version == 0 or not view.covers_module(followed.module):
            return None
        trainers = known.trainers(followed.module)
        if trainers:
            order = sorted(trainers, key=lambda peer: seniority(view, known.me, peer))
        else:
            here = {*known.holders(followed.module), known.me}
            order = list(keepers(followed.module, filter(known.is_callable, here), len(here)))
        return order.index(known.me) if known.me in order else None

    def _copies(self, followed: FollowedModule) -> set[str]:
        """Return who announces a state that is hardly older and can be called, or trains; nobody
        who computed another state of the same step."""
        known, trainers = self._known, self._known.trainers(followed.module)
        oldest = followed.link.round_index - _ROUNDS_BEHIND
        found = {
            holding.peer_id
            for holding in known.view.holdings.get(followed.module, ())
            if holding.head.round_index >= oldest or holding.peer_id in trainers
        }
        found -= self._wrong(followed)
        return {peer for peer in found | {known.me} if known.is_callable(peer)}

    def _wrong(self, followed: FollowedModule) -> set[str]:
        """Return the peers that announce another state of the same step than was computed here."""
        own, held = followed.head, self._known.view.holdings.get(followed.module, ())
        others = [(h.peer_id, h.head) for h in held if own is not None and h.head.step == own.step]
        return {peer for peer, head in others if own is not None and head.digest != own.digest}

    def _look_after(self, followed: FollowedModule, place: int) -> None:
        known = self._known
        has = self._copies(followed)
        missing = known.plan.rounds.copies - len(has)
        if missing <= 0:
            self._short_since_s.pop(followed.module, None)
            return
        since_s = self._short_since_s.setdefault(followed.module, known.now_s)
        if known.now_s - since_s < place * known.schedule.duration_s:
            return
        patience_s = _ASKED_PERIODS * refresh_period_s(known.plan.rounds)
        self._asked = {k: s for k, s in self._asked.items() if known.now_s - s < patience_s}
        pending = sum(module == followed.module for module, _ in self._asked)
        order = known.keepers(followed.module, _MAX_PLACE * known.plan.rounds.copies)
        no_use = {*has, *self._wrong(followed), known.me}
        peers = [p for p in order if p not in no_use and (followed.module, p) not in self._asked]
        chosen = tuple(peers[: max(0, missing - pending)])
        if chosen:
            self._asked.update(((followed.module, peer), known.now_s) for peer in chosen)
            known.do(Tell(chosen, followed.module, steps=followed.last_step, keep=True))

    def asked_to_keep(self, followed: FollowedModule) -> None:
        """Keep a copy that another peer asks for, if it is this peer's to keep."""
        known = self._known
        kept = sum(s.role is Role.KEEPER for s in self._modules.values())
        most = _MAX_PLACE * known.plan.rounds.copies
        is_near = known.me in known.keepers(followed.module, most)
        if is_near and kept < _MAX_KEPT and known.can_be_called:
            followed.keep()

    def _drop_one(self, kept: Collection[FollowedModule]) -> None:
        """Drop a copy that others have and that is not this peer's to keep."""
        known, copies = self._known, self._known.plan.rounds.copies
        for followed in kept:
            if followed.is_wanted or not known.view.covers_module(followed.module):
                continue
            if known.me in known.keepers(followed.module, _MAX_PLACE * copies):
                continue
            if len(self._copies(followed) - {known.me}) >= copies:
                known.do(Drop(followed.module))
                followed.follow(Role.ONLY_MAILBOX)
                return

    def hand_over(self) -> bool:
        """Have others keep the states that nobody else announces; returns whether there are any."""
        known, is_wanted = self._known, False
        for module, followed in sorted(self._modules.items()):
            others = set(known.view.holders(module, followed.stand)) - {known.me}
            order = known.keepers(module, known.plan.rounds.copies + 1)
            asked = tuple(peer for peer in order if peer != known.me)
            if followed.head is not None and followed.link.version and asked and not others:
                known.do(Tell(asked, module, steps=followed.last_step, keep=True))
                is_wanted = True
        return is_wanted
