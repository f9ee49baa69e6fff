"""The rules by which peers decided before certificates, to live through the same histories.

What could be expressed in today's member, as other pure functions in place of its own:

* of two states the one with more tokens wins, then the smaller digest; nobody has to have signed it
* whoever claims a path counts; half of those is enough to commit
* a peer that sees nobody, or whose clock leapt, commits like any other
* whether own work is in a state is inferred from what the state counts for the path
* nobody is doubted, and whoever made a reduce fail is welcome in the next round

Meetings, replication, moving and the ways in which views are read are today's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from dipaco.dht.agreement import expected_group
from dipaco.dht.certificates import CertificateBook
from dipaco.modules.state import PathProgress, StateReference, heaviest
from dipaco.peer.member import adoption, gathering, knowledge, outer
from dipaco.peer.member.actions import Action, CarryOn
from dipaco.peer.member.descent import Descent
from dipaco.peer.member.doubts import Doubts
from dipaco.peer.member.events import Event, SnapshotTaken
from dipaco.peer.member.knowledge import Knowledge, MemberSettings
from dipaco.peer.member.ledger import Ledger, Reckoning
from dipaco.peer.member.member import Member
from dipaco.peer.member.round_under_way import Culprits
from dipaco.simulator.swarm.world import Body

# Why a member carries on whose group committed without it.
MISSED = "the group committed without this peer"

Counts = Callable[[str], Mapping[int, PathProgress]]
"""What the state of a digest counts for each path."""


class HeaviestWins(Descent):
    """More tokens win; who contributed them is not asked."""

    def is_certified(self, state: StateReference) -> bool:
        """Believe every state."""
        return True

    def reaches(self, state: StateReference, other: StateReference) -> bool:
        """Need no certificates to compare two states."""
        return True

    def wins(
        self,
        candidate: StateReference,
        own: StateReference,
        among: Iterable[StateReference] = (),
    ) -> bool:
        """Tell whether a holder of `own` takes `candidate`."""
        return candidate.wins_over(own)

    def best(
        self, candidates: Iterable[StateReference], own: StateReference
    ) -> StateReference | None:
        """Return the heaviest state that wins over `own`."""
        return heaviest(state for state in candidates if state.wins_over(own))


class CountingLedger(Ledger):
    """Infers from what a state counts for the path whether own work is in it."""

    def __init__(self, anchor: StateReference, me: str, path: int, counts: Counts) -> None:
        super().__init__(anchor, me)
        self._path, self._counts = path, counts
        self.tokens: dict[int, int] = {}
        """Of each snapshot."""
        self.missed: int | None = None
        """The round in which the others committed without this peer, until it takes their state."""

    def adopt(self, state: StateReference, own: StateReference, descent: Descent) -> Reckoning:
        """Work out what of the own work a state seems to contain."""
        counted, before = (
            self._counts(found.digest).get(self._path, PathProgress(0, -1))
            for found in (state, own)
        )
        row: frozenset[int] = frozenset()
        is_merged = False
        if self.missed is not None and self.missed in self._rows:
            row = self._rows[self.missed]
            tokens = before.tokens + self.tokens.get(self.missed, 0)
            is_merged = counted.last_round >= self.missed and counted.tokens >= tokens
        self.missed = None
        if is_merged:
            on_top = [part for part in self.unmerged if part not in row]
        else:
            on_top = [p for p in self.parts if p in self.unmerged or p > counted.last_round]
        self.unmerged = on_top
        self._base_round = state.last_round
        return Reckoning(tuple(on_top), is_merged, 1.0)


class EarlierMember(Member):
    """A member that counts."""

    def __init__(self, counts: Counts, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._counts = counts

    def _begun(self) -> None:
        super()._begun()
        path = self.known.path
        assert path is not None
        self._adoption.ledgers = {
            module: CountingLedger(anchor, self.known.me, path, self._counts)
            for module, anchor in self.known.anchors.items()
        }

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Note what a snapshot has in it, and which commits were missed; else as any member."""
        if isinstance(event, SnapshotTaken):
            ledger = self._adoption.ledgers.get(event.module)
            if isinstance(ledger, CountingLedger):
                ledger.tokens[event.round_index] = event.tokens
        actions = super().handle(event, now_s)
        for action in actions:
            if isinstance(action, CarryOn) and action.reason == MISSED:
                ledger = self._adoption.ledgers[action.module]
                assert isinstance(ledger, CountingLedger)
                ledger.missed = action.round_index
        return actions


def earlier_member(
    machine: Body, book: CertificateBook, held: tuple[StateReference, ...]
) -> EarlierMember:
    """Return the member that peers had; for `run_history`."""
    world = machine.world
    settings = MemberSettings(
        me=machine.peer,
        pinned=machine.pinned,
        trains=machine.trains,
        can_be_called=machine.link.can_be_called,
        seed=f"{machine.peer}/{machine.link.life}",
    )

    def counts(digest: str) -> Mapping[int, PathProgress]:
        state = world.stock.states.get(digest)
        return state.progress if state is not None else {}

    return EarlierMember(counts, settings, world.plan, world.grid, book=book, held=held)


@contextmanager
def earlier_protocol() -> Iterator[None]:
    """Let members decide by the rules of then, in this process."""
    with ExitStack() as replaced:
        for where, name, rule in _RULES:
            replaced.enter_context(patch.object(where, name, rule))
        yield


def _who_claims(known: Knowledge, module: str, *_: object) -> frozenset[str]:
    return expected_group(known.view, known.grid, module) | {known.me}


def _is_half(group: Collection[str], counting: Collection[str]) -> bool:
    return 2 * len(set(group)) >= len({*group, *counting})


def _true(*_: object) -> bool:
    return True


def _false(*_: object) -> bool:
    return False


_RULES: tuple[tuple[Any, str, Any], ...] = (
    (knowledge, "Descent", HeaviestWins),
    (outer, "who_counts", _who_claims),
    (outer, "is_majority", _is_half),
    (gathering, "is_majority", _is_half),
    # A state that the others hold and that wins was committed by them.
    (adoption, "is_majority", _true),
    (outer, "has_contributed", _false),
    (outer, "is_cut_off", _false),
    (Knowledge, "is_clock_doubtful", False),
    (Doubts, "is_doubted", _false),
    (Doubts, "believed", lambda self, view: view),
    (Doubts, "has_shown_itself", _true),
    (Culprits, "excluded", lambda self, round_index, also: tuple(sorted(also))),
)
