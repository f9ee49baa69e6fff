"""One path more in a finished run: `prepare --from RUN --add-path NEW.jsonl`.

See design 4.9, successor. The new run has the old one's tokenizer, base model, paths and shards,
each with the same bytes. A new path has modules of its own in every level. They begin as those of
the old path that predicts the beginnings of the new documents best. The router gets one centroid
more: the mean of their features. All new documents go to the new path, and no others.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dipaco.base.errors import ConfigurationError, CorpusError, IntegrityError
from dipaco.base.files import link_or_copy
from dipaco.bootstrap.run_config import RunConfig, change_value
from dipaco.protocol.config import BEGIN_TOKEN, PAD_TOKEN, parse_config
from dipaco.protocol.plan import PathShard, RunPlan
from dipaco.routing.documents.corpus import CorpusConfig, holds_chats
from dipaco.routing.routers.document_routing import prefix_features
from dipaco.routing.routers.kinds import ROUTER_KINDS, load_router
from dipaco.routing.routers.router import Prefixes, Router
from dipaco.routing.shards import Beginnings, PathSummary, RowShape, ShardBuilder
from dipaco.routing.tokens.token_corpus import TokenCorpus
from dipaco.training.inner import learning_rate_at

from .local_scores import LocalScores, document_rows
from .pieces import encode
from .predecessor import Predecessor
from .prepare import Preparation, check_shards
from .prepare_options import PrepareOptions
from .stages import StageMarkers, corpus_fingerprint, inputs_hash
from .succession import SUMMARY_SEQUENCES
from .token_stage import TokenStage

# New documents whose beginnings the old paths are compared on, at most.
COMPARED_DOCUMENTS = 256
# What `--set` may change: how the run is trained, and how the new documents are read.
_FREE_TABLES = ("name", "seed", "inner", "outer", "rounds", "contributions", "mirrors", "data")
_GIVEN_KEYS = ("data.train", "data.validation", "data.hub")


def add_paths(
    files: Sequence[str],
    out: Path,
    options: PrepareOptions,
    *,
    predecessor: Predecessor,
    changes: Sequence[str] = (),
) -> RunPlan:
    """Make the run folder `out`: the run of `predecessor` with one path more for each of `files`.

    A file is a name or a pattern; see `prepare` for everything else. Raises ConfigurationError for
    a run whose router has no centroids or that has no trained states, CorpusError for documents
    that cannot be read or have no text, IntegrityError when a shard is not in the old folder.
    """
    config = config_with_paths(predecessor, files, changes)
    return PathAddition(config, out, predecessor, options).run()


def config_with_paths(
    old: Predecessor, files: Sequence[str], changes: Sequence[str] = ()
) -> RunConfig:
    """Return the configuration of the run in `old`, with a path more for each of `files`.

    The learning rate's schedule goes on, and batches are drawn with another seed, so that no path
    reads its shard in the same order again. Raises ConfigurationError.
    """
    plan = old.plan
    router = ROUTER_KINDS.get(plan.routing.kind)
    kind = router.kind_with_path if router else None
    if kind is None:
        raise ConfigurationError(
            f"--add-path: the router of {old.path} is of kind '{plan.routing.kind}', and only "
            f"k-means has a centroid for each path to add one to; make a successor with kind = "
            f"'kmeans' under [router] first, and add the path to that"
        )
    for file in files:
        if not any(mark in file for mark in "*?[") and not Path(file).exists():
            raise ConfigurationError(f"--add-path {file}: there is no such file")
        if files.count(file) > 1:
            raise ConfigurationError(
                f"--add-path {file} is given twice; each path needs documents of its own"
            )
    values = plan.model_dump(mode="json", include=set(RunConfig.model_fields))
    values["seed"] = (plan.seed + 1) % 2**32
    values["grid"]["added_paths"] += len(files)
    values["inner"]["first_step"] = old.path_steps()
    values["router"] = {**plan.routing.model_dump(), "kind": kind}
    values["data"] = {"train": list(files)}
    for change in changes:
        key = change.partition("=")[0].strip()
        if key.partition(".")[0] not in _FREE_TABLES or key in _GIVEN_KEYS:
            raise ConfigurationError(
                f"--set '{change}': with --add-path this is as in the run before, whose paths stay "
                f"what they are; {', '.join(_FREE_TABLES[:-1])} may change, and how the files of "
                f"--add-path are read: data.text_field, data.held_out_fraction"
            )
        change_value(values, change)
    config = parse_config(RunConfig, values, "--add-path")
    return config.model_copy(update={"data": config.data.relative_to(Path.cwd())})


class PathAddition(Preparation):
    """The preparation of a run that is another one with paths more."""

    @property
    def old(self) -> Predecessor:
        """The run that paths are added to."""
        assert self.predecessor is not None
        return self.predecessor

    @cached_property
    def marked(self) -> bool:
        """Whether the shards are made of chats."""
        return self.old.folder.shard_index(self.old.plan).marked

    @cached_property
    def _holds_chats(self) -> bool:
        return self.marked

    @cached_property
    def new_paths(self) -> dict[int, _NewPath]:
        """What each new path needs of its own, by path."""
        first = self.old.grid.path_count
        return {
            path: _NewPath(self, path, file)
            for path, file in enumerate(self.config.data.train, first)
        }

    @cached_property
    def base(self) -> str:
        """The old base model, which the router's features come from."""
        assert self.succession is not None
        return self.succession.take(self.old.plan.blobs.base)

    @cached_property
    def router(self) -> str:
        """The old router with one centroid more for each new path."""
        files = [new.tokens_hash for new in self.new_paths.values()]
        inputs = inputs_hash("router", self.old.plan.blobs.router, self.base, files)

        def make() -> dict[str, Any]:
            router = self.old.folder.router(self.old.plan)
            with self.display.stage("router"):
                for new in self.new_paths.values():
                    router = router.with_path(self._features(new.beginnings))
            return {"sha256": self.blobs.add_bytes(router.to_bytes())}

        return str(self.markers.stage("router", inputs, make)["sha256"])

    def _features(self, beginnings: Sequence[np.ndarray]) -> np.ndarray:
        return prefix_features(self.base_model, beginnings, self.config.router.prefix_tokens)

    @cached_property
    def _shards_hash(self) -> str:
        files = [new.tokens_hash for new in self.new_paths.values()]
        return inputs_hash("shards", self.old.plan.blobs.shards, files)

    def _make_shards(self) -> dict[str, Any]:
        old = self.old.folder.shard_index(self.old.plan)
        for shard in old.paths:
            for sha256 in (shard.train_sha256, shard.validation_sha256):
                self._take_shard(shard, sha256)
        new = [new.make_shard() for new in self.new_paths.values()]
        index = old.model_copy(update={"paths": (*old.paths, *new)})
        return {"sha256": self.blobs.add_bytes(index.canonical_json())}

    def _take_shard(self, shard: PathShard, sha256: str) -> None:
        if self.blobs.has(sha256):
            return
        if not self.old.folder.blobs.has(sha256):
            raise IntegrityError(
                f"{self.old.path} lacks the shard of path {shard.path} (blob {sha256[:16]}), which "
                f"the new run has too; give the folder of prepare with --from, or a copy of it"
            )
        link_or_copy(self.old.folder.blobs.path(sha256), self.blobs.path(sha256))

    def _copied(self) -> tuple[int, ...]:
        return tuple(new.nearest for new in self.new_paths.values())

    def _summarise(self, plan: RunPlan, is_new: bool) -> None:
        shards = self.folder.shard_index(plan).paths
        new = [shards[path] for path in self.new_paths]
        self.display.shards(new, [new.summary() for new in self.new_paths.values()])
        router = load_router(self.blobs.read(self.router))
        for path, added in self.new_paths.items():
            self.display.say(
                f"Path {path} ({added.name}) begins as path {added.nearest}, which predicts the "
                f"beginnings of its documents best"
            )
            said = f"{self._share_of(path, router, added.beginnings):.0%} of its documents to it"
            if others := self._others(plan):
                taken = self._share_of(path, router, others)
                said += f", and {taken:.1%} of the held-out ones of the old paths"
            self.display.say(f"The router sends {said}")
            if not shards[path].validation_sequences:
                self.display.say(
                    f"No document of {added.name} is held out, so nothing says how good path "
                    f"{path} is; give more, or --set data.held_out_fraction=0.1"
                )
        assert self.succession is not None
        self.succession.say_where_it_stands(self.folder, plan)
        rate = learning_rate_at(plan.inner, 0)
        if rate < plan.inner.learning_rate:
            self.display.say(
                f"[inner] All paths go on in their schedule, at {rate:.2g} of "
                f"{plan.inner.learning_rate:.2g}; to begin it again give --set inner.first_step=0"
            )
        self._say_how_to_start(plan, is_new)

    def _share_of(self, path: int, router: Router, beginnings: Sequence[np.ndarray]) -> float:
        """Return which part of the documents the router sends to a path."""
        paths = router.route(Prefixes(features=self._features(beginnings)))
        return float(np.mean(paths == path))

    def _others(self, plan: RunPlan) -> list[np.ndarray]:
        """Return the beginnings of some held-out documents of the old paths.

        Of chats there are none: their first user turn is not at the beginning of their windows.
        """
        found: list[np.ndarray] = []
        if self.marked:
            return found
        each = max(1, SUMMARY_SEQUENCES // self.old.grid.path_count)
        for path in range(self.old.grid.path_count):
            windows = self.folder.validation_tokens(plan, path)
            # A long document has several windows, and only the first begins like a document.
            rows = windows[windows[:, 0] == BEGIN_TOKEN][:each, : plan.routing.prefix_tokens]
            found += [row[row != PAD_TOKEN] for row in np.asarray(rows, dtype=np.int64)]
        return found


class _NewPath:
    """The documents of one new path, and what is made of them, each once."""

    def __init__(self, run: PathAddition, path: int, file: str) -> None:
        self.run, self.path, self.file, self.name = run, path, file, Path(file).name
        self._data: CorpusConfig = run.config.data.model_copy(update={"train": (file,)})
        self._work = run.work / f"P{path}"

    @cached_property
    def tokens_hash(self) -> str:
        """The hash of what the tokens depend on."""
        with self._named():
            fingerprint = corpus_fingerprint(self._data)
            self._check_form()
        prefix = self.run.config.router.prefix_tokens
        return inputs_hash("tokens", fingerprint, self.run.tokenizer, self.run.marked, prefix)

    @cached_property
    def corpora(self) -> tuple[TokenCorpus, TokenCorpus]:
        """The documents as tokens, training and held-out."""
        run = self.run
        run.check_tokenizer()
        chat_prefix_tokens = run.config.router.prefix_tokens if run.marked else None
        stage = TokenStage(
            run.config.model_copy(update={"data": self._data}), self._work,
            StageMarkers(self._work, run.blobs), run.options, self.tokens_hash,
            functools.partial(encode, run.out, run.tokenizer, chat_prefix_tokens),
            chat_prefix_tokens,
        )  # fmt: skip
        with self._named():
            return stage.corpora(None)

    def _check_form(self) -> None:
        """Raise CorpusError for chats in a run of texts, and for texts in a run of chats."""
        if holds_chats(self._data) != self.run.marked:
            theirs, ours = ("texts", "chats") if self.run.marked else ("chats", "texts")
            raise CorpusError(
                f"it holds {theirs}, but {self.run.old.path} trains on {ours}, and a run has "
                f"shards of one kind; give {ours}"
            )

    @cached_property
    def beginnings(self) -> list[np.ndarray]:
        """The first tokens of a sample of the training documents."""
        corpus, router = self.corpora[0], self.run.config.router
        chosen = corpus.sample(router.training_documents, self.run.old.plan.seed)
        return [corpus.beginning(int(index), router.prefix_tokens) for index in chosen]

    @cached_property
    def nearest(self) -> int:
        """The old path that gives the beginnings the greatest likelihood; of equals the first."""
        run, length = self.run, self.run.config.router.prefix_tokens
        rows = document_rows(self.beginnings[:COMPARED_DOCUMENTS], length)
        scores = LocalScores(self._work / "scores", run.old, rows, 0)
        paths = range(run.old.grid.path_count)
        missing = [path for path in paths if scores.load(path) is None]
        if missing:
            with run.display.stage(f"the path nearest to {self.name}") as progress:
                scores.make(
                    missing, run.device, mapped=run.options.workers.map,
                    progress=lambda done, total: progress.update(done, total, "paths"),
                )  # fmt: skip
        losses = [float(found.sum()) for p in paths if (found := scores.load(p)) is not None]
        return int(np.argmin(losses))

    def make_shard(self) -> PathShard:
        """Write the shard: all of the documents."""
        builder = self._shard_builder()
        with self.run.display.stage(f"shard of path {self.path}") as progress:
            builder.build(
                *self.corpora, _to_the_only_path,
                progress=lambda done, total: progress.update(done, total, "documents"),
            )  # fmt: skip
            check_shards(builder.summaries())
            [shard] = builder.finish(self.run.blobs).paths
        return shard.model_copy(update={"path": self.path})

    def summary(self) -> PathSummary:
        """Return what is shown of the shard."""
        return self._shard_builder().summaries()[0]

    def _shard_builder(self) -> ShardBuilder:
        model, prefix = self.run.config.model, self.run.config.router.prefix_tokens
        rows = RowShape(
            sequence_length=model.sequence_length,
            prefix_tokens=prefix,
            vocabulary_size=model.vocabulary_size,
            marked=self.run.marked,
        )
        inputs = inputs_hash("shard", self.tokens_hash, prefix)
        return ShardBuilder(self._work / "shards", rows, 1, inputs)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Say where the documents come from that cannot be read."""
        try:
            yield
        except CorpusError as error:
            raise CorpusError(
                f"--add-path {self.file}: {error}"
                f"{' (here --set data.KEY=VALUE)' if '[data]' in str(error) else ''}"
            ) from None


def _to_the_only_path(beginnings: Beginnings) -> np.ndarray:
    return np.zeros((len(beginnings.tokens), 1), dtype=np.int64)
