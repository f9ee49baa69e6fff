"""The benchmarks start, their results are rows, and what they share measures what it says."""

import gzip
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
NAMES = sorted(script.stem for script in FOLDER.glob("*.py"))

sys.path.insert(0, str(FOLDER))
import rows  # noqa: E402
from parts import common, gaps, mutations  # noqa: E402
from parts.changed_run import ChangedRun, read_changes  # noqa: E402
from parts.synthetic_run import make_synthetic_run  # noqa: E402

from dipaco.base.errors import ConfigurationError  # noqa: E402
from dipaco.protocol.config import ModelConfig  # noqa: E402
from dipaco.routing.tokens.token_files import scoring_windows  # noqa: E402
from support.programs.processes import ran  # noqa: E402

MODEL = ModelConfig(vocabulary_size=320, block_count=2, hidden_size=16, head_count=2, sequence_length=16)
# Lets a process become every kind of hostile peer at once, and has it publish garbage.
BECOME_HOSTILE = """
import sys, types, torch
from parts import insiders, liars
for kind in liars.LIARS:
    liars.become(kind)
liars.become("garbage")
for attack in insiders.INSIDERS:
    insiders.become(attack, sys.argv[1])
from dipaco.modules.contributions import CODECS
from dipaco.training import trainer
anchor = types.SimpleNamespace(parameters=torch.ones(4096))
told = trainer.Snapshot("P0", 0, anchor, torch.zeros(4096), 1)
print(set(told.encode(CODECS["int4"])))
"""
# Prints what each of the scripts named in the arguments says to --help: one process, because
# importing PyTorch and Hivemind takes seconds.
ASK_FOR_HELP = """
import contextlib, io, json, runpy, sys
folder, *names = sys.argv[1:]
sys.path[0] = folder
said = {}
for name in names:
    sys.argv = [f"{name}.py", "--help"]
    output, code = io.StringIO(), None
    with contextlib.redirect_stdout(output):
        try:
            runpy.run_path(f"{folder}/{name}.py", run_name="__main__")
        except SystemExit as end:
            code = end.code
    said[name] = (code, output.getvalue())
print(json.dumps(said))
"""


def run_python(*arguments, **environment):
    own = {**common.one_thread(), "PYTHONPATH": f"{FOLDER}:{FOLDER.parent / 'tests'}", **environment}
    return ran(sys.executable, *arguments, env=own)


@pytest.fixture(scope="module")
def helps():
    done = run_python("-c", ASK_FOR_HELP, FOLDER, *NAMES)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_help_shows_the_command(helps, name):
    code, output = helps[name]
    assert code == 0, output
    assert f"python benchmarks/{name}.py" in output
    assert "--json" in output


def test_what_hostile_peers_replace_is_there(tmp_path):
    done = run_python("-c", BECOME_HOSTILE, tmp_path / "notes")
    assert (done.returncode, done.stdout.strip()) == (0, "{255}"), done.stderr


# -- rows


def test_the_tables_of_the_pages_are_those_of_the_rows():
    """After a change of the rows: python benchmarks/rows.py --write."""
    texts = {page: page.read_text(encoding="utf-8") for page in rows.PAGES.glob("*.md")}
    assert {page.name for page, text in texts.items() if rows.filled(text) != text} == set()
    assert sum(text.count("<!-- rows ") for text in texts.values()) > 3


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


def test_the_commands_of_the_rows_are_there():
    texts = "".join(script.read_text(encoding="utf-8") for script in FOLDER.rglob("*.py"))
    for name in rows.names():
        command = rows.read(name).get("command", "")
        assert all((FOLDER / script).exists() for script in re.findall(r"(?<!/)\b\w+\.py\b", command)), (name, command)
        assert all(f'"{flag}"' in texts for flag in re.findall(r"--[a-z][a-z0-9-]+", command)), (name, command)


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


