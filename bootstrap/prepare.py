"""Preparing a run: tokenizer, tokens, base model, router, shards, signed manifest.

Each stage notes what it was made from, so a preparation that was stopped (or killed) goes on where
it was, and a changed RUN.toml repeats only what depends on the change. Whoever only trains never
runs this; see "For operators" in README.md.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from dipaco.dht.manifest import load_or_create_operator_key, sign_manifest
from dipaco.modules.errors import ConfigurationError, CorpusError
from dipaco.modules.evaluate import score_sequences
from dipaco.modules.files import atomic_write
from dipaco.modules.transformer import PathModel
from dipaco.routing.corpus import Document, is_held_out, iterate_documents
from dipaco.routing.document_routing import DocumentRouter
from dipaco.routing.features import prefix_features
from dipaco.routing.plan import (
    PROTOCOL_VERSION,
    RoutingPlan,
    RunBlobs,
    RunPlan,
    ShardIndex,
    canonical_json,
)
from dipaco.routing.routers import KMeansRouter, Router, load_router
from dipaco.routing.run_directory import RunDirectory
from dipaco.routing.shards import PathSummary, ShardBuilder
from dipaco.routing.token_corpus import TokenCorpus, TokenCorpusWriter, write_token_corpora
from dipaco.routing.tokenizer import Tokenizer, train_tokenizer

from .display import Display
from .pretrain import base_model_bytes, pretrain
from .run_config import RunConfig, load_run_config
from .stages import StageMarkers, corpus_fingerprint, inputs_hash

logger = logging.getLogger(__name__)

# Held-out sequences that the base model is scored on for the summary, over all paths.
_SUMMARY_SEQUENCES = 256


def prepare(
    run_toml: Path,
    out: Path,
    *,
    start_in_s: float | None = None,
    operator_key: Path | None = None,
    device: torch.device | None = None,
    display: Display | None = None,
) -> RunPlan:
    """Make the run directory `out` from a RUN.toml and return the plan that was signed.

    Round 0 begins `start_in_s` seconds from now (default: at once). When everything is done
    already, nothing is made or signed again unless `start_in_s` is given. The operator's key is
    `operator_key`, by default `out/operator.pem`, made if it is missing.

    Raises ConfigurationError for a wrong RUN.toml, CorpusError for an unusable corpus or an empty
    shard, StorageError for a full disk.
    """
    preparation = Preparation(
        load_run_config(run_toml),
        out,
        operator_key or out / "operator.pem",
        device or torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        display or Display(),
    )
    return preparation.run(start_in_s)


@dataclass
class Preparation:
    """One preparation; the stages call each other's results, each made once."""

    config: RunConfig
    out: Path
    operator_key: Path
    device: torch.device
    display: Display

    def __post_init__(self) -> None:
        self.work = self.out / "work"
        self.directory = RunDirectory(self.out)
        self.blobs = self.directory.blobs
        self.markers = StageMarkers(self.work, self.blobs)

    def run(self, start_in_s: float | None) -> RunPlan:
        """Do all stages that are not done, then sign."""
        tokenizer, base, router, shards = self.tokenizer, self.base, self.router, self.shards
        blobs = RunBlobs(tokenizer=tokenizer, router=router, base=base, shards=shards, genesis=None)
        plan, is_new = self._sign(blobs, start_in_s)
        self._summarise(plan, is_new)
        return plan

    # Each stage: the hash of its inputs, and its result as the SHA-256 of a blob.

    @cached_property
    def tokenizer(self) -> str:
        """Stage 1: train the tokenizer, or take the one that is given."""
        config = self.config.tokenizer
        given = config.model_file
        source = self._given_tokenizer(given) if given else [self._corpus_hash, self.config.seed]
        inputs = inputs_hash(
            "tokenizer", config.kind, config.training_characters,
            self.config.model.vocabulary_size, source,
        )  # fmt: skip
        if found := self.markers.done("tokenizer", inputs):
            return str(found["sha256"])
        if given:
            sha256 = self.blobs.add_file(given)
        else:
            sha256 = self._train_tokenizer()
        self.markers.mark("tokenizer", inputs, {"sha256": sha256})
        return sha256

    def _given_tokenizer(self, path: Path) -> str:
        if not path.is_file():
            raise ConfigurationError(f"[tokenizer] model_file: there is no {path}")
        pieces = Tokenizer(path).vocabulary_size
        if pieces > self.config.model.vocabulary_size:
            raise ConfigurationError(
                f"{path} has {pieces} pieces; write vocabulary_size = {pieces} under [model]"
            )
        return inputs_hash(path.read_bytes().hex())

    def _train_tokenizer(self) -> str:
        limit = self.config.tokenizer.training_characters
        partial = self.work / "tokenizer.model"
        with self.display.stage("tokenizer") as progress:

            def texts() -> Iterator[str]:
                characters = 0
                for document, held_out in self._documents(train_only=True):
                    if not held_out:
                        characters += len(document.text)
                        progress.update(characters, None, "characters read")
                        yield document.text

            train_tokenizer(
                texts(),
                self.config.model.vocabulary_size,
                partial,
                character_limit=limit,
                seed=self.config.seed,
                kind=self.config.tokenizer.kind,
            )
        sha256 = self.blobs.add_file(partial)
        partial.unlink()
        return sha256

    @cached_property
    def corpora(self) -> tuple[TokenCorpus, TokenCorpus]:
        """Stage 2: all documents as tokens, training and held-out."""
        vocabulary_size = self.config.model.vocabulary_size
        folders = {part: self.work / "tokens" / part for part in ("train", "validation")}
        if not self.markers.done("tokens", self._tokens_hash):
            train, validation = (
                TokenCorpusWriter(folder, vocabulary_size, self._tokens_hash)
                for folder in folders.values()
            )
            tokenizer = Tokenizer(self.blobs.read(self.tokenizer))
            with self.display.stage("tokens") as progress:
                for documents, tokens in write_token_corpora(
                    self._documents(), tokenizer, train, validation
                ):
                    progress.update(documents, None, f"documents, {tokens:,} tokens")
            self.markers.mark(
                "tokens", self._tokens_hash, {"train": train.tokens, "held_out": validation.tokens}
            )
        train_corpus, validation_corpus = (
            TokenCorpus(folder, vocabulary_size) for folder in folders.values()
        )
        if not len(train_corpus):
            raise CorpusError(
                "all documents were held out; give more data, or name validation files under [data]"
            )
        return train_corpus, validation_corpus

    @cached_property
    def _tokens_hash(self) -> str:
        return inputs_hash("tokens", self._corpus_hash, self.tokenizer)

    @cached_property
    def base(self) -> str:
        """Stage 3: dense pretraining."""
        config = self.config
        inputs = inputs_hash(
            "base", self._tokens_hash, config.model, config.base_inner(), config.base.steps,
            config.seed,
        )  # fmt: skip
        if found := self.markers.done("base", inputs):
            return str(found["sha256"])
        rows = self.corpora[0].rows(config.model.sequence_length)
        with self.display.stage("base model") as progress:
            model = pretrain(
                config.model,
                config.base_inner(),
                rows,
                config.base.steps,
                seed=config.seed,
                device=self.device,
                checkpoint=self.work / "base.pt",
                inputs=inputs,
                progress=lambda step, loss: progress.update(
                    step, config.base.steps, f"steps, loss {loss:.3f}"
                ),
            )
        sha256 = self.blobs.add_bytes(base_model_bytes(model))
        self.markers.mark("base", inputs, {"sha256": sha256})
        (self.work / "base.pt").unlink(missing_ok=True)
        return sha256

    @cached_property
    def base_model(self) -> PathModel:
        """The base model on the device of this preparation."""
        return self.directory.load_base_model(self.config.model, self.base).to(self.device)

    @cached_property
    def router(self) -> str:
        """Stage 4: fit the router on the features of a sample of training documents."""
        config = self.config.router
        inputs = inputs_hash("router", self._tokens_hash, self.base, config, self._paths,
                             self.config.seed)  # fmt: skip
        if found := self.markers.done("router", inputs):
            return str(found["sha256"])
        with self.display.stage("router"):
            sha256 = self.blobs.add_bytes(self._fit_router().to_bytes())
        self.markers.mark("router", inputs, {"sha256": sha256})
        return sha256

    def _fit_router(self) -> Router:
        train, config = self.corpora[0], self.config.router
        generator = np.random.default_rng(self.config.seed)
        size = min(config.training_documents, len(train))
        chosen = np.sort(generator.choice(len(train), size=size, replace=False))
        documents = [train.document(int(index))[: config.prefix_tokens] for index in chosen]
        return KMeansRouter.fit(
            prefix_features(self.base_model, documents, config.prefix_tokens),
            self._paths,
            seed=self.config.seed,
            balanced=config.balanced,
            weights=train.lengths()[chosen],
            restarts=config.restarts,
        )

    @cached_property
    def shards(self) -> str:
        """Stage 5: route every document and write the token files."""
        inputs = self._shards_hash
        if found := self.markers.done("shards", inputs):
            sha256 = str(found["sha256"])
            index = ShardIndex.model_validate_json(self.blobs.read(sha256))
            files = [(shard.train_sha256, shard.validation_sha256) for shard in index.paths]
            if all(self.blobs.has(sha256) for pair in files for sha256 in pair):
                return sha256
        builder = self._shard_builder()
        with self.display.stage("shards") as progress:
            builder.build(
                *self.corpora, lambda done, total: progress.update(done, total, "documents")
            )
            check_shards(builder.summaries())
            index = builder.finish(self.blobs)
        sha256 = self.blobs.add_bytes(canonical_json(index.model_dump(mode="json")))
        self.markers.mark("shards", inputs, {"sha256": sha256})
        return sha256

    @cached_property
    def _shards_hash(self) -> str:
        return inputs_hash(
            "shards", self._tokens_hash, self.base, self.router, self._paths,
            self.config.model.sequence_length, self.config.router.prefix_tokens,
        )  # fmt: skip

    def _shard_builder(self) -> ShardBuilder:
        router = DocumentRouter(
            Tokenizer(self.blobs.read(self.tokenizer)),
            self.base_model,
            load_router(self.blobs.read(self.router)),
            self.config.router.prefix_tokens,
        )
        return ShardBuilder(
            self.work / "shards",
            router,
            self._paths,
            self.config.model.sequence_length,
            self.config.model.vocabulary_size,
            self._shards_hash,
        )

    def _documents(self, train_only: bool = False) -> Iterator[tuple[Document, bool]]:
        """Yield all documents, each with whether it is held out."""
        data = self.config.data
        for document in iterate_documents(data, "train"):
            held_out = not data.has_validation and is_held_out(document, data.held_out_fraction)
            yield document, held_out
        if data.has_validation and not train_only:
            for document in iterate_documents(data, "validation"):
                yield document, True

    @cached_property
    def _corpus_hash(self) -> str:
        return corpus_fingerprint(self.config.data)

    @property
    def _paths(self) -> int:
        return math.prod(self.config.grid.modules_per_level)

    def _sign(self, blobs: RunBlobs, start_in_s: float | None) -> tuple[RunPlan, bool]:
        """Stage 6: sign the plan, unless the same one is signed already. Returns the plan, and
        whether it is new."""
        config = self.config
        plan = RunPlan(
            protocol_version=PROTOCOL_VERSION,
            name=config.name,
            seed=config.seed,
            start_s=round(time.time() + (start_in_s or 0.0), 3),
            model=config.model,
            grid=config.grid,
            inner=config.inner,
            outer=config.outer,
            rounds=config.rounds,
            averaging=config.averaging,
            routing=RoutingPlan(kind=config.router.kind, prefix_tokens=config.router.prefix_tokens),
            blobs=blobs,
            mirrors=config.mirrors,
        )
        if start_in_s is None and self.directory.manifest_path.exists():
            signed = self.directory.plan()
            if signed.model_copy(update={"start_s": plan.start_s}) == plan:
                return signed, False
        key = load_or_create_operator_key(self.operator_key)
        atomic_write(self.directory.manifest_path, sign_manifest(plan, key))
        return plan, True

    def _summarise(self, plan: RunPlan, is_new: bool) -> None:
        self.display.shards(self.directory.shard_index(plan), self._shard_builder().summaries())
        perplexity, tokens = self._base_perplexity(plan)
        if tokens:
            self.display.say(
                f"Base model: validation perplexity {perplexity:.2f} over {tokens:,} tokens"
            )
        self.display.run(plan, self.directory.grid(plan).parameter_counts(), str(self.out))
        if not is_new:
            self.display.say(
                "Everything was done already; the manifest stands as it was signed. For a new "
                "start give --start-in-s"
            )
        elif any((self.out / "states").glob("*")):
            self.display.say(
                f"{self.out / 'states'} holds states of an earlier run of this directory; move it "
                f"away unless you mean to inspect them"
            )

    def _base_perplexity(self, plan: RunPlan) -> tuple[float, int]:
        """Score the base model on some held-out sequences of every path."""
        each = max(1, _SUMMARY_SEQUENCES // self._paths)
        total_nll, total_tokens = 0.0, 0
        for path in range(self._paths):
            rows = self.directory.validation_tokens(plan, path)[:each]
            if len(rows):
                tokens = torch.from_numpy(rows.astype(np.int64))
                nll, count = score_sequences(
                    self.base_model, tokens, plan.routing.prefix_tokens, device=self.device
                )
                total_nll, total_tokens = total_nll + nll, total_tokens + count
        return math.exp(total_nll / max(1, total_tokens)), total_tokens


def check_shards(summaries: tuple[PathSummary, ...]) -> None:
    """Raise CorpusError if a path has no training document."""
    empty = [str(summary.path) for summary in summaries if not summary.train_documents]
    if empty:
        which = f"path {empty[0]} is" if len(empty) == 1 else f"paths {', '.join(empty)} are"
        raise CorpusError(
            f"the shard of {which} empty, so there would be nothing to train there; write "
            f"balanced = true under [router], choose fewer modules_per_level under [grid], or give "
            f"more data"
        )
