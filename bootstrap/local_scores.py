"""Scoring the router documents with every path on this machine, one path at a time.

What a swarm does for its operator (`gather_scores.py`), done alone: for a simulation, for an old
run whose peers are gone, for the paths that nobody scored in time, and for a sample of documents,
by which the scores of others are checked.
"""

from __future__ import annotations

import contextlib
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
# Where two peers part, the operator scores so many of these documents too.
PARTED_DOCUMENTS = 32
# The mean may have fallen by training since, but not by more than this part.
GREATEST_SHIFT = 0.3
# Rows between two calls of `progress`; a multiple of the scorer's batch, so that bits are equal.
_SLICE_ROWS = 16 * SCORING_BATCH


class ScoresFolder:
    """The scores for one request that are here, so that work goes on where it was stopped.

    A file for each path whose scores were made or checked here, and apart from them, a file for
    each peer, what others say. Earlier versions kept both under one name: those files are not read.
    """

    def __init__(self, folder: Path, request: str, documents: RouterDocuments) -> None:
        self.request = request
        self.documents = documents
        self._folder = folder / request

    def load(
        self, path: int, modules: Iterable[str], digests: Mapping[str, str] | None = None
    ) -> DocumentScores | None:
        """Return the scores of a path that were made or checked here, if they are right.

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
        """Keep scores that were made or checked here: all or nothing. Raises StorageError."""
        atomic_write(self._file(scores.path), scores.to_bytes())

    def add(self, scores: DocumentScores, peer: str) -> None:
        """Keep what a peer has scored, for `settle`. Raises StorageError."""
        atomic_write(self._opinions(scores.path) / peer, scores.to_bytes())

    def opinions(self, path: int, modules: Iterable[str]) -> dict[str, DocumentScores]:
        """Return by peer what was added of a path, in the order of their ids."""
        modules, found = tuple(modules), {}
        # Not what a killed process was writing; and what is damaged is fetched again.
        for file in sorted(self._opinions(path).glob("[!.]*")):
            with contextlib.suppress(IntegrityError):
                found[file.name] = self.checked(file.read_bytes(), path, modules)
        return found

    def refuse(self, path: int, peer: str) -> None:
        """Forget what a peer has scored."""
        (self._opinions(path) / peer).unlink(missing_ok=True)

    def remove(self, path: int) -> None:
        """Forget the scores of a path."""
        self._file(path).unlink(missing_ok=True)

    def _file(self, path: int) -> Path:
        return self._folder / f"checked-P{path:05d}.safetensors"

    def _opinions(self, path: int) -> Path:
        return self._folder / f"P{path:05d}"


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


def settle(
    folder: ScoresFolder,
    grid: Grid,
    load: LoadState,
    paths: Iterable[int],
    device: torch.device,
    generator: np.random.Generator,
) -> list[str]:
    """Leave in `folder`, of the scores that others made, those that agree with what is scored here;
    return a line for each peer whose do not.

    All `paths` score a few documents here, with the states that `load` gives. Where two peers part,
    the path scores some of these documents as well.
    """
    paths, documents = tuple(paths), folder.documents
    scored = np.flatnonzero(documents.targets)
    rows = np.sort(generator.choice(scored, min(SAMPLE_DOCUMENTS, len(scored)), replace=False))
    model = PathModel(grid.model).to(device).eval()

    def score(path: int, chosen: np.ndarray) -> np.ndarray:
        load_path(model, grid, path, {name: load(name) for name in grid.modules_of_path(path)})
        sample = RouterDocuments(documents.tokens[chosen], documents.prefix_tokens)
        losses: np.ndarray = score_router_documents(model, sample, device=device)[0]
        return losses / sample.targets

    own, lines = {path: score(path, rows) for path in paths}, []
    for path in paths:
        found = folder.opinions(path, grid.modules_of_path(path))
        claimed = {p: s.nll[scored] / documents.targets[scored] for p, s in found.items()}
        places = np.searchsorted(scored, rows)
        reasons = {p: disagreement(values[places], own, path) for p, values in claimed.items()}
        parted = parted_documents(*claimed.values()) if len(claimed) == 2 else ()
        if len(parted):
            here = score(path, scored[parted])
            for peer, values in claimed.items():
                shift = float(np.median(values[places] - own[path]))
                away = float(np.abs(values[parted] - shift - here).mean())
                if reasons[peer] is None and away > _bound(values):
                    count = len(parted)
                    reasons[peer] = f"{count} documents differ from here by {away:.2f} a token"
        good = [peer for peer, reason in reasons.items() if reason is None]
        for peer, reason in reasons.items():
            if reason is not None:
                folder.refuse(path, peer)
                then = f"those of {good[0][-8:]} are taken" if good else "the path is scored here"
                lines.append(
                    f"scores of path {path} by {peer[-8:]} do not agree with a sample scored here "
                    f"({reason}); {then}"
                )
        # What was taken stays, or the router would be trained anew whenever another peer's come.
        refused = {found[peer].to_bytes() for peer in reasons if peer not in good}
        taken = folder.load(path, grid.modules_of_path(path))
        is_refused = taken is None or taken.to_bytes() in refused
        if good and is_refused:
            folder.save(found[good[0]])
        elif reasons and is_refused:
            folder.remove(path)
    return lines


def parted_documents(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the documents, the worst first, of which two peers claim losses a token that part more
    than losses that fell alike do; both may have scored other rounds' states."""
    apart = first - second
    apart = np.abs(apart - np.median(apart))
    worst = np.argsort(-apart, kind="stable")[:PARTED_DOCUMENTS]
    return worst[apart[worst] > 2 * max(_bound(first), _bound(second))]


def _bound(values: np.ndarray) -> float:
    """Return by how much losses a token of the same documents may differ."""
    return max(CLEARLY * _spread(values), 0.05 * float(np.median(values)))


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
    if spreads[path] > _bound(own[path]):
        return f"its documents differ from those here by {spreads[path]:.2f} a token"
    return None


def _spread(values: np.ndarray) -> float:
    return float(np.abs(values - np.median(values)).mean())
