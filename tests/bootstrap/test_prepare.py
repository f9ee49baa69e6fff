import functools
import io
import json
import runpy
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.console import Console

from dipaco.base.errors import AddressError, ConfigurationError, CorpusError, IntegrityError, StorageError
from dipaco.base.files import atomic_write
from dipaco.base.progress import StageProgress
from dipaco.bootstrap import bootstrap_command
from dipaco.bootstrap.invite import LIST_FILE
from dipaco.bootstrap.prepare_output import Display
from dipaco.bootstrap.preparing import base_stage, corpus_stages, routing_stages, signing
from dipaco.bootstrap.preparing.pretrain import parameters_bytes, pretrain
from dipaco.bootstrap.preparing.routing_stages import check_shards
from dipaco.bootstrap.run_config import load_run_config
from dipaco.modules.layout import layout_of
from dipaco.peer.node.guests import OWN_INVITATION
from dipaco.protocol.admission import Gate
from dipaco.protocol.config import InnerConfig, ModelConfig
from dipaco.protocol.identity import peer_id_of_public_key, raw_public_key
from dipaco.protocol.invitations import MAX_PLACES, read_invitation
from dipaco.protocol.manifest import verify_manifest
from dipaco.protocol.record_errors import RecordError
from dipaco.routing.documents.corpus import CorpusConfig, corpus_documents, corpus_files
from dipaco.routing.run_folder import RunFolder
from dipaco.routing.shards import PathSummary
from dipaco.training.dense import SavedTraining
from support.runs.foreign_base import make_foreign_base
from support.runs.prepared_run import CPU, RUN_TOML, on_cpu, prepare, quiet_display, write_run
from support.runs.routed_texts import route_texts


def _prepare(toml, out, **options):
    return prepare(toml, out, on_cpu(**options))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    display = quiet_display()
    _prepare(write_run(folder), folder / "an out", display=display)
    return folder, RunFolder(folder / "an out"), display.console.file.getvalue()


def test_run_folder_is_complete(prepared):
    _, run, _ = prepared
    plan = run.plan()
    index, grid = run.shard_index(plan), run.grid(plan)
    assert grid.path_count == len(index.paths) == 4
    base = run.base_parameters(plan)
    for module in grid.modules():
        state = run.genesis_state(plan, module)
        assert (state.module, state.version, state.tokens) == (module, 0, 0)
        for name, view in layout_of(grid, module).views(state.parameters).items():
            assert torch.equal(view, base[name])
    for path in range(4):
        train, held = run.train_tokens(plan, path), run.validation_tokens(plan, path)
        assert train.shape == (index.paths[path].train_sequences, 32)
        assert held.shape == (index.paths[path].validation_sequences, 32)
        assert int(train.max()) < 320
        with pytest.raises(ValueError, match="read-only"):
            train[0, 0] = 1
    with pytest.raises(ValueError, match="path 4"):
        run.train_tokens(plan, 4)
    assert sum(s.train_documents for s in index.paths) + _held_out(run) == 240


def _held_out(run):
    [file] = (run.path / "work/tokens").glob("*/validation/corpus.json")
    return int(json.loads(file.read_text())["documents"])


def test_documents_find_the_shards_they_are_in(prepared):
    folder, run, _ = prepared
    plan = run.plan()
    router = run.document_router(plan)
    texts = [json.loads(line)["text"] for line in (folder / "train.jsonl").open()]
    paths = route_texts(router, texts)
    streams = [run.train_tokens(plan, path).astype("<u2").tobytes() for path in range(4)]
    found = 0
    for text, path in zip(texts, paths.tolist(), strict=True):
        # A last token that would be alone in a row is left out.
        needle = np.array(router.tokenizer.document_tokens(text)[:-1], "<u2").tobytes()
        holders = [p for p, stream in enumerate(streams) if needle in stream]
        # Those that are held out are nowhere.
        assert holders in ([], [path])
        found += len(holders)
    assert found == 240 - _held_out(run)