def test_what_a_report_finds_is_printed_and_added_with_its_conditions(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    parser = common.build_parser("A measure.")
    for seed in range(2):
        report = common.Report("a measure", seed=seed)
        report.add("slow", {"seconds": 12345.678, "at": {"4": 1, "8": None}})
        assert report.conclude(parser.parse_args(["--rows", "speed"])) == 0
    assert "| seconds | 12,346 |" in capsys.readouterr().out
    found = rows.read("speed")["rows"]
    assert [(row["figure"], row["seed"]) for row in found] == [(f, s) for s in range(2) for f in ("seconds", "at: 4")]
    assert all(row["load"] for row in found)
    # A source archive is of no commit.
    assert all(row["commit"] for row in found) or not (Path(__file__).parents[2] / ".git").exists()
    assert report.conclude(parser.parse_args(["--json"]), ["a promise"]) == 1
    assert json.loads(capsys.readouterr().out)["notes"] == ["broken: a promise"]


# -- what is measured


def test_memory_of_a_process_tree():
    text = "0-1 ---p 0 00:00 0 [rollup]\nRss: 2048 kB\nPss:  1024 kB\nPss_Anon:   512 kB\n"
    assert common.smaps_rollup(text) == {"Rss": 2.0, "Pss": 1.0, "Pss_Anon": 0.5}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        tree = common.process_tree(os.getpid())
        assert tree[0].pid == os.getpid()
        assert tree[0].proportional_mib >= tree[0].anonymous_mib > 1.0
        assert any(p.pid == child.pid and p.parent == os.getpid() for p in tree)
        child.communicate(b"\n")


def test_one_path_has_what_all_paths_have(tmp_path):
    run = make_synthetic_run(tmp_path / "run", MODEL, train_sequences=8, validation_sequences=40)
    changes = read_changes(["outer.momentum=0.5", "contributions.codec=sign", "seed=3"])
    grid = ChangedRun(run.path, changes, held_out_every=2)
    whole = ChangedRun(run.path, changes, one_path=True, held_out_every=2)
    plan = whole.plan()
    assert (plan.outer.momentum, plan.contributions.codec, plan.seed) == (0.5, "sign", 3)
    assert whole.train_tokens(plan, 0).shape == (32, 16)
    for half in range(2):
        of_paths = {row.tobytes() for path in range(4) for row in grid.held_out(path)[half][0]}
        assert of_paths == {row.tobytes() for row in whole.held_out(0)[half][0]}
        assert 10 < len(of_paths) < 60
    found = [one.scores({m: one.genesis_state(one.plan(), m) for m in modules_of(one)}) for one in (grid, whole)]
    for name in ("loss", "chosen_by", "targets", "nats"):
        assert found[0][name] == pytest.approx(found[1][name], abs=0.011)
    assert found[1]["loss"] == pytest.approx(sum(found[1]["nats"]) / sum(found[1]["targets"]), abs=1e-3)


def test_what_is_scored_can_be_whole_documents_of_domains(tmp_path, monkeypatch):
    run = make_synthetic_run(tmp_path / "run", MODEL, train_sequences=8)
    documents = [{"text": f"{word} " * 12, "domain": word[0]} for word in ("ab", "ac", "bd", "be", "bf", "bg", "ah")]
    with gzip.open(tmp_path / "texts.gz", "wt") as file:
        file.writelines(json.dumps(document) + "\n" for document in documents)
    changed = ChangedRun(run.path, {}, texts=tmp_path / "texts.gz")
    plan = changed.plan()
    texts = [changed.tokenizer(plan).document_tokens(document["text"]) for document in documents]
    windows = [scoring_windows(tokens, 16, plan.routing.prefix_tokens, 3) for tokens in texts]
    shards = [np.concatenate(windows[path::4]) for path in range(4)]
    monkeypatch.setattr(changed, "validation_tokens", lambda plan, path: shards[path])
    found = changed.scores({m: changed.genesis_state(plan, m) for m in modules_of(changed)})
    told = len(found["nats"])
    assert 0 < told < len(documents) < sum(map(len, windows))
    chosen_by = sum(len({*marks}) for half, marks in (changed.held_out(path)[0] for path in range(4)))
    assert told + chosen_by == len(documents)
    assert set(found["perplexities"]) <= {"a", "b"}


def modules_of(run):
    return run.grid(run.plan()).modules()


def test_a_run_is_measured_once_and_told(tmp_path):
    run = make_synthetic_run(tmp_path / "run", MODEL, train_sequences=8, validation_sequences=40)
    log = tmp_path / "log"
    short = (FOLDER / "worth.py", run.path, "--log", log, "--steps", 1, "--held-out-every", 1)
    for more in (
        ("--one-path", "--rounds", "2,8"),
        ("--rounds", "2", "--move-every", "1"),
        ("--rounds", "1,2", "--decay"),
    ):
        for _ in range(2):
            done = run_python(*short, *more)
            assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["of"]["row"], line["round"]) for line in lines] == [
        ("one machine", 2), ("one machine", 8), ("DiPaCo run", 2), ("DiPaCo run", 1), ("DiPaCo run", 2),
    ]  # fmt: skip
    done = run_python(FOLDER / "worth.py", "--log", log, "--gap", "run", "--json")
    found = {(row["of"], row["figure"]): row["value"] for row in json.loads(done.stdout)["rows"]}
    assert found["1,024 tokens", "loss, one machine"] == lines[1]["loss"]


def test_the_steps_to_a_loss_lie_between_the_rounds_that_were_scored():
    curve = [(40, 3.0), (90, 2.0)]
    assert gaps.steps_to(2.5, curve) == pytest.approx(60.0)
    assert gaps.steps_to(3.0, curve) == 40
    assert gaps.steps_to(1.9, curve) is None


