"""A member before the outer rounds of its modules, for tests."""

from __future__ import annotations

from dipaco.modules.state import StateReference
from dipaco.peer.member import actions as a

from .family import Family, genesis
from .lone_member import ME, LoneMember, claim

MODULE, LAST = "L0.E0", "L1.E0"
# Level L0 ends its rounds in the middle, L1 at their end, see `small_plan`.
ROUND_S = 20.0


def boundary_s(round_index: int) -> float:
    return (round_index + 0.5) * ROUND_S


def group(
    *peers: str, others: str = "", rounds: int = 3, is_new: bool = False, **settings: object
) -> LoneMember:
    """Return a member that has committed `rounds` rounds with `peers`; `others` claim it too.

    If it `is_new`, these were commits of a peer that is gone.

    It stands before the boundary of L0 in round `rounds`.
    """
    family = Family()
    members = ("Pz",) if is_new else (*peers, ME)
    anchors = [family.commits(genesis(m), range(rounds), members) for m in (MODULE, LAST)]
    made = LoneMember(family=family, **settings)
    made.claims = [claim(peer) for peer in (*peers, *others)]
    made.now_s += rounds * ROUND_S
    made.begin(*(anchors if rounds else ()))
    made.now_s = made.plan.start_s + boundary_s(rounds) - 1.0
    made.look()
    made.done.clear()
    return made


def fail(
    peer: LoneMember,
    attempt: int = 0,
    members: tuple[str, ...] = (),
    culprits: tuple[str, ...] = (),
    is_proven: bool = False,
) -> list[a.Action]:
    return peer.average_failed(MODULE, attempt, members, culprits, is_proven)


def answers(peer: LoneMember, *alive: str, **held: StateReference) -> list[a.Action]:
    found: dict[str, StateReference | None] = dict.fromkeys(alive)
    return peer.answered(MODULE, {**found, **held})
