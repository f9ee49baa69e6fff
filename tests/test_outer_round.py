"""When an outer round commits, retries, gives way to another's commit, or carries on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dipaco.modules.codecs import CODECS
from dipaco.modules.grid import Grid
from dipaco.modules.outer import AveragingRule, Contribution
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import ModuleState, PathProgress, StateReference
from dipaco.peer.averaging.averager import AveragingOutcome
from dipaco.peer.averaging.parts import AveragingFailed
from dipaco.peer.member.rounds import Boundary
from dipaco.peer.outer_round import Answers, CarriedOn, Committed, CommittedElsewhere, OuterRound
from dipaco.peer.trainer import Snapshot
from support.tiny_run import make_tiny_run

MODULE, ROUND = "L0.E0", 5
Reply = AveragingOutcome | AveragingFailed


class FakeAverager:
    """Replies what the test says, one reply for each attempt."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies)
        self.calls: list[dict[str, Any]] = []

    def average(self, flat: torch.Tensor, **call: Any) -> AveragingOutcome:
        self.calls.append(call)
        reply = self.replies.pop(0)
        if isinstance(reply, AveragingFailed):
            raise reply
        return reply


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> RunPlan:
    folder: Path = tmp_path_factory.mktemp("outer")
    run = make_tiny_run(
        folder / "run", inner_steps=0, duration_s=60.0, start_s=time.time() - 300
    )  # fmt: skip
    return run.plan()


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> RunPlan:
    """The plan of a run of fixed steps."""
    folder: Path = tmp_path_factory.mktemp("counted")
    return make_tiny_run(folder / "run", inner_steps=4, duration_s=60.0, start_s=0.0).plan()


def _snapshot(plan: RunPlan) -> Snapshot:
    grid = Grid(plan.model, plan.grid, plan.rounds.level_offsets)
    layout = grid.layout(MODULE)
    flat = torch.zeros(layout.size)
    progress = {0: PathProgress(640, ROUND - 1)}
    anchor = ModuleState(MODULE, 3, flat, flat.clone(), progress, layout)
    return Snapshot(MODULE, 0, ROUND, anchor, flat + 0.5, 64, 10)


def _outcome(snapshot: Snapshot, *peers: str) -> AveragingOutcome:
    table = tuple(Contribution(0, peer, 64) for peer in sorted(peers))
    return AveragingOutcome(snapshot.outer_gradient(), table)


def _run(
    plan: RunPlan,
    averager: FakeAverager,
    snapshot: Snapshot,
    *,
    expected: set[str],
    possible: set[str] | None = None,
    ask: Callable[[frozenset[str]], Answers] = lambda peers: Answers(),
    oldest_first: str = "ABCD",
    rounds_in_vain: int = 0,
    awaited: Callable[[], set[str]] | None = None,
    is_overtaken: bool = False,
    meets_for_s: float = 30.0,
) -> Any:
    outer = OuterRound(
        plan=plan,
        me="B",
        module_index=0,
        rule=AveragingRule(CODECS[plan.averaging.codec]),
        averager=averager,
        expected_group=lambda module: frozenset(expected),
        possible_group=lambda module: frozenset(possible or expected),
        ask_others=lambda module, anchor, peers: ask(peers),
        seniority=lambda peer: (False, float(oldest_first.index(peer)), peer),
        rounds_in_vain=rounds_in_vain,
        stopping=lambda: False,
        local_time=lambda swarm_s: swarm_s,
        awaited_group=lambda module: frozenset(awaited() if awaited else expected),
        is_overtaken=lambda anchor: is_overtaken,
    )
    now_s = time.time()
    return outer.run(snapshot, Boundary(now_s, ROUND, "L0", now_s + meets_for_s))


def _alive(*peers: str) -> Callable[[frozenset[str]], Answers]:
    return lambda asked: Answers(frozenset(peers) & asked)


def test_a_lone_peer_needs_no_averager(plan: RunPlan) -> None:
    averager = FakeAverager()
    result = _run(plan, averager, _snapshot(plan), expected={"B"})
    assert isinstance(result, Committed)
    assert averager.calls == []
    assert [row.peer for row in result.table] == ["B"]


def test_a_peer_that_is_about_to_join_is_waited_for(plan: RunPlan) -> None:
    """It may have begun since the view was read; two who step alone would fork the module."""
    snapshot = _snapshot(plan)
    averager = FakeAverager(_outcome(snapshot, "A", "B"))
    result = _run(plan, averager, snapshot, expected={"B"}, possible={"A", "B"})
    assert isinstance(result, Committed)
    assert len(result.table) == 2


def test_survivors_commit_in_the_second_attempt(plan: RunPlan) -> None:
    snapshot = _snapshot(plan)
    averager = FakeAverager(
        AveragingFailed("C is gone", ("A", "B", "C"), ("C",)), _outcome(snapshot, "A", "B")
    )
    result = _run(plan, averager, snapshot, expected={"A", "B", "C"}, ask=_alive("A"))
    assert isinstance(result, Committed)
    assert result.attempt == 1
    assert [call["expected_peers"] for call in averager.calls] == [3, 2]
    assert averager.calls[1]["exclude"] == ("C",)
    assert averager.calls[0]["group_bits"] != averager.calls[1]["group_bits"]


def test_a_state_committed_by_others_is_taken(plan: RunPlan) -> None:
    state = StateReference("L0.E0", 3, "d" * 64, tokens=900, last_round=2, bytes=80)
    elsewhere = CommittedElsewhere(state, ("A",), "the group committed without this peer")
    result = _run(
        plan,
        FakeAverager(AveragingFailed("broken", ("A", "B"))),
        _snapshot(plan),
        expected={"A", "B"},
        ask=lambda peers: Answers(frozenset("A"), elsewhere),
    )
    assert result is elsewhere


