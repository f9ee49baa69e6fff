"""One run after another on one machine: dense, k-means grid, re-sharded by scores, grown."""

import io
import itertools
import json
import re
import shutil

import numpy as np
import pytest
import torch
from rich.console import Console

from dipaco.base.errors import ConfigurationError, CorpusError, IntegrityError, ManifestError, StorageError
from dipaco.bootstrap import bootstrap_command
from dipaco.bootstrap.prepare_output import Display
from dipaco.bootstrap.preparing import score_stages
from dipaco.bootstrap.preparing.predecessor import open_predecessor
from dipaco.modules.compose import load_path
from dipaco.modules.grow import Growth, path_parameters
from dipaco.modules.layout import layout_of
from dipaco.modules.transformer import PathModel
from dipaco.protocol.manifest import load_or_create_operator_key, verify_manifest
from dipaco.routing.run_folder import RunFolder
from dipaco.simulator import simulate_command as simulate
from dipaco.training.scoring import sum_losses
from support.runs.prepared_run import RUN_TOML, on_cpu, prepare, write_run

ADDRESS = "/ip4/192.0.2.1/tcp/1/p2p/12D3KooWLGUApiCpST4ZyZPakytsXQ19eY7ZRGCyyJWXKk4tqiZw"

ROUTER = "[router]\nprefix_tokens = 8\n"
SUCCESSOR = """
name = "{name}"
seed = 3
[data]
train = "train.jsonl"
label_field = "domain"
held_out_fraction = 0.1
[grid]
modules_per_level = {levels}
{grid}
[inner]
batch_sequences = 4
warmup_steps = 2
[outer]
momentum = 0.9
private_momentum = 0.9
[router]
kind = "{kind}"
prefix_tokens = 8
training_documents = 100
"""


def successor_toml(folder, name, levels, kind="kmeans", grid="", more=""):
    file = folder / f"{name}.toml"
    text = SUCCESSOR.format(name=name, levels=levels, kind=kind, grid=grid) + more
    file.write_text(text)
    return file


def succeed(toml, out, old, **options):
    display = Display(Console(file=io.StringIO(), width=200))
    predecessor = open_predecessor(old, allow_genesis=options.pop("allow_genesis", False))
    prepare(toml, out, on_cpu(display, **options), predecessor=predecessor)
    return RunFolder(out), display.console.file.getvalue()


def train(run, rounds=1):
    """Train in place, so that the run folder holds its newest states."""
    arguments = [str(run), "--out", str(run), "--rounds", str(rounds), "--steps-per-round", "3"]
    assert simulate.main([*arguments, "--validation-sequences", "0"]) == 0


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """Four phases; all but the last are trained."""
    folder = tmp_path_factory.mktemp("chain")
    runs = {name: folder / name for name in ("dense", "kmeans", "scored", "grown")}
    inner = "[inner]\nbatch_sequences = 4\n"
    dense = write_run(folder, RUN_TOML.replace("[2, 2]", "[1]") + inner)
    prepare(dense, runs["dense"], on_cpu())
    train(runs["dense"], rounds=2)
    private = "private_blocks = []\nprivate_embedding = true"
    toml = successor_toml(folder, "kmeans", "[2, 2]", grid=private)
    succeed(toml, runs["kmeans"], runs["dense"])
    train(runs["kmeans"])
    toml = successor_toml(folder, "scored", "[2, 2]", kind="discriminative", grid=private)
    succeed(toml, runs["scored"], runs["kmeans"])
    train(runs["scored"])
    toml = successor_toml(folder, "grown", "[4, 4]", grid=private)
    succeed(toml, runs["grown"], runs["scored"])
    return runs


def test_each_run_names_the_one_before_and_has_the_same_operator(chain):
    manifests = [verify_manifest((run / "manifest.json").read_bytes()) for run in chain.values()]
    assert len({manifest.operator_fingerprint for manifest in manifests}) == 1
    runs = [manifest.plan.run_id for manifest in manifests]
    assert [manifest.plan.successor_of for manifest in manifests] == [None, *runs[:-1]]
    starts = [manifest.plan.start_s for manifest in manifests]
    assert starts == sorted(set(starts))
    for run in chain.values():
        assert (run / "operator.pem").stat().st_mode & 0o777 == 0o600
    assert len({manifest.plan.blobs.tokenizer for manifest in manifests}) == 1


