"""What an export says about itself: the model card of a run, and the README of one path.

Figures come from a `dipaco-eval --json` file, and otherwise from what the states and the swarm
show. What an export does not know (licence and origin of the data) the operator gives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dipaco.modules.errors import ConfigurationError
from dipaco.modules.evaluate import LossSum
from dipaco.modules.files import storage_errors
from dipaco.modules.plan import RunPlan
from huggingface_hub import ModelCardData

from .export_gguf import gguf_name
from .sources import StateSource

_UNKNOWN_DATA = (
    "The export was not told where the texts come from and under what licence they are. "
    "Whoever publishes this model should say so here."
)


@dataclass(frozen=True)
class CardNotes:
    """What the operator adds: a licence's name, Markdown on the data's origin and licences, and the
    repository of the Hub that the export goes to."""

    licence: str | None = None
    attribution: str | None = None
    repository: str | None = None


@dataclass(frozen=True)
class PathFigures:
    """One row of the card's table."""

    path: int
    modules: tuple[str, ...]
    tokens: int | None
    documents: int
    held_out_loss: LossSum
    best_round: int | None


@dataclass(frozen=True)
class RunFigures:
    """The figures of a whole run: `paths`, and an evaluation's report if one was given."""

    paths: Sequence[PathFigures]
    evaluation: Mapping[str, Any] | None = None
    rounds: int = field(default=0)

    @property
    def path_tokens(self) -> tuple[int, ...]:
        """Tokens trained, of the paths of which they are known."""
        return tuple(path.tokens for path in self.paths if path.tokens is not None)

    @property
    def tokens(self) -> int | None:
        """Tokens trained, over all paths; None if they are not known of all."""
        return sum(self.path_tokens) if len(self.path_tokens) == len(self.paths) else None


def load_evaluation(file: Path, plan: RunPlan) -> dict[str, Any]:
    """Read what `dipaco-eval --json` printed. Raises StorageError, or ConfigurationError if it is
    something else or of another run."""
    with storage_errors(file.parent):
        content = file.read_bytes()
    try:
        report = json.loads(content)
        perplexities = {row["path"]: row["perplexity"] for row in report["paths"]}
        values = [report["perplexity"], *perplexities.values()]
        if not all(value is None or isinstance(value, int | float) for value in values):
            raise TypeError("a perplexity is no number")
    except (ValueError, KeyError, TypeError) as error:
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


def gather_figures(source: StateSource, evaluation: Mapping[str, Any] | None = None) -> RunFigures:
    """Return the figures of all paths. No state is fetched for them."""
    index = source.shard_index()
    figures, rounds = [], 0
    for path in range(source.grid.path_count):
        progress = source.progress(path)
        rounds = max(rounds, 0 if progress.last_round is None else progress.last_round + 1)
        figures.append(
            PathFigures(
                path=path,
                modules=source.grid.modules_of_path(path),
                tokens=progress.tokens,
                documents=index.paths[path].train_documents,
                held_out_loss=progress.held_out_loss,
                best_round=source.best_round(path),
            )
        )
    return RunFigures(figures, evaluation, rounds)


def path_readme(source: StateSource, path: int, notes: CardNotes, gguf: str | None = None) -> str:
    """Return the README.md of a folder with one path; `gguf` is the type of a GGUF file."""
    plan = source.plan
    modules = ", ".join(source.grid.modules_of_path(path))
    return "\n".join(
        [
            *_front_matter(notes, gguf),
            f"# {plan.name}, path {path}",
            "",
            f"One path ({modules}) of the DiPaCo run `{plan.name}` ({plan.run_id}): an ordinary "
            f"Llama-shaped model of {_millions(source.grid.parameter_counts()['path'])} "
            f"parameters, trained on the documents that are routed to it. It is at its best on "
            f"such documents. States: {_states(source, path)}.",
            "",
            *(_gguf_usage(gguf_name(plan.name, path, gguf)) if gguf else _usage(notes)),
            "",
            *_data_section(notes),
            "",
        ]
    )


def model_card(
    source: StateSource,
    figures: RunFigures,
    notes: CardNotes,
    dtype: str,
    gguf: str | None = None,
) -> str:
    """Return the README.md of an export of all paths; `gguf` as in `path_readme`."""
    file = gguf_name(source.plan.name, 0, gguf or "")
    return "\n".join(
        [
            *_front_matter(notes, gguf),
            f"# {source.plan.name}",
            "",
            *_summary(source, figures, dtype),
            "",
            "## Use",
            "",
            "Route a text, load the folder of its path. [router/README.md](router/README.md) says "
            "how to route.",
            "",
            *(_gguf_usage(f"paths/00000/{file}") if gguf else _usage(notes, "paths/00000")),
            "",
            "## Figures",
            "",
            *_evaluation_section(figures),
            *_path_table(figures),
            "",
            "## Training",
            "",
            *_training(source, figures),
            "",
            *_data_section(notes),
            "",
        ]
    )


def _front_matter(notes: CardNotes, gguf: str | None = None) -> list[str]:
    data = ModelCardData(
        license=notes.licence,
        library_name="gguf" if gguf else "transformers",
        pipeline_tag="text-generation",
        tags=["dipaco"],
    )
    return ["---", data.to_yaml(), "---", ""]


