"""Chains that somebody invented: who counts, what is compared, and whose word is not taken."""

from __future__ import annotations

import pytest
from dipaco.dht.records import refresh_period_s
from dipaco.modules.state import StateReference
from dipaco.peer.member import actions as a
from dipaco.peer.member import events as e
from dipaco.peer.member.adoption import DISBELIEVED_ROUNDS, RETRY_PERIODS
from dipaco.peer.member.chains import AT_ONCE, CALLED
from support.adopter import LAST, MODULE, ROUND_S, Adopter
from support.family import Family, genesis
from support.lone_member import ME, LoneMember, claim, of

BARE = [f"bare{number:02}" for number in range(20)]


class Victim(Adopter):
    """A member in round 3, on commits of itself and others; the names in BARE never answer."""

    def __init__(self, *others: str, rounds: int = 3) -> None:
        super().__init__(*others, rounds=rounds, silent=BARE)

    def show(self, state: StateReference, holder: str) -> list[a.Action]:
        """Announce a state, bring its chain, and let the member look again."""
        self.held = {holder: [state]}
        found = self.look()
        found += self.happen(e.ChainFetched(state, self.family.chain(state)))
        return found + self.look()

    def refuse(self, state: StateReference, holder: str) -> None:
        """Let a state come that wrecks the held-out loss."""
        assert of(a.FetchState, self.show(state, holder)) != []
        self.happen(e.StateFetched(state, {}, self.family.chain(state), "adopt"))
        self.turn()
        self.happen(e.Checked(MODULE, state.digest, 1.0, 99.0))


def test_who_signed_an_unknown_chain_is_called_and_silent_names_move_nothing() -> None:
    peer = Victim("Pa")
    invented = peer.family.commits(peer.anchor, range(3, 4), BARE)
    actions = peer.show(invented, "Pz")
    assert set(of(a.Call, actions)[0].peers) <= {*BARE, "Pa", "Pz"}
    assert all(len(call.peers) <= CALLED for call in of(a.Call, actions))
    assert of(a.FetchState, actions) == []


def test_strangers_that_answer_count() -> None:
    peer = Victim("Pa")
    made = peer.family.commit(peer.anchor, 3, ["Py", "Pz"])
    assert [wanted.reference for wanted in of(a.FetchState, peer.show(made, "Pz"))] == [made]


@pytest.mark.parametrize("holder", ["Pa", "keeper"])
def test_a_holder_that_is_there_speaks_for_who_made_its_state_and_cannot_be_called(
    holder: str,
) -> None:
    peer = Victim("Pa")
    peer.serving = ["keeper"]
    made = peer.family.commit(peer.anchor, 3, BARE[:3])
    assert of(a.FetchState, peer.show(made, BARE[0])) == []
    descent = peer.member.known.descent
    assert not descent.wins(made, peer.anchor)
    assert [wanted.reference for wanted in of(a.FetchState, peer.show(made, holder))] == [made]
    assert descent.wins(made, peer.anchor)
    # However many have signed it, that is the word of one.
    other = peer.family.commit(peer.anchor, 3, ["Pa", ME], tokens=1)
    peer.member.known.book.add_all(peer.family.chain(other))
    assert descent.best([made, other], peer.anchor) == other


def test_keepers_are_not_blamed_for_what_they_cannot_judge() -> None:
    """All of them together are not believed for a while, where nobody else speaks for a state."""
    peer = Victim("Pa")
    peer.serving = ["keeper", "other keeper"]
    peer.refuse(peer.family.commit(peer.anchor, 3, BARE[:1]), "keeper")
    peer.done.clear()
    another = peer.family.commit(peer.anchor, 3, BARE[1:2])
    assert of(a.FetchState, peer.show(another, "other keeper")) == []
    good = peer.family.commit(peer.anchor, 3, ["keeper"])
    assert [wanted.reference for wanted in of(a.FetchState, peer.show(good, "keeper"))] == [good]


