"""`dipaco-status` on a terminal: problems stand on top, and with --watch tables are cut to fit."""

import io
import json
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from dipaco.base.errors import DipacoError, NetworkError
from dipaco.status import status_command
from dipaco.status.screen import render, watch
from support.swarms.big_swarm import spoil, status_at
from support.swarms.swarm_views import healthy_swarm, peer_name, plan_of


def healthy(peers, *sizes):
    plan, grid = plan_of(*sizes)
    return healthy_swarm(plan, grid, peers=peers, round_index=30)


def spoiled(peers, *sizes):
    return spoil(healthy(peers, *sizes))


def shown(drawn, width, height):
    console = Console(width=width, height=height, legacy_windows=False, color_system=None)
    with console.capture() as capture:
        console.print(drawn)
    return capture.get().rstrip("\n").split("\n")


def joined(lines):
    return re.sub(r"\s+", " ", " ".join(lines))


# -- --watch


def watched(first, size, *then):
    """Return the screens that --watch shows, one for each reading, until Ctrl+C."""
    console = Console(
        width=size[0],
        height=size[1],
        file=io.StringIO(),
        force_terminal=True,
        color_system=None,
        legacy_windows=False,
        _environ={},
    )
    outcomes = iter(then)

    def read():
        outcome = next(outcomes, None)
        if outcome is None:
            raise KeyboardInterrupt
        if isinstance(outcome, DipacoError):
            raise outcome
        return outcome

    with pytest.raises(KeyboardInterrupt):
        watch(first, read, 0.0, console)
    # Each screen begins where the one before began: at the corner.
    _, *screens = console.file.getvalue().split("\x1b[H")
    return [re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", screen) for screen in screens if "round 30" in screen]


@pytest.mark.parametrize(("width", "height"), [(80, 40), (120, 24)])
def test_all_problems_of_64_paths_stand_on_top(width, height):
    status = status_at(spoiled(64, 8, 8))
    assert len({p["kind"] for p in status["problems"]}) >= 4
    screen = watched(status, (width, height))[-1]
    lines = [line.strip() for line in screen.split("\n")]
    assert len(lines) <= height
    for problem in status["problems"]:
        assert joined([f"problem: {problem['text']}"]) in joined(lines)


def test_of_tables_that_do_not_fit_what_is_in_trouble_is_shown_and_the_rest_counted():
    status = status_at(healthy(500, 16, 16))
    (screen,) = watched(status, (100, 60))
    assert (screen.count("and 244 more"), screen.count("and 488 more")) == (1, 1)
    assert peer_name(499)[-8:] not in screen[screen.rindex("software") :]
    status["problems"] = [{"text": "it is slow", "subjects": [peer_name(499)]}]
    status["healthy"] = False
    (screen,) = watched(status, (100, 60))
    assert peer_name(499)[-8:] in screen[screen.rindex("software") :]


def test_a_swarm_that_cannot_be_read_is_said_and_what_was_stays():
    before, after = status_at(healthy(6, 2, 2)), status_at(spoiled(9, 2, 2))
    screens = watched(before, (100, 60), NetworkError("nobody answers"), after)
    said = "cannot read the swarm, tries again: nobody answers"
    assert [("all is well" in screen, said in screen) for screen in screens] == [
        (True, False),
        (True, True),
        (False, False),
    ]


def test_into_a_pipe_one_status_follows_the_other():
    outcomes = [status_at(healthy(6, 2, 2)), KeyboardInterrupt()]

    def read():
        if isinstance(outcomes[0], KeyboardInterrupt):
            raise outcomes[0]
        return outcomes.pop(0)

    console = Console(file=io.StringIO(), width=200)
    with pytest.raises(KeyboardInterrupt):
        watch(status_at(spoiled(9, 2, 2)), read, 0.0, console)
    text = console.file.getvalue()
    assert text.count("\npaths") == 2
    assert 0 < text.index("problem: ") < text.index("all is well")


def test_objects_of_json_follow_each_other_too(monkeypatch, capsys):
    outcomes = [{"healthy": True}, NetworkError("nobody answers"), {"healthy": False}, KeyboardInterrupt()]

    def read():
        outcome = outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(status_command, "_WATCH_PERIOD_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        status_command._show(SimpleNamespace(read=read), SimpleNamespace(json=True, watch=True))
    said = capsys.readouterr()
    assert [json.loads(line)["healthy"] for line in said.out.splitlines()] == [True, False]
    assert said.err == "cannot read the swarm, tries again: nobody answers\n"


# -- without --watch


def test_problems_stand_above_the_tables():
    status = status_at(spoiled(9, 2, 2))
    lines = [line.strip() for line in shown(render(status), 200, 80)]
    problems = [i for i, line in enumerate(lines) if line.startswith("problem: ")]
    assert len(problems) == len(status["problems"]) > 2
    assert max(problems) < min(i for i, line in enumerate(lines) if line.startswith("paths"))


@pytest.mark.parametrize(("reachable", "said"), [("direct", "yes"), ("outgoing", "no"), ("unknown", "not known")])
def test_whether_peers_can_be_called(reachable, said):
    records = healthy(6, 2, 2)
    name = peer_name(2)
    records.peers[name] = records.peers[name].model_copy(update={"reachable": reachable})
    row = next(
        line
        for line in shown(render(status_at(records)), 160, 50)
        if f" ..{name[-8:]} " in line and "dipaco/test" in line
    )
    assert f" {said} " in row


def test_a_swarm_as_read_by_scripts():
    status = status_at(spoiled(9, 2, 2))
    assert not status["healthy"]
    for problem in status["problems"]:
        assert set(problem) == {"kind", "text", "what", "since_round", "remedy", "subjects"}
    disagreeing = {m["module"] for m in status["modules"] if not m["agree"]}
    assert disagreeing == {name for p in status["problems"] if p["kind"] == "forked" for name in p["subjects"]}
