"""Rerouted losses: every token counts once, and hindsight is never worse than a choice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.scored_documents import PREFIX_TOKENS, changing_documents, windows_of

from dipaco.inference.document_windows import DocumentWindows, TokenDocument
from dipaco.inference.rerouting import (
    STAY,
    best_document_loss,
    best_window_loss,
    choose_paths,
    decisions,
    rerouted_loss,
    routed_loss,
    single_path_losses,
    switches,
)
from dipaco.inference.token_losses import TokenLosses
from dipaco.modules.config import PAD_TOKEN

DOCUMENTS = [*changing_documents(7, 12), TokenDocument(np.array([1, 9, 2]), path=0)]
WINDOWS = (1, 3, 16, 40, 1024)


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> DocumentWindows:
    return windows_of(DOCUMENTS, tmp_path_factory.mktemp("windows"))


@pytest.fixture(scope="module")
def losses(windows: DocumentWindows) -> TokenLosses:
    random = np.random.default_rng(0)
    return TokenLosses(windows, {p: random.random(windows.tokens, np.float32) for p in range(3)})


def test_every_scored_token_has_one_number(windows: DocumentWindows) -> None:
    assert len(windows) == 7
    assert windows.short_documents == 1
    seen = np.full(windows.tokens, -1)
    for row, start, count in zip(windows.rows, windows.row_starts, windows.row_tokens, strict=True):
        assert (row[count:] == PAD_TOKEN).all()
        own = row[PREFIX_TOKENS:count]
        assert (seen[start : start + len(own)] == -1).all()
        seen[start : start + len(own)] = own
    expected = [document.tokens[PREFIX_TOKENS:] for document in DOCUMENTS[:7]]
    np.testing.assert_array_equal(seen, np.concatenate(expected))
    assert windows.label_names == ("even", "odd")
    assert windows.paths.tolist() == [0, 1, 0, 1, 0, 1, 0]


def test_no_documents(tmp_path: Path) -> None:
    windows = windows_of([], tmp_path)
    assert (len(windows), windows.tokens, len(windows.rows)) == (0, 0, 0)
    losses = TokenLosses(windows, {0: np.zeros(0, np.float32)})
    assert routed_loss(losses).tokens == 0
    assert rerouted_loss(losses, np.zeros(0, int), 16).perplexity is None
    assert switches(losses, np.zeros(0, int), 16) == 0


@pytest.mark.parametrize("window", WINDOWS)
def test_a_rerouted_loss_is_the_sum_over_the_chosen_paths(losses: TokenLosses, window: int) -> None:
    made = decisions(losses.documents, window)
    choices = np.random.default_rng(1).integers(0, 3, len(made))
    expected, changed, number = 0.0, 0, 0
    bounds = losses.documents.token_starts
    for document, path in enumerate(losses.documents.paths):
        current = path
        for start in range(bounds[document], bounds[document + 1], window):
            stop = min(start + window, bounds[document + 1])
            expected += losses.nll[choices[number]][start:stop].sum(dtype=np.float64)
            changed += choices[number] != current
            current = choices[number]
            number += 1
    assert number == len(made)
    found = rerouted_loss(losses, choices, window)
    assert found.nll == pytest.approx(expected)
    assert found.tokens == losses.documents.tokens
    assert switches(losses, choices, window) == pytest.approx(changed / number)


@pytest.mark.parametrize("window", WINDOWS)
def test_hindsight_bounds_every_choice(losses: TokenLosses, window: int) -> None:
    best = best_window_loss(losses, window).nll
    values = losses.array()
    assert best_window_loss(losses, 1).nll == pytest.approx(values.min(axis=1).sum(), rel=1e-6)
    others = [routed_loss(losses), best_document_loss(losses)]
    for bound in [*others, *single_path_losses(losses).values()]:
        assert best <= bound.nll + 1e-9
    longest = best_window_loss(losses, 10**6).nll
    assert longest == pytest.approx(best_document_loss(losses).nll)


def test_staying_is_routing_once(losses: TokenLosses) -> None:
    for window in WINDOWS:
        made = decisions(losses.documents, window)
        logits = np.random.default_rng(2).normal(size=(len(made), 3))
        choices = choose_paths(logits, made, losses.documents.paths, STAY)
        assert rerouted_loss(losses, choices, window).nll == pytest.approx(routed_loss(losses).nll)
        assert switches(losses, choices, window) == 0


def test_a_bonus_keeps_the_current_path(losses: TokenLosses) -> None:
    made = decisions(losses.documents, 8)
    logits = np.random.default_rng(3).normal(size=(len(made), 3))
    routed = losses.documents.paths
    eager = choose_paths(logits, made, routed, 0.0)
    np.testing.assert_array_equal(eager, logits.argmax(axis=1))
    rates = [switches(losses, choose_paths(logits, made, routed, b), 8) for b in (0, 0.5, 1, 3)]
    assert rates == sorted(rates, reverse=True)
    current = -1
    for number, path in enumerate(choose_paths(logits, made, routed, 1.0)):
        if made.ordinals[number] == 0:
            current = routed[made.documents[number]]
        best = logits[number].argmax()
        if logits[number, best] - logits[number, current] > 1.0:
            current = best
        assert path == current
    allowed = np.array([True, True, False])
    assert 2 not in choose_paths(logits, made, routed, 0.0, allowed)


def test_documents_of_an_unscored_path_are_left_out(losses: TokenLosses) -> None:
    partial = TokenLosses(losses.documents, {0: losses.nll[0], 2: losses.nll[2]})
    kept = losses.documents.paths == 0
    tokens = int(losses.documents.document_tokens[kept].sum())
    assert routed_loss(partial).tokens == tokens
    assert best_document_loss(partial).tokens == tokens
    made = decisions(losses.documents, 16)
    assert rerouted_loss(partial, np.zeros(len(made), int), 16).nll == pytest.approx(
        single_path_losses(partial)[0].nll
    )
    with pytest.raises(ValueError, match="path 1 was chosen"):
        rerouted_loss(partial, np.ones(len(made), int), 16)
    with pytest.raises(ValueError, match="decisions"):
        rerouted_loss(partial, np.zeros(3, int), 16)
