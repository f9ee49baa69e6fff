"""What progress records say of best parameters: bounds, order of belief, keepers."""

from __future__ import annotations

import pytest
from dipaco.dht.announced_bests import MOST_ANNOUNCED, announced_bests, entry_of_kept
from dipaco.dht.keeping import is_best_keeper
from dipaco.dht.records import Claim, PeerRecord, ProgressEntry, ProgressRecord
from dipaco.dht.view import SwarmView
from dipaco.modules.best_parameters import BestReference
from dipaco.modules.evaluate import LossSum
from pydantic import ValidationError


def name(number: int) -> str:
    return "Qm" + "1" * 42 + "2" + "ABCDEFGHJKLMNPQRSTUVWXYZ"[number]


def best(digit: str, nll: float = 100.0, round_index: int = 3, path: int = 1) -> BestReference:
    return BestReference(path, round_index, LossSum(nll, 50), digit * 64)


def record(peer: int, *bests: BestReference) -> ProgressRecord:
    return ProgressRecord(peer_id=name(peer), entries=tuple(entry_of_kept(one) for one in bests))


def claim(peer: int, since_s: float, state: str = "training") -> Claim:
    return Claim.model_validate(
        {"peer_id": name(peer), "path": 1, "state": state, "since_s": since_s, "round": 0}
    )


PLAIN = {
    "path": 1,
    "last_round": 5,
    "tokens": 10,
    "validation_nll": 1.0,
    "validation_tokens": 1,
    "train_loss": 2.0,
}
BEST = {"best_sha256": "a" * 64, "best_nll": 2.0, "best_tokens": 7, "best_round": 4}


def test_an_entry_without_best_states_is_one_of_before() -> None:
    assert ProgressEntry.model_validate(PLAIN).best is None
    named = ProgressEntry.model_validate({**PLAIN, **BEST})
    assert named.best == BestReference(1, 4, LossSum(2.0, 7), "a" * 64)


@pytest.mark.parametrize(
    "change",
    [
        {"best_sha256": "x" * 64},
        {"best_sha256": "a" * 63},
        {"best_sha256": ""},
        {"best_tokens": 0},
        {"best_tokens": -1},
        {"best_nll": float("nan")},
        {"best_nll": float("inf")},
        {"best_nll": -1.0},
        {"best_round": 6},
        {"best_round": 1.5},
    ],
)
def test_impossible_best_states_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ProgressEntry.model_validate({**PLAIN, **BEST, **change})


def test_what_a_keeper_says_leaves_its_own_progress_as_it_is() -> None:
    known = ProgressEntry.model_validate(PLAIN)
    said = entry_of_kept(best("b", round_index=9), known)
    assert (said.tokens, said.validation_nll, said.last_round) == (10, 1.0, 9)
    assert said.best == best("b", round_index=9)
    assert entry_of_kept(best("b", round_index=2), known).last_round == 5


def test_the_lead_is_believed_first_then_the_least_loss() -> None:
    records = [record(0, best("a", 90.0)), record(1, best("b", 95.0)), record(2, best("c"))]
    claims = {c.peer_id: c for c in (claim(2, 5.0), claim(0, 9.0), claim(1, 1.0, "joining"))}

    def order(claims: dict[str, Claim]) -> list[str]:
        return [n.sha256[0] for n in announced_bests(records, claims, 4, 10)[1]]

    assert order(claims) == ["c", "a", "b"]
    assert order({}) == ["a", "b", "c"]


def test_what_is_not_plausible_is_left_out() -> None:
    late = record(0, best("a", round_index=11))
    foreign = record(1, best("b", path=4))
    twice = record(2, best("c"), best("d", 1.0))
    found = announced_bests([late, foreign, twice], {}, 4, 10)
    assert found == {1: (best("c"),)}
    many = [record(peer, best("abcdef"[peer], 50.0 + peer)) for peer in range(6)]
    assert len(announced_bests(many, {}, 4, 10)[1]) == MOST_ANNOUNCED


def test_somebody_elses_word_about_the_same_states_does_not_hide_the_leads() -> None:
    records = [record(0, best("a", 1.0)), record(1, best("a", 95.0))]
    claims = {name(1): claim(1, 0.0)}
    assert announced_bests(records, claims, 4, 10) == {1: (best("a", 95.0),)}


@pytest.mark.parametrize("led", [False, True])
def test_as_many_keep_a_path_as_there_should_be_copies(led: bool) -> None:
    peers = {
        name(number): PeerRecord.model_validate(
            {
                "peer_id": name(number),
                "protocol": 1,
                "software": "",
                "device": "",
                "state": "leaving" if number == 9 else "serving",
                "path": None,
                "tokens_per_s": 0.0,
                "round": 0,
                "reachable": "direct",
                "addresses": (),
                "bytes_up": 0,
                "bytes_down": 0,
            }
        )
        for number in range(10)
    }
    view = SwarmView(now_s=0.0, peers=peers, claims={name(0): claim(0, 0.0)} if led else {})
    keeping = {peer for peer in peers if is_best_keeper(view, peer, 1, 3)}
    assert len(keeping) == (2 if led else 3)
    assert name(9) not in keeping
    assert not led or name(0) not in keeping
