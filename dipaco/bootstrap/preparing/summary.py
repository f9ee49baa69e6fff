"""What is shown at the end of a preparation: shards, how good the models are, how to start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dipaco.base.files import atomic_write
from dipaco.modules.compose import load_path
from dipaco.modules.layout import parameter_counts, parameter_shapes
from dipaco.modules.transformer import PathModel
from dipaco.protocol.config import PAD_TOKEN, ModelConfig
from dipaco.protocol.plan import RunPlan
from dipaco.routing.report import report_routing
from dipaco.routing.routers.document_routing import prefix_features
from dipaco.routing.routers.router import Prefixes
from dipaco.routing.run_folder import RunFolder
from dipaco.training.inner import learning_rate_at
from dipaco.training.scoring import LossSum, sum_losses

from .predecessor import Predecessor
from .score_stages import added_sample
from .stages import Job
from .stages_of_run import Stages

# Held-out sequences that a model is scored on for the summary, over all paths.
SUMMARY_SEQUENCES = 256
# So much is computed for it: a minute of a few cores.
SUMMARY_OPERATIONS = 2e12


@dataclass
class Summary:
    """The summary of one preparation that is done."""

    job: Job
    stages: Stages
    plan: RunPlan

    def __post_init__(self) -> None:
        self.folder = RunFolder(self.job.out)
        self.say = self.job.display.say

    def show(self, *, is_new: bool) -> None:
        """Show it; `is_new` says whether the plan was signed now."""
        before, grown, index = self.job.before, self.job.grown, self.folder.shard_index(self.plan)
        summaries = self.stages.shards.summaries
        self.job.display.shards(summaries)
        if grown is not None:
            self._say_of_added_paths(grown)
        else:
            report = report_routing(self.plan.routing, summaries)
            atomic_write(self.job.out / "routing.json", report.model_dump_json(indent=1).encode())
            self.job.display.routing(report)
            self._say_base_perplexity(len(index.paths))
        if before is not None:
            self._say_where_modules_stand(before)
        self._say_how_to_start(is_new=is_new)

    def _say_base_perplexity(self, paths: int) -> None:
        with self.job.display.stage("base model's perplexity") as progress:
            scores = []
            for path in range(paths):
                scores.append(self._score(self.stages.base.model, path))
                progress.update(path + 1, paths, "paths")
        total = LossSum.total(scores)
        if total.perplexity is not None:
            self.say(
                f"Base model: validation perplexity {total.perplexity:.2f} over {total.tokens:,} "
                f"tokens, the first held-out sequences of each path; dipaco-eval scores whole texts"
            )

    def _score(self, model: PathModel, path: int) -> LossSum:
        """Score a model on some held-out sequences of a path."""
        each = summary_sequences(self.plan.model, self.plan.grid.path_count)
        rows = self.folder.validation_tokens(self.plan, path)[:each]
        if not len(rows):
            return LossSum()
        device = self.job.device
        return LossSum(*sum_losses(model, rows, self.plan.routing.prefix_tokens, device=device))

    def _say_where_modules_stand(self, before: Predecessor) -> None:
        """Say how good the modules are on the new shards, and where their schedule stands."""
        plan, grid = self.plan, self.folder.grid(self.plan)
        model = self.folder.path_model(plan, self.job.device).eval()
        scores = []
        for path in range(grid.path_count):
            modules = grid.modules_of_path(path)
            states = {module: self.folder.genesis_state(plan, module) for module in modules}
            load_path(model, grid, path, states)
            scores.append(self._score(model, path))
        total = LossSum.total(scores)
        if total.perplexity is not None:
            self.say(
                f"Genesis: validation perplexity {total.perplexity:.2f} over {total.tokens:,} "
                f"tokens, each path's modules on its own new shard"
            )
        inner, steps = plan.inner, before.path_steps()
        if (inner.warmup_steps or inner.decay_steps) and steps and not inner.first_step:
            self.say(
                f"[inner] The learning rate starts its warmup and decay over; the modules have "
                f"{steps} steps behind them. To continue one schedule write first_step = {steps}"
            )
        rate = learning_rate_at(inner, 0)
        if self.job.grown is not None and rate < inner.learning_rate:
            self.say(
                f"[inner] All paths go on in their schedule, at {rate:.2g} of "
                f"{inner.learning_rate:.2g}; to begin it again give --set inner.first_step=0"
            )

    def _say_of_added_paths(self, grown: Predecessor) -> None:
        others = self._others(grown)
        for summary, tokens, nearest in zip(
            self.stages.shards.summaries, self.stages.tokens, self.stages.nearest, strict=True
        ):
            path, name = summary.path, tokens.corpus.name
            beginnings = added_sample(self.job, grown, tokens).beginnings()
            self.say(
                f"Path {path} ({name}) begins as path {nearest.path}, which predicts the "
                f"beginnings of its documents best"
            )
            said = f"{self._share_of(path, beginnings):.0%} of its documents to it"
            if others:
                taken = self._share_of(path, others)
                said += f", and {taken:.1%} of the held-out ones of the old paths"
            self.say(f"The router sends {said}")
            if not summary.held_out_sequences:
                self.say(
                    f"No document of {name} is held out, so nothing says how good path {path} is; "
                    f"give more, or --set data.held_out_fraction=0.1"
                )

    def _share_of(self, path: int, beginnings: Sequence[np.ndarray]) -> float:
        """Return which part of the documents the router sends to a path."""
        prefix_tokens = self.plan.routing.prefix_tokens
        features = prefix_features(self.stages.base.model, beginnings, prefix_tokens)
        paths = self.stages.router.router.route(Prefixes(features=features))
        return float(np.mean(paths == path))

    def _others(self, grown: Predecessor) -> list[np.ndarray]:
        """Return the beginnings of some held-out documents of the old paths.

        Of chats there are none: their first user turn is not at the beginning of their windows.
        """
        found: list[np.ndarray] = []
        if self.folder.shard_index(self.plan).marked:
            return found
        each = max(1, SUMMARY_SEQUENCES // grown.grid.path_count)
        for path in range(grown.grid.path_count):
            windows = self.folder.validation_tokens(self.plan, path)
            # A long document has several windows, and the later ones begin with what the one
            # before ends with.
            prefix = self.plan.routing.prefix_tokens
            goes_on = (windows[1:, :prefix] == windows[:-1, -prefix:]).all(axis=1)
            begins = windows[:, :prefix][np.append(True, ~goes_on)[: len(windows)]][:each]
            rows = np.asarray(begins, dtype=np.int64)
            found += [row[row != PAD_TOKEN] for row in rows]
        return found

    def _say_how_to_start(self, *, is_new: bool) -> None:
        out = self.job.out
        self.job.display.run(self.plan, parameter_counts(self.folder.grid(self.plan)), str(out))
        if not is_new:
            self.say(
                "Everything is done already and the manifest is unchanged. For a new "
                "start give --start-in-s S --replace"
            )
        elif any((out / "states").glob("*")):
            self.say(
                f"{out / 'states'} holds states of an earlier run of this folder; move it "
                f"away unless you mean to inspect them"
            )


def summary_sequences(model: ModelConfig, paths: int) -> int:
    """Return how many held-out sequences of each path are scored to sum up a preparation: fewer of
    a large model."""
    parameters = sum(map(math.prod, parameter_shapes(model.without_adapters).values()))
    operations = 2 * parameters * model.sequence_length
    return max(1, min(SUMMARY_SEQUENCES, int(SUMMARY_OPERATIONS / operations)) // paths)
