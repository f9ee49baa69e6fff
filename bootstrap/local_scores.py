"""Scoring the router documents with every path on this machine, one path at a time.

What a swarm does for its operator (`gather_scores.py`), done alone: for a simulation, for an old
run whose peers are gone, for the paths that nobody scored in time, and for a sample of documents,
by which the scores of others are checked.
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

# Documents that the operator scores itself with every path. Drawn anew each time: who lies about
# scores does not know which.
SAMPLE_DOCUMENTS = 32
# Peers score the states of an earlier moment than the operator. So numbers may differ, but less
# than documents do, and another path's numbers must not fit better, in this sense.
CLEARLY = 0.5
# The mean may have fallen by training since, but not by more than this part.
GREATEST_SHIFT = 0.3
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

    def remove(self, path: int) -> None:
        """Forget the scores of a path."""
        self._file(path).unlink(missing_ok=True)

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


def disagreements(
    folder: ScoresFolder,
    grid: Grid,
    load: LoadState,
    paths: Iterable[int],
    device: torch.device,
    generator: np.random.Generator,
) -> dict[int, str]:
    """Return, by path, what is wrong with the scores in `folder` that others made.

    All `paths` score a few documents here, with the states that `load` gives.
    """
    paths, documents = tuple(paths), folder.documents
    scored = np.flatnonzero(documents.targets)
    count = min(SAMPLE_DOCUMENTS, len(scored))
    rows = np.sort(generator.choice(scored, count, replace=False))
    sample = RouterDocuments(documents.tokens[rows], documents.prefix_tokens)
    model = PathModel(grid.model).to(device).eval()
    own = {}
    for path in paths:
        states = {module: load(module) for module in grid.modules_of_path(path)}
        load_path(model, grid, path, states)
        own[path] = score_router_documents(model, sample, device=device)[0] / sample.targets
    found = {}
    for path in paths:
        scores = folder.load(path, grid.modules_of_path(path))
        if scores is None:
            continue
        reason = disagreement(scores.nll[rows] / sample.targets, own, path)
        if reason is not None:
            found[path] = reason
    return found


def disagreement(claimed: np.ndarray, own: Mapping[int, np.ndarray], path: int) -> str | None:
    """Tell why a path's loss per token of some documents, as somebody claims it, cannot be.

    `own` is what each path gives of them here, perhaps some rounds later: losses that fell alike
    agree, losses of other documents or of another path do not. None when they agree.
    """
    spreads = {other: _spread(claimed - values) for other, values in own.items()}
    shift = float(np.median(claimed - own[path]))
    level = float(np.median(own[path]))
    if abs(shift) > GREATEST_SHIFT * level:
        return f"its loss is {shift:+.2f} a token beside {level:.2f} here"
    nearest = min(spreads, key=lambda other: (spreads[other], other))
    if spreads[nearest] < CLEARLY * spreads[path] and spreads[path] > 0.01 * level:
        return f"they are more like those of path {nearest}"
    # Where all documents are alike, a few percent are no disagreement.
    if spreads[path] > max(CLEARLY * _spread(own[path]), 0.05 * level):
        return f"its documents differ from those here by {spreads[path]:.2f} a token"
    return None


def _spread(values: np.ndarray) -> float:
    return float(np.abs(values - np.median(values)).mean())