def test_a_speed_up_spreads_as_far_as_what_is_held_out_differs():
    def scored(steps, *nats):
        return {"of": {"steps": 10}, "round": steps // 10, "nats": nats, "targets": [2] * 4}

    machine = scored(480, 6.0, 6.0, 6.0, 6.0)
    alike = [scored(120, 8.0, 8.0, 8.0, 8.0), scored(240, 4.0, 4.0, 4.0, 4.0)]
    assert gaps.speed_ups(machine, alike, 480) == pytest.approx([2.0 * 2**0.5] * 2)
    unlike = [scored(120, 8.0, 8.0, 8.0, 8.0), scored(240, 3.0, 3.0, 5.0, 5.0)]
    low, high = gaps.speed_ups(machine, unlike, 480)
    assert 2.0 < low < 2.0 * 2**0.5 < high < 4.0
    assert list(gaps.speed_ups(machine, alike[:1], 480)) == [0.0, 0.0]


def scored(row, peers, steps, chosen_by, loss, **of):
    common_of = {"row": row, "run": "runs/2x2", "one_path": peers == 1, "peers": peers, "steps": 10, "set": {}}
    rest = {"decay": False, "dropped": 0.0, "move_every": 0, "exact": True}
    rng = np.random.default_rng(steps)
    noise = rng.normal(0.0, 0.1, 400) * (peers > 1)
    nats = list(10 * (loss + noise - noise.mean()))
    amounts = {"tokens": 512 * peers * steps, "bytes": 0, "nats": nats, "targets": [10] * 400}
    return {"of": {**common_of, **rest, **of}, "round": steps // 10, "chosen_by": chosen_by, "loss": loss, **amounts}


def test_a_row_of_the_table_has_the_setting_that_other_texts_choose():
    rate = {"set": {"inner.learning_rate": 6e-3}}
    lines = [
        scored("one machine", 1, 240, 3.0, 3.0),
        scored("DiLoCo", 4, 60, 3.2, 3.3),
        scored("DiLoCo", 4, 120, 2.9, 3.0),
        scored("DiLoCo", 4, 120, 2.95, 2.0, **rate),
        scored("2x2", 4, 120, 3.1, 3.1),
    ]
    found = {(row["of"], row["figure"]): row for row in gaps.speed_up_rows(lines, 240)}
    assert found["DiLoCo, 4", "steps of each"]["value"] == 120
    assert found["DiLoCo, 4", "speed-up"]["value"] == 2.0
    assert found["DiLoCo, 4", "tokens of all, M"]["value"] == 0.25
    assert "rate" not in found["DiLoCo, 4", "setting"]["value"]
    assert ("2x2, 4", "speed-up") not in found
    with pytest.raises(ConfigurationError, match="no one machine"):
        gaps.speed_up_rows(lines, 480)


def test_a_gap_that_is_closed_is_told_with_the_length_at_which_it_was():
    told = []
    for number, gap in enumerate([0.2, 0.3, 0.1, -0.1]):
        steps = 800 * 2**number
        told += [scored("one machine", 1, steps, 4.0, 4.0), scored("2x2", 4, steps // 4, 4.0, 4.0 + np.log1p(gap))]
    told.append(scored("one machine", 1, 800, 3.9, 9.0, set={"x": 1}) | {"chosen_by": 4.1})
    *points, closed = gaps.gap_rows(told, "2x2", "tokens")
    assert [row["value"] for row in points if row["figure"] == "gap at equal tokens, %"] == [20.0, 30.0, 10.0, -10.0]
    assert closed["value"] == pytest.approx(512 * 800 * 4 * 2**0.5 / 1e6, abs=0.05)
    assert closed["low"] <= closed["value"] <= closed["high"]
    open_in_the_end = gaps.gap_rows(told[:-2], "2x2", "tokens")
    assert open_in_the_end[-1]["figure"] == "gap at equal tokens, %"
    steps = gaps.gap_rows(told, "2x2", "steps")
    assert [row["of"] for row in steps if row["figure"] == "loss, paths"] == ["1,638,400 tokens", "3,276,800 tokens"]
    told[0]["targets"] = [9] * 400
    with pytest.raises(ConfigurationError, match="different texts"):
        gaps.gap_rows(told, "2x2", "tokens")


def test_mutations_of_a_seed_are_the_same_and_reach_behind_the_spelling():
    sample = json.dumps({"a": [1, 2, {"b": "text"}], "c": None}).encode()
    inputs = [mutations.mutate(sample, "json", random.Random(seed)) for seed in range(200)]
    assert inputs == [mutations.mutate(sample, "json", random.Random(seed)) for seed in range(200)]
    assert sum(data is not None and json.loads(data) != json.loads(sample) for data in inputs) > 150
    assert mutations.mutate(b"\xc1", "msgpack", random.Random(0)) is None


@pytest.mark.parametrize("script", ["prepare.sh", "run.sh"])
def test_the_scripts_of_the_kit_are_sound(script):
    file = FOLDER / "gpu_kit" / script
    subprocess.run(["bash", "-n", str(file)], check=True, timeout=30)
    assert os.access(file, os.X_OK)
