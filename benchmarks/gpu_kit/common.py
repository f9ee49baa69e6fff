"""What the parts of the kit share: options, a JSON that is whole at any time, timed steps."""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from parts.cards import PATH_150M, TINY_PATH

from dipaco.modules.device import device_name, wait_for
from dipaco.modules.memory import release_memory
from dipaco.protocol.config import ModelConfig

# Where steps of a few tokens take no time, so many are timed all the same.
LEAST_STEPS = 3


class Part:
    """One part of the kit. What it has found is in its file at once: a cut loses the rest alone."""

    def __init__(self, name: str, file: Path, *, rehearses: bool) -> None:
        self.rehearses = rehearses
        if rehearses:
            # Graphs are traced as on a GPU, but no code is made for the CPU, which takes minutes.
            torch.compile = functools.partial(torch.compile, backend="aot_eager")
        self.device = torch.device("cpu") if rehearses else torch.device("cuda", 0)
        self.model: ModelConfig = TINY_PATH if rehearses else PATH_150M
        self._file = file
        self._started_s = time.monotonic()
        self._found: dict[str, Any] = {
            "part": name,
            "device": device_name(self.device),
            "torch": torch.__version__,
            "rehearsal": rehearses,
            "seconds": 0.0,
            "measures": {},
            "failed": {},
        }

    def note(self, measure: str, figures: dict[str, Any]) -> None:
        """Keep what was found, and show it in a line."""
        self._found["measures"][measure] = figures
        self._write()
        shown = ", ".join(f"{key} {_short(value)}" for key, value in figures.items())
        print(f"  {measure}: {shown}", flush=True)

    @contextmanager
    def measuring(self, measure: str) -> Iterator[None]:
        """Go on with the next measure when this one fails, and say so."""
        try:
            yield
        except Exception as error:
            self._found["failed"][measure] = traceback.format_exc()[-4000:]
            self._write()
            last = (str(error).splitlines() or [""])[-1]
            print(f"  {measure}: FAILED, {type(error).__name__}: {last[:200]}", flush=True)
        release_memory(self.device)

    def conclude(self) -> int:
        """Return the exit code: 1 where a measure failed."""
        self._write()
        return int(bool(self._found["failed"]))

    def _write(self) -> None:
        self._found["seconds"] = round(time.monotonic() - self._started_s, 1)
        whole = self._file.with_suffix(".new")
        whole.write_text(json.dumps(self._found, indent=1))
        whole.replace(self._file)


def begin(name: str, description: str | None) -> Part:
    """Read a part's options and return it."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, required=True, help="where its figures go")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on the CPU")
    chosen = parser.parse_args()
    if not chosen.rehearse and not torch.cuda.is_available():
        sys.exit("error: PyTorch sees no CUDA device; --rehearse tries it on the CPU")
    return Part(name, chosen.json, rehearses=chosen.rehearse)


def random_batch(model: ModelConfig, sequences: int, seed: int) -> torch.Tensor:
    """Return tokens [sequences, length] on the CPU; the lowest numbers are no text."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sequences, model.sequence_length)
    return torch.randint(4, model.vocabulary_size, shape, generator=generator)


def timed_steps(
    step: Callable[[int], object], device: torch.device, tokens: int, seconds: float
) -> dict[str, Any]:
    """Take steps of `tokens` for a while and return how fast they were, and their peak memory.

    The first step, which compiles, is told apart; the second is left out.
    """
    started = time.perf_counter()
    step(0)
    wait_for(device)
    first_step_s = time.perf_counter() - started
    step(1)
    wait_for(device)
    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats(device)
    steps, started = 0, time.perf_counter()
    while steps < LEAST_STEPS or time.perf_counter() - started < seconds:
        step(2 + steps)
        steps += 1
    wait_for(device)
    step_s = (time.perf_counter() - started) / steps
    found = {
        "tokens_per_s": tokens / step_s,
        "step_s": step_s,
        "steps": steps,
        "first_step_s": first_step_s,
    }
    if device.type != "cpu":
        peak = torch.get_device_module(device).max_memory_allocated(device)
        found["peak_memory_gib"] = peak / 2**30
    return found


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value) if not isinstance(value, dict | list) else f"({len(value)} entries)"
