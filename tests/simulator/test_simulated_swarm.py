"""The swarm simulator: it is deterministic, it sees what is wrong, and members hold in it."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dipaco.protocol.chain.steps import Step
from dipaco.protocol.member.actions import Action, Adopt, Compute, Publish, Tell
from dipaco.protocol.member.member import Member
from dipaco.simulator.swarm.engine import Engine
from dipaco.simulator.swarm.network import Link, Network
from dipaco.simulator.swarm.one_history import run_history
from dipaco.simulator.swarm.scenario import PROFILES, draw_scenario
from support.insiders import histories, liar
from support.insiders.histories import run_faulty

# Seeds of each profile that every run of the tests lives through; the benchmark lives through many.
SEEDS = range(3)
TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("profile", PROFILES)
def test_members_hold_in_histories_with_faults(profile):
    for seed in SEEDS:
        result = run_faulty(seed, profile, members=2 + seed, rounds=6)
        assert result.violations == [], result.scenario


@pytest.mark.parametrize("profile", ["calm", "nat", "all_nat", "fixed"])
def test_nothing_is_lost_and_nothing_forks_where_nobody_goes(profile):
    for seed in SEEDS:
        figures = run_faulty(seed, profile, members=4, rounds=6).figures
        # A peer that steps alone has not seen a newcomer yet.
        assert figures["forked"] <= 1
        # Nor has a newcomer that proposes heard of everybody in its first round.
        assert figures["lost"] <= 0.02 * figures["trained"]
        assert figures["kept"] > 0.5 * figures["trained"]


def test_what_movers_trained_is_in_the_model():
    for seed in SEEDS:
        figures = run_faulty(seed, "moving", rounds=10).figures
        assert figures["gone by move"] <= 0.01 * figures["trained"]
        assert figures["lost"] <= 0.05 * figures["trained"]


@pytest.mark.parametrize("inner_steps", [0, 8])
def test_a_peer_that_is_always_first_wastes_nobody_s_work(inner_steps, monkeypatch):
    """It tells a step of its own row alone, before others have told theirs."""

    def drawn(*given, **options):
        return replace(draw_scenario(*given, **options), inner_steps=inner_steps)

    monkeypatch.setattr(histories, "draw_scenario", drawn)
    monkeypatch.setattr(liar, "KINDS", ("alone",))
    for seed in SEEDS:
        figures = run_faulty(seed, "hostile", members=6, rounds=6).figures
        assert figures["lost"] <= 0.05 * figures["trained"]


def test_a_seed_is_the_same_history_on_any_machine():
    program = (
        "from support.insiders.histories import run_faulty\n"
        "log = []\n"
        "for profile in ('mixed', 'hostile'):\n"
        "    print(dict(run_faulty(29, profile, rounds=4, log=log).figures))\n"
        "print('\\n'.join(log))"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": number, "PYTHONPATH": str(TESTS)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in ("1", "2")
    ]
    first, second = (process.communicate(timeout=100)[0] for process in running)
    assert first == second
    assert first.count("starts with") > 4


def _found(change, profile="calm"):
    """Return what the invariants find when all members answer otherwise."""
    handle = Member.handle

    def spoiled(member, event, now_s):
        changed = [change(action) for action in handle(member, event, now_s)]
        return [action for action in changed if action is not None]

    found = set()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Member, "handle", spoiled)
        for seed in range(3):
            result = run_faulty(seed, profile, members=5, rounds=6)
            figures = result.figures
            found |= {violation.invariant for violation in result.violations}
            found |= {"lost"} if figures["lost"] > 0.05 * figures["trained"] else set()
    return found


def _tells_no_steps(action):
    return replace(action, steps=()) if isinstance(action, Tell) else action


def _computes_too_much(action):
    if not isinstance(action, Compute):
        return action
    invented = replace(action.steps[-1].rows[0], file="f" * 64, peer="nobody")
    return replace(action, steps=(Step.of([*action.steps[-1].rows, invented]),))


def _adopts_nothing(action):
    return None if isinstance(action, Adopt) else action


def _publishes_nothing(action):
    return None if isinstance(action, Publish) else action


def _keeps_no_copies(action):
    return replace(action, keep=False) if isinstance(action, Tell) else action


def _shares_no_rows(action):
    return replace(action, rows=()) if isinstance(action, Tell) else action


@pytest.mark.parametrize(
    ("change", "invariant"),
    [
        (_adopts_nothing, "contract"),
        (_publishes_nothing, "liveness"),
        (_computes_too_much, "files"),
        (_shares_no_rows, "lost"),
    ],
)
def test_broken_rules_are_noticed(change, invariant):
    assert invariant in _found(change)


def test_an_action_that_nobody_carries_out_is_an_error_at_once(monkeypatch):
    class Invented(Action):
        pass

    handle = Member.handle
    monkeypatch.setattr(Member, "handle", lambda *given: [Invented(), *handle(*given)])
    with pytest.raises(AssertionError, match="nobody carries out"):
        run_faulty(0, "calm", members=2, rounds=2)


def test_a_history_with_liars_needs_somebody_who_lies():
    with pytest.raises(ValueError, match="liars"):
        run_history(draw_scenario(0, "hostile"))


def test_who_hears_of_no_steps_asks_for_them():
    assert "agreement" not in _found(_tells_no_steps)


def test_a_module_of_few_trainers_has_no_copies_unless_somebody_is_asked_to_keep_them():
    assert "copies" in _found(_keeps_no_copies, "moving")


class _Echo:
    """A machine that answers with what it was asked."""

    def __init__(self):
        self.heard = []

    def serve(self, caller, verb, content):
        self.heard.append(f"{caller} {verb}")
        return content, 0


def _network(**second):
    engine = Engine(1, 0.0)
    network, echo = Network(engine), _Echo()
    network.join("a", Link(can_be_called=False), _Echo().serve)
    network.join("b", Link(**second), echo.serve)
    return engine, network, echo


def test_who_cannot_be_called_gets_answers_and_hears_nothing():
    engine, network, echo = _network()
    answers = []
    network.call("a", "b", "ask", "x", answers.append, limit_s=3.0)
    network.call("b", "a", "ask", "y", answers.append, limit_s=3.0)
    network.tell("b", "a", "z", 10)
    engine.run(10.0)
    assert sorted(answers, key=str) == [None, "x"]
    assert echo.heard == ["a ask"]


@pytest.mark.parametrize("fault", ["lost", "cut", "asleep", "dead"])
def test_a_call_that_gets_no_answer_ends_after_its_limit(fault):
    engine, network, _ = _network(hangs=True, is_up=fault != "dead")
    network.conditions.loss = 1.0 if fault == "lost" else 0.0
    network.links["b"].awake_s = 100.0 if fault == "asleep" else 0.0
    if fault == "cut":
        network.cut({"b": 1})
    answers = []
    network.call("a", "b", "ask", "x", answers.append, limit_s=3.0)
    engine.run(2.9)
    assert answers == []
    engine.run(200.0)
    assert answers == [None]
