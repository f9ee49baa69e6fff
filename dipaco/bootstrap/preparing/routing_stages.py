"""The stages that send documents to paths: features, the router, and the shards."""

from __future__ import annotations

import functools
import hashlib
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from dipaco.base.errors import ConfigurationError, CorpusError, IntegrityError
from dipaco.base.files import link_or_copy
from dipaco.modules.grow import Growth
from dipaco.protocol.plan import PathShard, ShardIndex
from dipaco.routing.routers.document_routing import prefix_features
from dipaco.routing.routers.kinds import ROUTER_KINDS, RouterSample, fit_router, load_router
from dipaco.routing.routers.router import Router
from dipaco.routing.shards import Beginnings, PathSummary, RowShape, ShardBuilder

from .base_stage import BaseStage
from .corpus_stages import TokenizerStage, TokensStage
from .pieces import RoutingTools, one_thread, route
from .predecessor import Predecessor
from .score_stages import (
    Sample,
    ScoresStage,
    added_sample,
    document_rows,
    read_array,
    write_array,
)
from .stages import Job, Stage

# Of documents: one path gets all of them, and its centre matters only where paths are added later.
_ENOUGH_FOR_ONE_PATH = 256
# How many of the documents that begin alike one path may get, as a multiple of an even share.
_MANY_ALIKE = 1.5
_FILES = "files"


class _FeaturesStage(Stage):
    """Compute the features of the beginnings of some documents, float32 [N, H]."""

    name = "features"

    def __init__(self, job: Job, sample: Sample, base: BaseStage) -> None:
        super().__init__(job, sample.tokens.part)
        self._sample, self._base = sample, base

    def inputs(self) -> Sequence[Any]:
        return [*self._sample.inputs(), self._base.sha256]

    def is_whole(self, outputs: dict[str, Any]) -> bool:
        return read_array(self.folder / "features.npy") is not None

    def make(self) -> dict[str, Any]:
        sample = self._sample
        with self.job.display.stage("features"), one_thread():
            features = prefix_features(self._base.model, sample.beginnings(), sample.prefix_tokens)
            write_array(self.folder / "features.npy", features)
        return {}

    @cached_property
    def features(self) -> np.ndarray:
        self.do()
        features = read_array(self.folder / "features.npy")
        assert features is not None  # it is done
        return features


class RouterStage(Stage):
    """Fit a router to a sample of the training documents; or, where paths are added, give the old
    router one centroid more for each."""

    name = "router"

    def __init__(self, job: Job, tokens: Sequence[TokensStage], base: BaseStage) -> None:
        super().__init__(job)
        self._base, self._kind = base, ROUTER_KINDS[job.config.router.kind]
        if job.grown is None:
            self._samples = [self._sample_to_fit(tokens[0])]
        else:
            self._samples = [added_sample(job, job.grown, one) for one in tokens]
        self._features = [_FeaturesStage(job, one, base) for one in self._samples]

    def _sample_to_fit(self, tokens: TokensStage) -> Sample:
        config = self.job.config
        most, longer_than = config.router.training_documents, 0
        if self._kind.fitted_on_scores:
            longer_than = config.router.prefix_tokens
        elif config.grid.path_count == 1:
            most = min(most, _ENOUGH_FOR_ONE_PATH)
        return Sample(tokens, config.router.prefix_tokens, most, config.seed, longer_than)

    @property
    def router(self) -> Router:
        return load_router(self.job.blobs.read(self.sha256))

    def inputs(self) -> Sequence[Any]:
        config, grown = self.job.config, self.job.grown
        samples = [sample.inputs() for sample in self._samples]
        if grown is not None:
            return [grown.plan.blobs.router, self._base.sha256, samples]
        # The router does not decide how many shards a document goes to.
        router = config.router.model_dump(mode="json", exclude={"train_paths"})
        scores = [] if self._nll is None else [hashlib.sha256(self._nll.tobytes()).hexdigest()]
        grid = [config.grid.modules_per_level, config.seed]
        return [samples, self._base.sha256, router, *grid, *scores]

    def make(self) -> dict[str, Any]:
        grown = self.job.grown
        if grown is None:
            router = self._fitted()
        else:
            router = grown.folder.router(grown.plan)
            for stage in self._features:
                router = router.with_path(stage.features)
        return {"sha256": self.job.blobs.add_bytes(router.to_bytes())}

    def _fitted(self) -> Router:
        config, [drawn] = self.job.config, self._samples
        corpus = drawn.tokens.corpora[0]
        if self._kind.needs_labels:  # of all documents: they cost nothing, and none may be missed
            labels = [corpus.label_name(index) for index in range(len(corpus))]
            sample = RouterSample(weights=corpus.lengths(), labels=labels)
        else:
            features = self._features[0].features if self._kind.needs_features else None
            if features is not None:
                self._say_if_many_are_alike(drawn)
            weights = corpus.lengths()[drawn.chosen]
            sample = RouterSample(weights=weights, features=features, nll=self._nll)
        with self.job.display.stage("router"):
            return fit_router(config.router, sample, config.grid.modules_per_level, config.seed)

    def _say_if_many_are_alike(self, sample: Sample) -> None:
        beginnings = sample.beginnings()
        alike = max(Counter(one.tobytes() for one in beginnings).values()) / len(beginnings)
        if alike * self.job.config.grid.path_count > _MANY_ALIKE:
            self.job.display.say(
                f"{alike:.0%} of the documents begin with the same {sample.prefix_tokens} tokens, "
                f"and one path gets them all; raise prefix_tokens under [router], or cut off what "
                f"they have in common"
            )

    @cached_property
    def _nll(self) -> np.ndarray | None:
        """The loss of each document of the sample as each new path's origin has it, float64
        [N, paths], for a router that is fitted on that."""
        if not self._kind.fitted_on_scores:
            return None
        config, before, [sample] = self.job.config, self.job.before, self._samples
        assert before is not None  # checked before anything was made
        origins = scored_origins(self.job, before)
        rows = document_rows(sample.documents(), config.model.sequence_length, config.model)
        scores = ScoresStage(self.job, before, rows, origins, config.router.prefix_tokens)
        return np.stack([scores.of(origin) for origin in origins], axis=1)


