"""Evaluation: the perplexity that training reported, and an account of what could not be scored."""

import dataclasses
import io
import json
import shutil

import numpy as np
import pytest
import safetensors.torch
import torch
from rich.console import Console

from dipaco.base.errors import AddressError, ConfigurationError, CorpusError, IntegrityError, NetworkError, StorageError
from dipaco.inference import evaluate_command, fit_rerouter
from dipaco.inference.evaluate import Evaluated, EvaluationReport, Rerouting, evaluate, load_baseline
from dipaco.inference.fit_rerouter import fit_to_documents
from dipaco.inference.mixing import mixed_losses
from dipaco.inference.rerouter import read_rerouter
from dipaco.inference.sources import DiskSource, SourceSettings, SwarmSource, assemble_path
from dipaco.modules.compose import gather_module
from dipaco.protocol.config import PAD_TOKEN
from dipaco.routing.documents.corpus import Document, is_held_out
from dipaco.routing.own_texts import HELD_OUT_FRACTION
from dipaco.routing.routers.document_routing import DocumentRouter
from dipaco.routing.run_folder import RunFolder
from dipaco.routing.tokens.token_files import scoring_windows
from dipaco.simulator import simulate_command as simulator_cli
from dipaco.training.scoring import LossSum
from support.runs.routed_texts import route_texts
from support.runs.tiny_run import make_tiny_run, tiny_documents
from support.swarms.fake_reader import FakeReader

CPU = torch.device("cpu")
HELD_OUT_SEED = 1_000_003

