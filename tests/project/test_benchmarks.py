"""The benchmarks start, and what they share measures what it says."""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
NAMES = sorted(
    script.relative_to(FOLDER).with_suffix("").as_posix()
    for script in (*FOLDER.glob("*.py"), *(FOLDER / "model").glob("*.py"))
)

sys.path.insert(0, str(FOLDER))
import rows  # noqa: E402
import worth  # noqa: E402
import worth_curve  # noqa: E402
import worth_queue  # noqa: E402
from parts import common, mutations  # noqa: E402
from parts.changed_run import ChangedRun, read_changes  # noqa: E402
from parts.power_law import fit  # noqa: E402
from parts.synthetic_run import make_synthetic_run  # noqa: E402
from rivals import packages, turns  # noqa: E402

from dipaco.base.errors import ConfigurationError  # noqa: E402
from dipaco.protocol.config import ModelConfig  # noqa: E402

# Lets a process become every kind of hostile peer at once, and has it publish garbage.
BECOME_HOSTILE = """
import sys, types
import hostile
for kind, does in hostile.KINDS.items():
    exec(does, {})
exec(hostile.KINDS["garbage"], {})
from parts.insiders import INSIDERS, become
for attack in INSIDERS:
    become(attack, sys.argv[1])
import torch
from dipaco.modules.contributions import CODECS
from dipaco.training import trainer
anchor = types.SimpleNamespace(parameters=torch.ones(4096))
told = trainer.Snapshot("P0", 0, anchor, torch.zeros(4096), 1)
print(set(told.encode(CODECS["int4"])))
"""
# Prints what each of the scripts named in the arguments says to --help: one process, because
# importing PyTorch and Hivemind takes seconds.
ASK_FOR_HELP = """
import contextlib, io, json, pathlib, runpy, sys
folder, *names = sys.argv[1:]
sys.path[:0] = [folder, str(pathlib.Path(folder).parent / "tests")]
said = {}
for name in names:
    sys.argv = [f"{name}.py", "--help"]
    # As Python does it for a script.
    sys.path[0] = str(pathlib.Path(folder, name).parent)
    output, code = io.StringIO(), None
    with contextlib.redirect_stdout(output):
        try:
            runpy.run_path(f"{folder}/{name}.py", run_name="__main__")
        except SystemExit as end:
            code = end.code
    said[name] = (code, output.getvalue())
print(json.dumps(said))
"""


