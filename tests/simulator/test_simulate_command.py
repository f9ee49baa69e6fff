"""The command line of the simulator: what it prints, and what it saves."""

import pytest

from dipaco.base.errors import ConfigurationError
from dipaco.modules.layout import layout_of
from dipaco.routing.run_folder import RunFolder
from dipaco.simulator import simulate as simulate_module
from dipaco.simulator import simulate_command
from dipaco.simulator.reference import ReferenceSwarm
from support.runs.tiny_run import make_tiny_run
from support.swarms.simulation import simulate

pytestmark = pytest.mark.usefixtures("one_thread")

INTERRUPTED = 130


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


def test_a_simulation_that_is_interrupted_keeps_the_rounds_that_ended(tmp_path, private_run, capsys, monkeypatch):
    (expected,) = simulate(capsys, private_run.path)
    out, ended = tmp_path / "out", []
    original = ReferenceSwarm.run_round

    def run_round(swarm):
        if ended:
            raise KeyboardInterrupt
        ended.append(original(swarm))
        return ended[0]

    monkeypatch.setattr(ReferenceSwarm, "run_round", run_round)
    arguments = [str(private_run.path), "--threads", "1", "--rounds", "3", "--out", str(out)]
    assert simulate_command.main(arguments) == INTERRUPTED
    assert f"ended after 1 of 3 rounds; the states are in {out}" in capsys.readouterr().err
    written = RunFolder(out)
    grid = written.grid(written.plan())
    for module, digest in expected["digests"].items():
        assert written.states.load_latest(module, layout_of(grid, module)).digest == digest
    # They are not written over.
    assert simulate_command.main(arguments) == ConfigurationError.exit_code
    assert "already holds trained states" in capsys.readouterr().err
    assert simulate_command.main([*arguments[:-1], str(tmp_path / "other")]) == INTERRUPTED
    assert "ended after 0 of 3 rounds, and nothing is kept" in capsys.readouterr().err


def test_an_interrupted_baseline_says_what_is_kept(tmp_path, shared_run, capsys, monkeypatch):
    def train_dense(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(simulate_module, "train_dense", train_dense)
    arguments = [str(shared_run.path), "--threads", "1", "--dense-steps", "3", "--json"]
    out = ["--out", str(tmp_path / "out"), "--validation-sequences", "0"]
    assert simulate_command.main([*arguments, *out]) == INTERRUPTED
    said = capsys.readouterr().err
    assert f"nothing of it is kept; the states are in {tmp_path / 'out'}" in said
    assert simulate_command.main([*arguments, "--rounds", "0"]) == INTERRUPTED
    assert capsys.readouterr().err.endswith("nothing of it is kept\n")


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


def test_each_round_is_a_line(shared_run, capsys):
    rows = simulate(capsys, shared_run.path, "--rounds", 3)
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
    assert "nowhere does not exist" in capsys.readouterr().err
