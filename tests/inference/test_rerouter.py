"""The rerouter: what it learns, the choices it makes, and the file it is kept in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from support.scored_documents import (
    CPU,
    base_model,
    changing_documents,
    language_losses,
    two_path_plan,
    windows_of,
)

from dipaco.base.errors import ConfigurationError, CorpusError, IntegrityError
from dipaco.inference.document_windows import DocumentWindows
from dipaco.inference.fit_rerouter import FitReport, RerouterConfig, fit_rerouter
from dipaco.inference.reroute_report import reroute_report
from dipaco.inference.rerouter import (
    Rerouter,
    check_windows,
    decision_logits,
    load_rerouter,
    rerouter_bytes,
)
from dipaco.inference.rerouting import STAY, decisions
from dipaco.inference.token_losses import TokenLosses

PLAN = two_path_plan()
QUICK = RerouterConfig(windows=(4, 16), steps=40, learning_rate=1e-2, batch_sequences=8)


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> TokenLosses:
    """Documents that change their language every twelve tokens."""
    documents = changing_documents(60, 12)
    return language_losses(windows_of(documents, tmp_path_factory.mktemp("w")), documents)


@pytest.fixture(scope="module")
def fitted(losses: TokenLosses) -> tuple[Rerouter, FitReport]:
    return fit_rerouter(base_model(PLAN), losses, QUICK, device=CPU)


def random_rerouter(windows: tuple[int, ...] = (4, 8)) -> Rerouter:
    rerouter = Rerouter(PLAN.model, blocks=1, windows=windows, path_count=2)
    rerouter.load_base(base_model(PLAN))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (rerouter.head, rerouter.prior):
            parameter.normal_(generator=generator)
    return rerouter.eval()


def test_rerouting_follows_the_language(fitted: tuple[Rerouter, FitReport], tmp_path: Path) -> None:
    rerouter, report = fitted
    assert report.held_out_documents == 15
    assert report.kept_step > 0
    documents = changing_documents(20, 12, seed=5)
    losses = language_losses(windows_of(documents, tmp_path), documents)
    found = reroute_report(losses, rerouter, [4, 16])
    every_4 = found.windows[0]
    assert found.routed.loss is not None
    assert every_4.rerouted.loss is not None
    assert every_4.best.loss is not None
    # A language goes on for twelve tokens: two decisions of three can be right.
    assert every_4.rerouted.loss < 0.85 * found.routed.loss
    assert every_4.best.loss <= every_4.rerouted.loss
    assert 0 < every_4.switches < 0.6
    assert every_4.decisions == len(decisions(losses.documents, 4))
    values = found.as_dict()
    assert values["windows"][0]["perplexity"] == every_4.rerouted.perplexity
    assert [path["path"] for path in values["paths"]] == [0, 1]


def test_the_same_inputs_give_the_same_bytes(
    losses: TokenLosses, fitted: tuple[Rerouter, FitReport]
) -> None:
    again, report = fit_rerouter(base_model(PLAN), losses, QUICK, device=CPU)
    assert report == fitted[1]
    assert rerouter_bytes(again, PLAN) == rerouter_bytes(fitted[0], PLAN)
    other = QUICK.model_copy(update={"seed": 1, "steps": 2})
    assert rerouter_bytes(fit_rerouter(base_model(PLAN), losses, other, device=CPU)[0], PLAN) != (
        rerouter_bytes(again, PLAN)
    )


def test_where_nothing_can_be_learnt_nobody_moves(tmp_path: Path) -> None:
    documents = changing_documents(24, 1000)
    windows = windows_of(documents, tmp_path)
    losses = language_losses(windows, documents)
    config = QUICK.model_copy(update={"steps": 4})
    rerouter, report = fit_rerouter(base_model(PLAN), losses, config, device=CPU)
    assert set(report.window_losses.values()) == {report.routed_loss}
    assert [policy.stay_bonus for policy in rerouter.policies] == [STAY, STAY]
    assert rerouter.choose(windows, [4])[4].tolist() == (
        windows.paths[decisions(windows, 4).documents].tolist()
    )
    values = report.as_dict()
    assert values["windows"][0]["stay_bonus"] is None
    assert json.loads(json.dumps(values)) == values


def test_too_few_documents_or_paths_are_refused(losses: TokenLosses, tmp_path: Path) -> None:
    documents = changing_documents(19, 12)
    few = language_losses(windows_of(documents, tmp_path), documents)
    with pytest.raises(CorpusError, match="19 documents"):
        fit_rerouter(base_model(PLAN), few, QUICK, device=CPU)
    missing = TokenLosses(losses.documents, {1: losses.nll[1]})
    with pytest.raises(ConfigurationError, match="all paths"):
        fit_rerouter(base_model(PLAN), missing, QUICK, device=CPU)
    with pytest.raises(ConfigurationError, match="3 blocks"):
        fit_rerouter(base_model(PLAN), losses, QUICK.model_copy(update={"blocks": 3}), device=CPU)


@pytest.mark.parametrize("windows", [(), (0,), (2**21,), tuple(range(1, 70))])
def test_impossible_windows_are_refused(windows: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError):
        check_windows(windows)


@torch.no_grad()
def test_a_decision_sees_the_tokens_before_it(losses: TokenLosses) -> None:
    """Each decision's logits are those of the row that scores its token, cut off before it."""
    rerouter, windows = random_rerouter(), losses.documents
    found = decision_logits(rerouter, windows, {5: [8, 4], 100: [4]})
    made = decisions(windows, 5)
    assert found[5].shape == (len(made), 2, 2)
    assert found[100].shape == (len(windows), 1, 2)
    for number in range(0, len(made), 17):
        row = int(np.searchsorted(windows.row_starts, made.starts[number], side="right")) - 1
        seen = windows.prefix_tokens + int(made.starts[number] - windows.row_starts[row])
        tokens = torch.from_numpy(windows.rows[row, :seen].astype(np.int64))[None]
        routed = torch.tensor([windows.paths[made.documents[number]]])
        logits = rerouter.logits(rerouter.hidden_states(tokens)[:, -1], routed)[0]
        np.testing.assert_allclose(found[5][number], logits[[1, 0]], rtol=1e-4, atol=1e-5)