def test_output_shows_shards_and_next_command(prepared):
    _, run, output = prepared
    for words in ("base model: done", "Shards", "mostly", "100.0%"):
        assert words in output
    assert f"dipaco-bootstrap serve '{run.path}'" in output


def test_broken_parts_are_refused(prepared, tmp_path):
    _, run, _ = prepared
    plan = run.plan()
    with pytest.raises(StorageError, match="is not a run folder"):
        RunFolder(tmp_path).plan()
    with pytest.raises(StorageError, match="none does not exist; give the folder"):
        RunFolder(tmp_path / "none").plan()
    missing = plan.model_copy(update={"blobs": plan.blobs.model_copy(update={"router": "0" * 64, "base": "0" * 64})})
    for read in (run.router, run.base_parameters, run.base_model):
        with pytest.raises(IntegrityError):
            read(missing)
    other = plan.model_copy(update={"model": plan.model.model_copy(update={"hidden_size": 32})})
    with pytest.raises(IntegrityError, match="not the plan's model"):
        run.base_model(other)
    grid = plan.grid.model_copy(update={"modules_per_level": (2, 4)})
    other = plan.model_copy(update={"grid": grid})
    for read in (run.router, run.shard_index):
        with pytest.raises(IntegrityError, match="prepare the run again"):
            read(other)


MAKERS = {
    "tokenizer": (corpus_stages, "train_tokenizer"),
    "tokens": (corpus_stages, "write_token_corpora"),
    "base": (base_stage, "pretrain"),
    "features": (routing_stages, "prefix_features"),
    "router": (routing_stages, "fit_router"),
    "shards": (routing_stages, "ShardBuilder"),
}
"""What each stage calls to be made."""


@pytest.fixture
def made(monkeypatch):
    """The stages that are made from now on."""
    stages = []

    def noting(stage, original):
        def make(*arguments, **options):
            stages.append(stage)
            return original(*arguments, **options)

        return make

    for stage, (module, name) in MAKERS.items():
        monkeypatch.setattr(module, name, noting(stage, getattr(module, name)))
    return stages


def _copied(prepared, tmp_path):
    return Path(shutil.copytree(prepared[0], tmp_path / "copy"))


def test_what_is_done_is_not_done_again(prepared, tmp_path, made):
    folder = _copied(prepared, tmp_path)
    run = RunFolder(folder / "an out")
    before = run.plan()
    envelope = run.manifest_path.read_bytes()
    assert _prepare(folder / "RUN.toml", run.path) == before
    assert run.manifest_path.read_bytes() == envelope
    with pytest.raises(ConfigurationError, match="start-in-s"):
        _prepare(folder / "RUN.toml", run.path, start_in_s=100)
    later = _prepare(folder / "RUN.toml", run.path, start_in_s=100, replace=True)
    assert later.start_s >= before.start_s + 99
    assert later.blobs == before.blobs
    write_run(folder, RUN_TOML + "[inner]\nlearning_rate = 1e-3\n[rounds]\nduration_s = 99\n")
    changed = _prepare(folder / "RUN.toml", run.path, replace=True)
    assert changed.rounds.duration_s == 99
    assert changed.blobs == before.blobs
    assert changed.run_id != later.run_id
    assert not made


@pytest.mark.parametrize(
    ("old", "new", "again"),
    [
        ("steps = 12", "steps = 13", ["base", "features", "router", "shards"]),
        ("prefix_tokens = 8", "prefix_tokens = 8\nbalanced = false", ["router", "shards"]),
        ("prefix_tokens = 8", "prefix_tokens = 8\ntrain_paths = 2", ["shards"]),
        ("modules_per_level = [2, 2]", "modules_per_level = [3, 2]", ["router", "shards"]),
    ],
)
def test_a_changed_key_repeats_what_depends_on_it(prepared, tmp_path, made, old, new, again):
    folder = _copied(prepared, tmp_path)
    _prepare(write_run(folder, RUN_TOML.replace(old, new)), folder / "an out", replace=True)
    assert list(dict.fromkeys(made)) == again