ADDRESS = "/ip4/192.0.2.1/tcp/1/p2p/12D3KooWLGUApiCpST4ZyZPakytsXQ19eY7ZRGCyyJWXKk4tqiZw"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A simulated run with private modules and a dense baseline, and what the simulator said."""
    folder = tmp_path_factory.mktemp("trained")
    make_tiny_run(folder / "run", private_blocks=(3,), private_embedding=True)
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda *parts, **_: lines.append(parts[0]))
        code = simulator_cli.main(
            [
                *(str(folder / "run"), "--rounds", "3", "--out", str(folder / "out")),
                *("--dense-steps", "12", "--threads", "1", "--json"),
            ]
        )
    assert code == 0
    return folder / "out", [json.loads(line) for line in lines]


@pytest.fixture
def damaged(trained, tmp_path):
    """A copy of the trained run without the states of some modules."""

    def make(*modules):
        copy = tmp_path / "copy"
        shutil.copytree(trained[0], copy)
        for module in modules:
            RunFolder(copy).states.remove(module)
        return copy

    return make


def held_out(languages=4):
    texts = tiny_documents(languages, 4, HELD_OUT_SEED)
    return [Document(text, f"language {index // 4}") for index, text in enumerate(texts)]


def write_jsonl(path, documents):
    rows = [json.dumps({"text": d.text, "domain": d.label}) for d in documents]
    path.write_text("\n".join(rows) + "\n")
    return path


def test_the_perplexity_is_the_one_that_the_simulator_reported(trained):
    out, lines = trained
    baseline = load_baseline(out / "dense.safetensors", DiskSource(out).path_model(CPU))
    report = evaluate(DiskSource(out), held_out(), device=CPU, baseline=baseline).as_dict()
    assert report["perplexity"] == pytest.approx(lines[2]["perplexity"], rel=1e-6)
    assert report["tokens"] == lines[2]["validation_tokens"]
    assert report["documents"] == 16
    assert report["baseline_perplexity"] == pytest.approx(lines[3]["dense"]["perplexity"], rel=1e-6)
    assert report["base_perplexity"] > 200
    assert report["perplexity"] < 0.7 * report["base_perplexity"]
    assert report["missing_paths"] == []
    assert [part["path"] for part in report["paths"]] == [0, 1, 2, 3]
    for part, said in zip(report["paths"], lines[2]["paths"], strict=True):
        assert part["tokens"] == said["validation_tokens"]


def test_paths_and_labels_divide_the_documents(trained):
    report = evaluate(DiskSource(trained[0]), held_out(), device=CPU)
    assert list(report.labels()) == [f"language {index}" for index in range(4)]
    for parts in (report.paths(), report.labels()):
        assert sum(part.documents for part in parts.values()) == 16
        assert sum(part.losses["routed"].tokens for part in parts.values()) == report.overall.losses["routed"].tokens
        total = sum(part.losses["routed"].nll for part in parts.values())
        assert total == pytest.approx(report.overall.losses["routed"].nll, rel=1e-12)


def test_each_document_may_have_a_label_of_its_own(trained):
    """A field such as an address of the web: what is added up is looked at once, not for each."""

    class Groups(dict):
        looks = 0

        def items(self):
            self.looks += 1
            return super().items()

        def __iter__(self):
            self.looks += 1
            return super().__iter__()

    documents = [Document(one.text, f"{number:02d}") for number, one in enumerate(held_out())]
    report = evaluate(DiskSource(trained[0]), documents, device=CPU)
    report = dataclasses.replace(report, groups=Groups(report.groups))
    found = report.labels()
    assert report.groups.looks == 1
    assert list(found) == [document.label for document in documents]
    for document in documents:
        [alone] = evaluate(DiskSource(trained[0]), [document], device=CPU).groups.values()
        here = found[document.label]
        assert (here.documents, here.losses["base"].tokens) == (1, alone.losses["base"].tokens)
        for name, loss in alone.losses.items():
            assert here.losses[name].nll == pytest.approx(loss.nll, rel=1e-5)


def test_short_documents_are_counted_but_not_scored(trained):
    source = DiskSource(trained[0])
    documents = [Document("b"), *held_out()[:2]]
    report = evaluate(source, documents, device=CPU)
    assert (report.short_documents, report.overall.documents) == (1, 2)
    assert report.labels().keys() == {"language 0"}
    with pytest.raises(CorpusError, match="longer documents"):
        evaluate(source, [Document("b")], device=CPU)


def test_a_path_without_a_state_is_reported_and_left_out(damaged):
    source = DiskSource(damaged("P2"))
    report = evaluate(source, held_out(), device=CPU)
    paths = route_texts(source.document_router(CPU), [document.text for document in held_out()])
    assert report.missing_paths == (2,)
    assert report.unscored_documents == int((paths == 2).sum())
    assert report.unscored_documents + report.overall.documents == 16
    assert 2 not in report.paths()
    assert report.overall.losses["base"].tokens == report.overall.losses["routed"].tokens


def test_a_path_without_a_state_can_be_taken_from_the_genesis(damaged):
    folder = damaged("P2")
    with pytest.raises(StorageError, match=r"no state of its module P2.*--allow-genesis"):
        assemble_path(DiskSource(folder), 2)
    source = DiskSource(folder, SourceSettings(allow_genesis=True))
    assert evaluate(source, held_out(), device=CPU).missing_paths == ()
    model = assemble_path(source, 2)
    genesis = RunFolder(folder).genesis_state(source.plan, "P2")
    assert torch.equal(gather_module(model, source.grid, "P2"), genesis.parameters)


def test_nothing_to_assemble_is_an_error(damaged):
    with pytest.raises(StorageError, match=r"L0\.E[01]"):
        evaluate(DiskSource(damaged("L0.E0", "L0.E1")), held_out(), device=CPU)


def test_assembled_paths_hold_the_states_of_their_modules(trained):
    source = DiskSource(trained[0])
    model = None
    for path in range(4):
        model = assemble_path(source, path, model=model)
        for module in source.grid.modules_of_path(path):
            state = source.state(module)
            assert torch.equal(gather_module(model, source.grid, module), state.parameters)
    with pytest.raises(ConfigurationError):
        assemble_path(source, 4)


@pytest.fixture(scope="module")
def rerouter(trained, tmp_path_factory):
    """A rerouter fitted to documents of two languages each, with the command."""
    folder = tmp_path_factory.mktemp("rerouter")
    data = write_jsonl(folder / "mixed.jsonl", mixed_documents(20, HELD_OUT_SEED + 1))
    out = folder / "rerouter.safetensors"
    arguments = ["--state-dir", str(trained[0]), "--data", str(data), "--threads", "1", "--json"]
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr("builtins.print", lambda *parts, **_: lines.append(parts[0]))
        patch.setattr(fit_rerouter, "STEPS", 150)
        assert evaluate_command.main([*arguments, "--fit-rerouter", str(out)]) == 0
    said = json.loads(lines[0])
    assert said["file"] == str(out)
    assert (said["documents"], said["steps"]) == (40, 150)
    assert 0 < said["kept_step"] <= 150
    return out


def mixed_documents(count, seed):
    """Documents that go on in another language after a third."""
    texts = tiny_documents(4, count, seed)
    firsts, seconds = texts[: 2 * count], texts[2 * count :]
    return [
        Document(first[: len(first) // 3] + second[: 2 * len(second) // 3])
        for first, second in zip(firsts, seconds, strict=True)
    ]


def test_labels_are_printed_as_they_are():
    """Square brackets are markup to rich, and `all` is the name of the last row."""
    names = ("[red]x[/y]", "all", "a\nb")
    groups = {(0, name): Evaluated(number, {"routed": LossSum(1, 1)}) for number, name in enumerate(names)}
    console = Console(file=io.StringIO(), width=100)
    evaluate_command.show(EvaluationReport("run", groups, (), 0, 0), console)
    rows = [line.rsplit(maxsplit=3) for line in console.file.getvalue().splitlines()]
    counts = [(row[0].strip(), row[2]) for row in rows if len(row) == 4]
    assert {name for name, _ in counts} >= {"[red]x[/y]", "a b"}
    assert [count for name, count in counts if name == "all"] == ["3", "1", "3"]


def test_headings_of_all_columns_fit_into_eighty_characters():
    loss = LossSum(1, 1)
    part = Evaluated(1, dict.fromkeys(("routed", "base", "baseline", "chosen", "mixed"), loss))
    console = Console(file=io.StringIO(), width=80)
    evaluate_command.show(EvaluationReport("run", {(0, "textbook_en"): part}, (), 0, 0), console)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    columns = ["perplexity", "chosen", "mixed", "base", "model", "baseline", "documents", "tokens"]
    assert ["path", *columns] in lines
    assert ["label", *columns] in lines


def test_rerouting_helps_where_documents_change(trained, rerouter):
    source, documents = DiskSource(trained[0]), mixed_documents(4, HELD_OUT_SEED)
    plain = evaluate(source, documents, device=CPU, base=False).overall
    loaded = read_rerouter(rerouter, source.plan)
    found = {}
    for window in (8, 10_000):
        report = evaluate(source, documents, device=CPU, base=False, rerouting=Rerouting(loaded, window)).overall
        assert report.losses["routed"].nll == pytest.approx(plain.losses["routed"].nll, rel=1e-6)
        assert report.losses["rerouted"].tokens == plain.losses["routed"].tokens
        found[window] = report.losses["rerouted"].nll
    assert found[8] < 0.97 * plain.losses["routed"].nll
    assert found[8] < found[10_000]


def test_rerouting_leaves_out_paths_without_a_state(damaged, rerouter):
    source = DiskSource(damaged("P2"))
    rerouting = Rerouting(read_rerouter(rerouter, source.plan), 4)
    report = evaluate(source, held_out(), device=CPU, rerouting=rerouting, mix=2)
    assert report.missing_paths == (2,)
    # A path that is not there would cost nothing.
    assert report.overall.losses["rerouted"].nll > 0.9 * report.overall.losses["routed"].nll
    alone = evaluate(source, held_out(), device=CPU, mix=2)
    assert all(report.overall.losses[name] == alone.overall.losses[name] for name in ("mixed", "chosen"))


def test_a_swarm_gives_the_same_as_a_directory(trained, tmp_path):
    reader = FakeReader(trained[0], tmp_path)
    with SwarmSource(reader) as source:
        report = evaluate(source, held_out(), device=CPU)
    assert reader.closed
    assert sorted(set(reader.fetched)) == sorted(source.grid.modules())
    assert len([m for m in reader.fetched if m.startswith("L")]) == 4
    assert report == evaluate(DiskSource(trained[0]), held_out(), device=CPU)


class NoisyReader(FakeReader):
    """Most contributors of one module have named a state of noise."""

    noisy, scale = "P0", 1.0

    def winning_state(self, module):
        state = super().winning_state(module)
        if module != self.noisy:
            return state
        generator = torch.Generator().manual_seed(0)
        return dataclasses.replace(state, parameters=self.scale * torch.randn(state.layout.size, generator=generator))


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_reader_refuses_a_state_that_reads_held_out_texts_much_worse_than_the_genesis(trained, tmp_path, is_trained):
    reader = NoisyReader(trained[0], tmp_path)
    if not is_trained:
        # Modules that never were trained together may fit each other worse than at their genesis.
        reader.paths_of_last_step = lambda module: frozenset()
    with SwarmSource(reader) as source:
        if is_trained:
            with pytest.raises(NetworkError, match=r"no state of its module P0"):
                assemble_path(source, 0)
        assemble_path(source, 1 if is_trained else 0)
    assert reader.refused == (["P0"] if is_trained else [])


@pytest.mark.parametrize("noisy", ["L0.E0", "L1.E0", "P0"])
def test_a_state_of_huge_numbers_is_not_blamed_on_another_module(trained, tmp_path, noisy):
    """With it no loss is a number, whatever stands in the place of another."""
    reader = NoisyReader(trained[0], tmp_path)
    reader.noisy, reader.scale = noisy, 1e15
    with SwarmSource(reader) as source, pytest.raises(NetworkError, match=noisy):
        assemble_path(source, 0)
    assert reader.refused == [noisy]


def test_what_a_swarm_does_not_serve_is_missing(trained, tmp_path):
    reader = FakeReader(trained[0], tmp_path, unserved=("L1.E0",))
    source = SwarmSource(reader)
    assert evaluate(source, held_out(), device=CPU).missing_paths == (0, 2)
    with pytest.raises(NetworkError, match=r"L1\.E0"):
        assemble_path(source, 0)


def test_a_baseline_of_another_shape_is_refused(trained, tmp_path):
    source = DiskSource(trained[0])
    parameters = safetensors.torch.load_file(trained[0] / "dense.safetensors")
    parameters["model.norm.weight"] = torch.ones(3)
    safetensors.torch.save_file(parameters, tmp_path / "other.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    for name in ("other", "broken", "absent"):
        with pytest.raises(IntegrityError, match=f"{name}.safetensors"):
            load_baseline(tmp_path / f"{name}.safetensors", source.path_model(CPU))


def test_the_command_prints_one_json_object(trained, tmp_path, capsys):
    out, lines = trained
    data = write_jsonl(tmp_path / "held-out.jsonl", held_out())
    arguments = ["--state-dir", str(out), "--data", str(data), "--label-field", "domain"]
    baseline = ["--baseline", str(out / "dense.safetensors")]
    assert evaluate_command.main([*arguments, *baseline, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["perplexity"] == pytest.approx(lines[2]["perplexity"], rel=1e-6)
    assert set(report["labels"]) == {f"language {index}" for index in range(4)}
    assert report["run"] == DiskSource(out).plan.run_id
    write_jsonl(data, held_out()[:4])
    assert evaluate_command.main([*arguments, *baseline]) == 0
    text = capsys.readouterr().out
    for word in ("perplexity", "base model", "baseline", "language 0", "all"):
        assert word in text
    assert "language 1" not in text


def test_of_an_owner_s_texts_only_the_held_out_ones_are_scored(trained, tmp_path, capsys):
    texts = tiny_documents(4, 20, seed=5)
    data = tmp_path / "mine.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    arguments = ["--state-dir", str(trained[0]), "--data", str(data), "--no-base", "--json"]
    held_out = sum(is_held_out(Document(text), HELD_OUT_FRACTION) for text in texts)
    for extra, count in (([], len(texts)), (["--held-out"], held_out)):
        assert evaluate_command.main([*arguments, *extra]) == 0
        assert json.loads(capsys.readouterr().out)["documents"] == count > 0


def test_paths_are_mixed(trained, damaged, tmp_path):
    """Each token by the best paths of its document, weighted by what they said before it."""
    source, documents = DiskSource(trained[0]), held_out()
    report = evaluate(source, documents, device=CPU, mix=4, base=False)
    plain = evaluate(source, documents, device=CPU, base=False)
    assert report.overall.losses["routed"].nll == pytest.approx(plain.overall.losses["routed"].nll, rel=1e-6)
    router = source.document_router(CPU)
    length, prefix = source.plan.model.sequence_length, source.plan.routing.prefix_tokens

    def mixed(document, known):
        """Return the nats of a document by those of its paths that are known."""
        tokens = np.array(router.tokenizer.document_tokens(document.text))
        best = [p for p in router.nearest_paths([tokens], 4)[0].tolist() if p in known]
        rows = torch.from_numpy(scoring_windows(tokens, length, prefix, PAD_TOKEN).astype(np.int64))
        with torch.no_grad():
            logprobs = [assemble_path(source, p)(rows)[:, :-1].log_softmax(-1) for p in best]
        targets = rows[:, 1:, None]
        losses = [-found.gather(2, targets)[..., 0] for found in logprobs]
        found = mixed_losses(torch.stack(losses))[:, prefix - 1 :]
        return float(found[rows[:, prefix:] != PAD_TOKEN].sum())

    nll = sum(mixed(document, range(4)) for document in documents)
    assert report.overall.losses["mixed"].nll == pytest.approx(nll, rel=1e-5)
    # Those that can be had are mixed, each once.
    broken = DiskSource(damaged("L0.E1"))
    known = [path for path in range(4) if not broken.missing_modules(path)]
    assert len(known) == 2
    found = evaluate(broken, documents, device=CPU, mix=4, base=False)
    assert found.unscored_documents > 0
    routed = router.nearest_paths([router.tokenizer.document_tokens(d.text) for d in documents], 1)[:, 0]
    nll = sum(mixed(d, known) for d, path in zip(documents, routed.tolist(), strict=True) if path in known)
    assert found.overall.losses["mixed"].nll == pytest.approx(nll, rel=1e-5)


def test_the_prefix_chooses_among_the_best_paths(trained, monkeypatch):
    """A path that the router likes least is taken when the first tokens cost it least."""
    source, documents = DiskSource(trained[0]), held_out()
    right = evaluate(source, documents, device=CPU, base=False).overall
    ranked = DocumentRouter.nearest_paths
    monkeypatch.setattr(DocumentRouter, "nearest_paths", lambda *asked: ranked(*asked)[:, ::-1])
    found = evaluate(source, documents, device=CPU, mix=4, base=False).overall
    assert found.losses["chosen"].nll == pytest.approx(right.losses["routed"].nll, rel=1e-6)
    assert found.losses["routed"].nll > 1.05 * right.losses["routed"].nll


def test_the_command_reroutes(trained, rerouter, tmp_path, capsys):
    data = write_jsonl(tmp_path / "held-out.jsonl", mixed_documents(1, 3))
    arguments = ["--state-dir", str(trained[0]), "--data", str(data), "--no-base"]
    reroute = ["--reroute", "8", "--rerouter", str(rerouter)]
    assert evaluate_command.main([*arguments, *reroute, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["rerouted_perplexity"] > 1
    assert "base_perplexity" not in report
    assert evaluate_command.main([*arguments, *reroute]) == 0
    assert "rerouted" in capsys.readouterr().out


def test_the_same_documents_give_the_same_rerouter(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fit_rerouter, "STEPS", 2)
    data = write_jsonl(tmp_path / "mixed.jsonl", mixed_documents(10, 5))
    arguments = ["--state-dir", str(trained[0]), "--data", str(data)]
    files = [tmp_path / name for name in ("first", "second")]
    for file in files:
        assert evaluate_command.main([*arguments, "--fit-rerouter", str(file)]) == 0
        assert "fitted to 20 documents" in capsys.readouterr().out
    assert files[0].read_bytes() == files[1].read_bytes()


def test_fitting_takes_enough_documents_and_every_path(damaged, tmp_path):
    source = DiskSource(damaged())
    with pytest.raises(CorpusError, match="16 documents"):
        fit_to_documents(source, held_out(), device=CPU)
    RunFolder(tmp_path / "copy").states.remove("P2")
    with pytest.raises(StorageError, match="P2"):
        fit_to_documents(DiskSource(tmp_path / "copy"), held_out(), device=CPU)


@pytest.mark.parametrize(
    ("extra", "code", "words"),
    [
        (["--text-field", "txet"], CorpusError.exit_code, "text_field = 'text'"),
        (["--data", "nowhere/*.jsonl"], CorpusError.exit_code, "--data 'nowhere/*.jsonl'"),
        (["--initial-peers", ADDRESS], ConfigurationError.exit_code, "--state-dir"),
        (["--initial-peers", "/ip4/1.2.3.4"], AddressError.exit_code, "the whole address"),
        (["--threads", "0"], ConfigurationError.exit_code, "--threads 0"),
        (["--reroute", "0"], ConfigurationError.exit_code, "--reroute 0"),
        (["--reroute", "16"], ConfigurationError.exit_code, "together with --rerouter FILE"),
        (["--rerouter", "a"], ConfigurationError.exit_code, "--fit-rerouter FILE"),
        (["--reroute", "16", "--rerouter", "a"], StorageError.exit_code, "--fit-rerouter a"),
        (
            ["--reroute", "16", "--rerouter", "a", "--fit-rerouter", "b"],
            ConfigurationError.exit_code,
            "without --reroute",
        ),
    ],
)
def test_errors_say_what_to_type(trained, tmp_path, capsys, extra, code, words):
    data = write_jsonl(tmp_path / "held-out.jsonl", held_out()[:2])
    arguments = ["--state-dir", str(trained[0]), "--data", str(data)]
    assert evaluate_command.main([*arguments, *extra]) == code
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