def test_what_strangers_put_on_top_of_a_settled_state_is_checked() -> None:
    peer = Victim("Pa", "Pc")
    honest = peer.family.commit(peer.anchor, 3, ["Pa", "Pc"])
    peer.now_s += ROUND_S
    on_top = peer.family.commit(honest, 4, ["Pz", *BARE])
    peer.show(on_top, "Pz")
    peer.happen(e.StateFetched(on_top, {}, peer.family.chain(on_top), "adopt"))
    assert of(a.CheckState, peer.turn()) == [a.CheckState(MODULE, on_top.digest)]


def test_from_who_made_a_refused_state_no_other_one_is_taken_for_some_rounds() -> None:
    peer = Victim("Pa")
    peer.refuse(peer.family.commit(peer.anchor, 3, ["Pz"]), "Pz")
    peer.done.clear()
    another = peer.family.commit(peer.anchor, 3, ["Pz"], tokens=99)
    assert of(a.FetchState, peer.show(another, "Pz")) == []
    peer.now_s += DISBELIEVED_ROUNDS * ROUND_S
    assert [wanted.reference for wanted in of(a.FetchState, peer.look())] == [another]


def test_what_an_inventor_put_a_wrecked_state_on_top_of_is_still_taken() -> None:
    peer = Victim("Pa")
    good = peer.family.commit(peer.anchor, 3, ["Pa"])
    peer.refuse(peer.family.commit(good, 3, ["Pz", *BARE]), "Pz")
    peer.done.clear()
    wanted = [fetch.reference for fetch in of(a.FetchState, peer.show(good, "Pa"))]
    assert wanted == [good]


def test_who_serves_nothing_does_not_hide_what_others_hold() -> None:
    peer = Victim("Pa")
    good = peer.family.commit(peer.anchor, 3, ["Pa"])
    invented = [peer.family.commit(good, 3, ["Pz"], tokens=n) for n in (10, 20)]
    peer.held = {"Pa": [good], "Pz": [invented[0]]}
    peer.look()
    for state in (good, invented[0]):
        peer.happen(e.ChainFetched(state, peer.family.chain(state)))
    peer.look()
    assert [fetch.reference for fetch in peer.of(a.FetchState)] == [invented[0]]
    peer.held["Pz"] = [invented[1]]
    peer.look()
    peer.happen(e.ChainFetched(invented[1], peer.family.chain(invented[1])))
    peer.happen(e.FetchFailed(MODULE, invented[0].digest, "it could not serve it", "adopt"))
    peer.look()
    assert [fetch.reference for fetch in peer.of(a.FetchState)] == [invented[0], good]


def test_who_serves_nothing_cannot_speak_for_the_side_that_this_peer_is_on() -> None:
    """What is fetched for want of the best is put under the work, not fetched again for ever."""
    family = Family()
    both = family.commits(genesis(MODULE), range(3), ("Pa", "Pc", ME))
    own = family.commit(both, 3, [ME])
    peer = LoneMember(family=family)
    peer.claims = [claim("Pa"), claim("Pc")]
    peer.now_s += 4.4 * ROUND_S
    peer.begin(
        family.commit(own, 4, [ME], tokens=1),
        family.commits(genesis(LAST), range(4), ("Pa", "Pc", ME)),
    )
    peer.look()
    good = family.commit(both, 4, ["Pa", "Pc"], tokens=1)
    invented = family.commit(own, 4, ["Pz"], tokens=99)
    peer.held = {"Pa": [good], "Pz": [invented]}
    peer.look()
    for state in (invented, good):
        peer.happen(e.ChainFetched(state, family.chain(state)))
        peer.look()
    for _ in range(2):
        assert [fetch.reference for fetch in peer.of(a.FetchState)] == [invented]
        peer.happen(e.FetchFailed(MODULE, invented.digest, "it could not serve it", "adopt"))
        peer.happen(e.FetchFailed(MODULE, good.digest, "its holders are busy", "adopt"))
        peer.now_s += RETRY_PERIODS * refresh_period_s(peer.plan.rounds)
        peer.done.clear()
        peer.look()
    assert [fetch.reference for fetch in peer.of(a.FetchState)] == [good]
    peer.happen(e.StateFetched(good, {}, family.chain(good), "adopt"))
    actions = peer.turn()
    if of(a.CheckState, actions):
        actions = peer.happen(e.Checked(MODULE, good.digest, 1.0, 1.0))
    assert [adopted.reference for adopted in of(a.Adopt, actions)] == [good]


