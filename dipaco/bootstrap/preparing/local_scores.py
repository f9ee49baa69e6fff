"""How well every trained path predicts a sample of documents: what some routers are trained on."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import torch

from dipaco.base.errors import ConfigurationError
from dipaco.base.files import atomic_write
from dipaco.modules.compose import load_path
from dipaco.protocol.config import PAD_TOKEN
from dipaco.routing.tokens.token_corpus import Mapped
from dipaco.training.scoring import row_losses

from .pieces import one_thread
from .predecessor import Predecessor

DOCUMENTS_FILE = "documents.npy"


def document_rows(documents: Iterable[np.ndarray], sequence_length: int) -> np.ndarray:
    """Cut or pad documents, each its tokens, to rows, int32 [N, sequence_length]."""
    rows = []
    for document in documents:
        row = np.full(sequence_length, PAD_TOKEN, dtype=np.int32)
        start = np.asarray(document[:sequence_length], dtype=np.int32)
        row[: len(start)] = start
        rows.append(row)
    return np.stack(rows)


class LocalScores:
    """The scores of some rows by the paths of a trained run, kept in `folder` as they are made.

    A path's file is named by the rows and by the states that scored them, so a preparation that
    was stopped goes on with the next path, and newer states are scored anew.
    """

    def __init__(
        self, folder: Path, predecessor: Predecessor, rows: np.ndarray, prefix_tokens: int
    ) -> None:
        self._folder = folder
        self._predecessor = predecessor
        self._rows = rows
        self._prefix_tokens = prefix_tokens
        content = rows.tobytes() + prefix_tokens.to_bytes(8, "big")
        self._documents = hashlib.sha256(content).hexdigest()

    def load(self, path: int) -> np.ndarray | None:
        """Return the summed loss of each row behind its prefix, in nats, float64 [N], as a path
        gives it; None if that was not made yet, or is damaged."""
        try:
            scores: np.ndarray = np.load(self._file(path), allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        return scores if scores.shape == (len(self._rows),) else None

    def make(
        self,
        paths: Sequence[int],
        device: torch.device,
        *,
        mapped: Mapped = map,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Score the rows with some paths; `progress` gets (paths done, paths to do).

        Raises ConfigurationError for a path that gives a row no finite loss.
        """
        documents = self._folder / DOCUMENTS_FILE
        _write_array(documents, self._rows)
        score = functools.partial(
            score_path, self._predecessor, documents, self._prefix_tokens, str(device)
        )
        for done, (path, scores) in enumerate(zip(paths, mapped(score, paths), strict=True), 1):
            if not np.isfinite(scores).all():
                raise ConfigurationError(
                    f"path {path} of {self._predecessor.path} has a loss that is not finite; its "
                    f"states cannot be used"
                )
            _write_array(self._file(path), scores)
            progress(done, len(paths))

    def _file(self, path: int) -> Path:
        digests = self._predecessor.digests
        states = [digests[module] for module in self._predecessor.grid.modules_of_path(path)]
        name = hashlib.sha256(" ".join([self._documents, *states]).encode()).hexdigest()[:16]
        return self._folder / f"P{path:05d}-{name}.npy"


def _write_array(file: Path, values: np.ndarray) -> None:
    content = BytesIO()
    np.save(content, values)
    atomic_write(file, content.getvalue())


def score_path(
    predecessor: Predecessor, documents: Path, prefix_tokens: int, device: str, path: int
) -> np.ndarray:
    """Return the loss of every row by a path of a trained run: a piece for `workers.py`."""
    rows: np.ndarray = np.load(documents, mmap_mode="r", allow_pickle=False)
    grid = predecessor.grid
    model = predecessor.folder.path_model(predecessor.plan, torch.device(device)).eval()
    states = {module: predecessor.load(module) for module in grid.modules_of_path(path)}
    load_path(model, grid, path, states)
    with one_thread():
        losses, _ = row_losses(model, rows, prefix_tokens, device=torch.device(device))
    return losses
