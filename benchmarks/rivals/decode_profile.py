"""Where the time of one client goes: a token from the matrix products up to HTTP.

A worker: `python -m rivals.decode_profile RUN_DIR PATH`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dipaco.inference.decoding import decoder as decoder_module
from dipaco.inference.decoding.decoder import Decoder
from dipaco.inference.decoding.fused_block import Map
from dipaco.inference.generate import choose_token
from dipaco.inference.sampling import Sampling
from dipaco.modules.compose import load_path
from dipaco.modules.device import prepare_process
from dipaco.modules.transformer import PathModel
from dipaco.routing.run_folder import RunFolder
from rivals.turns import take_turns

PROMPT, TOKENS = 20, 48


def model_of(run: RunFolder, path: int) -> PathModel:
    """Return a path as it is at genesis."""
    plan = run.plan()
    grid, model = run.grid(plan), PathModel(plan.model)
    states = {module: run.genesis_state(plan, module) for module in grid.modules_of_path(path)}
    load_path(model, grid, path, states)
    return model.eval()


class Timers:
    """Adds up how long calls of some functions take."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, owner: Any, name: str, part: str) -> None:
        """Time all calls of `owner.name`, as those of a part."""
        inner: Callable[..., Any] = getattr(owner, name)
        self.seconds.setdefault(part, 0.0)

        def timed(*arguments: Any) -> Any:
            began = time.thread_time()
            found = inner(*arguments)
            self.seconds[part] += time.thread_time() - began
            return found

        setattr(owner, name, timed)


def answer(decoder: Decoder) -> tuple[float, float]:
    """Give an answer; return the processor seconds of its steps and of choosing their tokens."""
    *_, logits = decoder.read(0, list(range(4, 4 + PROMPT)))
    row, steps, choosing = logits[-1], 0.0, 0.0
    for _ in range(TOKENS):
        began = time.thread_time()
        token = choose_token(row, Sampling(temperature=0.0), None)
        chosen = time.thread_time()
        row = decoder.step([token])[0]
        steps += time.thread_time() - chosen
        choosing += chosen - began
    decoder.free(0)
    return steps / TOKENS, choosing / TOKENS


def bare_products_s(decoder: Decoder) -> float:
    """Return how long the same products take when nothing else is done between them."""
    maps = [m for block in decoder._blocks for m in vars(block).values()]
    arrays = [m._array for m in [*maps, decoder._head] if isinstance(m, Map)]
    inputs = [np.ones((1, 1, len(array)), dtype=np.float32) for array in arrays]

    began = time.thread_time()
    for _ in range(TOKENS):
        for one, array in zip(inputs, arrays, strict=True):
            one @ array
    return (time.thread_time() - began) / TOKENS


class Profile:
    """A path in memory; its functions are timed from the second half of a turn on."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.timers: Timers | None = None
        answer(decoder)

    def plain(self) -> dict[str, float]:
        """Return the processor seconds a token of what is not timed within."""
        step_s, choosing_s = answer(self.decoder)
        return {
            "a step": step_s,
            "choosing": choosing_s,
            "products alone": bare_products_s(self.decoder),
        }

    def timed(self) -> dict[str, float]:
        """Return the same of the parts of a step; timers add a little to each."""
        if self.timers is None:
            self.timers = Timers()
            self.timers.around(Map, "few", "products")
            self.timers.around(decoder_module, "few_normed", "norms")
        before = dict(self.timers.seconds)
        step_s, _ = answer(self.decoder)
        parts = {p: (s - before[p]) / TOKENS for p, s in self.timers.seconds.items()}
        return {"a step with timers": step_s, **parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("path", type=int)
    chosen = parser.parse_args()
    prepare_process(1)
    found = Profile(Decoder(model_of(RunFolder(chosen.run), chosen.path), 8))

    def turn(command: str) -> dict[str, float]:
        with torch.inference_mode():
            return found.timed() if command == "timed" else found.plain()

    take_turns(turn)


if __name__ == "__main__":
    main()
