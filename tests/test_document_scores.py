from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from dipaco.modules.config import ModelConfig
from dipaco.modules.errors import IntegrityError
from dipaco.modules.evaluate import sum_losses
from dipaco.modules.transformer import PathModel, initialise
from dipaco.routing.document_scores import (
    SCORING_BATCH,
    DocumentScores,
    RouterDocuments,
    greatest_scores_bytes,
    score_router_documents,
)

MODEL = ModelConfig(
    vocabulary_size=32, block_count=1, hidden_size=8, head_count=1, sequence_length=12
)
STATES = {"L0.E0": "a" * 64, "P3": "b" * 64}


def documents(count: int = 40) -> RouterDocuments:
    generator = np.random.default_rng(0)
    texts = [generator.integers(4, 32, size=int(n)) for n in generator.integers(5, 30, size=count)]
    return RouterDocuments.from_documents(texts, 12, 4)


def scores(sample: RouterDocuments, **fields: Any) -> DocumentScores:
    values: dict[str, Any] = {
        "request": "0123456789abcdef",
        "path": 3,
        "states": STATES,
        "nll": sample.targets * 2.5,
        "tokens": sample.targets,
    }
    return DocumentScores(**{**values, **fields})


def test_documents_survive_the_round_trip_and_have_one_byte_string() -> None:
    sample = documents()
    data = sample.to_bytes()
    again = RouterDocuments.from_bytes(data, vocabulary_size=32)
    assert np.array_equal(again.tokens, sample.tokens)
    assert again.prefix_tokens == 4
    assert again.to_bytes() == data == documents().to_bytes()
    assert sample.targets.tolist() == [int((row != 3).sum()) - 4 for row in sample.tokens]
    assert all(len(prefix) == 4 for prefix in sample.prefixes())


def test_scores_survive_the_round_trip_and_have_one_byte_string() -> None:
    sample = documents()
    data = scores(sample).to_bytes()
    again = DocumentScores.from_bytes(data, 40, request="0123456789abcdef", path=3)
    again.check_documents(sample)
    assert np.array_equal(again.nll, sample.targets * 2.5)
    assert dict(again.states) == STATES
    assert again.to_bytes() == data
    assert len(data) <= greatest_scores_bytes(40)


def test_slices_give_the_bits_of_one_pass() -> None:
    model = PathModel(MODEL)
    initialise(model, 1)
    sample = documents(3 * SCORING_BATCH + 5)
    nll, tokens = score_router_documents(model.eval(), sample)
    pieces = [
        score_router_documents(model, sample, start=start, stop=start + SCORING_BATCH)
        for start in range(0, len(sample), SCORING_BATCH)
    ]
    assert np.array_equal(np.concatenate([piece[0] for piece in pieces]), nll)
    assert np.array_equal(tokens, sample.targets)
    summed, count = sum_losses(model, torch.from_numpy(sample.tokens), 4)
    assert (summed, count) == (nll.sum(), tokens.sum())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nll": np.full(40, np.nan)}, "negative or not finite"),
        ({"nll": np.full(40, -1.0)}, "negative or not finite"),
        ({"nll": np.full(40, 1e12)}, "impossibly large"),
        ({"nll": np.zeros(40, np.float32)}, "float32"),
        ({"nll": np.zeros(39)}, "shapes"),
        ({"tokens": np.full(40, -1)}, "negative or not finite"),
        ({"tokens": np.full(40, 2**40)}, "impossibly large"),
        ({"request": "xyz"}, "no score request"),
        ({"path": -1}, "name no path"),
        ({"path": True}, "name no path"),
        ({"states": {}}, "which module states"),
        ({"states": {"L0.E0": "short"}}, "which module states"),
        ({"states": {"../../x": "a" * 64}}, "which module states"),
    ],
)
def test_scores_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        scores(documents(), **fields)


def test_scores_of_something_else_are_refused() -> None:
    sample, data = documents(), scores(documents()).to_bytes()
    with pytest.raises(IntegrityError, match="of 40 documents, not 41"):
        DocumentScores.from_bytes(data, 41)
    with pytest.raises(IntegrityError, match="answer the request 0123456789abcdef, not f"):
        DocumentScores.from_bytes(data, 40, request="f" * 16)
    with pytest.raises(IntegrityError, match="of path 3, not 2"):
        DocumentScores.from_bytes(data, 40, path=2)
    with pytest.raises(IntegrityError, match="of other documents"):
        scores(sample, tokens=sample.targets + 1).check_documents(sample)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[:40],
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data + b"more",
        lambda data: b"{}",
        lambda data: (2).to_bytes(8, "little") + b"[]" + data,
        lambda data: safetensors.numpy.save({"nll": np.zeros(40)}),
        lambda data: safetensors.numpy.save({"nll": np.zeros(40)}, metadata={"scores": "{}"}),
        lambda data: safetensors.numpy.save({"nll": np.zeros(40)}, metadata={"scores": "[]"}),
        lambda data: data.replace(b"document-scores/1", b"document-scores/2"),
    ],
)
def test_bytes_that_are_something_else_are_refused(spoil: Callable[[bytes], bytes]) -> None:
    for good, read in (
        (scores(documents()).to_bytes(), lambda data: DocumentScores.from_bytes(data, 40)),
        (documents().to_bytes(), lambda data: RouterDocuments.from_bytes(data)),
    ):
        bad = spoil(good)
        if bad != good:
            with pytest.raises(IntegrityError):
                read(bad)


def test_documents_that_cannot_be_are_refused() -> None:
    rows = documents().tokens
    with pytest.raises(IntegrityError, match="int64"):
        RouterDocuments(rows.astype(np.int64), 4)
    with pytest.raises(IntegrityError, match="nothing to score"):
        RouterDocuments(rows, 12)
    with pytest.raises(IntegrityError, match="negative"):
        RouterDocuments(rows - 40, 4)
    with pytest.raises(IntegrityError, match="vocabulary ends at 15"):
        RouterDocuments.from_bytes(documents().to_bytes(), vocabulary_size=16)