def test_the_trained_dense_model_is_the_new_base(chain):
    dense, kmeans, scored, grown = (RunFolder(run) for run in chain.values())
    plan, grid = dense.plan(), dense.grid(dense.plan())
    state = dense.states.load_latest("L0.E0", layout_of(grid, "L0.E0"))
    assert state.version == 2
    trained = path_parameters(grid, 0, lambda module: state)
    base = kmeans.base_parameters(kmeans.plan())
    assert base.keys() == trained.keys()
    assert all(torch.equal(base[name], trained[name]) for name in base)
    assert kmeans.plan().blobs.base != plan.blobs.base
    assert {run.plan().blobs.base for run in (kmeans, scored, grown)} == {kmeans.plan().blobs.base}


def test_genesis_is_what_the_run_before_ended_with(chain):
    runs = [RunFolder(run) for run in chain.values()]
    for old, new in itertools.pairwise(runs):
        plan, old_grid, grid = new.plan(), old.grid(old.plan()), new.grid(new.plan())
        growth = Growth(old_grid, grid)

        def load(module, old=old):
            return old.states.load_latest(module, layout_of(old.grid(old.plan()), module))

        for module in grid.modules():
            state = new.genesis_state(plan, module)
            assert (state.version, state.tokens) == (0, 0)
            assert bool(state.momentum.any())  # It was trained, and the momentum is carried over.
            assert state.digest == growth.state(module, load).digest


def test_the_simulator_begins_with_the_genesis(chain, tmp_path):
    source = RunFolder(chain["grown"])
    arguments = ["--paths", "5", "--rounds", "1", "--steps-per-round", "3"]
    assert simulate.main([str(source.path), "--out", str(tmp_path / "sim"), *arguments]) == 0
    plan, grid = source.plan(), source.grid(source.plan())
    stepped = RunFolder(tmp_path / "sim").states
    for module in grid.modules():
        genesis = source.genesis_state(plan, module)
        state = stepped.load_latest(module, layout_of(grid, module))
        if module in grid.modules_of_path(5):
            # Nesterov: momentum' = m * momentum + gradient.
            assert state.version == 1
            assert plan.outer.momentum == plan.outer.private_momentum
            carried = plan.outer.momentum * genesis.momentum
            assert (state.momentum - carried).norm() < carried.norm()
        else:
            assert state.digest == genesis.digest


def test_scores_are_those_of_the_old_paths(chain):
    [folder], old = (chain["scored"] / "work/scores").iterdir(), open_predecessor(chain["kmeans"])
    rows = np.load(folder / "documents.npy")
    assert rows.shape == (100, 32)
    for path in range(4):
        model = PathModel(old.plan.model)
        states = {module: old.load(module) for module in old.grid.modules_of_path(path)}
        load_path(model, old.grid, path, states)
        expected = [sum_losses(model.eval(), row[None], 8)[0] for row in rows]
        assert np.load(folder / f"P{path:05d}.npy") == pytest.approx(expected, rel=1e-5)
    assert RunFolder(chain["scored"]).plan().routing.kind == "discriminative"


def test_the_same_folders_give_the_same_run(chain, tmp_path):
    """And what was made is not made again."""
    folder = chain["dense"].parent
    again, _ = succeed(folder / "scored.toml", tmp_path / "again", chain["kmeans"])
    assert again.plan().blobs == RunFolder(chain["scored"]).plan().blobs
    _, output = succeed(folder / "scored.toml", tmp_path / "again", chain["kmeans"])
    assert "Everything is done already" in output
    assert not re.findall(r"^(.+): done in", output, re.M)


def test_scoring_goes_on_where_it_was_stopped(chain, tmp_path, monkeypatch):
    folder, scored = chain["dense"].parent, []
    real = score_stages.score_path

    def stopping(*arguments):
        scored.append(arguments[-1])
        if len(scored) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(score_stages, "score_path", stopping)
    with pytest.raises(KeyboardInterrupt):
        succeed(folder / "scored.toml", tmp_path / "out", chain["kmeans"])
    [file] = (tmp_path / "out/work/scores").glob("*/P00001.npy")
    file.write_bytes(file.read_bytes()[:-8])  # Damaged: it is scored again.
    run, _ = succeed(folder / "scored.toml", tmp_path / "out", chain["kmeans"])
    assert scored == [0, 1, 2, 1, 2, 3]
    assert run.plan().blobs == RunFolder(chain["scored"]).plan().blobs


