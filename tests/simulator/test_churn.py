"""The counting of `benchmarks/churn.py` on event logs made up for it, and its schedule."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from parts.churn_counts import (
    QUIET_ROUNDS,
    Counts,
    Ending,
    Event,
    Life,
    count,
    schedule,
)
from support.swarm import LIMIT_S, Swarm

from dipaco.routing.run_folder import RunFolder

STEP = 10
MODULES = {0: ("L0.E0", "L1.E0"), 1: ("L0.E0", "L1.E1")}


class Log:
    """Writes the event log of one life, a second for every event."""

    def __init__(self, peer_id: str, path: int) -> None:
        self.peer_id = peer_id
        self.events: list[Event] = []
        self.train(path)

    def add(self, kind: str, **values: Any) -> Log:
        self.events.append({"event": kind, "time_s": float(len(self.events)), **values})
        return self

    def train(self, path: int) -> Log:
        return self.add("training", path=path, modules=dict.fromkeys(MODULES[path], 0))

    def steps(self, times: int) -> Log:
        for _ in range(times):
            self.add("inner", path=0)
        return self

    def boundary(self, module: str, round_index: int, tokens: int) -> Log:
        return self.add("outer_round", module=module, round=round_index, tokens=tokens)

    def commit(self, module: str, round_index: int, digest: str, tokens: int, *group: str) -> Log:
        return self.add(
            "commit",
            module=module,
            round=round_index,
            version=round_index + 1,
            digest=digest,
            tokens=tokens,
            group=list(group or (self.peer_id,)),
        )

    def adopt(self, module: str, version: int, digest: str, tokens: int, *, merged: bool) -> Log:
        return self.add(
            "adopt",
            module=module,
            version=version,
            digest=digest,
            tokens=tokens,
            own_work_merged=merged,
        )

    def life(self, ending: Ending) -> Life:
        return Life(self.peer_id, self.peer_id, ending, self.events)


def counted(*lives: Life, end_s: float = 100.0) -> Counts:
    return count(lives, lambda path: MODULES[path], STEP, end_s)


def test_a_calm_peer_has_all_its_tokens_in_the_states_or_on_top() -> None:
    log = Log("A", 0).steps(2).boundary("L0.E0", 0, 20).steps(1).commit("L0.E0", 0, "a", 20)
    log.steps(1).boundary("L1.E0", 0, 40).commit("L1.E0", 0, "b", 40).steps(1)
    found = counted(log.life("stayed"))
    assert (found.trained, found.final_tokens, found.stayed_unmerged) == (100, 60, 40)
    assert found.share == 1.0
    assert (found.commits, found.versions, found.forked, found.agreed) == (2, 2, {}, True)


def test_what_a_killed_peer_had_not_merged_does_not_count() -> None:
    stays = Log("A", 0).boundary("L0.E0", 0, 0).commit("L0.E0", 0, "a", 30, "A", "B")
    stays.commit("L1.E0", 0, "b", 0)
    killed = Log("B", 1).steps(3).boundary("L0.E0", 0, 30).steps(1)
    found = counted(stays.life("stayed"), killed.life("killed"))
    # Its group committed L0.E0 without it having been told; of L1.E1 nothing was merged.
    assert (found.trained, found.killed_unmerged) == (80, 10 + 40)
    assert (found.final_tokens, found.share) == (30, 1.0)


def test_what_leaves_and_moves_leave_behind_is_a_loss() -> None:
    stays = Log("A", 0).steps(4).boundary("L0.E0", 0, 40).commit("L0.E0", 0, "a", 40)
    stays.boundary("L1.E0", 0, 40).commit("L1.E0", 0, "b", 40)
    left = Log("B", 1).steps(1)
    moved = Log("C", 1).steps(2).train(0)
    found = counted(stays.life("stayed"), left.life("left"), moved.life("stayed"))
    assert (found.left_unmerged, found.moved_unmerged) == (20, 40)
    assert found.share == 80 / 140


def test_a_fork_is_seen_and_its_loser_is_a_loss() -> None:
    winner = Log("A", 0).steps(2).boundary("L0.E0", 0, 20).commit("L0.E0", 0, "a", 20)
    loser = Log("B", 1).steps(1).boundary("L0.E0", 0, 10).commit("L0.E0", 0, "z", 10)
    loser.adopt("L0.E0", 1, "a", 20, merged=False)
    found = counted(winner.life("stayed"), loser.life("stayed"))
    assert found.forked == {("L0.E0", 1): {"a", "z"}}
    assert found.agreed
    # Of L0.E0 20 of 30 tokens are in; the other modules were never merged.
    assert (found.final_tokens, found.stayed_unmerged) == (20, 30)
    assert found.share == 20 / 30


def test_an_adoption_can_contain_own_work() -> None:
    stays = Log("A", 0).steps(1).boundary("L0.E0", 0, 10).commit("L0.E0", 0, "a", 20, "A", "B")
    late = Log("B", 1).steps(1).boundary("L0.E0", 0, 10).steps(1)
    late.adopt("L0.E0", 1, "a", 20, merged=True)
    found = counted(stays.life("stayed"), late.life("stayed"))
    assert found.stayed_unmerged == 10 + 10 + 20
    assert found.share == 1.0


def test_peers_that_differ_in_the_end_are_told_and_most_are_right() -> None:
    logs = [Log(name, 0).steps(1) for name in "ABC"]
    for log, digest, tokens in zip(logs, "xyy", (50, 20, 20), strict=True):
        log.commit("L0.E0", 0, digest, tokens)
    found = counted(*(log.life("stayed") for log in logs))
    assert not found.agreed
    assert found.final["L0.E0"]["digest"] == "y"


def test_a_peer_that_stands_aside_is_no_agreement() -> None:
    goes_on = Log("A", 0).steps(1).boundary("L0.E0", 1, 10).commit("L0.E0", 1, "b", 20)
    goes_on.commit("L1.E0", 1, "c", 0)
    aside = Log("B", 0).steps(1)
    assert not counted(goes_on.life("stayed"), aside.life("stayed")).agreed
    aside.add("carry_on", module="L0.E0", round=1, anchor="a")
    assert not counted(goes_on.life("stayed"), aside.life("stayed")).agreed
    aside.add("round", round=1, digests={"L0.E0": "b", "L1.E0": "c"})
    assert counted(goes_on.life("stayed"), aside.life("stayed")).agreed


def test_the_longest_stretch_without_a_commit_reaches_to_the_end() -> None:
    log = Log("A", 0).commit("L0.E0", 0, "a", 1).steps(4).commit("L0.E0", 1, "b", 2)
    log.commit("L1.E0", 0, "c", 1)
    assert counted(log.life("stayed"), end_s=8.0).longest_without_commit == ("L0.E0", 5.0)
    assert counted(log.life("stayed"), end_s=20.0).longest_without_commit == ("L0.E0", 14.0)


def test_the_schedule_follows_from_the_seed_and_ends_in_quiet() -> None:
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


def test_a_life_has_no_events_of_the_peer_that_comes_back_under_its_name(tmp_path: Path) -> None:
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
