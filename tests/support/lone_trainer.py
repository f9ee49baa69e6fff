"""A member that trains the only path alone, looks after the copies, and may leave, for tests."""

from __future__ import annotations

from dipaco.dht.keeping import keepers
from dipaco.dht.records import refresh_period_s
from dipaco.modules.state import StateReference
from dipaco.peer.member import actions as a
from dipaco.peer.member import events as e

from .family import Family, genesis
from .lone_member import ME, LoneMember, claim, of, small_plan

MODULE, LAST, ROUND_S = "L0.E0", "L1.E0", 20.0
COPIES = 3
PERIOD_S = refresh_period_s(small_plan().rounds)
SERVING = ("Ps", "Pt", "Pu", "Pv", "Pw")
ORDER = keepers(MODULE, SERVING, len(SERVING))


class Trainer(LoneMember):
    """A member that trains the only path alone, and stands on three commits."""

    def __init__(self, *others: str, serving: tuple[str, ...] = (), **settings: object) -> None:
        family = Family()
        members = (*others, ME)
        anchors = [family.commits(genesis(m), range(3), members) for m in (MODULE, LAST)]
        super().__init__(family=family, **settings)
        self.claims = [claim(peer, since_s=1e9) for peer in others]
        self.now_s += 3 * ROUND_S
        self.begin(*anchors)
        self.serving = list(serving)

    @property
    def state(self) -> StateReference:
        return self.member.anchors[MODULE]

    def offered(self, actions: list[a.Action] | None = None) -> list[str]:
        """Return who was asked to keep the module."""
        found = of(a.Offer, self.look() if actions is None else actions)
        return [offer.peer for offer in found if offer.reference.module == MODULE]

    def answer(self, peer: str, *, is_kept: bool) -> list[a.Action]:
        return self.happen(e.OfferAnswered(MODULE, self.state.digest, peer, is_kept))
