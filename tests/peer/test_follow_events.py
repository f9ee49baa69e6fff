"""The listener of examples/monitoring: what events are worth to a tracker."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "examples" / "monitoring" / "follow_events.py"
INNER = {"event": "inner", "path": 1, "path_step": 1, "loss": 3.5, "tokens_per_s": 9.0,
         "seconds": 0.5, "tokens": 64, "time_s": 100.0}  # fmt: skip
STEP = {"event": "outer_step", "module": "L0.E1", "group": ["A", "B"], "version": 4, "round": 3,
        "seconds_after_boundary": 1.0, "time_s": 101.0}  # fmt: skip


@pytest.fixture(scope="module")
def listener():
    spec = importlib.util.spec_from_file_location("follow_events", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def log(path, *events, rest=""):
    path.write_text("".join(json.dumps(event) + "\n" for event in events) + rest)
    return path


def test_events_become_numbers_at_the_step_they_came_at(listener, tmp_path):
    file = log(
        tmp_path / "peer.jsonl",
        INNER,
        {"event": "leaving"},
        INNER,
        STEP,
        {**STEP, "module": "P3"},
        {"event": "carry_on", "module": "L0.E1", "round": 5},
        {"event": "validation", "path": 1, "loss": 2.5},
        {"event": "outer_step"},
        {
            "event": "simulated_round",
            "round": 7,
            "tokens": 64,
            "train_loss": 3.0,
            "perplexity": None,
            "bytes": 9,
            "seconds": 0.5,
            "paths": [],
        },
        rest='no event\n[]\n{"event": "inner", "pa',
    )
    seen = []
    steps = listener.follow(listener.events_of(file, once=True), lambda *values: seen.append(values))
    assert steps == 2
    assert seen[0] == (
        {"train/loss": 3.5, "train/tokens_per_s": 9.0, "train/step_seconds": 0.5, "train/path": 1},
        1,
        100.0,
    )
    assert seen[2][0]["outer_step/L0/peers"] == 2
    assert seen[2][1:] == (2, 101.0)
    assert "outer_step/private/version" in seen[3][0]
    simulated, step, _ = seen.pop()
    assert (simulated["simulated/train_loss"], "simulated/perplexity" in simulated) == (3.0, False)
    assert step == 7
    assert [values[0] for values in seen[4:]] == [{"carry_on/L0": 5}, {"validation/path_1": 2.5}]


def test_it_goes_on_with_what_is_appended(listener, tmp_path):
    file = log(tmp_path / "peer.jsonl", INNER, rest='{"event": "inn')
    events = listener.events_of(file, once=False)
    assert next(events) == INNER
    with file.open("a") as more:
        more.write('er"}\n')
    assert next(events) == {"event": "inner"}


@pytest.mark.parametrize("tracker", ["tensorboard", "trackio", "wandb"])
def test_a_tracker_that_is_not_installed_is_said_in_one_line(listener, tmp_path, tracker, monkeypatch, capsys):
    for name in ("torch.utils.tensorboard", "trackio", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    file = log(tmp_path / "peer.jsonl", INNER)
    assert listener.main([str(file), "--to", tracker, "--once"]) == 2
    said = capsys.readouterr().err
    assert said == f"error: {tracker} is not installed: pip install {tracker}\n"
    assert listener.main([str(tmp_path / "none"), "--to", tracker]) == 2
    assert "is not there" in capsys.readouterr().err
