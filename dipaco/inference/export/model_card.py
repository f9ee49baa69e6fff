"""What an export says about itself: huggingface_hub's model card, for a run and for one path.

The words are in `model_card.jinja`. The figures come from the states and the swarm.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from dipaco.inference.sources import StateSource
from dipaco.modules.frozen_file import base_parameter_count
from dipaco.modules.layout import parameter_counts
from dipaco.protocol.config import GridConfig
from dipaco.routing.routers.kinds import ROUTER_KINDS

from .adapter_peft import written_rank
from .form import ExportForm
from .path_gguf import GGUF_TYPES, gguf_name, ollama_name
from .rounding import Rounding
from .tokenizer_files import (
    ends_unsaid_by_base,
    lack_of_transformers,
    names_are_text,
)

_TEMPLATE = Path(__file__).with_name("model_card.jinja")
# Widths of heads that vLLM's attention has kernels for by its sources, on GPUs and CPUs alike.
_HEADS_OF_VLLM = (32, 64, 96, 128, 192, 256)


@dataclass(frozen=True)
class _PathFigures:
    """One row of the card's table."""

    path: int
    modules: tuple[str, ...]
    tokens: int | None
    documents: int
    perplexity: float | None
    rounds: int


def model_card(
    source: StateSource,
    form: ExportForm,
    *,
    path: int | None = None,
    rounding: Rounding | None = None,
) -> str:
    """Return the README.md of an export of one path, or (None) of all. No state is fetched for it.

    `rounding` is what merging adapters into their base lost.
    """
    plan, model, adapters = source.plan, source.plan.model, source.plan.model.adapters
    tokenizer = source.blob(plan.blobs.tokenizer)
    file = gguf_name(plan.name, path or 0, GGUF_TYPES[form.dtype]) if form.format == "gguf" else ""
    paths = range(source.grid.path_count) if path is None else [path]
    card = ModelCard.from_template(
        ModelCardData(
            language=_of_hub(plan.about.language, r"[a-z]{2,3}"),
            license=_of_hub(plan.about.licence, r"[A-Za-z0-9.-]+"),
            base_model=form.base,
            library_name=form.format,
            pipeline_tag="text-generation",
            tags=["dipaco"],
        ),
        template_path=str(_TEMPLATE),
        plan=plan,
        about=plan.about,
        escaped=escaped,
        model=model,
        base=form.base,
        adapters=adapters,
        is_adapter=form.is_adapter,
        largest_rank=max(16, written_rank(adapters.rank)) if adapters else None,
        chats=source.shard_index().marked,
        names_are_text=names_are_text(tokenizer),
        has_own_ends=form.format == "peft" and bool(ends_unsaid_by_base(tokenizer)),
        lack=None if form.is_adapter else lack_of_transformers(tokenizer),
        vllm=model.width_of_head in _HEADS_OF_VLLM,
        path=path,
        # Where the commands of the card find a path; they are typed in the folder of the card.
        folder="." if path is not None else "paths/00000",
        gguf_file=file,
        ollama_name=ollama_name(file),
        counts=parameter_counts(source.grid),
        whole_path=base_parameter_count(model.without_padding),
        private=", ".join(_private_parts(plan.grid)),
        stored=form.dtype,
        rounding=rounding,
        router=ROUTER_KINDS[plan.routing.kind],
        figures=[_figures(source, one) for one in paths],
        count=lambda value: "-" if value is None else f"{value:,}",
        millions=lambda value: f"{value / 1e6:.1f} M" if value >= 1e6 else f"{value:,}",
        shown=lambda value: "-" if value is None else f"{value:.2f}",
    )
    return f"{card.content}\n"


def escaped(text: str) -> str:
    """Return a line from outside as Markdown that shows it as it is."""
    return re.sub(r"([\\`*_{}\[\]()<>#+!|&~-])", r"\\\1", text)


def _of_hub(value: str, pattern: str) -> str | None:
    """Return what an operator said, if it is said in the Hub's words."""
    return value.lower() if re.fullmatch(pattern, value) else None


def _private_parts(grid: GridConfig) -> list[str]:
    """Return which parts of the model are private to each path."""
    blocks = ", ".join(map(str, grid.private_blocks))
    parts = {
        f"blocks {blocks}": bool(blocks),
        "the embedding": grid.private_embedding,
        "the head": grid.private_head,
    }
    return [name for name, is_private in parts.items() if is_private]


def _figures(source: StateSource, path: int) -> _PathFigures:
    progress = source.progress(path)
    return _PathFigures(
        path=path,
        modules=source.grid.modules_of_path(path),
        tokens=progress.tokens,
        documents=source.shard_index().paths[path].train_documents,
        perplexity=progress.held_out_loss.perplexity,
        rounds=0 if progress.last_round is None else progress.last_round + 1,
    )
