"""What an export says about itself: huggingface_hub's model card, for a run and for one path.

The words are in `model_card.jinja`. Figures come from a `dipaco-eval --json` file, and otherwise
from what the states and the swarm show. What an export does not know (licence, origin of the data)
the operator gives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from dipaco.base.errors import ConfigurationError, printable
from dipaco.base.files import storage_errors
from dipaco.inference.sources import StateSource
from dipaco.modules.frozen_file import base_parameter_count
from dipaco.modules.layout import parameter_counts
from dipaco.protocol.config import GridConfig, ModelConfig
from dipaco.protocol.plan import RunPlan

from .adapter_peft import Rounding, written_rank
from .form import ExportForm
from .path_gguf import gguf_name, ollama_name
from .standalone_router import begin_row
from .tokenizer_files import file_rows, text_habits

TEMPLATE = Path(__file__).with_name("model_card.jinja")
_COMPARED = {
    "perplexity": "this model, each document by its path",
    "base_perplexity": "the base model that all paths began with",
    "baseline_perplexity": "the dense model that it was compared with",
}
_COMPARED_OF_PATH = {"perplexity": "this path, on the documents that are routed to it"}
# Widths of heads that vLLM's attention has kernels for by its sources, on GPUs and CPUs alike.
_HEADS_OF_VLLM = (32, 64, 96, 128, 192, 256)


@dataclass(frozen=True)
class CardNotes:
    """What the operator adds: a licence's name, Markdown on the data's origin and licences, and
    repositories of the Hub: that the export goes to, that the run's base and its texts are from."""

    licence: str | None = None
    attribution: str | None = None
    repository: str | None = None
    base_model: str | None = None
    datasets: tuple[str, ...] = ()


@dataclass(frozen=True)
class PathFigures:
    """One row of the card's table."""

    path: int
    modules: tuple[str, ...]
    tokens: int | None
    documents: int
    perplexity: float | None
    rounds: int


def load_evaluation(file: Path, plan: RunPlan) -> dict[str, Any]:
    """Read what `dipaco-eval --json` printed. Raises StorageError, or ConfigurationError if it is
    something else or of another run."""
    with storage_errors(file.parent):
        content = file.read_bytes()
    try:
        report = json.loads(content)
        rows = [report, *report["paths"], *(report.get("labels") or {}).values()]
        if not all(isinstance(row["perplexity"], int | float | None) for row in rows):
            raise TypeError("a perplexity is no number")
        if not all(isinstance(row["path"], int) for row in report["paths"]):
            raise TypeError("a path is no number")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"--eval-json {file} is not what 'dipaco-eval --json' prints "
            f"({type(error).__name__}: {error})"
        ) from None
    if report.get("run") != plan.run_id:
        raise ConfigurationError(
            f"--eval-json {file} is of the run {report.get('run')}, and this is {plan.run_id}; "
            f"evaluate this run"
        )
    return dict(report)