def test_output_says_where_the_schedules_stand(chain, tmp_path):
    folder = chain["dense"].parent
    _, output = succeed(folder / "scored.toml", tmp_path / "out", chain["kmeans"])
    assert "[inner] The learning rate starts its warmup and decay over" in output
    assert "write first_step = 3" in output
    assert f"tokens: taken from {chain['dense'] / 'work/tokens'}" in output
    toml = successor_toml(folder, "later", "[2, 2]")
    text = toml.read_text().replace("warmup_steps = 2", "warmup_steps = 2\nfirst_step = 3")
    toml.write_text(text)
    run, output = succeed(toml, tmp_path / "later", chain["kmeans"])
    assert "first_step" not in output
    assert run.plan().inner.first_step == 3


def test_states_that_were_taken_stay_while_the_folder_goes_on(chain, tmp_path, monkeypatch):
    """The bootstrap node keeps newer states in the folder after a successor has begun."""

    class NobodyServes:
        def __init__(self, *arguments, **options): ...
        def __enter__(self):
            return self

        def __exit__(self, *error): ...
        def winning_state(self, module):
            return None

    monkeypatch.setattr("dipaco.peer.reader.SwarmReader", NobodyServes)
    old = tmp_path / "old"
    shutil.copytree(chain["dense"], old)

    def digests():
        predecessor = open_predecessor(old)
        address = ("/ip4/127.0.0.1",)
        return predecessor.with_states_of(address, tmp_path / "taken", lambda line: None).digests

    taken = digests()
    shutil.rmtree(old / "store")
    train(old, rounds=3)
    assert open_predecessor(old).digests != taken
    assert digests() == taken


def test_a_model_that_differs_is_refused(chain, tmp_path):
    folder = chain["dense"].parent
    more = "[model]\nhidden_size = 16\nfeed_forward_size = 64\nblock_count = 2\n"
    same = successor_toml(folder, "same", "[2, 2]", more=more)
    run, _ = succeed(same, tmp_path / "same", chain["kmeans"])
    assert run.plan().model == RunFolder(chain["dense"]).plan().model
    for wrong, message in (
        ("hidden_size = 32", "model.hidden_size is 32, but the run .* has 16"),
        ("hiden_size = 16", "did you mean 'hidden_size'"),
        ("sequence_length = 64", "sequence_length is 64"),
    ):
        toml = successor_toml(folder, "wrong", "[2, 2]", more=f"[model]\n{wrong}\n")
        with pytest.raises(ConfigurationError, match=message):
            succeed(toml, tmp_path / "wrong", chain["kmeans"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("[tokenizer]\nmodel_file = 'other.model'\n", "not the tokenizer of the run"),
        ("[base]\ncheckpoint = 'llama'\n", "cannot be imported into a run that continues"),
    ],
)
def test_another_beginning_is_refused(chain, tmp_path, more, message):
    folder = chain["dense"].parent
    (folder / "llama").mkdir(exist_ok=True)
    (folder / "other.model").write_bytes(b"other")
    toml = successor_toml(folder, "wrong", "[2, 2]", more=more)
    with pytest.raises(ConfigurationError, match=message):
        succeed(toml, tmp_path / "out", chain["kmeans"])


