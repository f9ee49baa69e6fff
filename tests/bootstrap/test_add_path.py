"""One path more in a finished run: `prepare --from RUN --add-path NEW.jsonl`."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from dipaco.base.errors import ConfigurationError, CorpusError, IntegrityError
from dipaco.bootstrap import bootstrap_command
from dipaco.bootstrap.preparing.added_paths import config_with_paths
from dipaco.bootstrap.preparing.predecessor import open_predecessor
from dipaco.inference.sources import DiskSource
from dipaco.modules.grow import path_parameters
from dipaco.modules.layout import layout_of
from dipaco.protocol.about import AboutRun
from dipaco.routing.run_folder import RunFolder
from dipaco.simulator import simulate_command as simulate
from dipaco.training.scoring import LossSum, sum_losses
from support.runs.prepared_run import RUN_TOML, on_cpu, prepare, write_run
from support.runs.routed_texts import route_texts
from support.runs.tiny_run import make_tiny_run, tiny_documents

ROUNDS = 3
PRIVATE = {"private_blocks": (1,)}


def train(run, out, *more):
    arguments = [str(run), "--out", str(out), "--rounds", str(ROUNDS), "--threads", "1"]
    assert simulate.main([*arguments, "--validation-sequences", "0", *more]) == 0


def write_documents(file, language, count=40):
    texts = tiny_documents(language + 1, count, seed=5)[language * count :]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def add(old, out, *files, options=()):
    return bootstrap_command.main([
        "prepare", "--from", str(old), "--add-path", *map(str, files), "--out", str(out),
        "--device", "cpu", "--threads", "1", *options,
    ])  # fmt: skip


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """A finished run of four languages."""
    run = make_tiny_run(tmp_path_factory.mktemp("old") / "run", inner_steps=4, **PRIVATE).path
    train(run, run)
    return run


@pytest.fixture(scope="module")
def new(old):
    """It with a path for a fifth language."""
    documents = write_documents(old.parent / "fifth.jsonl", 4)
    options = ("--set", "data.held_out_fraction=0.2", "rounds.duration_s=300")
    assert add(old, old.parent / "next", documents, options=options) == 0
    return old.parent / "next"


def opened(run):
    folder = RunFolder(run)
    return folder, folder.plan()


def test_everything_but_the_new_path_is_as_before(old, new):
    before, old_plan = opened(old)
    after, plan = opened(new)
    assert plan.successor_of == old_plan.run_id
    assert plan.grid == old_plan.grid.model_copy(update={"added_paths": 1})
    assert plan.seed == old_plan.seed + 1
    assert plan.inner == old_plan.inner.model_copy(update={"first_step": ROUNDS * 4})
    assert plan.rounds.duration_s == 300
    same = ("name", "model", "outer", "contributions", "routing", "mirrors")
    assert all(getattr(plan, field) == getattr(old_plan, field) for field in same)
    assert plan.blobs.tokenizer == old_plan.blobs.tokenizer
    assert plan.blobs.base == old_plan.blobs.base
    # The shards have the same names, hence the same bytes, and they are here.
    assert after.shard_index(plan).paths[:4] == before.shard_index(old_plan).paths
    for path in range(4):
        assert np.array_equal(after.train_tokens(plan, path), before.train_tokens(old_plan, path)), path


def test_what_the_run_is_for_stays_too(old):
    before = open_predecessor(old)
    plan = before.plan.model_copy(update={"about": AboutRun(language="de")})
    before.manifest = dataclasses.replace(before.manifest, plan=plan)
    assert config_with_paths(before, [str(old / "manifest.json")]).about == plan.about


def test_new_documents_are_read_as_those_before(tmp_path, capsys):
    """Field and what is held out are those of the run's own RUN.toml; a label is not needed."""
    rows = [{"body": text, "kind": "old"} for text in tiny_documents(3, 40, seed=3)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = 'text_field = "body"\nlabel_field = "kind"\nheld_out_fraction = 0.2'
    old = RUN_TOML.replace('label_field = "domain"\nheld_out_fraction = 0.1', keys).replace("[2, 2]", "[1, 2]")
    prepare(write_run(tmp_path, old), tmp_path / "old", on_cpu())
    new_rows = [{"body": row["body"]} for row in rows[:60]]
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in new_rows))
    assert add(tmp_path / "old", tmp_path / "next", tmp_path / "new.jsonl", options=("--allow-genesis",)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    # Texts of the old paths do not lie together for a new one.
    assert "dipaco-generate --path 2" in shown
    [made] = (tmp_path / "next" / "work").glob("tokens*/*/made.json")
    assert json.loads(made.read_bytes())["read"]["held_out_fraction"] == 0.2


def test_paths_begin_where_they_ended_and_the_new_one_as_the_nearest(old, new):
    predecessor = open_predecessor(old)
    run, plan = opened(new)
    grid = run.grid(plan)
    assert grid.modules_of_path(4) == ("L0.E2", "L1.E2", "P4")
    for module in predecessor.grid.modules():
        head, state = predecessor.load(module), run.genesis_state(plan, module)
        assert head.version == ROUNDS
        assert torch.equal(state.parameters, head.parameters)
        assert torch.equal(state.momentum, head.momentum)
    begun = path_parameters(grid, 4, lambda module: run.genesis_state(plan, module))
    copied = [
        path
        for path in range(4)
        if all(
            torch.equal(value, begun[name])
            for name, value in path_parameters(predecessor.grid, path, predecessor.load).items()
        )
    ]
    assert copied == [nearest_by_hand(old, new)]


def nearest_by_hand(old, new):
    """Return the old path that predicts the first 8 tokens of the new documents best."""
    (before, _), (run, plan) = opened(old), opened(new)
    tokenizer, texts = run.tokenizer(plan), tiny_documents(5, 40, seed=5)[160:]
    rows = np.array([tokenizer.document_tokens(text)[:8] for text in texts])
    predecessor, losses = open_predecessor(before.path), []
    for path in range(4):
        model = before.base_model(before.plan())
        model.load_state_dict(path_parameters(predecessor.grid, path, predecessor.load))
        losses.append(sum_losses(model, rows, 0)[0])
    return int(np.argmin(losses))


def test_until_a_peer_trains_it_a_successor_is_read_as_it_begins(new, tmp_path):
    with DiskSource(new) as source:
        assert [source.missing_modules(path) for path in range(5)] == [()] * 5
    # A peer's cache may lack what it does not train.
    shutil.copytree(new, tmp_path / "cache")
    run, plan = opened(tmp_path / "cache")
    run.blobs.path(run.genesis_index(plan)["P4"]).unlink()
    with DiskSource(tmp_path / "cache") as source:
        assert [source.missing_modules(path) for path in (0, 4)] == [(), ("P4",)]


def test_only_the_new_documents_are_in_its_shard(new):
    run, plan = opened(new)
    shard = run.shard_index(plan).paths[4]
    tokens = run.train_tokens(plan, 4).reshape(-1)
    tokenizer = run.tokenizer(plan)
    texts = tiny_documents(5, 40, seed=5)[160:]
    documents = [tokenizer.document_tokens(text) for text in texts]
    assert shard.validation_sequences > 0
    assert 20 <= shard.train_documents < 40
    found, kept = tokens.tolist(), []
    for document in documents:
        if found[: len(document)] == list(document):
            kept.append(document)
            found = found[len(document) :]
    assert len(kept) == shard.train_documents
    assert not any(found[1:]) or set(found) == {3}  # padding is left


def test_the_router_has_one_centroid_more(old, new):
    (before, old_plan), (run, plan) = opened(old), opened(new)
    texts = tiny_documents(5, 40, seed=5)
    prefixes = [
        run.document_router(plan).prefixes([run.tokenizer(plan).document_tokens(text)])
        for text in (texts[0], texts[60], texts[170])
    ]
    for prefix in prefixes:
        costs = run.router(plan).costs(prefix)
        assert np.array_equal(costs[:, :4], before.router(old_plan).costs(prefix))
    paths = route_texts(run.document_router(plan), texts)
    assert (paths[160:] == 4).mean() > 0.9
    assert (paths[:160] == 4).mean() < 0.1


def test_training_it_teaches_the_new_language_and_changes_nobody_else(new, tmp_path):
    train(new, tmp_path / "trained", "--paths", "4")
    run, plan = opened(new)
    trained = RunFolder(tmp_path / "trained")
    grid = run.grid(plan)
    held_out, losses = run.validation_tokens(plan, 4), []
    for load in (
        lambda module: run.genesis_state(plan, module),
        lambda module: trained.states.load_latest(module, layout_of(grid, module)),
    ):
        model = run.base_model(plan)
        model.load_state_dict(path_parameters(grid, 4, load))
        losses.append(LossSum(*sum_losses(model, held_out, 8)).loss or 0.0)
    assert losses[1] < losses[0] - 0.1
    for module in grid.modules():
        state = trained.states.load_latest(module, layout_of(grid, module))
        assert (state.version > 0) == (module in grid.modules_of_path(4))


def test_a_second_path_is_added_to_a_run_with_an_added_one(new, tmp_path, capsys):
    train(new, tmp_path / "old")
    shutil.copy(new / "operator.pem", tmp_path / "old")
    files = [write_documents(tmp_path / f"{number}.jsonl", number, 12) for number in (5, 6)]
    options = ("--set", "name=seven", "data.held_out_fraction=1e-9")
    assert add(tmp_path / "old", tmp_path / "out", *files, options=options) == 0
    output = capsys.readouterr().out
    assert "Path 5 (5.jsonl) begins as path " in output
    assert "No document of 6.jsonl is held out" in output
    assert "2 x 2 and 3 added" in output
    run, plan = opened(tmp_path / "out")
    grid, before = run.grid(plan), open_predecessor(tmp_path / "old")
    assert (plan.name, grid.path_count) == ("seven", 7)
    assert grid.modules_of_path(6) == ("L0.E4", "L1.E4", "P6")
    for module in before.grid.modules():
        assert torch.equal(run.genesis_state(plan, module).parameters, before.load(module).parameters)
    assert add(tmp_path / "old", tmp_path / "out", *files, options=options) == 0
    assert "Everything is done already" in capsys.readouterr().out


def refused(error, capsys, *words):
    """Return the one line with which a command is refused."""
    capsys.readouterr()
    assert bootstrap_command.main(["prepare", *map(str, words)]) == error.exit_code
    [line] = capsys.readouterr().err.splitlines()
    return line


def test_bad_documents_are_refused(old, tmp_path, capsys):
    contents = {
        "empty.jsonl": "",
        "blank.jsonl": '{"text": ""}\n{"text": " "}\n',
        "form.jsonl": '{"body": "a text"}\n',
        "broken.jsonl": '{"text": "a',
        "letter.docx": "a text",
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    for name, message in {
        "empty.jsonl": "is empty; leave it out",
        "blank.jsonl": "hold no text: every 'text' is empty",
        "form.jsonl": "no field 'text'; it has body. Write text_field = 'body' under [data]",
        "broken.jsonl": "broken.jsonl:1 is not JSON",
        "letter.docx": "an ending this version cannot read",
    }.items():
        line = refused(
            CorpusError, capsys, "--from", old, "--add-path", tmp_path / name,
            "--out", tmp_path / "out", "--device", "cpu",
        )  # fmt: skip
        assert f"--add-path {tmp_path / name}: " in line
        assert message in line
    assert not (tmp_path / "out/manifest.json").exists()


def test_what_cannot_be_is_refused(old, tmp_path, capsys):
    documents = write_documents(tmp_path / "new.jsonl", 4, 10)
    toml = write_run(tmp_path / "other")
    out = ("--out", tmp_path / "out")
    given = ("--from", old, "--add-path", documents, *out)
    for words, message in (
        (("--add-path", documents, *out), "give the folder of that run with --from"),
        (("--from", old, *out), "give RUN.toml, or --from RUN with --add-path"),
        ((toml, *given), "leave RUN.toml out, and change settings with --set"),
        (("--from", old, "--add-path", tmp_path / "none.jsonl", *out), "there is no such file"),
        ((*given, "--add-path", documents), "is given twice"),
        ((*given, "--set", "grid.added_paths=3"), "as in the run before"),
        ((*given, "--set", "data.train=x"), "as in the run before"),
        ((*given, "--set", "rounds.duration=3"), "did you mean 'duration_s'"),
    ):
        assert message in refused(ConfigurationError, capsys, *words)
    toml.write_text(toml.read_text().replace("[2, 2]", "[2, 2]\nadded_paths = 1"))
    line = refused(ConfigurationError, capsys, toml, *out)
    assert "added_paths under [grid] is counted by" in line


def test_an_unfit_predecessor_is_refused(old, tmp_path, capsys):
    documents = write_documents(tmp_path / "new.jsonl", 4, 10)

    def line(error, run):
        return refused(error, capsys, "--from", run, "--add-path", documents,
                       "--out", tmp_path / "out", "--device", "cpu")  # fmt: skip

    untrained = make_tiny_run(tmp_path / "untrained").path
    assert "holds no state of L0.E0" in line(ConfigurationError, untrained)
    lacking = tmp_path / "lacking"
    shutil.copytree(old, lacking)
    run, plan = opened(lacking)
    run.blobs.remove(run.shard_index(plan).paths[2].train_sha256)
    assert "lacks the shard of path 2" in line(IntegrityError, lacking)
