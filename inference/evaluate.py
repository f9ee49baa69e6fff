"""How good the swarm's model is: every document is scored by the path that it is routed to.

As in the paper, the tokens that routing saw are not scored, neither for the paths nor for what
they are compared with, and every other token of a document is scored exactly once (section 2.4,
4). The comparison, the base model and perhaps a dense one, is made on the same tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from dipaco.modules.errors import CorpusError, IntegrityError
from dipaco.modules.evaluate import score_sequences
from dipaco.modules.score import Score
from dipaco.modules.transformer import PathModel
from dipaco.routing.corpus import Document
from dipaco.routing.plan import RunPlan
from dipaco.routing.token_files import token_dtype
from dipaco.routing.windows import scoring_windows

from .assemble import assemble_path
from .sources import StateSource

logger = logging.getLogger(__name__)

# Documents that are routed in one go.
_DOCUMENTS_AT_ONCE = 256

# Documents of one path with one label.
GroupKey = tuple[int, str | None]


@dataclass
class _Group:
    """The scoring windows of one path and label, until they are scored."""

    documents: int = 0
    windows: list[np.ndarray] = field(default_factory=list)

    def rows(self) -> np.ndarray:
        return np.concatenate(self.windows)


@dataclass(frozen=True)
class Evaluated:
    """Some documents and how the models do on them."""

    documents: int
    score: Score
    base: Score
    baseline: Score | None = None

    @staticmethod
    def total(parts: Iterable[Evaluated]) -> Evaluated:
        """Add up."""
        parts = tuple(parts)
        baselines = [part.baseline for part in parts if part.baseline is not None]
        return Evaluated(
            documents=sum(part.documents for part in parts),
            score=Score.total(part.score for part in parts),
            base=Score.total(part.base for part in parts),
            baseline=Score.total(baselines) if baselines else None,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        values = {
            "perplexity": self.score.perplexity,
            "tokens": self.score.tokens,
            "documents": self.documents,
            "base_perplexity": self.base.perplexity,
        }
        if self.baseline is not None:
            values["baseline_perplexity"] = self.baseline.perplexity
        return values


@dataclass(frozen=True)
class EvaluationReport:
    """What `dipaco-eval` found. Figures are over the documents whose path could be assembled."""

    run_id: str
    groups: Mapping[GroupKey, Evaluated]
    missing_paths: tuple[int, ...]
    """Paths with documents but without a state of some module."""
    unscored_documents: int
    """Documents of missing paths."""
    short_documents: int
    """Documents with no token behind the routing prefix."""

    @property
    def overall(self) -> Evaluated:
        """All documents together, every token counting alike."""
        return Evaluated.total(self.groups.values())

    def paths(self) -> dict[int, Evaluated]:
        """Return the figures by path."""
        return {
            path: Evaluated.total(part for key, part in self.groups.items() if key[0] == path)
            for path in sorted({path for path, _ in self.groups})
        }

    def labels(self) -> dict[str, Evaluated]:
        """Return the figures by label; documents without one are in none."""
        return {
            label: Evaluated.total(part for key, part in self.groups.items() if key[1] == label)
            for label in sorted({label for _, label in self.groups if label is not None})
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values: what `dipaco-eval --json` prints."""
        return {
            "run": self.run_id,
            **self.overall.as_dict(),
            "paths": [{"path": path, **part.as_dict()} for path, part in self.paths().items()],
            "labels": {label: part.as_dict() for label, part in self.labels().items()},
            "missing_paths": list(self.missing_paths),
            "unscored_documents": self.unscored_documents,
            "short_documents": self.short_documents,
        }


