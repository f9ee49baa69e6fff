"""What is shown at the end of a preparation: shards, what was added, how to start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dipaco.modules.layout import parameter_counts
from dipaco.protocol.plan import RunPlan
from dipaco.routing.routers.document_routing import prefix_features
from dipaco.routing.routers.router import Prefixes
from dipaco.routing.run_folder import RunFolder
from dipaco.training.inner import learning_rate_at

from .predecessor import Predecessor
from .score_stages import added_sample
from .stages import Job
from .stages_of_run import Stages

# Held-out documents of old paths that are routed anew, over all of them.
_SUMMARY_DOCUMENTS = 256
# Where the router finds less than this of a new path's documents, its owner is told what to do.
_FEW_FOUND = 0.8


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
        """Show the summary; `is_new` says whether the plan was signed just now."""
        before, grown = self.job.before, self.job.grown
        summaries = self.stages.shards.summaries
        self.job.display.shards(summaries)
        if grown is not None:
            self._say_of_added_paths(grown)
        else:
            self.job.display.routing(summaries)
        if before is not None:
            self._say_where_schedules_stand(before)
        self._say_how_to_start(is_new=is_new)

    def _say_where_schedules_stand(self, before: Predecessor) -> None:
        inner, steps = self.plan.inner, before.path_steps()
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
            found = self._share_of(path, beginnings)
            said = f"{found:.0%} of its documents to it"
            if others:
                taken = self._share_of(path, others)
                said += f", and {taken:.1%} of the held-out ones of the old paths"
            self.say(f"The router sends {said}")
            if found < _FEW_FOUND:
                self.say(
                    f"The others begin like texts of other paths. Where they are to be read, name "
                    f"the path (dipaco-generate --path {path}, the model path-{path} of "
                    f"dipaco-serve), or make a successor with a RUN.toml, which routes all anew"
                )
            if not summary.held_out_sequences:
                self.say(
                    f"No document of {name} is held out, so nothing says how good path {path} is; "
                    f"give more, or --set data.held_out_fraction=0.1"
                )

    def _share_of(self, path: int, beginnings: Sequence[np.ndarray]) -> float:
        """Return which part of the documents the router sends to a path."""
        prefix_tokens = self.plan.routing.prefix_tokens
        features = prefix_features(self.stages.base.model, beginnings, prefix_tokens)
        router = self.stages.router.router
        parts = np.array_split(features, len(features) // 1024 + 1)
        found = [router.route(Prefixes(features=part)) == path for part in parts]
        return float(np.mean(np.concatenate(found)))

    def _others(self, grown: Predecessor) -> list[np.ndarray]:
        """Return the beginnings of some held-out documents of the old paths.

        Of chats there are none: their first user turn is not at the beginning of their windows.
        """
        found: list[np.ndarray] = []
        if self.folder.shard_index(self.plan).marked:
            return found
        each = max(1, _SUMMARY_DOCUMENTS // grown.grid.path_count)
        for path in range(grown.grid.path_count):
            windows = self.folder.validation_tokens(self.plan, path)
            # A long document has several windows, and the later ones begin with what the one
            # before ends with.
            prefix = self.plan.routing.prefix_tokens
            goes_on = (windows[1:, :prefix] == windows[:-1, -prefix:]).all(axis=1)
            begins = windows[:, :prefix][np.append(True, ~goes_on)[: len(windows)]][:each]
            rows = np.asarray(begins, dtype=np.int64)
            found += [row[row != self.plan.model.padding_token] for row in rows]
        return found

    def _say_how_to_start(self, *, is_new: bool) -> None:
        counts = parameter_counts(self.folder.grid(self.plan))
        self.job.display.run(self.plan, counts, str(self.job.out))
        if not is_new:
            self.say(
                "Everything is done already and the manifest is unchanged. For a new "
                "start give --start-in-s S --replace"
            )
