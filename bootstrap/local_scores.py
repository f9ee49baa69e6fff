"""Scoring the router documents with every path on this machine, one path at a time.

What a swarm does for its operator (`gather_scores.py`), done alone: for a simulation, for an old
run whose peers are gone, and for the paths that nobody scored in time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from dipaco.modules.compose import load_path
from dipaco.modules.errors import IntegrityError
from dipaco.modules.files import atomic_write
from dipaco.modules.grid import Grid
from dipaco.modules.grow import LoadState
from dipaco.modules.transformer import PathModel
from dipaco.routing.document_scores import (
    SCORING_BATCH,
    DocumentScores,
    RouterDocuments,
    score_router_documents,
)

# Rows between two calls of `progress`; a multiple of the scorer's batch, so that bits are equal.
_SLICE_ROWS = 16 * SCORING_BATCH


class ScoresFolder:
    """The scores for one request that are here, a file for each path, so that work goes on where
    it was stopped."""

    def __init__(self, folder: Path, request: str, documents: RouterDocuments) -> None:
        self.request = request
        self.documents = documents
        self._folder = folder / request

    def load(
        self, path: int, modules: Iterable[str], digests: Mapping[str, str] | None = None
    ) -> DocumentScores | None:
        """Return the scores of a path if they are here and right.

        With `digests` they must be of these states of the path's `modules`.
        """
        file = self._file(path)
        if not file.is_file():
            return None
        try:
            scores = self.checked(file.read_bytes(), path, modules)
        except IntegrityError:
            file.unlink(missing_ok=True)
            return None
        if digests is not None and any(
            digests[module] != digest for module, digest in scores.states.items()
        ):
            return None
        return scores

    def checked(self, data: bytes, path: int, modules: Iterable[str]) -> DocumentScores:
        """Read scores that may be anything. Raises IntegrityError unless they answer this request
        for this path."""
        scores = DocumentScores.from_bytes(
            data, len(self.documents), request=self.request, path=path
        )
        scores.check_documents(self.documents)
        if set(scores.states) != set(modules):
            raise IntegrityError(f"the scores of path {path} name the modules of another path")
        return scores

    def save(self, scores: DocumentScores) -> None:
        """Keep scores: all or nothing. Raises StorageError."""
        atomic_write(self._file(scores.path), scores.to_bytes())

    def _file(self, path: int) -> Path:
        return self._folder / f"P{path:05d}.safetensors"


def local_request(documents: RouterDocuments, run_id: str) -> str:
    """Return the id under which scores are kept if no swarm was asked for them."""
    content = run_id.encode() + hashlib.sha256(documents.to_bytes()).digest()
    return hashlib.sha256(content).hexdigest()[:16]


def score_paths(
    folder: ScoresFolder,
    grid: Grid,
    load: LoadState,
    digests: Mapping[str, str],
    paths: Iterable[int],
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Score the documents with the states named in `digests`, path by path, into `folder`.

    A path whose scores are there already is left alone; each finished one is saved at once.
    `progress` gets (path, rows of it that are done).
    """
    model: PathModel | None = None
    for path in paths:
        modules = grid.modules_of_path(path)
        if folder.load(path, modules, digests) is not None:
            continue
        if model is None:
            model = PathModel(grid.model).to(device).eval()
        load_path(model, grid, path, {module: load(module) for module in modules})
        pieces = []
        for start in range(0, len(folder.documents), _SLICE_ROWS):
            stop = min(start + _SLICE_ROWS, len(folder.documents))
            pieces.append(
                score_router_documents(
                    model, folder.documents, start=start, stop=stop, device=device
                )
            )
            if progress:
                progress(path, stop)
        nll, tokens = (np.concatenate(part) for part in zip(*pieces, strict=True))
        states = {module: digests[module] for module in modules}
        folder.save(DocumentScores(folder.request, path, states, nll, tokens))