def test_less_than_half_of_the_claims_carries_on(plan: RunPlan) -> None:
    snapshot = _snapshot(plan)
    averager = FakeAverager(_outcome(snapshot, "A", "B"))
    result = _run(plan, averager, snapshot, expected=set("ABCD") | {"E"})
    assert isinstance(result, CarriedOn)


def test_the_survivor_of_two_steps_alone_at_once(plan: RunPlan) -> None:
    averager = FakeAverager(AveragingFailed("A is gone", ("A", "B"), ("A",)))
    result = _run(plan, averager, _snapshot(plan), expected={"A", "B"})
    assert isinstance(result, Committed)
    assert len(averager.calls) == 1


@pytest.mark.parametrize(("oldest_first", "commits"), [("BA", True), ("AB", False)])
def test_of_two_that_do_not_meet_only_the_older_steps(
    plan: RunPlan, oldest_first: str, commits: bool
) -> None:
    averager = FakeAverager(*[AveragingFailed("no other peer came to the group")] * 2)
    result = _run(
        plan,
        averager,
        _snapshot(plan),
        expected={"A", "B"},
        ask=_alive("A"),
        oldest_first=oldest_first,
    )
    assert isinstance(result, Committed if commits else CarriedOn)


def test_nobody_waits_for_ever_for_an_older_peer_that_hangs(plan: RunPlan) -> None:
    averager = FakeAverager(*[AveragingFailed("no other peer came to the group")] * 2)
    result = _run(
        plan,
        averager,
        _snapshot(plan),
        expected={"A", "B"},
        ask=_alive("A"),
        rounds_in_vain=2,
    )
    assert isinstance(result, Committed)


def test_fixed_steps_a_group_waits_for_all_that_train_the_module(counted: RunPlan) -> None:
    snapshot = _snapshot(counted)
    averager = FakeAverager(_outcome(snapshot, "A", "B"))
    before_s = time.time()
    result = _run(counted, averager, snapshot, expected={"A", "B"})
    assert isinstance(result, Committed)
    (call,) = averager.calls
    assert call["awaited"]() == {"A", "B"}
    assert before_s + 30.0 <= call["scheduled_time"] <= time.time() + 30.0
    assert call["longest_wait_s"] >= 60.0


def test_fixed_steps_without_a_group_the_same_attempt_begins_anew(counted: RunPlan) -> None:
    """The others may be there already: another key would part the peer from them."""
    snapshot = _snapshot(counted)
    averager = FakeAverager(AveragingFailed("the leader left"), _outcome(snapshot, "A", "B"))
    result = _run(counted, averager, snapshot, expected={"A", "B"})
    assert isinstance(result, Committed)
    assert result.attempt == 0
    assert averager.calls[0]["group_bits"] == averager.calls[1]["group_bits"]


def test_fixed_steps_survivors_of_a_broken_group_meet_under_another_key(counted: RunPlan) -> None:
    snapshot = _snapshot(counted)
    averager = FakeAverager(
        AveragingFailed("C is gone", ("A", "B", "C"), ("C",)), _outcome(snapshot, "A", "B")
    )
    result = _run(counted, averager, snapshot, expected=set("ABC"), ask=_alive("A"))
    assert isinstance(result, Committed)
    assert result.attempt == 1
    assert averager.calls[1]["awaited"]() == {"A", "B"}
    assert averager.calls[0]["group_bits"] != averager.calls[1]["group_bits"]


def test_fixed_steps_a_claim_that_expires_is_waited_for_no_more(counted: RunPlan) -> None:
    """A is killed while B waits for it: B steps alone, whatever is left of the limit."""
    snapshot = _snapshot(counted)
    claims = {"A", "B"}

    class Waiting(FakeAverager):
        def average(self, flat: torch.Tensor, **call: Any) -> AveragingOutcome:
            assert call["awaited"]() == {"A", "B"}
            claims.remove("A")
            assert call["awaited"]() is None
            return super().average(flat, **call)

    averager = Waiting(AveragingFailed("no other peer came to the group"))
    result = _run(counted, averager, snapshot, expected={"A", "B"}, awaited=lambda: claims)
    assert isinstance(result, Committed)
    assert len(result.table) == 1
    assert len(averager.calls) == 1


def test_fixed_steps_who_is_overtaken_takes_the_others_state(counted: RunPlan) -> None:
    snapshot = _snapshot(counted)
    newer = _snapshot(counted).anchor.reference
    elsewhere = CommittedElsewhere(newer, ("A",), "the group committed without this peer")
    averager = FakeAverager(AveragingFailed("no other peer came to the group"))
    result = _run(
        counted,
        averager,
        snapshot,
        expected={"A", "B"},
        ask=lambda peers: Answers(frozenset("A"), elsewhere),
        is_overtaken=True,
    )
    assert result is elsewhere
    assert averager.calls[0]["awaited"]() is None


def test_fixed_steps_after_the_limit_the_rules_are_those_of_the_clock(counted: RunPlan) -> None:
    """The others live and did not come: a third of the module's peers commits nothing."""
    result = _run(
        counted,
        FakeAverager(AveragingFailed("no other peer came to the group")),
        _snapshot(counted),
        expected=set("ABC"),
        ask=_alive("A", "C"),
        meets_for_s=0.0,
    )
    assert isinstance(result, CarriedOn)