def test_what_hostile_peers_replace_is_there(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", BECOME_HOSTILE, str(tmp_path / "notes")],
        cwd=FOLDER,
        env={**common.one_thread(), "PYTHONPATH": str(FOLDER)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "{255}"), done.stderr


@pytest.fixture(scope="module")
def helps():
    done = subprocess.run(
        [sys.executable, "-c", ASK_FOR_HELP, str(FOLDER), *NAMES],
        env=common.one_thread(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_help_shows_the_command(helps, name):
    code, output = helps[name]
    assert code == 0, output
    assert f"python benchmarks/{name}.py" in output
    # With --json, always, or for each of its parts into a file.
    assert "json" in output.lower()


def test_the_tables_of_the_pages_are_those_of_the_rows():
    """After a change of the rows: python benchmarks/rows.py --write."""
    texts = {page: page.read_text(encoding="utf-8") for page in rows.PAGES.glob("*.md")}
    assert {page.name for page, text in texts.items() if rows.filled(text) != text} == set()
    assert sum(text.count("<!-- rows ") for text in texts.values()) > 15


def test_rows_say_what_was_measured_and_under_which_conditions():
    for name in rows.names():
        result = rows.read(name)
        assert result["title"]
        places = []
        for row in result["rows"]:
            assert all(row[key] not in ("", [], None) for key in ("of", "figure", "value")), (name, row)
            assert {"conditions", "commit"} <= {*result, *row}, (name, row)
            assert row.get("low", -1e9) <= row.get("high", 1e9), (name, row)
            places.append((row["of"], row["figure"], row.get("seed"), row.get("commit")))
        assert len(set(places)) == len(places), f"{name} has the same row twice"


def test_a_table_has_a_line_for_each_and_seeds_in_their_order():
    result = {
        "of": "codec",
        "rows": [
            {"of": "int4", "figure": "loss", "value": 4.5, "seed": 0},
            {"of": "int4", "figure": "loss", "value": 4.25, "low": 4.0, "high": 4.75, "seed": 1},
            {"of": "sign", "figure": "loss", "value": -1.5, "seed": 1},
            {"of": "sign", "figure": "told (mean, most)", "value": [3, 12345]},
        ],
    }
    assert rows.table(result).splitlines() == [
        "| codec | loss | told (mean, most) |",
        "|---|---:|---:|",
        "| int4 | 4.50 / 4.25 (4.00 to 4.75) |  |",
        "| sign | – / −1.50 | 3, 12,345 |",
    ]
    assert rows.filled("<!-- rows no-such -->\n") == "<!-- rows no-such -->\n"


def test_rows_that_are_added_keep_their_conditions(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    for load in (1.0, 2.0):
        rows.append("speed", [{"of": "int4", "figure": "s", "value": load}], load=load)
    assert [row["load"] for row in rows.read("speed")["rows"]] == [1.0, 2.0]
    assert all(row["commit"] for row in rows.read("speed")["rows"])


def test_alternating_pairs_each_measure_with_its_neighbours():
    speeds = iter([100.0, 95.0, 90.0, 81.0, 80.0])

    def take():
        return {"speed": next(speeds)}

    found = common.alternate(take, take, 2)
    assert common.paired_ratios(found, "speed") == [1.0, round(81 / 85, 4)]


def test_two_programs_take_turns_and_who_is_first_changes(tmp_path):
    program = """
import sys, time
from rivals.turns import take_turns
def turn(command):
    print("not an answer")
    return {"value": int(sys.argv[1]), "at": time.monotonic()}
take_turns(turn)
"""
    (tmp_path / "counting.py").write_text(program)
    pairs = turns.side_by_side(
        turns.Worker("counting", "6", packages=[tmp_path]), turns.Worker("counting", "3", packages=[tmp_path]), 3
    )
    assert turns.ratios(pairs, "value") == [2.0, 2.0, 2.0]
    assert [ours["at"] < theirs["at"] for ours, theirs in pairs] == [True, False, True]


def test_a_program_that_ends_in_its_turn_is_an_error(tmp_path):
    (tmp_path / "ending.py").write_text("raise SystemExit(3)")
    with (
        turns.Worker("ending", packages=[tmp_path]) as worker,
        pytest.raises(RuntimeError, match="ending ended with 3"),
    ):
        worker.turn()


def test_a_cell_has_the_median_and_the_quarters():
    assert turns.told([1.0, 2.0, 3.0, 4.0, 5.0]) == "3 (2 to 4)"
    assert turns.told([1234.5]) == "1,234"


def test_rivals_are_pinned():
    for pins in packages.PINNED.values():
        assert all(pin.count("==") == 1 for pin in pins)


def test_report_shows_numbers_and_the_machine(capsys):
    report = common.Report("a measure", ("", "seconds"))
    report.row("slow", 12345.678)
    report.row("fast", 0.25)
    report.figures = {"ratio": 0.5}
    report.print(False)
    printed = capsys.readouterr().out
    assert "12,346" in printed
    assert "0.250" in printed
    assert "load" in printed
    report.print(True)
    assert '"ratio": 0.5' in capsys.readouterr().out


def test_memory_of_a_process_tree():
    text = "0-1 ---p 0 00:00 0 [rollup]\nRss: 2048 kB\nPss:  1024 kB\nPss_Anon:   512 kB\n"
    assert common.smaps_rollup(text) == {"Rss": 2.0, "Pss": 1.0, "Pss_Anon": 0.5}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        tree = common.process_tree(os.getpid())
        assert tree[0].pid == os.getpid()
        assert tree[0].proportional_mib >= tree[0].anonymous_mib > 1.0
        assert any(p.pid == child.pid and p.parent == os.getpid() for p in tree)
        child.communicate(b"\n")


def test_synthetic_run_is_a_whole_run(tmp_path):
    model = ModelConfig(vocabulary_size=320, block_count=2, hidden_size=16, head_count=2, sequence_length=16)
    run = make_synthetic_run(tmp_path / "run", model, duration_s=30.0, train_sequences=8)
    plan = run.plan()
    assert plan.rounds.duration_s == 30.0
    assert run.router(plan).path_count == 4
    assert run.train_tokens(plan, 3).shape == (8, 16)
    assert run.validation_tokens(plan, 0).shape == (16, 16)
    assert run.genesis_state(plan, "L1.E1").layout.size > 0
    assert run.tokenizer(plan).vocabulary_size == 320


def test_one_path_has_what_all_paths_have(tmp_path):
    model = ModelConfig(vocabulary_size=320, block_count=2, hidden_size=16, head_count=2, sequence_length=16)
    run = make_synthetic_run(tmp_path / "run", model, train_sequences=8, validation_sequences=40)
    changes = read_changes(["outer.momentum=0.5", "contributions.codec=sign", "seed=3"])
    grid = ChangedRun(run.path, changes, held_out_every=2)
    whole = ChangedRun(run.path, changes, one_path=True, held_out_every=2)
    plan = whole.plan()
    assert (plan.outer.momentum, plan.contributions.codec, plan.seed) == (0.5, "sign", 3)
    assert whole.train_tokens(plan, 0).shape == (32, 16)
    assert whole.shard_index(plan).paths[0].train_sequences == 32
    for half in range(2):
        of_paths = [row.tobytes() for path in range(4) for row in grid.held_out(path)[half]]
        assert of_paths == [row.tobytes() for row in whole.held_out(0)[half]]
        assert 10 < len(of_paths) < 60
    states = {module: grid.genesis_state(grid.plan(), module) for module in grid_modules(grid)}
    base = {module: whole.genesis_state(plan, module) for module in grid_modules(whole)}
    of_paths, of_one = grid.scores(states), whole.scores(base)
    assert of_paths["nats"] == pytest.approx(of_one["nats"], abs=0.011)
    for name in ("loss", "chosen_by", "targets"):
        assert of_paths[name] == pytest.approx(of_one[name], abs=1e-4)
    mean = sum(of_one["nats"]) / sum(of_one["targets"])
    assert of_one["loss"] == pytest.approx(mean, abs=1e-3)


def grid_modules(run):
    return run.grid(run.plan()).modules()


def test_the_steps_to_a_loss_lie_between_the_rounds_that_were_scored():
    curve = [(40, 3.0), (90, 2.0)]
    assert worth.steps_to(2.5, curve) == pytest.approx(60.0)
    assert worth.steps_to(3.0, curve) == 40
    assert worth.steps_to(1.9, curve) is None


def test_a_speed_up_spreads_as_far_as_sequences_differ():
    def scored(steps, *nats):
        return {"of": {"steps": 10}, "round": steps // 10, "nats": nats, "targets": [2] * 4}

    machine = scored(480, 6.0, 6.0, 6.0, 6.0)
    alike = [scored(120, 8.0, 8.0, 8.0, 8.0), scored(240, 4.0, 4.0, 4.0, 4.0)]
    assert worth.speed_ups(machine, alike, 480) == pytest.approx([2.0 * 2**0.5] * 2)
    unlike = [scored(120, 8.0, 8.0, 8.0, 8.0), scored(240, 3.0, 3.0, 5.0, 5.0)]
    low, high = worth.speed_ups(machine, unlike, 480)
    assert 2.0 < low < 2.0 * 2**0.5 < high < 4.0
    assert list(worth.speed_ups(machine, alike[:1], 480)) == [0.0, 0.0]


def test_a_row_of_the_table_has_the_setting_that_other_sequences_choose():
    def scored(row, peers, rate, steps, *losses):
        of = {"row": row, "peers": peers, "steps": 10, "set": {"inner.learning_rate": rate}}
        chosen_by, loss = losses
        return {
            "of": {**of, "decay": False, "dropped": 0.0},
            "round": steps // 10, "chosen_by": chosen_by, "loss": loss,
            "nats": [loss], "targets": [1], "tokens": 512 * peers * steps, "bytes": 0,
        }  # fmt: skip

    lines = [
        scored("one machine", 1, 3e-3, 240, 3.0, 3.0),
        scored("DiLoCo", 4, 3e-3, 60, 3.2, 3.3),
        scored("DiLoCo", 4, 3e-3, 120, 2.9, 3.0),
        scored("DiLoCo", 4, 6e-3, 120, 2.95, 2.0),
        scored("2x2", 4, 3e-3, 120, 3.1, 3.1),
    ]
    told = worth.table(lines, 240).splitlines()[-3:]
    assert told[0].startswith("| one machine, 1 | 3.0000 (240) | 240 | 1.00 (1.00 to 1.00) ")
    assert told[1].startswith("| DiLoCo, 4 | 3.0000 (120) | 120 | 2.00 (2.00 to 2.00) | 0.25 M ")
    assert "inner.learning_rate 0.003" in told[1]
    assert told[2].startswith("| 2x2, 4 | 3.1000 (120) | not reached |")
    with pytest.raises(ConfigurationError, match="no one machine"):
        worth.table(lines, 480)


def test_a_power_law_is_found_again_and_tells_where_it_reaches_a_gap():
    lengths = np.array([1e6, 2e6, 4e6, 8e6])
    shrinks, grows = 0.3 * (lengths / 1e6) ** -0.5, 0.1 * (lengths / 1e6) ** 0.2
    laws = fit(lengths, np.stack([shrinks, grows]))
    assert laws.exponents == pytest.approx([0.5, -0.2])
    assert laws.scatter == pytest.approx([0.0, 0.0], abs=1e-9)
    assert list(laws.lengths_at(0.1)) == pytest.approx([9e6, np.inf])
    uneven = fit(lengths, shrinks * np.array([1.1, 0.9, 0.9, 1.1]))
    assert float(uneven.exponents) == pytest.approx(0.5)
    assert 0.05 < float(uneven.scatter) < 0.2
    with pytest.raises(ValueError, match="three lengths"):
        fit(lengths[:2], shrinks[:2])


def curve_lines(gaps, spread):
    """Return figures of one machine and of four paths after 1, 2, 4, ... M tokens."""
    rng = np.random.default_rng(1)
    lines = []
    for number, gap in enumerate(gaps):
        for peers, loss in ((1, 4.0), (4, 4.0 + float(np.log1p(gap)))):
            noise = rng.normal(0.0, spread, 400) * (peers > 1)
            of = {"run": "runs/2x2", "one_path": peers == 1, "peers": peers, "steps": 10}
            rounds = 80 * 2**number // peers
            lines.append({
                "of": of, "round": rounds, "tokens": 1_250 * 10 * peers * rounds,
                "chosen_by": loss, "loss": loss, "targets": [10] * 400,
                "nats": list(10 * (loss + noise - noise.mean())),
            })  # fmt: skip
    return lines


def curve_of(lines, equal="tokens"):
    chosen = argparse.Namespace(run="2x2", one_machine_of=None, equal=equal, at=0.05)
    return worth_curve.curve(lines, chosen)


def test_a_gap_that_shrinks_is_told_with_the_length_at_which_it_is_small():
    lines = curve_lines([0.4 * 2 ** (-0.5 * n) for n in range(5)], spread=0.2)
    dearer = [{**line, "loss": 9.0, "chosen_by": 9.0} for line in lines]
    law = curve_of([*dearer, *lines, *dearer])["law"]
    assert law["exponent"] == pytest.approx(0.5)
    low, high = law["exponent_interval"]
    assert 0.3 < low < 0.5 < high < 0.7
    assert law["exponents_between"] == pytest.approx([0.5] * 4)
    assert law["length_at"] == pytest.approx(64e6)
    shortest, longest = law["length_at_interval"]
    assert 30e6 < shortest < 64e6 < longest < 200e6
    assert "5% after 64.0 M tokens" in worth_curve.told(curve_of(lines))


def test_a_gap_that_may_not_shrink_has_no_length_within_reach():
    law = curve_of(curve_lines([0.2, 0.21, 0.19, 0.2], spread=0.2))["law"]
    assert law["length_at_interval"][1] is None
    assert "not within reach" in worth_curve.told(curve_of(curve_lines([0.2, 0.3, 0.4], 0.0)))


def test_a_gap_that_is_closed_is_told_with_the_length_at_which_it_was():
    figures = curve_of(curve_lines([0.2, 0.3, 0.1, -0.1], spread=0.1))
    assert figures["law"] is None
    closed = figures["closed_after"]
    assert closed["length"] == pytest.approx(4e6 * 2**0.5)
    shortest, longest = closed["length_interval"]
    assert 5e6 < shortest < closed["length"] < longest < 6.5e6
    assert "closed after 5.7 M tokens" in worth_curve.told(figures)
    never = curve_of(curve_lines([-0.2, -0.1], spread=0.0))
    assert never["closed_after"]["length"] is None
    assert "no gap" in worth_curve.told(never)


def test_at_equal_steps_the_gap_is_what_one_machine_lacks():
    lines = curve_lines([0.4, 0.3, 0.2, 0.1, 0.05], spread=0.0)
    for line in lines:
        line["loss"] -= 0.5 * (line["of"]["peers"] > 1)
        line["nats"] = [10 * line["loss"]] * 400
    points = curve_of(lines, "steps")["points"]
    # The paths' first length has the steps of no one machine.
    assert [point["steps"] for point in points] == [800, 1600, 3200]
    assert points[0]["gap"] == pytest.approx(np.exp(0.5) / 1.2 - 1)
    assert points[0]["tokens"] == 4 * 800 * 1_250


def test_figures_of_different_sequences_are_not_compared():
    lines = curve_lines([0.4, 0.3, 0.2], spread=0.0)
    lines[0]["targets"] = [9] * 400
    with pytest.raises(ConfigurationError, match="different sequences"):
        curve_of(lines)


def test_a_queue_is_read_without_comments_and_a_log_has_whole_lines(tmp_path):
    queue, log = tmp_path / "queue", tmp_path / "0.jsonl"
    queue.write_text("# first\n\nrun --rounds 1,2  # short\nrun --set 'a.b=[1, 2]'\n")
    assert worth_queue.read_queue(queue) == [["run", "--rounds", "1,2"], ["run", "--set", "a.b=[1, 2]"]]
    queue.write_text("run --log elsewhere\n")
    with pytest.raises(ConfigurationError, match="line 1"):
        worth_queue.read_queue(queue)
    log.write_text('{"round": 1}\n{"rou')
    worth_queue.drop_half_a_line(log)
    assert worth.read_log(log) == [{"round": 1}]


def test_a_queue_is_run_in_several_processes_and_made_once(tmp_path):
    model = ModelConfig(vocabulary_size=320, block_count=2, hidden_size=16, head_count=2, sequence_length=16)
    make_synthetic_run(tmp_path / "run", model, train_sequences=8)
    short = f"{tmp_path / 'run'} --steps 1 --rounds 1 --held-out-every 1"
    (tmp_path / "queue").write_text(f"{short} --one-path\nno-run\n{short}\n")

    def run_queue(seconds):
        done = subprocess.run(
            [sys.executable, "worth_queue.py", str(tmp_path / "queue"),
             "--logs", str(tmp_path / "logs"), "--workers", "2", "--seconds", str(seconds)],
            cwd=FOLDER, capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout.splitlines()[-1])

    assert run_queue(250) == (0, {"scored": 2, "not_begun": 0, "time_was_up": False})
    rows = {line["of"]["row"] for line in worth_queue.read_logs(tmp_path / "logs")}
    assert rows == {"one machine", "DiPaCo run"}
    assert run_queue(250)[1]["scored"] == 0
    assert run_queue(0)[1]["time_was_up"]


def test_mutations_of_a_seed_are_the_same_and_reach_behind_the_spelling():
    sample = json.dumps({"a": [1, 2, {"b": "text"}], "c": None}).encode()

    def inputs(seed):
        rng = random.Random(seed)
        return [mutations.mutate(rng, [sample], "json") for _ in range(200)]

    assert inputs(1) == inputs(1) != inputs(2)
    still_json = 0
    for data in inputs(1):
        with contextlib.suppress(ValueError):
            still_json += json.loads(data) != json.loads(sample)
    assert still_json > 50
