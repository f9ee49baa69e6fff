"""Evaluation: the perplexity that training reported, and an account of what could not be scored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from dipaco.inference import evaluate_cli
from dipaco.inference.assemble import assemble_path
from dipaco.inference.evaluate import evaluate, load_baseline, route_documents
from dipaco.inference.sources import DiskSource, SwarmSource, open_source
from dipaco.modules.compose import gather_module
from dipaco.modules.errors import (
    ConfigurationError,
    CorpusError,
    IntegrityError,
    NetworkError,
    StorageError,
)
from dipaco.modules.state import ModuleState
from dipaco.routing.corpus import Document
from dipaco.routing.run_directory import RunDirectory
from dipaco.simulator import cli as simulator_cli
from tiny_run import make_tiny_run, tiny_documents

CPU = torch.device("cpu")
HELD_OUT_SEED = 1_000_003


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """A simulated run with private modules and a dense baseline, and what the simulator said."""
    directory = tmp_path_factory.mktemp("trained")
    make_tiny_run(directory / "run", private_blocks=(3,), private_embedding=True)
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda *parts, **_: lines.append(parts[0]))
        code = simulator_cli.main(
            [
                *(str(directory / "run"), "--rounds", "3", "--out", str(directory / "out")),
                *("--dense-steps", "12", "--threads", "1", "--json"),
            ]
        )
    assert code == 0
    return directory / "out", [json.loads(line) for line in lines]


@pytest.fixture
def damaged(trained: tuple[Path, list[dict]], tmp_path: Path) -> Callable[..., Path]:
    """A copy of the trained run without the states of some modules."""

    def make(*modules: str) -> Path:
        copy = tmp_path / "copy"
        shutil.copytree(trained[0], copy)
        for module in modules:
            shutil.rmtree(copy / "states" / module)
        return copy

    return make


def held_out(languages: int = 4) -> list[Document]:
    texts = tiny_documents(languages, 4, HELD_OUT_SEED)
    return [Document(text, f"language {index // 4}") for index, text in enumerate(texts)]


def write_jsonl(path: Path, documents: list[Document]) -> Path:
    rows = [json.dumps({"text": d.text, "domain": d.label}) for d in documents]
    path.write_text("\n".join(rows) + "\n")
    return path


def test_the_perplexity_is_the_one_that_the_simulator_reported(
    trained: tuple[Path, list[dict]],
) -> None:
    out, lines = trained
    baseline = load_baseline(out / "dense.safetensors", DiskSource(out).plan)
    report = evaluate(DiskSource(out), held_out(), device=CPU, baseline=baseline).as_dict()
    assert report["perplexity"] == pytest.approx(lines[2]["validation"]["perplexity"], rel=1e-6)
    assert report["tokens"] == lines[2]["validation"]["tokens"]
    assert report["documents"] == 16
    assert report["baseline_perplexity"] == pytest.approx(lines[3]["dense"]["perplexity"], rel=1e-6)
    assert report["base_perplexity"] > 200
    assert report["perplexity"] < 0.5 * report["base_perplexity"]
    assert report["missing_paths"] == []
    assert [part["path"] for part in report["paths"]] == [0, 1, 2, 3]
    for part, said in zip(report["paths"], lines[2]["paths"], strict=True):
        assert part["tokens"] == said["validation_tokens"]


def test_paths_and_labels_divide_the_documents(trained: tuple[Path, list[dict]]) -> None:
    report = evaluate(DiskSource(trained[0]), held_out(), device=CPU)
    assert list(report.labels()) == [f"language {index}" for index in range(4)]
    for parts in (report.paths(), report.labels()):
        assert sum(part.documents for part in parts.values()) == 16
        assert sum(part.score.tokens for part in parts.values()) == report.overall.score.tokens
        total = sum(part.score.nll for part in parts.values())
        assert total == pytest.approx(report.overall.score.nll, rel=1e-12)


def test_every_token_behind_the_prefix_is_scored_once(trained: tuple[Path, list[dict]]) -> None:
    source = DiskSource(trained[0])
    router = source.document_router(CPU)
    documents = held_out()
    lengths = [len(router.tokenizer.document_tokens(d.text)) for d in documents]
    prefix = source.plan.routing.prefix_tokens
    report = evaluate(source, documents, device=CPU)
    assert report.overall.score.tokens == sum(length - prefix for length in lengths)


def test_short_documents_are_counted_but_not_scored(trained: tuple[Path, list[dict]]) -> None:
    source = DiskSource(trained[0])
    documents = [Document("b"), *held_out()[:2]]
    report = evaluate(source, documents, device=CPU)
    assert (report.short_documents, report.overall.documents) == (1, 2)
    assert report.labels().keys() == {"language 0"}
    with pytest.raises(CorpusError, match="longer documents"):
        evaluate(source, [Document("b")], device=CPU)


def test_a_path_without_a_state_is_reported_and_left_out(damaged: Callable[..., Path]) -> None:
    source = DiskSource(damaged("P2"))
    report = evaluate(source, held_out(), device=CPU)
    groups, _ = route_documents(source, held_out(), CPU)
    assert report.missing_paths == (2,)
    assert report.unscored_documents == sum(g.documents for k, g in groups.items() if k[0] == 2)
    assert report.unscored_documents + report.overall.documents == 16
    assert 2 not in report.paths()
    assert report.overall.base.tokens == report.overall.score.tokens


def test_a_path_without_a_state_can_be_taken_from_the_genesis(
    damaged: Callable[..., Path],
) -> None:
    directory = damaged("P2")
    with pytest.raises(StorageError, match=r"no state of its module P2.*--allow-genesis"):
        assemble_path(DiskSource(directory), 2)
    source = DiskSource(directory, allow_genesis=True)
    assert evaluate(source, held_out(), device=CPU).missing_paths == ()
    model = assemble_path(source, 2)
    genesis = RunDirectory(directory).genesis_state(source.plan, "P2")
    assert torch.equal(gather_module(model, source.grid, "P2"), genesis.parameters)


def test_nothing_to_assemble_is_an_error(damaged: Callable[..., Path]) -> None:
    with pytest.raises(StorageError, match=r"L0\.E[01]"):
        evaluate(DiskSource(damaged("L0.E0", "L0.E1")), held_out(), device=CPU)


def test_assembled_paths_hold_the_states_of_their_modules(
    trained: tuple[Path, list[dict]],
) -> None:
    source = DiskSource(trained[0])
    model = None
    for path in range(4):
        model = assemble_path(source, path, model=model)
        for module in source.grid.modules_of_path(path):
            state = source.state(module)
            assert state is not None
            assert torch.equal(gather_module(model, source.grid, module), state.parameters)
    with pytest.raises(ConfigurationError):
        assemble_path(source, 4)


class FakeClient:
    """What `SwarmSource` needs of `ReadOnlyClient`, from a directory."""

    def __init__(self, served: Path, cache: Path, unserved: tuple[str, ...] = ()) -> None:
        self._served = RunDirectory(served)
        self._unserved = unserved
        self.plan = self._served.plan()
        self.directory_path = cache
        self.fetched: list[str] = []
        self.closed = False

    def fetch_blob(self, sha256: str, what: str = "a blob") -> Path:
        return self._served.blobs.require(sha256)

    def best_state(self, module: str) -> ModuleState | None:
        self.fetched.append(module)
        if module in self._unserved:
            raise NetworkError("none serves it")
        layout = self._served.grid(self.plan).layout(module)
        return self._served.states.load_latest(module, layout)

    def close(self) -> None:
        self.closed = True


def test_a_swarm_gives_the_same_as_a_directory(
    trained: tuple[Path, list[dict]], tmp_path: Path
) -> None:
    client = FakeClient(trained[0], tmp_path)
    with SwarmSource(client) as source:  # type: ignore[arg-type]
        report = evaluate(source, held_out(), device=CPU)
    assert client.closed
    assert sorted(set(client.fetched)) == sorted(source.grid.modules())
    assert len([m for m in client.fetched if m.startswith("L")]) == 4
    assert report == evaluate(DiskSource(trained[0]), held_out(), device=CPU)


def test_what_a_swarm_does_not_serve_is_missing(
    trained: tuple[Path, list[dict]], tmp_path: Path
) -> None:
    client = FakeClient(trained[0], tmp_path, unserved=("L1.E0",))
    source = SwarmSource(client)  # type: ignore[arg-type]
    assert evaluate(source, held_out(), device=CPU).missing_paths == (0, 2)
    with pytest.raises(NetworkError, match=r"L1\.E0"):
        assemble_path(source, 0)


def test_exactly_one_source(tmp_path: Path) -> None:
    for arguments in ({}, {"state_directory": tmp_path, "initial_peers": ["/ip4/127.0.0.1"]}):
        with pytest.raises(ConfigurationError, match="--state-dir"):
            open_source(**arguments)


def test_a_baseline_of_another_shape_is_refused(
    trained: tuple[Path, list[dict]], tmp_path: Path
) -> None:
    plan = DiskSource(trained[0]).plan
    parameters = safetensors.torch.load_file(trained[0] / "dense.safetensors")
    parameters["model.norm.weight"] = torch.ones(3)
    safetensors.torch.save_file(parameters, tmp_path / "other.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    for name in ("other", "broken", "absent"):
        with pytest.raises(IntegrityError, match=f"{name}.safetensors"):
            load_baseline(tmp_path / f"{name}.safetensors", plan)


def test_the_command_prints_one_json_object(
    trained: tuple[Path, list[dict]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, lines = trained
    data = write_jsonl(tmp_path / "held-out.jsonl", held_out())
    arguments = ["--state-dir", str(out), "--data", str(data), "--label-field", "domain"]
    baseline = ["--baseline", str(out / "dense.safetensors")]
    assert evaluate_cli.main([*arguments, *baseline, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["perplexity"] == pytest.approx(lines[2]["validation"]["perplexity"], rel=1e-6)
    assert set(report["labels"]) == {f"language {index}" for index in range(4)}
    assert report["run"] == DiskSource(out).plan.run_id
    assert evaluate_cli.main([*arguments, *baseline, "--limit-documents", "4"]) == 0
    text = capsys.readouterr().out
    for word in ("perplexity", "base model", "baseline", "language 0", "all"):
        assert word in text
    assert "language 1" not in text


@pytest.mark.parametrize(
    ("extra", "code", "words"),
    [
        (["--text-field", "txet"], CorpusError.exit_code, "text_field = 'text'"),
        (["--limit-documents", "0"], ConfigurationError.exit_code, "--limit-documents 0"),
        (["--data", "nowhere/*.jsonl"], CorpusError.exit_code, "--data 'nowhere/*.jsonl'"),
        (["--initial-peers", "/ip4/1.2.3.4"], ConfigurationError.exit_code, "--state-dir"),
        (["--threads", "0"], ConfigurationError.exit_code, "--threads 0"),
    ],
)
def test_errors_say_what_to_type(
    trained: tuple[Path, list[dict]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    extra: list[str],
    code: int,
    words: str,
) -> None:
    data = write_jsonl(tmp_path / "held-out.jsonl", held_out()[:2])
    arguments = ["--state-dir", str(trained[0]), "--data", str(data)]
    assert evaluate_cli.main([*arguments, *extra]) == code
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