def test_half_of_another_run_is_not_taken_for_this_one_s(prepared, tmp_path):
    """Another RUN.toml was tried in the folder, and stopped too."""
    folder, run, _ = prepared
    toml = write_run(tmp_path, RUN_TOML)
    shutil.copy2(folder / "train.jsonl", tmp_path)
    with pytest.raises(KeyboardInterrupt):
        _prepare(toml, tmp_path / "out", display=_Stopping("base model", 0))
    for line in ("held_out_fraction = 0.4", "held_out_fraction = 0.1\ntrain_limit = 90"):
        other = write_run(tmp_path, RUN_TOML.replace("held_out_fraction = 0.1", line))
        with pytest.raises(KeyboardInterrupt):
            _prepare(other, tmp_path / "out", display=_Stopping("tokens", 0))
    toml = write_run(tmp_path, RUN_TOML)
    assert _prepare(toml, tmp_path / "out").blobs == run.plan().blobs


@pytest.mark.parametrize("part", ["train_sha256", "validation_sha256"])
def test_a_shard_that_is_gone_is_made_again(prepared, tmp_path, made, part):
    folder = _copied(prepared, tmp_path)
    run = RunFolder(folder / "an out")
    shard = getattr(run.shard_index(run.plan()).paths[1], part)
    content = run.blobs.read(shard)
    run.blobs.remove(shard)
    plan = _prepare(folder / "RUN.toml", run.path)
    assert plan == run.plan()
    assert run.blobs.read(shard) == content
    assert made == ["shards"]


def test_two_do_not_prepare_in_one_folder(prepared, tmp_path):
    folder = _copied(prepared, tmp_path)

    class Meanwhile(Display):
        def say(self, line):
            with pytest.raises(AddressError, match="is being prepared by another process"):
                _prepare(folder / "RUN.toml", folder / "an out")
            super().say(line)

    _prepare(folder / "RUN.toml", folder / "an out", display=Meanwhile(Console(file=io.StringIO())))


def test_an_invitation_is_there_before_the_manifest(prepared, tmp_path, monkeypatch):
    folder = _copied(prepared, tmp_path)
    (folder / "an out/manifest.json").unlink()

    def killed(path, content, **options):
        if path.name == "manifest.json":
            raise KeyboardInterrupt
        return atomic_write(path, content, **options)

    monkeypatch.setattr(signing, "atomic_write", killed)
    with pytest.raises(KeyboardInterrupt):
        _prepare(folder / "RUN.toml", folder / "an out", admission="invitation")
    assert (folder / "an out" / OWN_INVITATION).is_file()


def test_another_run_is_not_overwritten(prepared, tmp_path, monkeypatch):
    folder = _copied(prepared, tmp_path)
    run = RunFolder(folder / "an out")
    before, envelope = run.plan(), run.manifest_path.read_bytes()
    write_run(folder, RUN_TOML.replace("seed = 3", "seed = 3\n[outer]\nmomentum = 0.7"))
    with pytest.raises(ConfigurationError, match=f"{before.run_id}.*outer.momentum.*--replace"):
        _prepare(folder / "RUN.toml", run.path)
    # Other texts make another run too, which is known once they are read.
    write_run(folder)
    texts = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(texts[:200]))
    with pytest.raises(ConfigurationError, match=f"{before.run_id}.*blobs.shards.*--replace"):
        _prepare(folder / "RUN.toml", run.path)
    assert run.manifest_path.read_bytes() == envelope
    assert _prepare(folder / "RUN.toml", run.path, replace=True).run_id != before.run_id