def test_the_next_path_is_the_choice_of_the_head(losses: TokenLosses) -> None:
    rerouter, windows = random_rerouter(), losses.documents
    everywhere = np.ones(2, dtype=bool)
    for document in range(4):
        row = int(windows.first_rows[document])
        tokens = windows.rows[row, : windows.prefix_tokens].tolist()
        routed = int(windows.paths[document])
        path = rerouter.next_path(tokens, routed, routed, 4, everywhere)
        first = int(np.searchsorted(decisions(windows, 4).documents, document))
        assert path == rerouter.choose(windows, [4])[4][first]
        only = np.arange(2) == 1 - path
        assert rerouter.next_path(tokens, routed, routed, 4, only) == 1 - path


def test_a_window_that_was_not_fitted_uses_the_nearest() -> None:
    rerouter = random_rerouter((16, 64, 1024))
    asked = {w: rerouter.policy(w).window for w in (1, 16, 31, 40, 100, 500, 2**20)}
    assert asked == {1: 16, 16: 16, 31: 16, 40: 64, 100: 64, 500: 1024, 2**20: 1024}


# -- the file


def test_a_file_holds_the_rerouter(fitted: tuple[Rerouter, FitReport]) -> None:
    rerouter = fitted[0]
    content = rerouter_bytes(rerouter, PLAN)
    again = load_rerouter(content, PLAN)
    assert again.policies == rerouter.policies
    assert again.windows == rerouter.windows
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, rerouter.get_parameter(name))
    assert rerouter_bytes(again, PLAN) == content
    assert set(safetensors.torch.load(content)) >= {"head", "prior"}


def test_a_rerouter_of_another_run_is_refused(fitted: tuple[Rerouter, FitReport]) -> None:
    other = two_path_plan(seed=1)
    with pytest.raises(ConfigurationError, match=rf"run {PLAN.run_id}.*{other.run_id}.*fit"):
        load_rerouter(rerouter_bytes(fitted[0], PLAN), other)


def test_all_fields_are_documented(fitted: tuple[Rerouter, FitReport], losses: TokenLosses) -> None:
    page = (Path(__file__).parents[2] / "docs" / "rerouting.md").read_text(encoding="utf-8")
    content = rerouter_bytes(fitted[0], PLAN)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["rerouter"])
    report = reroute_report(losses, fitted[0], [4]).as_dict()
    for fields in (header, header["policies"][0], report, report["windows"][0]):
        assert [field for field in fields if f"`{field}`" not in page] == []
    assert [field for field in fitted[1].as_dict() if f"`{field}`" not in page] == []


def reworked(content: bytes, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> bytes:
    length = int.from_bytes(content[:8], "little")
    header = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["rerouter"])
    tensors = safetensors.torch.load(content)
    change(header, tensors)
    return safetensors.torch.save(tensors, metadata={"rerouter": json.dumps(header)})


@pytest.mark.parametrize(
    "change",
    [
        lambda header, tensors: header.update(format="dipaco-rerouter/9"),
        lambda header, tensors: header.update(base="0" * 64),
        lambda header, tensors: header.update(windows=[4]),
        lambda header, tensors: header.update(windows=[4, -16]),
        lambda header, tensors: header.update(windows="many"),
        lambda header, tensors: header.update(blocks=0),
        lambda header, tensors: header.update(blocks=1),
        lambda header, tensors: header.update(paths=3),
        lambda header, tensors: header.update(policies=[]),
        lambda header, tensors: header["policies"][0].update(head=5),
        lambda header, tensors: header["policies"][0].update(stay_bonus=-1.0),
        lambda header, tensors: header["policies"][0].update(stay_bonus=float("nan")),
        lambda header, tensors: header.pop("sha256"),
        lambda header, tensors: tensors.update(head=tensors["head"] + 1),
        lambda header, tensors: tensors.update(head=tensors["head"] * torch.nan),
        lambda header, tensors: tensors.pop("prior"),
    ],
)
def test_a_changed_file_is_refused(
    fitted: tuple[Rerouter, FitReport], change: Callable[[dict[str, Any], dict[str, Any]], None]
) -> None:
    content = reworked(rerouter_bytes(fitted[0], PLAN), change)
    with pytest.raises(IntegrityError, match="some file"):
        load_rerouter(content, PLAN, "some file")


@pytest.mark.parametrize("content", [b"", b"no", b"\x00" * 100, b"\xff" * 100])
def test_what_is_no_file_of_ours_is_refused(content: bytes) -> None:
    with pytest.raises(IntegrityError):
        load_rerouter(content, PLAN)
    whole = rerouter_bytes(random_rerouter(), PLAN)
    for cut in (7, 60, len(whole) - 1):
        with pytest.raises(IntegrityError):
            load_rerouter(whole[:cut], PLAN)
    plain = safetensors.torch.save({"head": torch.ones(2)})
    with pytest.raises(IntegrityError):
        load_rerouter(plain, PLAN)


def test_windows_of_documents_are_named_by_their_content(tmp_path: Path) -> None:
    def sha256(seed: int) -> str:
        windows: DocumentWindows = windows_of(changing_documents(3, 12, seed), tmp_path / str(seed))
        return windows.sha256

    assert sha256(0) == sha256(0)
    assert sha256(0) != sha256(1)