def test_only_the_same_operator_signs(chain, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(chain["kmeans"], old)
    (old / "operator.pem").unlink()
    toml = chain["dense"].parent / "scored.toml"
    with pytest.raises(ConfigurationError, match="--operator-key FILE"):
        succeed(toml, tmp_path / "out", old)
    load_or_create_operator_key(tmp_path / "other.pem")
    with pytest.raises(ManifestError, match="peers would not move to it"):
        succeed(toml, tmp_path / "out", old, operator_key=tmp_path / "other.pem")
    succeed(toml, tmp_path / "out", old, operator_key=chain["dense"] / "operator.pem")
    assert not (tmp_path / "out/operator.pem").exists()


def test_modules_without_a_state_are_named(chain, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(chain["kmeans"], old)
    RunFolder(old).states.remove("L1.E0")
    toml = successor_toml(chain["dense"].parent, "again", "[2, 2]")
    with pytest.raises(ConfigurationError, match=r"no state of L1\.E0 .7 of 8 modules have one"):
        succeed(toml, tmp_path / "out", old)
    run, _ = succeed(toml, tmp_path / "out", old, allow_genesis=True)
    old_run = RunFolder(old)
    layout = layout_of(run.grid(run.plan()), "L1.E0")
    before = old_run.genesis_state(old_run.plan(), "L1.E0")
    after = run.genesis_state(run.plan(), "L1.E0")
    assert after.layout.names == layout.names
    assert all(
        torch.equal(view, before.layout.views(before.parameters)[name])
        for name, view in layout.views(after.parameters).items()
    )


def test_the_run_before_is_only_read(chain, tmp_path):
    """It may be the folder of a peer, which looks after its files itself."""
    old = tmp_path / "old"
    shutil.copytree(chain["kmeans"], old)
    states = RunFolder(old).states
    before = states.newest_digest("L1.E0")
    file = states.find(before)
    file.write_bytes(file.read_bytes()[:-1])
    states.kept.index.close()
    assert open_predecessor(old, allow_genesis=True).digests["L1.E0"] != before
    assert file.is_file()


def test_scores_need_a_trained_path_for_each_new_one(chain, tmp_path):
    folder = chain["dense"].parent
    toml = successor_toml(folder, "grown-by-scores", "[4, 4]", kind="discriminative")
    with pytest.raises(ConfigurationError, match="16 paths come from 4 of the old run's 4"):
        succeed(toml, tmp_path / "out", chain["kmeans"])
    first = RUN_TOML.replace(ROUTER, ROUTER + "kind = 'discriminative'\n")
    with pytest.raises(ConfigurationError, match="give it with --from"):
        prepare(write_run(tmp_path, first), tmp_path / "first", on_cpu())


def test_scores_need_text_behind_what_routing_sees(chain, tmp_path):
    rows = [json.dumps({"text": f"{number:02d}", "domain": "short"}) for number in range(100)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows) + "\n")
    toml = successor_toml(tmp_path, "short", "[2, 2]", kind="discriminative")
    with pytest.raises(CorpusError, match="no training document is longer than the 8 tokens"):
        succeed(toml, tmp_path / "out", chain["kmeans"])


def test_a_successor_begins_later(chain, tmp_path):
    toml = successor_toml(chain["dense"].parent, "again", "[2, 2]")
    succeed(toml, tmp_path / "late", chain["kmeans"], start_in_s=1000.0)
    train(tmp_path / "late")
    with pytest.raises(ConfigurationError, match="would begin .* give --start-in-s 1"):
        succeed(toml, tmp_path / "early", tmp_path / "late")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda index: index.pop("L0.E0"), "names no state of module L0.E0"),
        (lambda index: index.update({"L0.E0": index["L0.E1"]}), "expected a state of L0.E0"),
        (lambda index: index.update({"L0.E0": "0" * 64}), "fetch it again"),
    ],
)
def test_a_broken_genesis_is_refused(chain, spoil, message):
    run = RunFolder(chain["grown"])
    plan = run.plan()
    index = run.genesis_index(plan)
    spoil(index)
    sha256 = run.blobs.add_bytes(json.dumps(index).encode())
    broken = plan.model_copy(update={"blobs": plan.blobs.model_copy(update={"genesis": sha256})})
    with pytest.raises(IntegrityError, match=message):
        run.genesis_state(broken, "L0.E0")


def test_command_line(chain, tmp_path, capsys):
    folder = chain["dense"].parent
    arguments = ["prepare", str(folder / "kmeans.toml"), "--out", str(tmp_path / "out")]
    assert bootstrap_command.main([*arguments, "--from", str(chain["dense"]), "--device", "cpu"]) == 0
    run = RunFolder(tmp_path / "out")
    assert run.plan().blobs == RunFolder(chain["kmeans"]).plan().blobs
    assert bootstrap_command.main([*arguments, "--from", str(tmp_path / "none")]) == StorageError.exit_code
    assert "is not a run folder" in capsys.readouterr().err
    assert bootstrap_command.main([*arguments, "--initial-peers", ADDRESS]) == ConfigurationError.exit_code
    assert "give its folder with --from" in capsys.readouterr().err
