"""What every target costs a path in nats, from which all perplexities are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from dipaco.base.errors import IntegrityError
from dipaco.base.files import storage_errors
from dipaco.base.progress import each
from dipaco.modules.device import autocast_for
from dipaco.modules.marked_tokens import plain_tokens
from dipaco.modules.memory import AtOnce
from dipaco.modules.transformer import PathModel, token_losses

from .document_windows import DocumentWindows
from .sources import StateSource, assemble_path

# Logits that are held at once: half a gigabyte on a GPU, where large batches pay.
_LOGITS_ON_CPU, _LOGITS_ON_GPU = 2**23, 2**27
_MAX_ROWS = 256


def nats_of_paths(
    source: StateSource,
    documents: DocumentWindows,
    paths: np.ndarray,
    file: Path,
    device: torch.device,
    progress: Callable[[str], None],
) -> tuple[np.ndarray, list[int]]:
    """Return what every target of every row costs by `paths` [R, K] of its own, fp32
    [K, R, L - 1], a memory map of `file`; and the paths that have no state.

    One path is in memory at a time. What is behind a row's end costs 0. For a path without a state
    the first one of the row takes its place, and costs 0 if it has no state either. Raises
    StorageError when the disk is full.
    """
    rows, length = documents.rows.shape
    missing: list[int] = []
    with storage_errors(file.parent):
        nats = np.memmap(file, np.float32, "w+", shape=(paths.shape[1], rows, length - 1))
        model: PathModel | None = None
        used = np.unique(paths).tolist()
        for path in each(used, progress, lambda path: f"scoring path {path}"):
            if source.missing_modules(path):
                missing.append(path)
            else:
                model = assemble_path(source, path, model=model, device=device)
                own = np.flatnonzero((paths == path).any(1))
                for batch, losses in row_losses(model, documents, own):
                    for column in range(paths.shape[1]):
                        chosen = paths[batch, column] == path
                        nats[column, batch[chosen], : losses.shape[1]] = losses[chosen]
            source.forget(path)
        for row, column in np.argwhere(np.isin(paths, missing)):
            nats[column, row] = nats[0, row]
    return nats, missing


def row_losses(
    model: PathModel, documents: DocumentWindows, rows: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield batches of the given rows: their numbers [B] and target losses, fp32 [B, L - 1].

    Rows of like length go together, cut to the longest: what is padded costs time. Loss t of a row
    is that of its token t + 1. Raises IntegrityError for a loss that is not a number.
    """
    vocabulary, device = model.config.vocabulary_size, model.device
    at_once = AtOnce(_tokens_at_once(vocabulary, device), device, "scoring", in_tokens=True)
    for batch in length_batches(documents.row_tokens, rows, vocabulary, device):
        tokens = row_tensor(documents, batch)
        losses = batch_losses(model, tokens, at_once).numpy()
        if not np.isfinite(losses).all():
            raise IntegrityError(
                "a path gives a token no finite likelihood; its states are damaged or its "
                "training diverged"
            )
        yield batch, losses


def length_batches(
    row_tokens: np.ndarray, rows: np.ndarray, width: int, device: torch.device
) -> Iterator[np.ndarray]:
    """Divide rows, int64, into batches of like length that need a bounded memory.

    `width` is how many numbers a token needs at the end of the model.
    """
    budget = _tokens_at_once(width, device)
    ordered = rows[np.argsort(-row_tokens[rows], kind="stable")]
    start = 0
    while start < len(ordered):
        longest = max(int(row_tokens[ordered[start]]), 1)
        stop = start + min(max(budget // longest, 1), _MAX_ROWS)
        yield ordered[start:stop]
        start = stop


def _tokens_at_once(width: int, device: torch.device) -> int:
    """Return for how many tokens a device holds `width` numbers each, where memory is plentiful."""
    return (_LOGITS_ON_CPU if device.type == "cpu" else _LOGITS_ON_GPU) // max(width, 1)


def row_tensor(documents: DocumentWindows, rows: np.ndarray) -> torch.Tensor:
    """Return rows as int64 [B, L] on the CPU, cut to the longest of them, without marks."""
    longest = int(documents.row_tokens[rows].max())
    ordered = np.sort(rows)  # the file is read forward
    places = np.searchsorted(ordered, rows)
    return plain_tokens(
        torch.from_numpy(documents.rows[ordered, :longest].astype(np.int64)[places])
    )


@torch.no_grad()
def batch_losses(model: PathModel, tokens: torch.Tensor, at_once: AtOnce) -> torch.Tensor:
    """Return the loss in nats of each target of `tokens` [B, T], fp32 [B, T - 1] on the CPU.

    As many rows at once as memory allows. Raises ConfigurationError when not even one fits.
    """
    device, length = model.device, tokens.shape[1]

    def score(token_count: int) -> torch.Tensor:
        losses = []
        for piece in tokens.split(token_count // length):
            moved = piece.to(device)
            with autocast_for(device):
                losses.append(token_losses(model, moved).cpu())
        return torch.cat(losses)

    return at_once.attempt(score, length)
