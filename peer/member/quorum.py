"""Which group may commit: more than half of those who count (design 4.4). Pure.

Who counts has shown that it trains: it stood in a certificate of the last rounds and still claims
a path through the module, or it is in the group. A claim alone proves nothing, so invented ones
stop nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from dipaco.dht.admission import Admission, places_filled
from dipaco.dht.agreement import expected_group
from dipaco.dht.certificates import CertificateBook
from dipaco.dht.view import SwarmView
from dipaco.modules.grid import Grid
from dipaco.modules.state import StateReference

from .events import Admitted, Revoked

# Who was in no commit for so many rounds counts no longer.
RECENT_ROUNDS = 3
# A module without a commit yet: for so many rounds without one, claims are believed.
PATIENCE_ROUNDS = 2


class Guests:
    """Whom a member of a run by invitation knows to be in, as far as its shell has checked it."""

    def __init__(self) -> None:
        self._admissions: dict[str, Admission] = {}
        self._revoked: frozenset[str] = frozenset()

    def note(self, event: Admitted | Revoked) -> None:
        """Somebody is in, or the operator has ended some invitations."""
        if isinstance(event, Admitted):
            self._admissions[event.peer] = event.admission
        else:
            self._revoked = frozenset(event.invitations)

    def weigh(self, contributors: Collection[str]) -> int:
        """Return for how many peers some count: of an invitation, for its places at most."""
        found = (self._admissions[peer] for peer in contributors if peer in self._admissions)
        return places_filled(one for one in found if one.invitation not in self._revoked)


def weigh(
    contributors: Collection[str],
    has_shown_itself: Callable[[str], bool],
    guests: Guests | None = None,
) -> int:
    """Return how much certified contributors weigh when two chains are compared.

    A signature costs nothing: one machine can sign with a thousand identities. So in an open run
    those count that have shown themselves to this member, and what an inventor's chain weighs is
    bounded by the identities that really answer. In a run by invitation the invited count.
    """
    if guests is not None:
        return guests.weigh(contributors)
    return sum(has_shown_itself(peer) for peer in contributors)


def counting_peers(
    view: SwarmView,
    grid: Grid,
    book: CertificateBook,
    anchor: StateReference,
    *,
    me: str,
    round_index: int,
    rounds_in_vain: int,
) -> frozenset[str]:
    """Return who counts when a step from `anchor` is to be committed, `me` included.

    Before a module's first commit nobody can have shown anything: then claims count, but not for
    ever.
    """
    claimed = expected_group(view, grid, anchor.module)
    if anchor.version == 0:
        return claimed | {me} if rounds_in_vain < PATIENCE_ROUNDS else frozenset({me})
    # After a pause of all, those of the last commits count first of all, however long ago that was.
    last = anchor.last_round + 1 if rounds_in_vain < RECENT_ROUNDS else round_index
    recent = book.recent_contributors(anchor.module, anchor.digest, last - RECENT_ROUNDS)
    return (recent & claimed) | {me}


def is_majority(group: Collection[str], counting: Collection[str]) -> bool:
    """Tell whether a group may commit. Half is not enough: the other half may do the same."""
    return 2 * len(set(group)) > len({*group, *counting})
