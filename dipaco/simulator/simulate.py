"""What `dipaco-simulate` does and prints once its command line is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
from rich.console import Console
from rich.table import Table

from dipaco.base.errors import ConfigurationError
from dipaco.base.files import atomic_write
from dipaco.base.progress import StageProgress
from dipaco.base.running import say
from dipaco.modules.device import choose_device, prepare_process
from dipaco.routing.run_folder import STORE_FOLDER, RunFolder, link_run

from .dense_baseline import DenseResult, train_dense
from .reference import ReferenceSwarm
from .round_report import RoundReport
from .simulate_settings import SimulateSettings
from .simulated_peers import SimulatedPeer, SimulatorSettings


def run(settings: SimulateSettings) -> int:
    """Run the command. Raises the errors of `dipaco.base.errors`."""
    _check_output(settings)
    source = RunFolder(settings.run_folder)
    source.plan()
    prepare_process(settings.threads)
    output = link_run(source, settings.out) if settings.out else None
    swarm = ReferenceSwarm(
        source,
        peers=_parse_paths(settings.paths),
        steps_per_round=settings.steps_per_round,
        settings=SimulatorSettings(
            device=choose_device(settings.device)[0],
            optimizer=settings.optimizer,
            validation_sequences=settings.validation_sequences,
        ),
    )
    if settings.rounds:
        swarm.check_steps()
    printer = None if settings.json else _RoundPrinter(swarm)
    if printer and settings.validation_sequences != 0:
        printer.round(swarm.report())
    if printer:
        swarm.on_steps = printer.steps(swarm, settings.rounds)
    _run_rounds(settings, swarm, output, printer)
    if settings.dense_steps:
        _run_dense(settings, source, output, printer)
    return 0


def _run_rounds(
    settings: SimulateSettings,
    swarm: ReferenceSwarm,
    output: RunFolder | None,
    printer: _RoundPrinter | None,
) -> None:
    """Run and print the rounds, and save the states after each. On Ctrl+C say what is kept."""
    last: RoundReport | None = None
    try:
        for _ in range(settings.rounds):
            last = swarm.run_round()
            if output is not None:
                for state in swarm.states.values():
                    output.states.save(state)
            if printer:
                printer.round(last)
            else:
                print(json.dumps(last.as_dict()), flush=True)
    except KeyboardInterrupt:
        kept = f"; {_where(output)}" if output is not None and last else ", and nothing is kept"
        say(f"ended after {swarm.next_round} of {settings.rounds} rounds{kept}")
        raise
    if printer and last:
        printer.summary(last)
        if output is not None:
            printer.line(_where(output))


def _where(output: RunFolder) -> str:
    """Say where the states are, and what they are for."""
    return (
        f"the states are in {output.path}; dipaco-eval, dipaco-generate, dipaco-serve and "
        f"dipaco-export take them with --state-dir {output.path}"
    )


def _parse_paths(text: str | None) -> tuple[SimulatedPeer, ...] | None:
    """Read --paths: "0,2,2" is one peer on path 0 and two on path 2. Raises ConfigurationError."""
    if text is None:
        return None
    peers: list[SimulatedPeer] = []
    for part in text.split(","):
        if not part.strip().isdecimal():
            raise ConfigurationError(f"--paths '{text}': '{part}' is not a path; write --paths 0,3")
        path = int(part)
        peers.append(SimulatedPeer(path, sum(peer.path == path for peer in peers)))
    return tuple(peers)


def _check_output(settings: SimulateSettings) -> None:
    if settings.out is not None and settings.rounds and (settings.out / STORE_FOLDER).exists():
        raise ConfigurationError(
            f"--out {settings.out} already holds trained states; give another folder"
        )


def _run_dense(
    settings: SimulateSettings,
    source: RunFolder,
    output: RunFolder | None,
    printer: _RoundPrinter | None,
) -> None:
    try:
        result = train_dense(
            source,
            settings.dense_steps,
            device=choose_device(settings.device)[0],
            optimizer=settings.optimizer,
            learning_rate=settings.dense_rate,
            validation_sequences=settings.validation_sequences,
            on_step=printer.dense_step(settings.dense_steps) if printer else None,
        )
    except KeyboardInterrupt:
        kept = f"; {_where(output)}" if output is not None and settings.rounds else ""
        say(f"the dense baseline was interrupted, and nothing of it is kept{kept}")
        raise
    file: Path | None = None
    if output is not None:
        file = output.path / "dense.safetensors"
        atomic_write(file, safetensors.torch.save(result.parameters))
    if printer:
        printer.dense(result, file)
    else:
        print(json.dumps({"dense": _dense_dict(result, file)}), flush=True)


def _dense_dict(result: DenseResult, file: Path | None) -> dict[str, Any]:
    return {
        "steps": result.steps,
        "train_loss": result.train_loss,
        "perplexity": result.validation.perplexity,
        "tokens": result.validation.tokens,
        "file": str(file) if file else None,
    }


class _RoundPrinter:
    """Prints a simulation as it goes."""

    def __init__(self, swarm: ReferenceSwarm) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        plan = swarm.plan
        self._console.print(
            f"run {plan.run_id} ({plan.name}): {len({p.path for p in swarm.peers})} of "
            f"{swarm.grid.path_count} paths, {len(swarm.peers)} peers, "
            f"{swarm.steps_per_round} inner steps a round, codec {plan.contributions.codec}"
        )

    def steps(self, swarm: ReferenceSwarm, rounds: int) -> Callable[[int], None]:
        """Return a callback for steps that were done; it prints a line now and then."""
        stage = StageProgress("training", self._console.print)
        total, done = rounds * len(swarm.peers) * swarm.steps_per_round, 0
        stage.update(0, total)

        def show(steps: int) -> None:
            nonlocal done
            done += steps
            stage.update(done, total, "(inner steps)")

        return show

    def round(self, report: RoundReport) -> None:
        """Print the line of a round."""
        loss = report.train_loss
        parts = [
            "before" if loss is None else f"round {report.round_index}",
            "" if loss is None else f"train loss {loss:.4f}",
            _perplexity(report.validation.perplexity),
            f"{report.seconds:.1f} s",
        ]
        self._console.print("   ".join(part for part in parts if part))

    def summary(self, report: RoundReport) -> None:
        """Print the paths and the modules as they are after the last round."""
        paths = Table("path", "steps", "train loss", "validation loss", "tokens scored")
        for path in report.paths:
            paths.add_row(
                str(path.path),
                str(path.step),
                _loss(path.train_loss),
                _loss(path.validation.loss),
                str(path.validation.tokens),
            )
        modules = Table("module", "version", "digest")
        for module, digest in report.digests.items():
            modules.add_row(module, str(report.versions[module]), digest[:16])
        self._console.print(paths, modules)

    def line(self, line: str) -> None:
        """Print a line."""
        self._console.print(line)

    def dense_step(self, steps: int) -> Callable[[int, float], None]:
        """Return a callback that prints a line now and then while the dense baseline trains."""
        stage = StageProgress("dense baseline", self._console.print)
        stage.update(0, steps)
        return lambda step, loss: stage.update(step + 1, steps, f"(train loss {loss:.4f})")

    def dense(self, result: DenseResult, file: Path | None) -> None:
        """Print how the dense baseline does."""
        saved = f"   saved as {file}" if file else ""
        self._console.print(
            f"dense after {result.steps} steps   "
            f"{_perplexity(result.validation.perplexity) or 'not scored'}{saved}"
        )


def _perplexity(value: float | None) -> str:
    return "" if value is None else f"validation perplexity {value:.2f}"


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
