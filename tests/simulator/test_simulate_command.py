"""The command line of the simulator: what is saved, and how it goes on."""

import json

import pytest
import torch

from dipaco.base.errors import ConfigurationError, IntegrityError
from dipaco.modules.layout import layout_of
from dipaco.routing.run_folder import RunFolder
from dipaco.simulator import simulate_command
from dipaco.simulator.reference import ReferenceSwarm
from support.runs.tiny_run import make_tiny_run
from support.swarms.simulation import simulate

pytestmark = pytest.mark.usefixtures("one_thread")

INTERRUPTED = 130


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_resuming_changes_no_bit(tmp_path, private_run, capsys, optimizer):
    """Local parameters of levels that ended within the round are ahead of their anchors."""
    common = ["--optimizer", optimizer, "--paths", "0,0,3"]
    straight = simulate(capsys, private_run.path, "--rounds", 4, *common)
    out = tmp_path / "out"
    first = simulate(capsys, private_run.path, "--rounds", 2, "--out", out, *common)
    second = simulate(capsys, private_run.path, "--rounds", 2, "--out", out, "--resume", *common)
    assert [line["round"] for line in first + second] == [0, 1, 2, 3]
    for resumed, line in zip(first + second, straight, strict=True):
        assert resumed | {"seconds": 0} == line | {"seconds": 0}
    written = RunFolder(out)
    grid = written.grid(written.plan())
    for module, digest in second[-1]["digests"].items():
        state = written.states.load_latest(module, layout_of(grid, module))
        assert state.digest == digest


def test_the_output_is_a_run_folder_with_the_states(tmp_path, shared_run, capsys):
    out = tmp_path / "out"
    lines = simulate(capsys, shared_run.path, "--rounds", 2, "--out", out, "--dense-steps", 3)
    assert lines[-1]["dense"]["steps"] == 3
    slow = ("--rounds", 0, "--dense-steps", 3, "--dense-rate", 1e-6)
    other = simulate(capsys, shared_run.path, *slow)[-1]["dense"]
    assert other["perplexity"] > lines[-1]["dense"]["perplexity"]
    assert (out / "dense.safetensors").is_file()
    written = RunFolder(out)
    plan = written.plan()
    assert plan == shared_run.plan()
    grid = written.grid(plan)
    for module, digest in lines[1]["digests"].items():
        state = written.states.load_latest(module, layout_of(grid, module))
        assert state.digest == digest
    assert len(written.train_tokens(plan, 0)) == len(shared_run.train_tokens(plan, 0))


def test_a_simulation_that_is_killed_goes_on_from_its_last_save(tmp_path, private_run, capsys, monkeypatch):
    """Killed within a round, and then while it saves: new states are there, its file is not."""
    straight = simulate(capsys, private_run.path, "--rounds", 3)
    out = tmp_path / "out"
    arguments = [str(private_run.path), "--threads", "1", "--out", str(out), "--rounds", "2"]
    (first,) = simulate(capsys, private_run.path, "--out", out)
    with monkeypatch.context() as patch:
        patch.setattr(ReferenceSwarm, "_step_module", _killed)
        assert simulate_command.main([*arguments, "--resume"]) == INTERRUPTED
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", _killed)
        assert simulate_command.main([*arguments, "--resume"]) == INTERRUPTED
    capsys.readouterr()
    lines = [first, *simulate(capsys, private_run.path, "--rounds", 2, "--out", out, "--resume")]
    assert [line["digests"] for line in lines] == [line["digests"] for line in straight]


def _killed(*_, **__):
    raise KeyboardInterrupt


def test_a_damaged_simulation_is_named(tmp_path, shared_run, capsys):
    out = tmp_path / "out"
    simulate(capsys, shared_run.path, "--out", out)
    file = out / "simulation.pt"
    file.write_bytes(file.read_bytes()[:1000])
    assert simulate_command.main([str(shared_run.path), "--out", str(out), "--resume"]) == (IntegrityError.exit_code)
    error = capsys.readouterr().err
    assert "simulation.pt cannot be resumed" in error
    assert error.count("\n") == 1


