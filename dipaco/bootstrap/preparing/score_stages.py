"""The stages that ask the paths of the run before how well they predict documents."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dipaco.base.errors import ConfigurationError, CorpusError
from dipaco.base.files import atomic_write
from dipaco.modules.compose import load_path
from dipaco.protocol.config import ModelConfig
from dipaco.training.scoring import row_losses

from .corpus_stages import TokensStage
from .pieces import one_thread
from .predecessor import Predecessor
from .stages import Job, Stage

# New documents whose beginnings the old paths are compared on, at most.
_COMPARED_DOCUMENTS = 256
_DOCUMENTS_FILE = "documents.npy"


@dataclass
class Sample:
    """Training documents of a corpus, drawn at random."""

    tokens: TokensStage
    prefix_tokens: int
    """The tokens of each document that routing sees."""
    most: int
    seed: int
    longer_than_tokens: int = 0

    def inputs(self) -> list[Any]:
        """Return all that the choice of documents depends on."""
        drawn = [self.most, self.seed, self.longer_than_tokens]
        return [self.tokens.hash, self.prefix_tokens, *drawn]

    @cached_property
    def chosen(self) -> np.ndarray:
        """The indices of the documents, int64 [N]. Raises CorpusError if there is none."""
        found = self.tokens.corpora[0].sample(self.most, self.seed, self.longer_than_tokens)
        if not len(found):
            raise CorpusError(
                f"no training document is longer than the {self.longer_than_tokens} tokens that "
                f"routing sees, so paths have nothing to score; give longer documents, a smaller "
                f"prefix_tokens under [router], or another kind there"
            )
        return found

    def documents(self) -> Iterator[np.ndarray]:
        """Yield the tokens of each chosen document."""
        corpus = self.tokens.corpora[0]
        return (corpus.document(int(index)) for index in self.chosen)

    def beginnings(self) -> list[np.ndarray]:
        """Return the tokens of each chosen document that routing sees."""
        corpus = self.tokens.corpora[0]
        return [corpus.beginning(int(index), self.prefix_tokens) for index in self.chosen]


class ScoresStage(Stage):
    """Score rows of tokens [N, T] by some paths of the run before.

    Each path's scores are kept as they are made. Other states of that run are other inputs.
    """

    name = "scores"

    def __init__(
        self,
        job: Job,
        before: Predecessor,
        rows: np.ndarray,
        paths: Sequence[int],
        prefix_tokens: int,
        part: str = "",
        shown: str = "scores",
    ) -> None:
        super().__init__(job, part)
        self._before, self._rows, self._paths = before, rows, sorted(set(paths))
        self._prefix_tokens, self._shown = prefix_tokens, shown

    def inputs(self) -> Sequence[Any]:
        rows = hashlib.sha256(self._rows.tobytes()).hexdigest()
        return [rows, self._prefix_tokens, self._paths, self._before.digests]

    def is_whole(self, outputs: dict[str, Any]) -> bool:
        return all(self._load(path) is not None for path in self._paths)

    def make(self) -> dict[str, Any]:
        """Raises ConfigurationError for a path that gives a row no finite loss."""
        job, documents = self.job, self.folder / _DOCUMENTS_FILE
        write_array(documents, self._rows)
        score = functools.partial(
            score_path, self._before, documents, self._prefix_tokens, str(job.device)
        )
        missing = [path for path in self._paths if self._load(path) is None]
        with job.display.stage(self._shown) as progress:
            scored = zip(missing, job.workers.map(score, missing), strict=True)
            for done, (path, scores) in enumerate(scored, 1):
                if not np.isfinite(scores).all():
                    raise ConfigurationError(
                        f"path {path} of {self._before.path} has a loss that is not finite; its "
                        f"states cannot be used"
                    )
                write_array(self._file(path), scores)
                progress.update(done, len(missing), "paths")
        return {}

    def of(self, path: int) -> np.ndarray:
        """Return the summed loss of each row behind its prefix, in nats, float64 [N], as a path
        gives it."""
        self.do()
        scores = self._load(path)
        assert scores is not None  # it is done
        return scores

    def _file(self, path: int) -> Path:
        return self.folder / f"P{path:05d}.npy"

    def _load(self, path: int) -> np.ndarray | None:
        scores = read_array(self._file(path))
        return scores if scores is not None and scores.shape == (len(self._rows),) else None


class NearestPath:
    """The old path that gives the beginnings of a new path's documents the greatest likelihood; of
    equals the first."""

    def __init__(self, job: Job, before: Predecessor, tokens: TokensStage) -> None:
        self._job, self._before, self._tokens = job, before, tokens

    @cached_property
    def path(self) -> int:
        sample = added_sample(self._job, self._before, self._tokens)
        rows = document_rows(
            sample.beginnings()[:_COMPARED_DOCUMENTS], sample.prefix_tokens, self._job.config.model
        )
        paths = range(self._before.grid.path_count)
        shown = f"the path nearest to {self._tokens.corpus.name}"
        scores = ScoresStage(self._job, self._before, rows, paths, 0, self._tokens.part, shown)
        return int(np.argmin([float(scores.of(path).sum()) for path in paths]))


def added_sample(job: Job, before: Predecessor, tokens: TokensStage) -> Sample:
    """Return a sample of the documents of a path that is added."""
    router = job.config.router
    return Sample(tokens, router.prefix_tokens, router.training_documents, before.plan.seed)


def document_rows(
    documents: Iterable[np.ndarray], sequence_length: int, model: ModelConfig
) -> np.ndarray:
    """Cut or pad documents, each its tokens, to rows for a `model`, int32 [N, sequence_length]."""
    rows = []
    for document in documents:
        row = np.full(sequence_length, model.padding_token, dtype=np.int32)
        start = np.asarray(document[:sequence_length], dtype=np.int32)
        row[: len(start)] = start
        rows.append(row)
    return np.stack(rows)


def write_array(file: Path, values: np.ndarray) -> None:
    """Write an array whole."""
    content = BytesIO()
    np.save(content, values)
    atomic_write(file, content.getvalue())


def read_array(file: Path) -> np.ndarray | None:
    """Return an array that was written; None if it is not there, or damaged."""
    try:
        values: np.ndarray = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return values


def score_path(
    before: Predecessor, documents: Path, prefix_tokens: int, device: str, path: int
) -> np.ndarray:
    """Return the loss of every row by a path of a trained run: a piece for `workers.py`."""
    rows: np.ndarray = np.load(documents, mmap_mode="r", allow_pickle=False)
    grid = before.grid
    model = before.folder.path_model(before.plan, torch.device(device)).eval()
    states = {module: before.load(module) for module in grid.modules_of_path(path)}
    load_path(model, grid, path, states)
    with one_thread():
        losses, _ = row_losses(model, rows, prefix_tokens, device=torch.device(device))
    return losses
