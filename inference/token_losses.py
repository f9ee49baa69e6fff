"""The loss that every path gives every token: one pass, from which all perplexities come.

Routed, rerouted and single-path perplexities, and the bounds in hindsight, are sums of the same
numbers, so they are comparable to the last token (DiPaCo section 7.2.2: the array S_ijp).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dipaco.base.errors import IntegrityError
from dipaco.base.files import storage_errors
from dipaco.base.progress import each
from dipaco.modules.device import autocast_for
from dipaco.modules.memory import AtOnce
from dipaco.modules.transformer import PathModel, token_losses

from .document_windows import DocumentWindows
from .sources import StateSource, assemble_path

# Logits that are held at once: half a gigabyte on a GPU, where large batches pay.
_LOGITS_ON_CPU, _LOGITS_ON_GPU = 2**23, 2**27
_MOST_ROWS = 256


@dataclass(frozen=True)
class TokenLosses:
    """The negative log-likelihood in nats of every counted token under every path."""

    documents: DocumentWindows
    nll: Mapping[int, np.ndarray]
    """Path to fp32 [tokens], a memory map, for the paths that could be assembled."""

    @property
    def paths(self) -> tuple[int, ...]:
        """The paths whose losses are known, in order."""
        return tuple(sorted(self.nll))

    @property
    def kept(self) -> np.ndarray:
        """Documents that are reported, bool [N]: those whose routed path is among `paths`."""
        return np.isin(self.documents.paths, self.paths)

    def array(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return fp32 [stop - start, paths] in memory, columns in the order of `paths`."""
        return np.stack([self.nll[path][start:stop] for path in self.paths], axis=1)


def losses_of_paths(
    source: StateSource,
    documents: DocumentWindows,
    *,
    folder: Path,
    device: torch.device,
    paths: Sequence[int] | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> TokenLosses:
    """Return all documents' losses under each of `paths` (default: all with a state).

    One path is in memory at a time.

    A path's losses are a file of 4 bytes a token in `folder`, named by a hash of the documents
    and of the path's parameters: a later call with the same folder reuses what is there, so an
    interrupted one goes on with the path where it stopped. Every token has as much context as
    the windows give it, whichever path it is.

    Raises as `assemble_path` does for one of `paths` without a state, StorageError when the disk is
    full, IntegrityError for a loss that is no number.
    """
    found: dict[int, np.ndarray] = {}
    model: PathModel | None = None
    wanted = [*range(source.grid.path_count)] if paths is None else [*paths]
    for path in each(wanted, progress, lambda path: f"scoring all documents with path {path}"):
        if paths is None and source.missing_modules(path):
            source.forget(path)
            continue
        model = assemble_path(source, path, model=model, device=device)
        found[path] = _losses_of_path(model, documents, folder)
        source.forget(path)
    return TokenLosses(documents, found)


def _losses_of_path(model: PathModel, documents: DocumentWindows, folder: Path) -> np.ndarray:
    """Return the losses of one model, fp32 [tokens], from their file if it is there."""
    name = hashlib.sha256(
        f"{documents.sha256} {documents.prefix_tokens} {parameters_sha256(model)}".encode()
    ).hexdigest()
    file = folder / f"scores-{name[:32]}.f32"
    shape = (documents.tokens,)
    with storage_errors(folder):
        if not (file.is_file() and file.stat().st_size == 4 * documents.tokens):
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = file.with_suffix(".tmp")
            losses = np.memmap(unfinished, np.float32, "w+", shape=shape)
            fill_token_losses(model, documents, losses)
            losses.flush()
            del losses
            os.replace(unfinished, file)
        return np.memmap(file, np.float32, "r", shape=shape)


def parameters_sha256(model: PathModel) -> str:
    """Return the SHA-256 of all parameters of a model, by name and in fp32."""
    hasher = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        hasher.update(name.encode())
        values = parameter.detach().to("cpu", torch.float32).contiguous()
        hasher.update(values.view(-1).numpy().data)
    return hasher.hexdigest()


def fill_token_losses(model: PathModel, documents: DocumentWindows, filled: np.ndarray) -> None:
    """Fill `filled`, fp32 [tokens], with the negative log-likelihood of every counted token."""
    for rows, losses in row_losses(model, documents, np.arange(len(documents.rows))):
        for row, values in zip(rows.tolist(), losses, strict=True):
            start, stop = documents.prefix_tokens, int(documents.row_tokens[row])
            first = int(documents.row_starts[row])
            filled[first : first + stop - start] = values[start - 1 : stop - 1]


def row_losses(
    model: PathModel, documents: DocumentWindows, rows: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield batches of the given rows: their numbers [B] and target losses, fp32 [B, L - 1].

    Rows of like length go together, cut to the longest: what is padded costs time. Loss t of a row
    is that of its token t + 1. Raises IntegrityError for one that is no number.
    """
    vocabulary, device = model.config.vocabulary_size, next(model.parameters()).device
    at_once = AtOnce(tokens_at_once(vocabulary, device), device, "scoring", in_tokens=True)
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
    budget = tokens_at_once(width, device)
    ordered = rows[np.argsort(-row_tokens[rows], kind="stable")]
    start = 0
    while start < len(ordered):
        longest = max(int(row_tokens[ordered[start]]), 1)
        stop = start + min(max(budget // longest, 1), _MOST_ROWS)
        yield ordered[start:stop]
        start = stop


def tokens_at_once(width: int, device: torch.device) -> int:
    """Return for how many tokens a device holds `width` numbers each, where memory is no matter."""
    return (_LOGITS_ON_CPU if device.type == "cpu" else _LOGITS_ON_GPU) // max(width, 1)


def row_tensor(documents: DocumentWindows, rows: np.ndarray) -> torch.Tensor:
    """Return rows as int64 [B, L] on the CPU, cut to the longest of them."""
    longest = int(documents.row_tokens[rows].max())
    ordered = np.sort(rows)  # the file is read forward
    places = np.searchsorted(ordered, rows)
    return torch.from_numpy(documents.rows[ordered, :longest].astype(np.int64)[places])


@torch.no_grad()
def batch_losses(model: PathModel, tokens: torch.Tensor, at_once: AtOnce) -> torch.Tensor:
    """Return the loss in nats of each target of `tokens` [B, T], fp32 [B, T - 1] on the CPU.

    As many rows at once as memory allows. Raises ConfigurationError when not even one fits.
    """
    device, length = next(model.parameters()).device, tokens.shape[1]

    def score(token_count: int) -> torch.Tensor:
        losses = []
        for piece in tokens.split(token_count // length):
            moved = piece.to(device)
            with autocast_for(device):
                losses.append(token_losses(model, moved).cpu())
        return torch.cat(losses)

    return at_once.attempt(score, length)