def test_resuming_what_was_never_saved_begins_at_the_genesis(tmp_path, shared_run, capsys):
    (line,) = simulate(capsys, shared_run.path, "--out", tmp_path / "out", "--resume")
    assert line["round"] == 0


def test_the_output_of_another_simulation_is_refused(tmp_path, shared_run, capsys):
    out = tmp_path / "out"
    simulate(capsys, shared_run.path, "--out", out)
    arguments = [str(shared_run.path), "--out", str(out)]
    assert simulate_command.main(arguments) == ConfigurationError.exit_code
    assert "--resume" in capsys.readouterr().err
    assert simulate_command.main([*arguments, "--resume", "--paths", "0"]) == ConfigurationError.exit_code
    assert "peers" in capsys.readouterr().err


def test_what_is_saved_holds_what_encodings_have_lost(tmp_path, capsys):
    run = make_tiny_run(tmp_path / "run", codec="int2", inner_steps=2)
    straight = simulate(capsys, run.path, "--rounds", 3)
    out, lines = tmp_path / "out", []
    for resume in ([], ["--resume"], ["--resume"]):
        lines += simulate(capsys, run.path, "--out", out, *resume)
    assert [line["digests"] for line in lines] == [line["digests"] for line in straight]


def test_the_human_output_names_rounds_paths_and_modules(tmp_path, shared_run, capsys):
    out = tmp_path / "out"
    arguments = [str(shared_run.path), "--rounds", "1", "--dense-steps", "2", "--out", str(out)]
    assert simulate_command.main(arguments) == 0
    text = capsys.readouterr().out
    for word in ("before", "round 0", "validation perplexity", "L1.E1", "dense after 2 steps"):
        assert word in text
    assert f"--state-dir {out}" in text


def test_a_long_simulation_says_how_long_it_goes_on(shared_run, capsys, monkeypatch):
    monkeypatch.setattr("dipaco.base.progress.LINE_EVERY_S", 0.0)
    assert simulate_command.main([str(shared_run.path), "--validation-sequences", "0"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("training")]
    # Two levels: four workers go to the first boundary, then to the second.
    assert len(lines) == 1 + 2 * 4
    assert lines[-1] == "training: 16 of 16 (inner steps)"


def test_rounds_are_kept_in_a_file(tmp_path, shared_run, capsys):
    log = tmp_path / "rounds.jsonl"
    common = ["--out", tmp_path / "out", "--log-json", log]
    lines = simulate(capsys, shared_run.path, "--rounds", 2, *common)
    lines += simulate(capsys, shared_run.path, "--rounds", 1, *common, "--resume")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert rows == lines
    assert [row["round"] for row in rows] == [0, 1, 2]
    plan = shared_run.plan()
    steps = plan.rounds.inner_steps * plan.inner.batch_sequences * plan.model.sequence_length
    assert {row["tokens"] for row in rows} == {4 * steps}
    assert len({row["bytes"] for row in rows}) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rounds", "-1"], "--rounds -1"),
        (["--steps-per-round", "0"], "--steps-per-round 0"),
        (["--paths", "0,x"], "'x' is not a path"),
        (["--paths", "9"], "give 0 to 3"),
        (["--resume"], "--out"),
        (["--threads", "0"], "--threads 0"),
        (["--device", "toaster"], "'toaster'"),
    ],
)
def test_errors_are_one_line_that_says_what_to_type(shared_run, capsys, arguments, words):
    assert simulate_command.main([str(shared_run.path), *arguments]) == ConfigurationError.exit_code
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_run_that_follows_the_clock_needs_a_number_of_steps(tmp_path, capsys):
    run = make_tiny_run(tmp_path / "run", inner_steps=0)
    assert simulate_command.main([str(run.path)]) == ConfigurationError.exit_code
    printed = capsys.readouterr()
    assert "--steps-per-round" in printed.err
    assert "validation perplexity" not in printed.out, "it scored before it refused"
    (line,) = simulate(capsys, run.path, "--steps-per-round", 2)
    assert {path["step"] for path in line["paths"]} == {2}


def test_no_run_directory(tmp_path, capsys):
    assert simulate_command.main([str(tmp_path / "nowhere")]) == 9
    assert "manifest.json" in capsys.readouterr().err