@pytest.mark.parametrize(
    ("keys", "agreement"),
    [('kind = "product_kmeans"', False), ('kind = "random"\ntrain_paths = 2', False), ('kind = "label"', True)],
)
def test_other_routers(prepared, tmp_path, keys, agreement):
    folder = _copied(prepared, tmp_path)
    toml = RUN_TOML + keys
    if agreement:  # three labels make three paths
        toml = toml.replace("[2, 2]", "[1, 3]")
    display = quiet_display()
    plan = _prepare(write_run(folder, toml), folder / "an out", replace=True, display=display)
    run = RunFolder(folder / "an out")
    assert plan.routing.kind == run.router(plan).kind
    shards = run.shard_index(plan).paths
    copies = plan.routing.train_paths
    assert sum(shard.train_documents for shard in shards) == copies * (240 - _held_out(run))
    said = display.console.file.getvalue()
    assert "Agreement with the labels: " in said
    assert ("Agreement with the labels: 100%" in said) == agreement
    rows = [json.loads(line) for line in (folder / "train.jsonl").open()]
    router = run.document_router(plan)
    paths = route_texts(router, [r["text"] for r in rows], [r["domain"] for r in rows])
    held = np.bincount(paths, minlength=grid_paths(plan))
    assert held.min() > 0
    if agreement:
        assert len({(r["domain"], path) for r, path in zip(rows, paths.tolist(), strict=True)}) == 3
        with pytest.raises(ConfigurationError, match="--label-field"):
            route_texts(router, ["a text"])


def test_an_open_run_lets_everybody_in_and_one_by_invitation_does_not(prepared, tmp_path):
    folder = _copied(prepared, tmp_path)
    plan = prepared[1].plan()
    gate = Gate.of(verify_manifest(prepared[1].manifest_path.read_bytes()))
    stranger = Ed25519PrivateKey.generate()
    peer = peer_id_of_public_key(raw_public_key(stranger))
    admission = read_invitation(plan.admission).admit(stranger, time.time())
    assert gate.check(peer, admission).places == MAX_PLACES
    noted = [json.loads(line) for line in (folder / "an out" / LIST_FILE).open()]
    assert [one["id"] for one in noted] == [read_invitation(plan.admission).id]

    options = {"admission": "invitation"}
    with pytest.raises(ConfigurationError, match="admission differs"):
        _prepare(folder / "RUN.toml", folder / "an out", **options)
    closed = _prepare(folder / "RUN.toml", folder / "an out", replace=True, **options)
    assert closed.admission is None
    assert closed.blobs == plan.blobs
    assert (folder / "an out" / OWN_INVITATION).read_text().startswith("dipaco-invitation-")
    with pytest.raises(RecordError):
        Gate.of(verify_manifest((folder / "an out/manifest.json").read_bytes())).check(peer, admission)
    for again in (options, {}):
        assert _prepare(folder / "RUN.toml", folder / "an out", **again) == closed


def test_documents_that_begin_alike_are_pointed_out(tmp_path):
    toml, display = write_run(tmp_path), quiet_display()
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").open()]
    for row in rows[12:]:
        row["text"] = f"This work is under the licence of its author.\n{row['text']}"
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _prepare(toml, tmp_path / "out", display=display)
    assert "% of the documents begin with the same 8 tokens" in display.console.file.getvalue()


def grid_paths(plan):
    return int(np.prod(plan.grid.modules_per_level))


class _Stopping(Display):
    """Stops the preparation in one stage, at a sign of life of it."""

    def __init__(self, stage, updates):
        super().__init__(Console(file=io.StringIO()))
        self.stopped_stage, self.left = stage, updates

    @contextmanager
    def stage(self, name):
        with super().stage(name) as progress:
            yield _Counting(self, progress) if name == self.stopped_stage else progress


class _Counting(StageProgress):
    def __init__(self, display, progress):
        self._display, self._progress = display, progress

    def update(self, done, total, note=""):
        if self._display.left == 0:
            raise KeyboardInterrupt
        self._display.left -= 1
        self._progress.update(done, total, note)