def model_card(
    source: StateSource,
    notes: CardNotes,
    form: ExportForm,
    *,
    path: int | None = None,
    rounding: Rounding | None = None,
    evaluation: Mapping[str, Any] | None = None,
) -> str:
    """Return the README.md of an export of one path, or (None) of all. No state is fetched for it.

    `rounding` is what merging adapters into their base lost.
    """
    plan, grid = source.plan, source.grid
    report: Mapping[str, Any] | None = evaluation
    if path is not None and evaluation is not None:
        # A path is a model on its own: of the figures it has one row, without the labels.
        report = next((row for row in evaluation["paths"] if row["path"] == path), None)
    rows = [
        _figures(source, one, evaluation)
        for one in (range(grid.path_count) if path is None else [path])
    ]
    tokens = [row.tokens for row in rows if row.tokens is not None]
    step_tokens = plan.inner.batch_sequences * plan.model.sequence_length
    tokenizer = source.blob(plan.blobs.tokenizer)
    file = gguf_name(plan.name, path or 0, form.stored) if form.gguf else None
    card = ModelCard.from_template(
        _metadata(plan, notes, report, library=_library(form)),
        template_path=str(TEMPLATE),
        plan=plan,
        model=plan.model,
        adapters=plan.model.adapters if form.adapters_alone else None,
        written_rank=written_rank(plan.model.adapters.rank) if plan.model.adapters else 0,
        base=base_name(plan, notes),
        begin=begin_row(plan) if form.adapters_alone else None,
        habits=text_habits(tokenizer),
        chats=source.shard_index().marked,
        whole_path=_exported_parameters(plan.model, tokenizer),
        rounding=rounding,
        family=f"{plan.model.family.capitalize()}-shaped",
        path=path,
        folder="paths/00000" if path is None else "",
        repository=notes.repository,
        vllm=plan.model.width_of_head in _HEADS_OF_VLLM,
        gguf_file=file,
        ollama_name=ollama_name(file) if file else None,
        counts=parameter_counts(grid),
        private=", ".join(_private_parts(plan.grid)),
        rows=rows,
        rounds=max(row.rounds for row in rows),
        tokens=sum(tokens) if len(tokens) == len(rows) else None,
        steps=[count // step_tokens for count in tokens],
        stored=form.stored,
        report=report,
        compared={**_COMPARED, **({} if path is None else _COMPARED_OF_PATH)},
        licence=notes.licence,
        attribution=notes.attribution,
        count=lambda value: "-" if value is None else f"{value:,}",
        millions=lambda value: f"{value / 1e6:.1f} M" if value >= 1e6 else f"{value:,}",
        cell=_cell,
        shown=lambda value: "-" if value is None else f"{value:.2f}",
    )
    return f"{card.content}\n"


def _exported_parameters(model: ModelConfig, tokenizer: bytes) -> int:
    """Return how many parameters a whole path has, without rows that the run added to its base."""
    rows = file_rows(tokenizer, model.vocabulary_size)
    added = 0 if rows is None else model.vocabulary_size - len(rows)
    tables = 1 if model.tied_embedding else 2
    return base_parameter_count(model) - tables * added * model.hidden_size


def _cell(label: str) -> str:
    """Return a label of a corpus as it is read in a table of Markdown, on one line."""
    return re.sub(r"([\\|`*<\[])", r"\\\1", printable(label))


def base_name(plan: RunPlan, notes: CardNotes) -> str | None:
    """Return what the run's base is called, if it is known."""
    return notes.base_model or (plan.base_source.name if plan.base_source else None)


def _private_parts(grid: GridConfig) -> list[str]:
    """Return what of the model every path has for itself alone."""
    blocks = ", ".join(map(str, grid.private_blocks))
    parts = {
        f"blocks {blocks}": bool(blocks),
        "the embedding": grid.private_embedding,
        "the head": grid.private_head,
    }
    return [name for name, is_private in parts.items() if is_private]


def _library(form: ExportForm) -> str:
    if form.gguf is not None:
        return "gguf"
    return "peft" if form.adapters_alone else "transformers"


def _figures(source: StateSource, path: int, report: Mapping[str, Any] | None) -> PathFigures:
    """Return the figures of a path: its perplexity by an evaluation, else as training found it."""
    progress = source.progress(path)
    found = {"perplexity": progress.held_out_loss.perplexity}
    if report is not None:
        found = next((row for row in report["paths"] if row["path"] == path), {})
    return PathFigures(
        path=path,
        modules=source.grid.modules_of_path(path),
        tokens=progress.tokens,
        documents=source.shard_index().paths[path].train_documents,
        perplexity=found.get("perplexity"),
        rounds=0 if progress.last_round is None else progress.last_round + 1,
    )


def _metadata(
    plan: RunPlan, notes: CardNotes, report: Mapping[str, Any] | None, *, library: str
) -> ModelCardData:
    """Return what the Hub reads: the header of the card, with the perplexities of an evaluation."""
    parts = {None: report or {}, **((report or {}).get("labels") or {})}
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=notes.datasets[0] if notes.datasets else "held-out",
            dataset_name=notes.datasets[0] if notes.datasets else "held-out documents",
            dataset_config=None if label is None else printable(label),
            metric_type="perplexity",
            metric_value=row["perplexity"],
        )
        for label, row in parts.items()
        if row.get("perplexity") is not None
    ]
    return ModelCardData(
        license=notes.licence,
        base_model=base_name(plan, notes),
        datasets=list(notes.datasets) or None,
        library_name=library,
        pipeline_tag="text-generation",
        tags=["dipaco"],
        metrics=["perplexity"] if results else None,
        model_name=plan.name if results else None,
        eval_results=results or None,
    )
