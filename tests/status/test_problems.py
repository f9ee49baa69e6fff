"""What counts as a problem of a swarm: nothing in a healthy one, and the worst first."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dipaco.protocol.records import Holding
from dipaco.status.problems import MAX_ALIKE, forked_modules, problems
from support.swarms.big_swarm import spoil, status_at
from support.swarms.swarm_views import digest_of, healthy_swarm, peer_name, plan_of

KINDS = (
    "untrained", "stalled", "broken", "forked", "behind", "copies", "waiting", "undialable",
)  # fmt: skip


def found(records):
    return problems(records.view(), records.plan, records.grid)


def kinds(records):
    return [problem.kind for problem in found(records)]


def swarm(peers=8, *sizes, round_index=12):
    plan, grid = plan_of(*(sizes or (2, 2)))
    return healthy_swarm(plan, grid, peers=peers, round_index=round_index)


@settings(max_examples=150, deadline=None)
@given(
    peers=st.integers(3, 60),
    sizes=st.sampled_from([(1,), (2, 2), (4, 4), (2, 3, 2), (8, 8)]),
    round_index=st.integers(0, 70),
    in_round=st.floats(0.0, 0.99),
    behind=st.sampled_from([0, 2, 3]),
    duration_s=st.sampled_from([5.0, 20.0, 600.0]),
    inner_steps=st.sampled_from([0, 10]),
    dwell_rounds=st.integers(1, 4),
    private=st.booleans(),
)
def test_a_healthy_swarm_has_no_problem(
    peers, sizes, round_index, in_round, behind, duration_s, inner_steps, dwell_rounds, private
):
    plan, grid = plan_of(
        *sizes, private=private, duration_s=duration_s, inner_steps=inner_steps, dwell_rounds=dwell_rounds
    )
    records = healthy_swarm(plan, grid, peers=peers, round_index=round_index, in_round=in_round, behind=behind)
    assert [problem.text for problem in found(records)] == []


@pytest.mark.parametrize("peers", [3, 40, 500])
def test_a_healthy_swarm_of_256_paths_has_no_problem(peers):
    assert kinds(swarm(peers, 16, 16, round_index=30)) == []


# -- a module without a step


def sentence(records):
    return status_at(records)["sentence"]


def stall(records, module, last_round):
    for held, peer in list(records.holdings):
        if held == module:
            records.hold(peer, module, last_round)


def test_a_module_without_a_step_for_rounds():
    records = swarm(8, 2, 2)
    stall(records, "L0.E1", 9)
    assert kinds(records) == []
    stall(records, "L0.E1", 8)
    [problem] = found(records)
    assert (problem.kind, problem.since_round, problem.subjects) == ("stalled", 8, ("L0.E1",))
    assert problem.text.startswith("L0.E1 has had no step for 3 rounds, since round 8; look at")
    stall(records, "L0.E1", -1)
    assert "since the run began; look" in found(records)[0].text


def test_a_module_without_a_step_with_fixed_steps():
    plan, grid = plan_of(2, 2, inner_steps=10)
    records = healthy_swarm(plan, grid, peers=8, round_index=12)
    stall(records, "L1.E0", 8)
    assert kinds(records) == ["stalled"]
    # Counted rounds may be much shorter than their limit: the clock has seen one round.
    records.now_s = plan.start_s + 1.5 * plan.rounds.duration_s
    assert kinds(records) == ["stalled"]
    stall(records, "L1.E0", 9)
    assert kinds(records) == []


def test_who_comes_to_a_module_that_waited_has_rounds_for_a_step():
    records = swarm(3, 4, 4, round_index=40)
    module = next(m for m in records.grid.modules() if len(records.trainers(m)) == 1)
    stall(records, module, 20)
    for path in records.grid.paths_of_module(module):
        entry = records.progress.pop(path, None)
        if entry is not None:
            records.progress[path] = entry.model_copy(update={"last_round": 20})
    assert "stalled" not in kinds(records)
    trainer = records.trainers(module)[0]
    earlier_s = records.plan.start_s + 36 * records.plan.rounds.duration_s
    records.claims[trainer] = records.claims[trainer].model_copy(update={"since_s": earlier_s})
    assert kinds(records)[0] == "stalled"


def test_a_module_that_peers_come_to_in_turn_and_that_has_no_step():
    """As two peers do on four paths: no claim on it lasts as long as its steps are missing."""
    records = swarm(2, 2, 2, round_index=20)
    [module, *_] = (m for m in records.grid.modules() if not records.trainers(m))
    trained = max(records.progress[p].last_round for p in records.grid.paths_of_module(module))
    # A path may wait ceil(4 / 2) + 1 turns of two rounds, and two rounds.
    for last_round, is_stalled in ((trained - 10, False), (trained - 11, True)):
        stall(records, module, last_round)
        assert (kinds(records)[:1] == ["stalled"]) is is_stalled
    assert "has had no step for 11 rounds" in found(records)[0].text


# -- forks


def test_two_steps_of_one_version_are_a_fork():
    records = swarm(8)
    other = records.trainers("L0.E0")[1]
    records.hold(other, "L0.E0", 11, chain="b")
    [problem] = found(records)
    assert (problem.kind, problem.subjects) == ("forked", ("L0.E0",))
    assert all(digest_of("L0.E0", 12, chain)[:8] in problem.text for chain in ("", "b"))
    assert forked_modules([problem]) == {"L0.E0"}
    # A version behind may be an ancestor.
    records.hold(other, "L0.E0", 10, chain="b")
    assert kinds(records) == []


def test_another_state_of_the_same_step_is_a_broken_machine():
    records = swarm(8)
    other = records.trainers("L0.E0")[1]
    head = records.holdings["L0.E0", other].head
    wrong = dataclasses.replace(head, digest="0" * 64)
    records.holdings["L0.E0", other] = Holding(other, wrong)
    [problem] = found(records)
    assert (problem.kind, problem.subjects) == ("broken", (other, "L0.E0"))
    assert problem.text.startswith(f"..{other[-8:]} computed another state than most of L0.E0;")
    assert "memory and processor" in problem.remedy


@pytest.mark.parametrize("kind", ["broken", "behind"])
def test_what_is_wrong_with_one_machine_is_told_once_however_many_modules_it_has(kind):
    records = swarm(16, 2, 2, 2, 2)
    other = peer_name(0)
    for module in records.grid.modules_of_path(records.claims[other].path):
        if kind == "behind":
            records.hold(other, module, 8)
        else:
            head = records.holdings[module, other].head
            records.holdings[module, other] = Holding(other, dataclasses.replace(head, digest="0" * 64))
    [problem] = found(records)
    assert (problem.kind, problem.subjects[0], len(problem.subjects)) == (kind, other, 5)
    assert problem.text.startswith(f"..{other[-8:]} ")
    assert ("memory and processor" in problem.remedy) == (kind == "broken")
    assert ("network" in problem.remedy) == (kind == "behind")


def test_an_older_state_in_training_for_rounds_is_told():
    records = swarm(8)
    other = records.trainers("L0.E0")[1]
    records.hold(other, "L0.E0", 9)
    assert kinds(records) == []
    records.hold(other, "L0.E0", 8)
    [problem] = found(records)
    assert (problem.kind, problem.since_round) == ("behind", 8)
    assert problem.text.startswith(f"..{other[-8:]} holds an older state of L0.E0, since round 8")
    assert forked_modules([problem]) == frozenset()


# -- copies, paths, addresses


def test_fewer_copies_than_the_run_wants():
    records = swarm(8)
    holders = [peer for module, peer in records.holdings if module == "L0.E0"]
    for peer in holders[2:]:
        records.holdings.pop(("L0.E0", peer))
    [problem] = found(records)
    assert (problem.kind, problem.subjects) == ("copies", ("L0.E0",))
    assert problem.text.startswith("L0.E0 has 2 copies of 3; see whether")
    records.holdings.pop(("L0.E0", holders[1]))
    assert found(records)[0].what == "L0.E0 has 1 copy of 3"
    # Two versions after the first step there was no time to copy yet.
    early = swarm(8, round_index=2)
    for peer in holders[1:]:
        early.holdings.pop(("L0.E0", peer), None)
    assert kinds(early) == []


def test_more_copies_than_can_be_had_are_not_asked_for():
    assert kinds(swarm(2)) == []
    # One machine has no other to give copies to, and neither has one among those that nobody can call.
    assert "copies" not in kinds(swarm(1, round_index=30))
    records = swarm(8)
    keeper, *others = [peer for module, peer in records.holdings if module == "L0.E0"]
    for peer in others:
        records.holdings.pop(("L0.E0", peer))
    assert kinds(records) == ["copies"]
    for peer in records.peers.keys() - {keeper}:
        records.peers[peer] = records.peers[peer].model_copy(update={"reachable": "outgoing"})
    assert kinds(records) == []
    assert sentence(records).endswith("by 8 machines; no other machine keeps copies")


def test_one_sentence_says_how_a_run_is():
    trained = "4 of 4 parts of the model are being trained by 8 machines"
    records = swarm(8)
    assert sentence(records) == f"all is well: {trained}"
    stall(records, "L0.E1", 8)
    assert sentence(records) == f"1 problem: {trained}"
    assert sentence(swarm(2)) == (
        "all is well: 2 of 4 parts of the model are being trained by 2 machines; the parts take turns"
    )


def test_a_path_waits_only_so_long():
    """ceil(4 / 3) + 1 turns of two rounds, and two rounds more."""
    records = swarm(3, round_index=20)
    path = next(p for p in range(4) if not records.view().claimants(p))
    for last_round, expected in ((11, []), (10, ["path 0 has waited 9 rounds (8 are usual),"])):
        entry = records.progress[path].model_copy(update={"last_round": last_round})
        records.progress[path] = entry
        waiting = [problem for problem in found(records) if problem.kind == "waiting"]
        assert [problem.what for problem in waiting] == [text.replace("path 0", f"path {path}") for text in expected]
    # With peers enough it need not wait at all.
    records = swarm(4)
    records.claims[peer_name(3)] = records.claims[peer_name(3)].model_copy(update={"path": 2})
    assert "path 3 has no trainer since round 11; if it lasts" in found(records)[-1].text


def test_a_path_that_nobody_here_has_trained_has_waited_since_its_private_module_s_last_step():
    """Nobody tells of its rounds after its operator has brought the run back from a backup."""
    plan, grid = plan_of(2, 2, private=True)
    records = healthy_swarm(plan, grid, peers=1, round_index=20)
    path = next(p for p in range(4) if not records.view().claimants(p))
    records.progress.clear()
    records.hold(peer_name(0), f"P{path}", 19)
    assert not [problem for problem in found(records) if problem.subjects == (f"path {path}",)]
    records.hold(peer_name(0), f"P{path}", 2)
    [problem] = [problem for problem in found(records) if problem.subjects == (f"path {path}",)]
    assert problem.since_round == 2


def test_a_claimed_path_that_gets_nowhere():
    records = swarm(8)
    records.progress[2] = records.progress[2].model_copy(update={"last_round": 6})
    [problem] = found(records)
    assert (problem.kind, problem.subjects, problem.since_round) == ("waiting", ("path 2",), 6)
    assert "path 2 is claimed and has made no progress for 5 rounds, since round 6" in problem.text


def test_without_anybody_that_can_be_called_there_is_no_mailbox():
    records = swarm(8)
    for name in records.peers:
        records.peers[name] = records.peers[name].model_copy(update={"reachable": "outgoing"})
    [problem] = [problem for problem in found(records) if problem.kind == "undialable"]
    assert problem.text.startswith("none of 8 peers can be called, so they cannot hear")
    assert set(problem.subjects) == set(records.peers)
    # One is enough, also one that nobody has tried yet.
    name = peer_name(0)
    for reachable in ("direct", "unknown"):
        records.peers[name] = records.peers[name].model_copy(update={"reachable": reachable})
        assert "undialable" not in kinds(records)


@pytest.mark.parametrize(("peers", "is_problem"), [(1, False), (2, True)])
def test_two_peers_that_cannot_be_called_do_not_find_each_other(peers, is_problem):
    records = swarm(peers)
    for name in records.peers:
        records.peers[name] = records.peers[name].model_copy(update={"reachable": "outgoing"})
    assert ("undialable" in kinds(records)) is is_problem


# -- order and number


@pytest.mark.parametrize(("peers", "sizes"), [(3, (2, 2)), (60, (4, 4)), (500, (16, 16))])
def test_the_worst_stand_first_and_many_become_one(peers, sizes):
    records = spoil(swarm(peers, *sizes, round_index=30))
    ranks = [KINDS.index(kind) for kind in kinds(records)]
    assert ranks == sorted(ranks)
    assert len(set(ranks)) >= 3
    assert all(ranks.count(rank) <= MAX_ALIKE for rank in set(ranks))
    assert all(len(problem.text) < 240 for problem in found(records))


def test_nobody_trains():
    records = swarm(8)
    records.claims.clear()
    assert kinds(records) == ["untrained"]
    assert "dipaco-peer ADDR" in found(records)[0].text


def test_every_trainer_with_a_state_of_its_own():
    """Invented holdings do not make the work grow with the square of their number."""
    records = swarm(2000, 4, 4)
    for number, (module, peer) in enumerate(list(records.holdings)):
        records.hold(peer, module, 11, chain=str(number))
    assert kinds(records)[0] == "forked"
