"""What `dipaco-simulate` shows a person: a line per round, and a table of paths at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .dense import DenseResult
from .reference import ReferenceSwarm, RoundReport

# Steps of the dense baseline between two lines, at least, and lines in all, about.
_DENSE_LINE_STEPS, _DENSE_LINES = 10, 20


class RoundPrinter:
    """Prints a simulation as it goes. Plain lines without a terminal."""

    def __init__(self, swarm: ReferenceSwarm, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        plan = swarm.plan
        self._console.print(
            f"run {plan.run_id} ({plan.name}): {len({p.path for p in swarm.peers})} of "
            f"{swarm.grid.path_count} paths, {len(swarm.peers)} peers, "
            f"{swarm.steps_per_round} inner steps a round, codec {plan.averaging.codec}"
        )

    def round(self, report: RoundReport) -> None:
        """Print one line."""
        losses = [path.train_loss for path in report.paths if path.train_loss is not None]
        parts = [
            f"round {report.round_index}" if losses else "before",
            f"train loss {sum(losses) / len(losses):.4f}" if losses else "",
            _perplexity(report.validation.perplexity),
            _best(report),
            f"{report.seconds:.1f} s",
        ]
        self._console.print("   ".join(part for part in parts if part))

    def summary(self, report: RoundReport) -> None:
        """Print the paths and the modules as they are after the last round."""
        paths = Table(
            "path", "steps", "train loss", "validation loss", "tokens scored", "best", "in round"
        )
        for path in report.paths:
            paths.add_row(
                str(path.path),
                str(path.step),
                _loss(path.train_loss),
                _loss(path.validation.loss),
                str(path.validation.tokens),
                _loss(path.best.validation.loss if path.best else None),
                str(path.best.round_index) if path.best else "-",
            )
        modules = Table("module", "version", "digest")
        for module, digest in report.digests.items():
            modules.add_row(module, str(report.versions[module]), digest[:16])
        self._console.print(paths, modules)

    def dense_step(self, steps: int) -> Callable[[int, float], None]:
        """Return what prints a line now and then while the dense baseline trains."""
        every = max(_DENSE_LINE_STEPS, steps // _DENSE_LINES)

        def show(step: int, loss: float) -> None:
            if (step + 1) % every == 0:
                self._console.print(f"dense step {step + 1} of {steps}   train loss {loss:.4f}")

        return show

    def dense(self, result: DenseResult, file: Path | None) -> None:
        """Print how the dense baseline does."""
        saved = f"   saved as {file}" if file else ""
        self._console.print(
            f"dense after {result.steps} steps   "
            f"{_perplexity(result.validation.perplexity) or 'not scored'}{saved}"
        )


def _perplexity(value: float | None) -> str:
    return "" if value is None else f"validation perplexity {value:.2f}"


def _best(report: RoundReport) -> str:
    if not any(path.best for path in report.paths):
        return ""
    perplexity = report.best_validation.perplexity
    return "" if perplexity is None else f"with best states {perplexity:.2f}"


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