def evaluate(
    source: StateSource,
    documents: Iterable[Document],
    *,
    device: torch.device,
    baseline: PathModel | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> EvaluationReport:
    """Route the documents and score each with its path, one path in memory at a time.

    `baseline` is a dense model of the run's shape to score on the same tokens. `progress` is told
    what is being done. The token windows of all documents are held in memory, two bytes a token.

    Raises CorpusError if no document has a token to score, or if no path with documents can be
    assembled while some are missing (then also what to do). Called by `dipaco-eval`.
    """
    progress("routing the documents")
    groups, short = route_documents(source, documents, device)
    if not groups:
        raise CorpusError(
            f"none of the {short} documents is longer than the {source.plan.routing.prefix_tokens} "
            f"tokens that routing sees, so there is nothing to score; give longer documents"
        )
    used = sorted({path for path, _ in groups})
    missing = tuple(path for path in used if source.missing_modules(path))
    if missing == tuple(used):
        assemble_path(source, used[0])
    scored = {key: group for key, group in groups.items() if key[0] not in missing}
    own = _score_paths(source, scored, device, progress)
    progress("scoring the base model")
    base = _score_model(source.base_model(device), scored, source.plan)
    dense: dict[GroupKey, Score] = {}
    if baseline is not None:
        progress("scoring the baseline")
        dense = _score_model(baseline.to(device), scored, source.plan)
    return EvaluationReport(
        run_id=source.plan.run_id,
        groups={
            key: Evaluated(group.documents, own[key], base[key], dense.get(key))
            for key, group in scored.items()
        },
        missing_paths=missing,
        unscored_documents=sum(g.documents for key, g in groups.items() if key[0] in missing),
        short_documents=short,
    )


def route_documents(
    source: StateSource, documents: Iterable[Document], device: torch.device
) -> tuple[dict[GroupKey, _Group], int]:
    """Return the scoring windows of the documents by path and label, and how many have none."""
    router = source.document_router(device)
    length, prefix_tokens = source.plan.model.sequence_length, source.plan.routing.prefix_tokens
    dtype = token_dtype(source.plan.model.vocabulary_size)
    groups: dict[GroupKey, _Group] = {}
    short = 0
    for chunk in _chunks(documents, _DOCUMENTS_AT_ONCE):
        tokens = [router.tokenizer.document_tokens(document.text) for document in chunk]
        paths = router.route_tokens(tokens)
        for document, row, path in zip(chunk, tokens, paths, strict=True):
            windows = scoring_windows(row, length, prefix_tokens)
            if not len(windows):
                short += 1
                continue
            group = groups.setdefault((int(path), document.label), _Group())
            group.documents += 1
            group.windows.append(windows.astype(dtype))
    ordered = sorted(groups, key=lambda key: (key[0], key[1] is not None, key[1] or ""))
    return {key: groups[key] for key in ordered}, short


def load_baseline(file: Path, plan: RunPlan) -> PathModel:
    """Read a dense model of the run's shape from a safetensors file with Hugging Face names.

    Such as `dense.safetensors` of `dipaco-simulate --dense-steps`. Raises IntegrityError if it is
    not such a file.
    """
    model = PathModel(plan.model)
    try:
        model.load_state_dict(safetensors.torch.load_file(file))
    except (OSError, safetensors.SafetensorError) as error:
        raise IntegrityError(f"--baseline {file} cannot be read: {error}") from None
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
        raise IntegrityError(
            f"--baseline {file} is not a model of this run's shape: {lines[0]}"
        ) from None
    return model.eval()


def _score_paths(
    source: StateSource,
    groups: Mapping[GroupKey, _Group],
    device: torch.device,
    progress: Callable[[str], None],
) -> dict[GroupKey, Score]:
    scores: dict[GroupKey, Score] = {}
    model: PathModel | None = None
    for path in sorted({path for path, _ in groups}):
        progress(f"scoring path {path}")
        model = assemble_path(source, path, model=model, device=device)
        own = {key: group for key, group in groups.items() if key[0] == path}
        scores |= _score_model(model, own, source.plan)
        source.forget(path)
    return scores


def _score_model(
    model: PathModel, groups: Mapping[GroupKey, _Group], plan: RunPlan
) -> dict[GroupKey, Score]:
    prefix_tokens = plan.routing.prefix_tokens
    return {
        key: Score(*score_sequences(model, group.rows(), prefix_tokens))
        for key, group in groups.items()
    }


def _chunks(documents: Iterable[Document], size: int) -> Iterator[list[Document]]:
    iterator = iter(documents)
    while chunk := list(islice(iterator, size)):
        yield chunk