def test_who_cannot_be_called_takes_it_that_one_of_those_it_cannot_meet_is_there() -> None:
    """Else two peers behind routers stay apart that the same third one can meet."""
    peer = Victim("Pa", "Pc")
    base = peer.anchor
    own = peer.family.commit(base, 3, [ME, "Pc"], tokens=1)
    behind = peer.family.commit(base, 3, ["Pa", *BARE[:3]], tokens=99)
    alone = peer.family.commit(base, 3, [*BARE[:3]], tokens=99)
    known = peer.member.known
    for state in (own, behind, alone):
        known.book.add_all(peer.family.chain(state))
    peer.claims += [claim(name, reachable="outgoing") for name in BARE[:3]]
    peer.look()
    assert not known.descent.wins(behind, own)
    peer.happen(e.Probed("outgoing"))
    assert known.descent.wins(behind, own)
    assert not known.descent.wins(own, behind)
    # However many they are they count for one, and for none where nobody has shown itself.
    assert not known.descent.wins(alone, own)
    whole = peer.family.commit(base, 3, [ME, "Pa", "Pc"], tokens=1)
    known.book.add_all(peer.family.chain(whole))
    assert not known.descent.wins(behind, whole)


@pytest.mark.parametrize(("is_apart", "offers"), [(True, 2), (False, 1)])
def test_who_trains_on_another_chain_holds_no_copy(is_apart: bool, offers: int) -> None:
    family = Family()
    both = family.commit(genesis(MODULE), 0, ["Pz", ME])
    own = family.commits(both, (1, 2), [ME])
    theirs = family.commits(both, (1, 2, 3), ["Pz"]) if is_apart else family.commit(own, 3, ["Pz"])
    peer = LoneMember(family=family)
    peer.claims = [claim("Pz", since_s=1e9)]
    peer.now_s += 4 * ROUND_S
    peer.begin(own, family.commits(genesis(LAST), range(3), ["Pz", ME]))
    peer.member.known.book.add_all(family.chain(theirs))
    peer.held, peer.serving = {"Pz": [theirs]}, ["Ps", "Pt", "Pu"]
    found = [offer for offer in of(a.Offer, peer.look()) if offer.reference == own]
    assert len(found) == offers


def test_many_invented_digests_keep_no_certificates_out() -> None:
    peer = Victim("Pa")
    peer.now_s += 4 * ROUND_S
    made = peer.family.commit(peer.anchor, 6, ["Pa"])
    invented = [StateReference(MODULE, 5, f"{n:064x}", 50, 6, 1) for n in range(5 * AT_ONCE)]
    peer.held = {"Pa": [made], **{name: [s] for name, s in zip(BARE, invented, strict=True)}}
    asked = of(a.FetchChain, peer.look())
    assert made in [chain.reference for chain in asked]
    assert len([chain for chain in asked if chain.reference.module == MODULE]) == AT_ONCE


def test_what_a_path_began_from_is_refused_when_the_genesis_state_is_better() -> None:
    family = Family()
    invented = family.commits(genesis(MODULE), range(2), ["Pz", *BARE])
    peer = LoneMember(family=family)
    peer.silent = set(BARE)
    peer.now_s += 3 * ROUND_S
    peer.worse = {genesis(MODULE).digest: 99.0}
    peer.begin(invented)
    assert peer.member.anchors[MODULE] == genesis(MODULE)
    peer.held = {"Pz": [invented]}
    peer.done.clear()
    peer.look()
    assert peer.of(a.FetchState) == []
