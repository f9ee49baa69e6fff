"""The stages of preparation that a successor has in place of its own, or besides.

See design 4.9, successor.

Tokenizer and base come from the old run, the modules begin with its trained ones, and a router
that is trained on scores gets them from its paths.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from dipaco.base.blobs import BlobStore
from dipaco.base.errors import ConfigurationError
from dipaco.base.files import canonical_json, sha256_of_file
from dipaco.modules.compose import load_path
from dipaco.modules.grow import Growth, check_genesis_index
from dipaco.modules.layout import parameter_shapes
from dipaco.modules.state import write_state
from dipaco.protocol.config import InnerConfig, ModelConfig
from dipaco.protocol.grid import Grid
from dipaco.protocol.plan import RunPlan
from dipaco.routing.run_folder import RunFolder
from dipaco.training.scoring import LossSum, sum_losses

from .local_scores import LocalScores
from .predecessor import Predecessor
from .prepare_options import PrepareOptions
from .stages import StageMarkers, inputs_hash

# Held-out sequences that a model is scored on for the summary, over all paths.
SUMMARY_SEQUENCES = 256
# So much is computed for it: a minute of a few cores.
SUMMARY_OPERATIONS = 2e12


@dataclass
class Succession:
    """What a successor takes from its predecessor; each result is made once."""

    predecessor: Predecessor
    grid: Grid
    """The grid of the new run."""
    blobs: BlobStore
    """The blobs of the new run."""
    work: Path
    markers: StageMarkers
    options: PrepareOptions
    copied: Callable[[], tuple[int, ...]] = tuple
    """The old paths that paths which are added now begin as."""

    @cached_property
    def growth(self) -> Growth:
        """How old and new modules belong together."""
        return Growth(self.predecessor.grid, self.grid, self.copied())

    def tokenizer(self, given: Path | None) -> str:
        """Take over the old run's tokenizer as a blob of the new run and return its SHA-256.

        Raises ConfigurationError if another one is `given` in RUN.toml.
        """
        sha256 = self.predecessor.plan.blobs.tokenizer
        if given is not None and (not given.is_file() or sha256_of_file(given) != sha256):
            raise ConfigurationError(
                f"[tokenizer] model_file {given} is not the tokenizer of the run to continue, "
                f"and modules fit only the tokens that they were trained on; leave it out"
            )
        return self.take(sha256)

    @cached_property
    def base(self) -> str:
        """The base model: the old one, or the trained model of a dense run."""
        if not self.predecessor.is_dense:
            return self.take(self.predecessor.plan.blobs.base)
        inputs = inputs_hash("base of a dense run", self.predecessor.digests)
        if found := self.markers.done("base", inputs):
            return str(found["sha256"])
        sha256 = self.blobs.add_bytes(self.predecessor.base_bytes())
        self.markers.mark("base", inputs, {"sha256": sha256})
        return sha256

    @cached_property
    def genesis(self) -> str:
        """The first state of every module as blobs, and the index that names them."""
        old = self.predecessor
        inputs = inputs_hash("genesis", old.digests, old.plan.grid, self.grid.config, self.copied())
        if found := self.markers.done("genesis", inputs):
            index = json.loads(self.blobs.read(str(found["sha256"])))
            digests = check_genesis_index(index, self.grid)
            if all(self.blobs.has(digest) for digest in digests.values()):
                return str(found["sha256"])
        digests = {}
        modules = self.grid.modules()
        with self.options.display.stage("genesis") as progress:
            for number, state in enumerate(self.growth.states(old.load), 1):
                file = self.work / "genesis.safetensors"
                write_state(state, file)
                digests[state.module] = self.blobs.add_file(file, move=True)
                progress.update(number, len(modules), "modules")
        sha256 = self.blobs.add_bytes(canonical_json(digests))
        self.markers.mark("genesis", inputs, {"sha256": sha256})
        if given_up := self.growth.unused():
            shown = f"{', '.join(given_up[:6])}{' ...' if len(given_up) > 6 else ''}"
            self.options.display.say(
                f"{len(given_up)} modules of the old run are not taken over, because the new grid "
                f"has no place for them: {shown}"
            )
        return sha256

    def take(self, sha256: str) -> str:
        """Copy a blob of the old run."""
        return self.blobs.add_file(self.predecessor.folder.blobs.require(sha256))

    def check_scorable(self) -> None:
        """Raise ConfigurationError unless each new path goes on with one old path of its own.

        Labels say under which old path a document is likeliest, and copies are equally likely.
        """
        origins = [self.growth.origin_path(path) for path in range(self.grid.path_count)]
        if len(set(origins)) < self.grid.path_count:
            raise ConfigurationError(
                f"a router trained on scores needs as many trained paths as the grid has, but its "
                f"{self.grid.path_count} paths come from {len(set(origins))} of the old run's "
                f"{self.predecessor.grid.path_count}, so some would be equal; write kind = "
                f"'kmeans' under [router], and re-shard in a further successor"
            )

    def scores(self, rows: np.ndarray, prefix_tokens: int) -> np.ndarray:
        """Return the summed loss of each row under each new path's origin, float64 [N, paths].

        Raises ConfigurationError as `check_scorable` does.
        """
        self.check_scorable()
        origins = [self.growth.origin_path(path) for path in range(self.grid.path_count)]
        scores = LocalScores(self.work / "scores", self.predecessor, rows, prefix_tokens)
        missing = [path for path in sorted(set(origins)) if scores.load(path) is None]
        if missing:
            with self.options.display.stage("scores") as progress:
                scores.make(
                    missing, self.options.device, mapped=self.options.workers.map,
                    progress=lambda done, total: progress.update(done, total, "paths"),
                )  # fmt: skip
        by_path = {path: scores.load(path) for path in set(origins)}
        found = [nll for origin in origins if (nll := by_path[origin]) is not None]
        return np.stack(found, axis=1)

    def say_where_it_stands(self, run: RunFolder, plan: RunPlan) -> None:
        """Show how good the modules are on the new shards, and where their schedule stands."""
        each = summary_sequences(plan.model, self.grid.path_count)
        model = run.path_model(plan, self.options.device).eval()
        scores = []
        for path in range(self.grid.path_count):
            held_out = run.validation_tokens(plan, path)
            rows = held_out[:each]
            if len(rows):
                modules = self.grid.modules_of_path(path)
                states = {module: run.genesis_state(plan, module) for module in modules}
                load_path(model, self.grid, path, states)
                scores.append(LossSum(*sum_losses(model, rows, plan.routing.prefix_tokens)))
        total = LossSum.total(scores)
        if total.perplexity is not None:
            self.options.display.say(
                f"Genesis: validation perplexity {total.perplexity:.2f} over {total.tokens:,} "
                f"tokens, each path's modules on its own new shard"
            )
        self._say_schedule(plan.inner)

    def _say_schedule(self, inner: InnerConfig) -> None:
        """Point out that the schedule starts over, which may not be intended."""
        steps = self.predecessor.path_steps()
        if (inner.warmup_steps or inner.decay_steps) and steps and not inner.first_step:
            self.options.display.say(
                f"[inner] The learning rate starts its warmup and decay over; the modules have "
                f"{steps} steps behind them. To continue one schedule write first_step = {steps}"
            )


def summary_sequences(model: ModelConfig, paths: int) -> int:
    """Return how many held-out sequences of each path are scored to sum up a preparation: fewer of
    a large model."""
    parameters = sum(map(math.prod, parameter_shapes(model.without_adapters).values()))
    operations = 2 * parameters * model.sequence_length
    return max(1, min(SUMMARY_SEQUENCES, int(SUMMARY_OPERATIONS / operations)) // paths)
