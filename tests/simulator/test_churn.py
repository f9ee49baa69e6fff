"""The counting of `benchmarks/churn.py` on event logs made up for it, and its schedule."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from parts.lives import (
    QUIET_ROUNDS,
    Clock,
    Life,
    count,
    greatest_wait_s,
    joins,
    rounds_without_step,
    schedule,
    tokens_per_s,
)

from dipaco.routing.run_folder import RunFolder
from support.swarms.swarm import LIMIT_S, Swarm

STEP = 10
MODULES = {0: ("L0.E0", "L1.E0"), 1: ("L0.E0", "L1.E1")}


class Log:
    """Writes the event log of one life, a second for every event."""

    def __init__(self, peer_id, path):
        self.peer_id = peer_id
        self.events = []
        self.train(path)

    def add(self, kind, **values):
        self.events.append({"event": kind, "time_s": float(len(self.events)), **values})
        return self

    def train(self, path):
        return self.add("training", path=path, modules=dict.fromkeys(MODULES[path], 0))

    def steps(self, times):
        for _ in range(times):
            self.add("inner", path=0)
        return self

    def boundary(self, module, round_index, tokens):
        return self.add("outer_round", module=module, round=round_index, tokens=tokens)

    def outer_step(self, module, round_index, digest, tokens, *group):
        return self.add(
            "outer_step",
            module=module,
            round=round_index,
            version=round_index + 1,
            digest=digest,
            tokens=tokens,
            group=list(group or (self.peer_id,)),
        )

    def adopt(self, module, version, digest, tokens, *, is_own_in):
        return self.add("adopt", module=module, version=version, digest=digest, tokens=tokens, is_own_in=is_own_in)

    def life(self, ending, **span):
        return Life(self.peer_id, self.peer_id, ending, self.events, **span)


def counted(*lives):
    return count(lives, MODULES.__getitem__, STEP)


def test_a_calm_peer_has_all_its_tokens_in_the_states_or_on_top():
    log = Log("A", 0).steps(2).boundary("L0.E0", 0, 20).steps(1).outer_step("L0.E0", 0, "a", 20)
    log.steps(1).boundary("L1.E0", 0, 40).outer_step("L1.E0", 0, "b", 40).steps(1)
    found = counted(log.life("stayed"))
    assert found.tokens == {"trained": 100, "final": 60, "pending, stayed": 40, "moved": 0, "missed": 0}
    assert found.share == 1.0
    assert (found.versions, found.forked, found.agreed) == (2, {}, True)


def test_what_a_killed_peer_had_in_no_step_does_not_count():
    stays = Log("A", 0).boundary("L0.E0", 0, 0).outer_step("L0.E0", 0, "a", 30, "A", "B")
    stays.outer_step("L1.E0", 0, "b", 0)
    killed = Log("B", 1).steps(3).boundary("L0.E0", 0, 30).steps(1)
    found = counted(stays.life("stayed"), killed.life("killed"))
    # Its group took a step of L0.E0 without it having been told; of L1.E1 there was none.
    assert (found.tokens["trained"], found.tokens["pending, killed"]) == (80, 10 + 40)
    assert (found.tokens["final"], found.share) == (30, 1.0)


def test_what_leaves_and_moves_leave_behind_is_a_loss():
    stays = Log("A", 0).steps(4).boundary("L0.E0", 0, 40).outer_step("L0.E0", 0, "a", 40)
    stays.boundary("L1.E0", 0, 40).outer_step("L1.E0", 0, "b", 40)
    left = Log("B", 1).steps(1)
    moved = Log("C", 1).steps(2).train(0)
    found = counted(stays.life("stayed"), left.life("left"), moved.life("stayed"))
    assert (found.tokens["pending, left"], found.tokens["moved"]) == (20, 40)
    assert found.share == 80 / 140


def test_a_fork_is_seen_and_its_loser_is_a_loss():
    winner = Log("A", 0).steps(2).boundary("L0.E0", 0, 20).outer_step("L0.E0", 0, "a", 20)
    loser = Log("B", 1).steps(1).boundary("L0.E0", 0, 10).outer_step("L0.E0", 0, "z", 10)
    loser.adopt("L0.E0", 1, "a", 20, is_own_in=False)
    found = counted(winner.life("stayed"), loser.life("stayed"))
    assert found.forked == {("L0.E0", 1): {"a", "z"}}
    assert found.outbid == 0
    assert found.agreed
    # Of L0.E0 20 of 30 tokens are in; the other modules were in no step.
    assert (found.tokens["final"], found.tokens["pending, stayed"]) == (20, 30)
    assert found.share == 20 / 30


def test_a_step_with_all_rows_of_the_other_outbids_it():
    first = Log("A", 0).outer_step("L0.E0", 3, "a", 10, "A", "B").outer_step("L1.E0", 3, "x", 0)
    fuller = Log("B", 0).outer_step("L0.E0", 3, "b", 20, "A", "B", "C")
    assert counted(first.life("stayed"), fuller.life("stayed")).outbid == 1
    other = Log("B", 0).outer_step("L0.E0", 3, "b", 20, "B", "C")
    assert counted(first.life("stayed"), other.life("stayed")).outbid == 0
    taken = Log("B", 0).adopt("L0.E0", 4, "b", 20, is_own_in=True)
    assert counted(first.life("stayed"), taken.life("stayed")).outbid == 0, "its rows are unknown"


def test_an_adoption_can_contain_own_work():
    stays = Log("A", 0).steps(1).boundary("L0.E0", 0, 10).outer_step("L0.E0", 0, "a", 20, "A", "B")
    late = Log("B", 1).steps(1).boundary("L0.E0", 0, 10).steps(1)
    late.adopt("L0.E0", 1, "a", 20, is_own_in=True)
    found = counted(stays.life("stayed"), late.life("stayed"))
    assert found.tokens["pending, stayed"] == 10 + 10 + 20
    assert found.share == 1.0


def test_peers_that_differ_in_the_end_are_told_and_most_are_right():
    logs = [Log(name, 0).steps(1) for name in "ABC"]
    for log, digest, tokens in zip(logs, "xyy", (50, 20, 20), strict=True):
        log.outer_step("L0.E0", 0, digest, tokens)
    found = counted(*(log.life("stayed") for log in logs))
    assert not found.agreed
    assert found.final["L0.E0"]["digest"] == "y"


def test_a_peer_that_stands_aside_is_no_agreement():
    goes_on = Log("A", 0).steps(1).boundary("L0.E0", 1, 10).outer_step("L0.E0", 1, "b", 20)
    goes_on.outer_step("L1.E0", 1, "c", 0)
    aside = Log("B", 0).steps(1)
    assert not counted(goes_on.life("stayed"), aside.life("stayed")).agreed
    aside.add("carry_on", module="L0.E0", round=1, anchor="a")
    assert not counted(goes_on.life("stayed"), aside.life("stayed")).agreed
    aside.add("round", round=1, digests={"L0.E0": "b", "L1.E0": "c"})
    assert counted(goes_on.life("stayed"), aside.life("stayed")).agreed


def test_what_a_step_missed_is_lost():
    goes_on = Log("A", 0).steps(4).boundary("L0.E0", 0, 40).outer_step("L0.E0", 0, "a", 40)
    late = Log("C", 0).steps(1).boundary("L0.E0", 0, 10).adopt("L0.E0", 1, "a", 40, is_own_in=False)
    found = counted(goes_on.life("stayed"), late.life("stayed"))
    assert found.tokens["missed"] == 10
    assert found.share == 40 / 50


CLOCK = Clock(0.0, 10.0, {"L0.E0": 0.5, "L1.E0": 1.0, "L1.E1": 1.0})


def newcomer(*groups, trains_s=6.0, **span):
    """Return what is found of a peer B on path 0, when another has taken steps of these groups."""
    other = Log("A", 0)
    for module, round_index, peers in groups:
        other.outer_step(module, round_index, "a", 0, *peers)
    came = Log("B", 0)
    came.events[0]["time_s"] = trains_s
    lives = [other.life("stayed"), came.life("stayed", **{"is_join": True, **span})]
    [found] = joins(lives, MODULES.__getitem__, CLOCK, patience_s=50.0, step_s=3.0)
    return found


def test_a_join_has_two_rounds_to_contribute():
    # It trains from 6 s on: its rounds end at 15 and 25, and at 10 and 20 s.
    assert newcomer(("L0.E0", 1, "AB"), ("L1.E0", 1, "AB")).is_everywhere
    only_one = newcomer(("L0.E0", 2, "AB"), ("L1.E0", 1, "A"))
    assert only_one.has_contributed
    assert not only_one.is_everywhere
    assert newcomer(("L1.E1", 1, "B")).has_contributed, "it has moved"
    assert not newcomer(("L0.E0", 0, "AB"), ("L1.E0", 2, "AB")).has_contributed
    assert newcomer(began_s=1.5).start_s == 4.5


def test_a_join_that_was_not_there_for_two_rounds_had_no_time():
    assert newcomer(ended_s=28.0).had_time
    assert not newcomer(ended_s=27.9).had_time
    assert not newcomer(stops=[(20.0, 21.0)]).had_time
    assert newcomer(stops=[(40.0, 41.0)]).had_time
    # It ended before it trained; the second time after more than anybody needs for that.
    assert not newcomer(trains_s=70.0, ended_s=49.0).had_time
    never = newcomer(trains_s=70.0, ended_s=51.0)
    assert never.had_time
    assert not never.has_contributed


def test_the_first_peers_are_no_joins():
    life = Log("A", 0).life("stayed")
    assert joins([life], MODULES.__getitem__, CLOCK, patience_s=50.0, step_s=3.0) == []


def test_rounds_without_a_step_are_counted_where_they_end():
    log = Log("A", 0)
    for round_index in (0, 1, 3):
        log.outer_step("L0.E0", round_index, "a", 0)
    log.outer_step("L1.E0", 2, "a", 0)
    found = rounds_without_step([log.life("left")], CLOCK, 12.0, 36.0)
    # Those that end at 15, 25 and 35 s, and at 20 and 30 s.
    assert found == (1 + 1 + 2, 3 + 2 + 2)


def test_a_path_waits_from_step_to_step_and_until_the_end():
    log = Log("A", 0)
    for seconds, paths in ((10.0, [0]), (20.0, [0, 1]), (45.0, [0])):
        log.add("outer_step", paths=paths)
        log.events[-1]["time_s"] = seconds
    assert greatest_wait_s([log.life("stayed")], 2, 0.0, 50.0) == (1, 30.0)
    assert greatest_wait_s([log.life("stayed")], 2, 0.0, 40.0) == (0, 20.0)


def test_the_speed_is_of_processes_that_are_awake():
    log = Log("A", 0).steps(20).outer_step("L0.E0", 0, "a", 40).outer_step("L1.E0", 0, "b", 60)
    for number, event in enumerate(log.events):
        event["time_s"] = number / 2
    life = log.life("left", began_s=-5.0, ended_s=12.0, stops=[(8.0, 10.0)])
    gone = Life("B", "B", "killed", [], began_s=0.0, ended_s=1.0)
    # Without the suspension, and half a second of one that never trained.
    peer_s = 11.5 - 2.0 + 0.5
    trained = 20 * STEP
    assert tokens_per_s([life, gone], STEP, 0.5, 20.0) == (trained / peer_s, trained / (peer_s - 0.5))


def test_nothing_happens_to_elders():
    slots = {fault.slot for fault in schedule(8, 45, 0, elders=2)}
    assert slots == set(range(2, 8))


def test_the_schedule_follows_from_the_seed_and_ends_in_quiet():
    faults = schedule(8, 45, 0)
    assert faults == schedule(8, 45, 0)
    assert faults != schedule(8, 45, 1)
    assert max(fault.at_rounds for fault in faults) <= 45 - QUIET_ROUNDS
    ends = [f for f in faults if f.kind in ("kill", "leave", "stop")]
    assert {fault.kind for fault in ends} == {"kill", "leave", "stop"}
    # Eight peers live five rounds on average, for 42 rounds.
    assert 40 <= len(ends) <= 90
    # What goes comes back, what stops continues, and nothing else happens in between.
    follows = {"kill": {"return", "join"}, "leave": {"return", "join"}, "stop": {"continue"}}
    for slot in range(8):
        own = [fault.kind for fault in faults if fault.slot == slot]
        assert len(own) % 2 == 0
        for before, after in zip(own[::2], own[1::2], strict=True):
            assert after in follows[before]


def test_a_life_has_no_events_of_the_peer_that_comes_back_under_its_name(tmp_path):
    swarm = Swarm(tmp_path, RunFolder(tmp_path))
    for path in range(2):
        write = f"""
import json, sys
with open(sys.argv[sys.argv.index("--log-json") + 1], "a") as log:
    print(json.dumps({{"event": "inner", "path": {path}}}), file=log)
"""
        program = (sys.executable, "-c", write)
        peer = swarm.start_peer("/ip4/127.0.0.1/tcp/1", name="peer0", program=program)
        assert peer.popen.wait(LIMIT_S) == 0
    assert [[event["path"] for event in life.read()] for life in swarm.members] == [[0], [1]]
