"""The report of the paper's table: JSON, Markdown and plots, from the finished cells."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from parts.paper_table_cells import CELLS, Size

Figures = Mapping[str, Any]

# What the paper says of two of its models, and the cells that stand for them here: the first is
# better (lower perplexity) than the second.
ORDERINGS = (
    ("dipaco-2x4-private", "dipaco-2x4", "path-specific modules help (Tab. 1)"),
    ("dipaco-2x4", "diloco-8", "DiPaCo beats DiLoCo at 8 paths, by little (Tab. 1)"),
    ("diloco-8", "dense", "DiLoCo beats the dense model of one path's size (Tab. 1)"),
    ("flat-8", "dipaco-2x4", "sharing costs quality at 8 paths (Tab. 1)"),
    ("dipaco-4x4-private", "dipaco-2x4-private", "more paths are better (Tab. 1)"),
    ("dipaco-4x4", "dipaco-2x4", "more paths are better, shared only (Tab. 1)"),
    ("dipaco-2x4-discriminative", "dipaco-2x4-private", "discriminative routing helps (Tab. 2)"),
    ("dipaco-2x4-product", "dipaco-2x4-private", "product k-means beats k-means (Fig. 9)"),
    ("dipaco-2x4-overlap", "dipaco-2x4-private", "overlapping shards help at many paths (Tab. 3)"),
    ("reroute-2x4-private", "dipaco-2x4-private", "rerouting at test time helps (Tab. 3)"),
    ("dipaco-2x4", "dipaco-2x4-no-sqrt", "rescaling by the root of the paths helps (sec. 2.7)"),
    ("dipaco-2x4-private", "dipaco-2x4-private-no-sqrt", "the same, path-specific (sec. 2.7)"),
    ("diloco-8", "diloco-8-mean", "Nesterov outside beats plain averaging (DiLoCo)"),
    ("dipaco-2x4-private", "dipaco-2x4-private-mean", "the same for DiPaCo"),
    ("dense-total-batch", "dense", "a batch as large as all paths' helps the dense model"),
    ("dense-large", "dense", "a dense model of 8.7 times the size is better (Tab. 1)"),
)


def write_report(cells: Path, results: Path, size: Size) -> None:
    """Write table, JSON and plots of the finished cells into `results`, and copies of the cells."""
    found = {
        cell.name: json.loads((cells / f"{cell.name}.json").read_text())
        for cell in CELLS
        if (cells / f"{cell.name}.json").exists()
    }
    if not found:
        return
    (results / "cells").mkdir(parents=True, exist_ok=True)
    for name in found:
        shutil.copyfile(cells / f"{name}.json", results / "cells" / f"{name}.json")
    summary = {
        "size": next(iter(found.values()))["size"],
        "rows": {name: _row(figures) for name, figures in found.items()},
        "target": target(found),
        "orderings": orderings(found),
        "seeds": seed_spread(found),
        "missing": [cell.name for cell in CELLS if cell.name not in found],
    }
    (results / "paper_table.json").write_text(json.dumps(summary, indent=1) + "\n")
    (results / "paper_table.md").write_text(markdown(found, summary, size))
    draw(found, results)


def _row(figures: Figures) -> dict[str, Any]:
    keys = (
        "perplexity", "tokens_scored", "parameters_path", "parameters_total", "tokens_path",
        "tokens_total", "tokens_per_parameter", "training_flops", "cpu_seconds", "seconds",
    )  # fmt: skip
    return {"title": figures["cell"]["title"], "seed": figures["cell"]["seed"]} | {
        key: figures[key] for key in keys
    }


def target(found: Mapping[str, Figures]) -> dict[str, Any]:
    """Return the best DiPaCo cell beside the dense models."""
    names = ("dipaco", "reroute")
    dipaco = {n: f["perplexity"] for n, f in found.items() if n.startswith(names)}
    if not dipaco or "dense" not in found:
        return {}
    best = min(dipaco, key=lambda name: dipaco[name])
    values = {"best": best, "perplexity": dipaco[best]}
    for name in ("dense", "dense-large", "dense-total-batch"):
        if name in found:
            values[f"against_{name}"] = dipaco[best] / found[name]["perplexity"] - 1
    return values


def orderings(found: Mapping[str, Figures]) -> list[dict[str, Any]]:
    """Return for each ordering of the paper whether it holds, and by how much."""
    return [
        {
            "claim": claim,
            "better": better,
            "worse": worse,
            "holds": found[better]["perplexity"] < found[worse]["perplexity"],
            "difference": found[better]["perplexity"] / found[worse]["perplexity"] - 1,
        }
        for better, worse, claim in ORDERINGS
        if better in found and worse in found
    ]


def seed_spread(found: Mapping[str, Figures]) -> dict[str, list[float]]:
    """Return the perplexities of the cells that were trained with two seeds."""
    return {
        name: [figures["perplexity"], found[f"{name}-seed1"]["perplexity"]]
        for name, figures in found.items()
        if f"{name}-seed1" in found
    }


def markdown(found: Mapping[str, Figures], summary: Mapping[str, Any], size: Size) -> str:
    """Return the table for people."""
    lines = [
        "# The paper's table on a small corpus",
        "",
        f"Made by `benchmarks/paper_table.py` on a corpus of nine domains of openly licensed text "
        f"with --shape {size.shape} --steps {size.steps} --round-steps {size.round_steps} "
        f"--base-steps {size.base_steps} --train-documents {size.train_documents} "
        f"--validation-documents {size.validation_documents}. Perplexity is over the same "
        f"{next(iter(found.values()))['tokens_scored']:,} held-out tokens for all models, the "
        f"first {size.prefix_tokens} of every document excluded. Tokens and FLOPs include the "
        "base, but not the scoring of documents for re-sharding and rerouting, nor the training "
        "of a rerouter. All rows have AdamW, one inner rate and, where they do not say "
        "otherwise, the outer step 0.7/0.9: [tuned ones](../worth.md) are better, with "
        "another outer step.",
        "",
        "| model | seed | perplexity | against dense | parameters a path | in all | "
        "tokens a path | in all | tokens per parameter | training FLOPs | CPU seconds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for figures in found.values():
        lines.append(_line(figures, found.get("dense")))
    for figures in found.values():
        if "rerouting" in figures:
            lines += _rerouting_lines(figures)
    lines += ["", "## The paper's orderings", ""]
    lines += ["| claim | here | holds |", "|---|---|---|"]
    lines += [
        f"| {entry['claim']} | {entry['better']} {entry['difference']:+.1%} against "
        f"{entry['worse']} | {'yes' if entry['holds'] else 'no'} |"
        for entry in summary["orderings"]
    ]
    if summary["seeds"]:
        lines += ["", "## Two seeds", "", "| model | seed 0 | seed 1 |", "|---|---:|---:|"]
        lines += [f"| {name} | {a:.2f} | {b:.2f} |" for name, (a, b) in summary["seeds"].items()]
    if summary["missing"]:
        lines += ["", f"Cells that are not finished: {', '.join(summary['missing'])}."]
    return "\n".join([*lines, "", "![Perplexity](perplexity.png)", "![Cost](cost.png)",
                      "![Training loss](training_loss.png)", ""])  # fmt: skip


def _rerouting_lines(figures: Figures) -> list[str]:
    """Return what rerouting gives, every W tokens, and the bounds in hindsight."""
    found = figures["rerouting"]
    lines = [
        "",
        f"## Rerouting: {figures['cell']['of']}",
        "",
        "| path chosen | perplexity | decisions that switch | best path in hindsight |",
        "|---|---:|---:|---:|",
        f"| once a document | {found['routed_perplexity']:.2f} | | "
        f"{found['best_path_per_document_perplexity']:.2f} |",
    ]
    lines += [
        f"| every {own['window']} tokens | {own['perplexity']:.2f} | {own['switches']:.1%} | "
        f"{own['best_path_per_window_perplexity']:.2f} |"
        for own in found["windows"]
    ]
    return lines


def _line(figures: Figures, dense: Figures | None) -> str:
    cell = figures["cell"]
    against = figures["perplexity"] / dense["perplexity"] - 1 if dense else None
    return (
        f"| {cell['title']} | {cell['seed']} | {figures['perplexity']:.2f} | "
        f"{'' if against is None else f'{against:+.1%}'} | "
        f"{figures['parameters_path'] / 1e6:.2f} M | {figures['parameters_total'] / 1e6:.2f} M | "
        f"{figures['tokens_path'] / 1e6:.2f} M | {figures['tokens_total'] / 1e6:.2f} M | "
        f"{figures['tokens_per_parameter']:.2f} | {figures['training_flops']:.2e} | "
        f"{figures['cpu_seconds']:.0f} |"
    )


def draw(found: Mapping[str, Figures], results: Path) -> None:
    """Draw perplexities, perplexity against cost, and training losses. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    trained = {n: f for n, f in found.items() if f["cell"]["kind"] != "base"}
    if not trained:
        return
    titles = [
        f"{f['cell']['title']}{', seed 1' if f['cell']['seed'] else ''}" for f in trained.values()
    ]
    colours = [
        "tab:gray" if name.startswith("dense") else
        "tab:orange" if name.startswith(("diloco", "flat")) else "tab:blue"
        for name in trained
    ]  # fmt: skip
    figure, axes = pyplot.subplots(figsize=(9, 0.45 * len(trained) + 1.2))
    values = [f["perplexity"] for f in trained.values()]
    bars = axes.barh(np.arange(len(trained)), values, color=colours)
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.set_yticks(np.arange(len(trained)), titles)
    axes.invert_yaxis()
    axes.set_xlabel("validation perplexity")
    axes.margins(x=0.12)
    _save(figure, results / "perplexity.png")

    figure, axes = pyplot.subplots(figsize=(9, 6))
    flops = [f["training_flops"] for f in trained.values()]
    axes.scatter(flops, values, c=colours)
    for name, x, y in zip(trained, flops, values, strict=True):
        axes.annotate(name, (x, y), textcoords="offset points", xytext=(5, 4), fontsize=8)
    axes.set_xscale("log")
    axes.margins(x=0.2)
    axes.set_xlabel("training FLOPs, base included")
    axes.set_ylabel("validation perplexity")
    _save(figure, results / "cost.png")

    figure, axes = pyplot.subplots(figsize=(9, 6))
    for name, figures in trained.items():
        losses = figures.get("train_losses") or []
        if losses:
            axes.plot(*zip(*losses, strict=True), label=name, linewidth=1.2)
    axes.set_xlabel("inner steps a path, behind the base")
    axes.set_ylabel("training loss, nats a token (mean over paths)")
    axes.legend(fontsize=7)
    _save(figure, results / "training_loss.png")


def _save(figure: Any, file: Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    # Without the date in the file the same figures give the same bytes.
    figure.savefig(file, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