def test_stopped_anywhere_it_ends_with_the_same_run(prepared, tmp_path, monkeypatch, made):
    """A stage that was stopped is done again; those before it are kept."""
    folder, run, _ = prepared
    for module, name, options in [
        (base_stage, "SavedTraining", {"every_s": 0.0}),
        (corpus_stages, "write_token_corpora", {"chunk_documents": 50}),
        (routing_stages, "ShardBuilder", {"chunk_documents": 50}),
    ]:
        original = getattr(module, name)
        monkeypatch.setattr(module, name, functools.partial(original, **options))
    for stage, updates in [
        ("tokenizer", 0), ("tokenizer", 90), ("tokens", 0), ("tokens", 1),
        ("base model", 0), ("base model", 5), ("base model", 5), ("shards", 0), ("shards", 2),
    ]:  # fmt: skip
        with pytest.raises(KeyboardInterrupt):
            _prepare(folder / "RUN.toml", tmp_path / "out", display=_Stopping(stage, updates))
        assert not (tmp_path / "out" / "manifest.json").exists()
    assert _prepare(folder / "RUN.toml", tmp_path / "out").blobs == run.plan().blobs
    times = {"tokenizer": 3, "tokens": 3, "base": 4, "features": 1, "router": 1, "shards": 3}
    assert {stage: made.count(stage) for stage in MAKERS} == times


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_pretraining_resumes_to_the_bit(optimizer, tmp_path):
    model = ModelConfig(vocabulary_size=64, block_count=1, hidden_size=16, head_count=2, sequence_length=16)
    inner = InnerConfig(optimizer=optimizer, batch_sequences=4, warmup_steps=3, fresh_state_warmup_steps=0)
    rows = np.random.default_rng(0).integers(4, 64, (20, 16)).astype("<u2")

    def train(name, stop_at=None, seed=1):
        def on_step(step, loss):
            if step == stop_at:
                raise KeyboardInterrupt

        saved = SavedTraining(tmp_path / name, f"seed {seed}", every_s=0.0)
        trained = pretrain(model, inner, rows, 10, seed=seed, device=CPU, saved=saved, on_step=on_step)
        return parameters_bytes(dict(trained.named_parameters()))

    expected = train("whole")
    for stop_at in (1, 4, 9):
        with pytest.raises(KeyboardInterrupt):
            train("parts", stop_at)
    assert train("parts") == expected
    (tmp_path / "broken").write_bytes(b"not a saved training")
    assert train("broken") == expected
    assert train("whole", seed=2) == train("other", seed=2) != expected


def test_empty_shards_are_named():
    summaries = [PathSummary(path=path, documents=5 * (path != 1), tokens=9, held_out_documents=0) for path in range(3)]
    with pytest.raises(CorpusError, match=r"path 1 is empty.*balanced = true"):
        check_shards(summaries)
    check_shards(summaries[2:])


def test_paths_without_held_out_documents_are_named(tmp_path):
    """Nothing says how good they become, and no held-out loss speaks against a foreign state."""
    toml = RUN_TOML.replace("held_out_fraction = 0.1", 'validation = "held-out.jsonl"')
    toml = toml.replace("[2, 2]", "[1, 3]") + 'kind = "label"'
    display = quiet_display()
    run_toml = write_run(tmp_path, toml)
    row = json.loads((tmp_path / "train.jsonl").read_text().splitlines()[0])
    (tmp_path / "held-out.jsonl").write_text(json.dumps({**row, "text": f"{row['text']} 90 11"}))
    plan = _prepare(run_toml, tmp_path / "out", display=display)
    shards = RunFolder(tmp_path / "out").shard_index(plan).paths
    unscored = [str(shard.path) for shard in shards if not shard.validation_sequences]
    assert len(unscored) == 2
    said = " ".join(display.console.file.getvalue().split())
    assert f"No held-out document goes to paths {', '.join(unscored)}: " in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("[inner]\nlearning_rate = -1", "inner.learning_rate"),
        ("[ruonds]\nduration_s = 1", "did you mean 'rounds'"),
        ("x = = 1", "is not TOML"),
    ],
)
def test_mistakes_in_a_run_toml(tmp_path, change, message):
    toml = write_run(tmp_path, RUN_TOML + change)
    with pytest.raises(ConfigurationError, match=message):
        load_run_config(toml)


