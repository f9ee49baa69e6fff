"""A member that stands on some commits, and is told of states that others made."""

from __future__ import annotations

from collections.abc import Collection

from dipaco.modules.state import StateReference
from dipaco.peer.member import actions as a
from dipaco.peer.member import events as e

from .family import Family, genesis
from .lone_member import ME, LoneMember, claim, of

MODULE, LAST, ROUND_S = "L0.E0", "L1.E0", 20.0


class Adopter(LoneMember):
    """A member that stands on three commits of itself and others, in round 3.

    Who is `silent` never answers.
    """

    def __init__(self, *others: str, rounds: int = 3, silent: Collection[str] = ()) -> None:
        family = Family()
        members = (*others, ME)
        anchors = [family.commits(genesis(m), range(rounds), members) for m in (MODULE, LAST)]
        super().__init__(family=family)
        self.claims = [claim(peer) for peer in others]
        self.silent = set(silent)
        self.now_s += rounds * ROUND_S
        self.begin(*anchors)
        self.look()
        self.done.clear()

    @property
    def anchor(self) -> StateReference:
        return self.member.anchors[MODULE]

    def announce(self, state: StateReference, *holders: str) -> list[a.Action]:
        """Let peers say that they hold a state, and the member see it."""
        self.held = {peer: [state] for peer in holders}
        return self.look()

    def tell(self, state: StateReference) -> list[a.Action]:
        """Let the certificates of a state come, and what is announced be seen again."""
        return self.happen(e.ChainFetched(state, self.family.chain(state))) + self.look()

    def bring(
        self, state: StateReference, after: float = 1.0, steps_apart: float | None = None
    ) -> list[a.Action]:
        """Let a state come; the held-out loss with it is `after`, and 1 with the anchor."""
        found = self.happen(e.StateFetched(state, {}, self.family.chain(state), "adopt"))
        found += self.turn()
        for check in of(a.CheckState, found):
            checked = e.Checked(check.module, check.digest, 1.0, after, steps_apart)
            found += self.happen(checked)
        return found

    def adopts(self, state: StateReference, *holders: str) -> a.Adopt:
        """Take a state all the way, and return how."""
        self.announce(state, *holders)
        self.tell(state)
        (adopted,) = of(a.Adopt, self.bring(state))
        assert adopted.reference == state == self.anchor
        return adopted