def scored_origins(job: Job, before: Predecessor) -> list[int]:
    """Return the old path that each new one goes on with. Raises ConfigurationError unless they
    differ: labels say under which old path a document is likeliest, and copies are equally likely.
    """
    growth, paths = Growth(before.grid, job.grid), job.grid.path_count
    origins = [growth.origin_path(path) for path in range(paths)]
    if len(set(origins)) < paths:
        raise ConfigurationError(
            f"a router trained on scores needs as many trained paths as the grid has, but its "
            f"{paths} paths come from {len(set(origins))} of the old run's "
            f"{before.grid.path_count}, so some would be equal; write kind = 'kmeans' under "
            f"[router], and re-shard in a further successor"
        )
    return origins


class ShardsStage(Stage):
    """Write the token files of all paths, as blobs, and the index that names them.

    Every document is routed; or, where paths are added, the old shards stay as they are, and each
    new path gets all of its documents.
    """

    name = "shards"

    def __init__(
        self,
        job: Job,
        tokenizer: TokenizerStage,
        tokens: Sequence[TokensStage],
        base: BaseStage,
        router: RouterStage,
    ) -> None:
        super().__init__(job)
        self._tokenizer, self._tokens, self._base, self._router = tokenizer, tokens, base, router

    @property
    def summaries(self) -> tuple[PathSummary, ...]:
        """What was written for each path in this preparation."""
        return tuple(PathSummary.model_validate(one) for one in self.outputs["summaries"])

    def inputs(self) -> Sequence[Any]:
        config, grown = self.job.config, self.job.grown
        tokens = [one.hash for one in self._tokens]
        rows = [config.model.sequence_length, config.router.prefix_tokens]
        if grown is not None:
            return [grown.plan.blobs.shards, tokens, *rows]
        paths = [config.grid.path_count, config.router.train_paths]
        return [tokens, self._base.sha256, self._router.sha256, *rows, *paths]

    def is_whole(self, outputs: dict[str, Any]) -> bool:
        if not super().is_whole(outputs):
            return False
        index = ShardIndex.model_validate_json(self.job.blobs.read(str(outputs["sha256"])))
        files = [(shard.train_sha256, shard.validation_sha256) for shard in index.paths]
        return all(self.job.blobs.has(sha256) for pair in files for sha256 in pair)

    def make(self) -> dict[str, Any]:
        job, config, grown = self.job, self.job.config, self.job.grown
        if grown is None:
            if self._tokens[0].corpus.holds_chats:
                self._say_what_is_cut()
            tools = RoutingTools(
                job.out, self._tokenizer.sha256, self._base.sha256, self._router.sha256,
                config.model, config.router.prefix_tokens, str(job.device),
            )  # fmt: skip
            routed = functools.partial(route, tools)
            paths = range(config.grid.path_count)
            index, summaries = self._written(self._tokens[0], paths, routed, "shards")
        else:
            index, summaries = grown.folder.shard_index(grown.plan), []
            for shard in index.paths:
                self._take(grown, shard)
            for path, tokens in enumerate(self._tokens, grown.grid.path_count):
                shown = f"shard of path {path}"
                new, [summary] = self._written(
                    tokens, range(path, path + 1), _to_the_only_path, shown
                )
                index = index.model_copy(update={"paths": (*index.paths, *new.paths)})
                summaries.append(summary)
        sha256 = job.blobs.add_bytes(index.canonical_json())
        return {"sha256": sha256, "summaries": [one.model_dump() for one in summaries]}

    def _written(
        self,
        tokens: TokensStage,
        paths: range,
        routed: Callable[[Beginnings], np.ndarray],
        shown: str,
    ) -> tuple[ShardIndex, list[PathSummary]]:
        """Write the shards of some paths, for which documents are `routed`."""
        job, config = self.job, self.job.config
        rows = RowShape(
            sequence_length=config.model.sequence_length,
            prefix_tokens=config.router.prefix_tokens,
            vocabulary_size=config.model.vocabulary_size,
            padding=config.model.padding_token,
            marked=tokens.corpus.holds_chats,
        )
        builder = ShardBuilder(
            self.folder / _FILES / str(paths.start), rows, len(paths),
            train_paths=1 if job.grown else config.router.train_paths,
        )  # fmt: skip
        with job.display.stage(shown) as progress:
            builder.build(
                *tokens.corpora, routed, mapped=job.workers.map,
                progress=lambda done, total: progress.update(done, total, "documents"),
            )  # fmt: skip
            check_shards(builder.summaries())
            index = builder.finish(job.blobs)
        named = [{"path": path} for path in paths]
        shards = tuple(
            shard.model_copy(update=name) for shard, name in zip(index.paths, named, strict=True)
        )
        summaries = zip(builder.summaries(), named, strict=True)
        return (
            index.model_copy(update={"paths": shards}),
            [summary.model_copy(update=name) for summary, name in summaries],
        )

    def _take(self, grown: Predecessor, shard: PathShard) -> None:
        theirs, blobs = grown.folder.blobs, self.job.blobs
        for sha256 in (shard.train_sha256, shard.validation_sha256):
            if not blobs.has(sha256) and not theirs.has(sha256):
                raise IntegrityError(
                    f"{grown.path} lacks the shard of path {shard.path} (blob {sha256[:16]}), "
                    f"which the new run has too; give the folder of prepare with --from, or a "
                    f"copy of it"
                )
            link_or_copy(theirs.path(sha256), blobs.path(sha256))

    def tidy(self) -> None:
        # They are in the blob store as well.
        shutil.rmtree(self.folder / _FILES, ignore_errors=True)

    def _say_what_is_cut(self) -> None:
        length = self.job.config.model.sequence_length
        lengths = self._tokens[0].corpora[0].lengths()
        if cut := int((lengths > length).sum()):
            self.job.display.say(
                f"{cut:,} of {len(lengths):,} chats are longer than a row of {length:,} tokens; "
                f"the parts cut off no longer see the question (sequence_length under [model])"
            )


def _to_the_only_path(beginnings: Beginnings) -> np.ndarray:
    return np.zeros((len(beginnings.tokens), 1), dtype=np.int64)


def check_shards(summaries: Sequence[PathSummary]) -> None:
    """Raise CorpusError if a path has no training document."""
    empty = [str(summary.path) for summary in summaries if not summary.documents]
    if empty:
        which = f"path {empty[0]} is" if len(empty) == 1 else f"paths {', '.join(empty)} are"
        raise CorpusError(
            f"the shard of {which} empty, so there would be nothing to train there; under [router] "
            f"write balanced = true (k-means) or a higher least_share (discriminative), choose "
            f"fewer modules_per_level under [grid], or give more data"
        )