def test_marks_that_editors_put_first(tmp_path):
    toml = write_run(tmp_path)
    plain = load_run_config(toml)
    toml.write_bytes(RUN_TOML.encode("utf-8-sig"))
    assert load_run_config(toml) == plain
    toml.write_bytes(RUN_TOML.encode("utf-16"))
    assert load_run_config(toml) == plain
    toml.write_bytes(b"\xff" + RUN_TOML.encode())
    with pytest.raises(ConfigurationError, match="is not TOML"):
        load_run_config(toml)


def test_a_folder_may_have_any_name(tmp_path):
    odd = tmp_path / "a [b] *? %s 'q\" {c} \u00e4"
    odd.mkdir()
    (odd / "train.jsonl").write_text('{"text": "a document"}\n')
    files = CorpusConfig(train=("*.jsonl", "train.jsonl")).relative_to(odd)
    assert corpus_files(files, "train") == [odd / "train.jsonl"]


def test_impossible_combinations(tmp_path):
    for old, new, message in [
        ("prefix_tokens = 8", "prefix_tokens = 32", "prefix_tokens 32"),
        ("prefix_tokens = 8", "prefix_tokens = 8\ntrain_paths = 5", "more than the 4 paths"),
        ("block_count = 2", "block_count = 1", "level"),
        ('train = "train.jsonl"', "", "give either train"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            load_run_config(write_run(tmp_path, RUN_TOML.replace(old, new)))
    unlabelled = RUN_TOML.replace('label_field = "domain"', "") + 'kind = "label"'
    with pytest.raises(ConfigurationError, match="label_field = "):
        load_run_config(write_run(tmp_path, unlabelled))
    (tmp_path / "RUN.toml").write_text('name = "x"')
    with pytest.raises(ConfigurationError, match=r"\[data\] is missing"):
        load_run_config(tmp_path / "RUN.toml")
    with pytest.raises(ConfigurationError, match="there is no"):
        load_run_config(tmp_path / "nothing.toml")


@pytest.mark.parametrize(("name", "levels"), [("tiny", (2, 2)), ("language", (3,))])
def test_the_examples_are_valid(name, levels):
    toml = Path(__file__).parents[2] / "examples" / name / "RUN.toml"
    assert load_run_config(toml).grid.modules_per_level == levels


def test_the_example_of_a_club_is_valid_and_shows_no_text_of_an_owner(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "club"
    runpy.run_path(str(example / "make_texts.py"))["write_texts"](tmp_path / "texts")
    make_foreign_base(tmp_path / "base", "llama")
    toml = tmp_path / "RUN.toml"
    text = (example / "RUN.toml").read_text().replace("../smollm2/checkpoint", "base")
    toml.write_text(text.replace("sequence_length = 256", "sequence_length = 64"))
    config = load_run_config(toml)
    assert config.own_texts == "yes"
    sample = [document.text for document, _ in corpus_documents(config.data)]
    assert len(sample) == 4 * 24
    for number in range(1, 5):
        own = [file.read_text() for file in (tmp_path / "texts" / f"owner-{number}").glob("*.txt")]
        assert sum(map(len, own)) >= 100_000
        assert not any(text.startswith(shown) for text in own for shown in sample)


def test_command_line(tmp_path, capsys, prepared):
    folder, run, _ = prepared
    mistaken = write_run(tmp_path, RUN_TOML + "[inner]\nlearning_rat = 1.0")
    assert bootstrap_command.main(["prepare", str(mistaken), "--out", str(tmp_path / "out")]) == 3
    error = capsys.readouterr().err
    assert "did you mean 'learning_rate'" in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()
    arguments = ["prepare", str(folder / "RUN.toml"), "--out", str(run.path), "--device", "cpu"]
    assert bootstrap_command.main([*arguments, "--threads", "0"]) == 3
    assert bootstrap_command.main([*arguments[:-1], "tpu9"]) == 3
    assert bootstrap_command.main(arguments) == 0
    assert "Everything is done already" in capsys.readouterr().out