def _usage(notes: CardNotes, folder: str = "") -> list[str]:
    place = f'"{folder or "."}"'
    if notes.repository:
        place = f'"{notes.repository}"' + (f', subfolder="{folder}"' if folder else "")
    return [
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({place})",
        f"model = AutoModelForCausalLM.from_pretrained({place})",
        'inputs = tokenizer("The city lies", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))",
        "```",
        "",
        "A text begins with `<s>`, which the tokenizer puts there. Special pieces inside a text "
        "(`</s>` in HTML) are read as text, as in training.",
    ]


def _gguf_usage(file: str) -> list[str]:
    folder = file.rpartition("/")[0] or "."
    return [
        "```",
        f"llama-completion -m {file} -no-cnv -p 'The city lies'",
        f"cd {folder} && ollama create {Path(file).stem.lower()} -f Modelfile",
        "```",
        "",
        "A text begins with a token of its own, which llama.cpp puts there.",
    ]


def _summary(source: StateSource, figures: RunFigures, dtype: str) -> list[str]:
    plan, counts = source.plan, source.grid.parameter_counts()
    levels = " x ".join(map(str, plan.grid.modules_per_level))
    private = [f"blocks {', '.join(map(str, plan.grid.private_blocks))}"] * bool(
        plan.grid.private_blocks
    )
    private += ["the embedding"] * plan.grid.private_embedding
    private += ["the head"] * plan.grid.private_head
    model = plan.model
    rows = {
        "run": f"`{plan.run_id}`",
        "grid": f"{levels}, {source.grid.path_count} paths",
        "path-specific": ", ".join(private) or "nothing",
        "parameters of a path": _millions(counts["path"]),
        "parameters in all": f"{_millions(counts['total'])}, {_millions(counts['shared'])} of "
        f"them in shared modules",
        "a path": f"{model.block_count} blocks of {model.hidden_size}, {model.head_count} heads, "
        f"{model.vocabulary_size:,} pieces, trained on sequences of {model.sequence_length} tokens",
        "router": f"{plan.routing.kind}, by the first {plan.routing.prefix_tokens} tokens",
        "trained": f"{_count(figures.tokens)} tokens in {figures.rounds} rounds",
        "stored as": dtype,
    }
    return [
        "A language model trained by DiPaCo (Douillard et al., 2024): a document is routed to one "
        "of the paths by how it begins, and that path alone, a small Llama-shaped model, "
        "continues it.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {key} | {value} |" for key, value in rows.items()),
    ]


def _evaluation_section(figures: RunFigures) -> list[str]:
    report = figures.evaluation
    if report is None:
        return [
            "No evaluation was given with the export. The perplexities are those of each path on "
            "held-out documents of its own shard, as training found them; `-` is not known. Of "
            "best states they are a little too good: these documents chose them.",
            "",
        ]
    named = {
        "perplexity": "this model, each document by its path",
        "base_perplexity": "the base model that all paths began with",
        "baseline_perplexity": "the dense model that it was compared with",
    }
    prefix = "the tokens that routing sees are scored for none"
    documents = f"{report.get('documents', 0):,} documents"
    lines = [
        f"Perplexity on {report.get('tokens', 0):,} tokens of {documents} ({prefix}):",
        "",
        "| | perplexity |",
        "|---|---:|",
    ]
    for key, label in named.items():
        if report.get(key) is not None:
            lines.append(f"| {label} | {report[key]:.2f} |")
    labels = report.get("labels")
    if isinstance(labels, dict) and labels:
        lines += ["", "| documents | perplexity | tokens |", "|---|---:|---:|"]
        lines += [
            f"| {label} | {_shown(row.get('perplexity'))} | {row.get('tokens', 0):,} |"
            for label, row in labels.items()
        ]
    return [*lines, ""]


def _path_table(figures: RunFigures) -> list[str]:
    report = figures.evaluation
    evaluated = {row["path"]: row for row in report["paths"]} if report else {}
    lines = [
        "| path | modules | training documents | tokens trained | states | perplexity |",
        "|---:|---|---:|---:|---|---:|",
    ]
    for row in figures.paths:
        perplexity = row.held_out_loss.perplexity
        if report:
            perplexity = evaluated.get(row.path, {}).get("perplexity")
        states = "newest" if row.best_round is None else f"best, round {row.best_round}"
        lines.append(
            f"| {row.path} | {', '.join(row.modules)} | {row.documents:,} | {_count(row.tokens)} | "
            f"{states} | {_shown(perplexity)} |"
        )
    return lines


def _training(source: StateSource, figures: RunFigures) -> list[str]:
    plan = source.plan
    inner, outer = plan.inner, plan.outer
    step_tokens = inner.batch_sequences * plan.model.sequence_length
    steps = [tokens // step_tokens for tokens in figures.path_tokens]
    counted = f"{min(steps):,} to {max(steps):,} steps a path" if steps else "steps not known"
    return [
        f"Every path was trained on its own shard with AdamW (learning rate {inner.learning_rate}, "
        f"{inner.batch_sequences} sequences a step): {counted}. "
        f"After each round, paths that share a module averaged what they had learned about "
        f"it, and took one Nesterov step (learning rate {outer.learning_rate}, momentum "
        f"{outer.momentum}). The whole plan is in `plan.json`.",
    ]


def _data_section(notes: CardNotes) -> list[str]:
    lines = ["## Data and licence", ""]
    if notes.licence:
        lines += [f"Licence of the model, as its operator gives it: {notes.licence}.", ""]
    return [*lines, notes.attribution or _UNKNOWN_DATA]


def _states(source: StateSource, path: int) -> str:
    best = source.best_round(path)
    if best is None:
        return "the newest of each module"
    return f"those with the least held-out loss, of round {best}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _shown(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, int | float) else "-"


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count:,}"
