"""Preparing a run: tokenizer, tokens, base model, router, shards, signed manifest.

Each stage notes what it was made from, so a preparation that was stopped (or killed) goes on where
it was, and a changed RUN.toml repeats only what depends on the change. Volunteers never run this.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dipaco.base.errors import ConfigurationError, CorpusError
from dipaco.base.files import atomic_write
from dipaco.bootstrap.import_base import ImportedBase
from dipaco.bootstrap.run_config import RunConfig, load_run_config
from dipaco.modules.frozen_file import write_base
from dipaco.modules.layout import parameter_counts
from dipaco.modules.transformer import PathModel
from dipaco.protocol.grid import Grid
from dipaco.protocol.plan import BaseSource, RunBlobs, RunPlan, ShardIndex
from dipaco.routing.documents.corpus import corpus_documents, holds_chats
from dipaco.routing.report import report_routing
from dipaco.routing.routers.kinds import ROUTER_KINDS, fit_corpus_router
from dipaco.routing.run_folder import RunFolder
from dipaco.routing.shards import PathSummary, RowShape, ShardBuilder
from dipaco.routing.tokens.token_corpus import TokenCorpus
from dipaco.routing.tokens.tokenizer import Tokenizer, train_tokenizer
from dipaco.training.dense import SavedTraining
from dipaco.training.scoring import sum_losses

from .local_scores import document_rows
from .pieces import RoutingTools, base_model, encode, route
from .predecessor import Predecessor
from .prepare_options import PrepareOptions
from .pretrain import base_model_bytes, pretrain
from .signing import Signing
from .stages import StageMarkers, corpus_fingerprint, inputs_hash
from .succession import Succession, summary_sequences
from .token_stage import TokenStage


def prepare(
    run_toml: Path,
    out: Path,
    options: PrepareOptions,
    *,
    predecessor: Predecessor | None = None,
    changes: tuple[str, ...] = (),
) -> RunPlan:
    """Make the run folder `out` from a RUN.toml and return the plan that was signed.

    When everything is done already, nothing is made or signed again; another run in `out` is
    refused, unless it is to be replaced. `changes` are those of `--set`.

    With a `predecessor` it is a successor of that run: signed by the same operator, with its
    tokenizer, and its trained modules to begin with.

    Raises ConfigurationError for a wrong RUN.toml, CorpusError for an unusable corpus or an empty
    shard, StorageError for a full disk.
    """
    trained = predecessor.plan.model if predecessor else None
    config = load_run_config(run_toml, trained, changes)
    return Preparation(config, out, predecessor, options).run()


@dataclass
class Preparation:
    """One preparation; the stages call each other's results, each made once."""

    config: RunConfig
    out: Path
    predecessor: Predecessor | None
    options: PrepareOptions

    def __post_init__(self) -> None:
        self.signing = Signing(self.config, self.out, self.predecessor, self.options)
        self.device, self.display = self.options.device, self.options.display
        self.work = self.out / "work"
        self.folder = RunFolder(self.out)
        self.blobs = self.folder.blobs
        self.markers = StageMarkers(self.work, self.blobs)

    def run(self) -> RunPlan:
        """Do all stages that are not done, then sign."""
        kind = self.config.router.kind
        if ROUTER_KINDS[kind].fitted_on_scores and self.predecessor is None:
            raise ConfigurationError(
                f"a router of kind '{kind}' is trained on the losses that trained paths have on "
                f"documents; train a run with kind = 'kmeans' under [router] first, and give it "
                f"with --from RUN"
            )
        if self._holds_chats:
            self._check_chats()
        if self.signing.signed is not None:
            # What the blobs do not decide is refused before hours of work.
            self.signing.is_signed(self.signing.plan(self.signing.signed.blobs, self._base_source))
        tokenizer, base, router, shards = self.tokenizer, self.base, self.router, self.shards
        genesis = self.succession.genesis if self.succession else None
        blobs = RunBlobs(
            tokenizer=tokenizer, router=router, base=base, shards=shards, genesis=genesis
        )
        plan, is_new = self.signing.sign(self.signing.plan(blobs, self._base_source))
        self._summarise(plan, is_new)
        return plan

    @cached_property
    def succession(self) -> Succession | None:
        """What this run takes from the one before it, if it is a successor."""
        if self.predecessor is None:
            return None
        return Succession(
            self.predecessor,
            Grid(self.config.model, self.config.grid, self.config.rounds.level_offsets),
            self.blobs,
            self.work,
            self.markers,
            self.options,
            self._copied,
        )

    def _copied(self) -> tuple[int, ...]:
        """Return the old paths that paths which are added begin as."""
        return ()

    # Each stage: the hash of its inputs, and its result as the SHA-256 of a blob.

    @cached_property
    def tokenizer(self) -> str:
        """Stage 1: train the tokenizer, or use the one that is given."""
        config = self.config.tokenizer
        if self.succession:
            return self.succession.tokenizer(config.model_file)
        given = self._given_tokenizer()
        source = inputs_hash(given.hex()) if given else [self._corpus_hash, self.config.seed]
        inputs = inputs_hash(
            "tokenizer", config.kind, config.training_characters,
            self.config.model.vocabulary_size, source,
        )  # fmt: skip

        def make() -> dict[str, Any]:
            return {"sha256": self.blobs.add_bytes(given) if given else self._train_tokenizer()}

        return str(self.markers.stage("tokenizer", inputs, make)["sha256"])

    def _given_tokenizer(self) -> bytes | None:
        """Return the SentencePiece model that is named, or that of an imported base, if any."""
        path = self.config.tokenizer.model_file
        if path is None:
            tokenizer = self.imported.tokenizer if self.imported else None
            if tokenizer is not None:
                Tokenizer(tokenizer)  # refuses what is no tokenizer for a run
            return tokenizer
        if not path.is_file():
            raise ConfigurationError(f"[tokenizer] model_file: there is no {path}")
        pieces = Tokenizer(path).vocabulary_size
        if pieces > self.config.model.vocabulary_size:
            raise ConfigurationError(
                f"{path} has {pieces} pieces; write vocabulary_size = {pieces} under [model]"
            )
        return path.read_bytes()

    @cached_property
    def imported(self) -> ImportedBase | None:
        """The checkpoint that the base model is imported from, if it is."""
        folder = self.config.base.checkpoint
        given = self.config.tokenizer.model_file
        return ImportedBase(folder, own_tokenizer=given is None) if folder else None

    def _train_tokenizer(self) -> str:
        limit = self.config.tokenizer.training_characters
        partial = self.work / "tokenizer.model"
        with self.display.stage("tokenizer") as progress:

            def texts() -> Iterator[str]:
                characters = 0
                for document, held_out in corpus_documents(self.config.data):
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
                say=self.display.say,
            )
        sha256 = self.blobs.add_file(partial)
        partial.unlink()
        return sha256

    @cached_property
    def corpora(self) -> tuple[TokenCorpus, TokenCorpus]:
        """Stage 2: all documents as tokens, training and held-out."""
        self.check_tokenizer()
        chat_prefix_tokens = self.config.router.prefix_tokens if self._holds_chats else None
        stage = TokenStage(
            self.config, self.work, self.markers, self.options, self._tokens_hash,
            functools.partial(encode, self.out, self.tokenizer, chat_prefix_tokens),
            chat_prefix_tokens,
        )  # fmt: skip
        return stage.corpora(self.predecessor)

    def check_tokenizer(self) -> None:
        """Raise ConfigurationError for tokens of another tokenizer."""
        made_with = self.config.data.tokenizer_sha256
        if made_with is not None and self.imported is not None and self.imported.renumbers_pieces:
            raise ConfigurationError(
                f"[data] holds tokens, but a run gives the pieces of {self.imported.folder}'s "
                f"tokenizer.model other numbers; give the texts"
            )
        if made_with not in (None, self.tokenizer):
            raise ConfigurationError(
                f"the tokens of [data] were made with the tokenizer {made_with[:16]}... "
                f"(tokenizer_sha256), but that of this run has the SHA-256 {self.tokenizer}; give "
                f"the one that made them as model_file under [tokenizer], or give the texts"
            )

    @cached_property
    def _holds_chats(self) -> bool:
        return holds_chats(self.config.data)

    def _check_chats(self) -> None:
        """Refuse before any work what cannot be done with chats."""
        if self.imported is None and self.predecessor is None:
            raise ConfigurationError(
                "[data] holds chats, which need the chat template of a base; name its folder with "
                "base = 'FOLDER', or give texts"
            )
        if self.config.base.steps and self.predecessor is None:
            raise ConfigurationError(
                f"[data] holds chats, and steps is {self.config.base.steps} under [base]; only "
                f"paths train on chats, so leave steps out"
            )

    @cached_property
    def _tokens_hash(self) -> str:
        chats = [self.config.router.prefix_tokens] if self._holds_chats else []
        return inputs_hash("tokens", self._corpus_hash, self.tokenizer, *chats)

    @cached_property
    def base(self) -> str:
        """Stage 3: dense pretraining, of random or of imported parameters."""
        config = self.config
        if self.succession:
            return self.succession.base
        if config.model.adapters is not None:
            return self._frozen_base(config.model.adapters.base_format)
        inputs = inputs_hash(
            "base", self._tokens_hash, config.model, config.base_inner(), config.base.steps,
            config.seed, *([self.imported.fingerprint] if self.imported else []),
        )  # fmt: skip
        sha256 = str(self.markers.stage("base", inputs, lambda: self._train_base(inputs))["sha256"])
        (self.work / "base.pt").unlink(missing_ok=True)
        return sha256

    def _frozen_base(self, base_format: str) -> str:
        """Stage 3 with adapters: the checkpoint as it is, in the order of the run's tokens."""
        imported = self.imported
        assert imported is not None  # a RUN.toml with adapters names a base
        inputs = inputs_hash("frozen base", imported.fingerprint, imported.rows, base_format)

        def make() -> dict[str, Any]:
            with self.display.stage("base model"):
                file = self.work / "base.safetensors"
                write_base(imported.folder, imported.rows, base_format, file)
                return {"sha256": self.blobs.add_file(file, move=True)}

        return str(self.markers.stage("base", inputs, make)["sha256"])

    def _train_base(self, inputs: str) -> dict[str, Any]:
        config = self.config
        rows = self.corpora[0].rows(config.model.sequence_length)
        with self.display.stage("base model") as progress:
            model = pretrain(
                config.model,
                config.base_inner(),
                rows,
                config.base.steps,
                seed=config.seed,
                device=self.device,
                initial=self.imported.parameters() if self.imported else None,
                saved=SavedTraining(self.work / "base.pt", inputs),
                on_step=lambda step, loss: progress.update(
                    step + 1, config.base.steps, f"steps, loss {loss:.3f}"
                ),
            )
        return {"sha256": self.blobs.add_bytes(base_model_bytes(model))}

    @cached_property
    def base_model(self) -> PathModel:
        """The base model on the device of this preparation."""
        return base_model(self.out, self.config.model, self.base, str(self.device))

    @cached_property
    def router(self) -> str:
        """Stage 4: fit the router on the features of a sample of training documents."""
        config, levels = self.config.router, self.config.grid.modules_per_level
        chosen, nll = self._scores
        scored = [] if nll is None else [hashlib.sha256(nll.tobytes()).hexdigest()]
        inputs = inputs_hash("router", self._tokens_hash, self.base, config, levels,
                             self.config.seed, *scored)  # fmt: skip

        def make() -> dict[str, Any]:
            with self.display.stage("router"):
                router = fit_corpus_router(
                    self.corpora[0], self.base_model, config, levels, self.config.seed,
                    chosen=chosen, nll=nll, say=self.display.say,
                )  # fmt: skip
                return {"sha256": self.blobs.add_bytes(router.to_bytes())}

        return str(self.markers.stage("router", inputs, make)["sha256"])

    @cached_property
    def _scores(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return the documents that paths scored and the scores, for a router that needs them."""
        config = self.config.router
        if not ROUTER_KINDS[config.kind].fitted_on_scores:
            return None, None
        assert self.succession is not None  # checked before anything was made
        self.succession.check_scorable()
        corpus, length = self.corpora[0], self.config.model.sequence_length
        chosen = corpus.sample(config.training_documents, self.config.seed, config.prefix_tokens)
        rows = document_rows((corpus.document(int(index)) for index in chosen), length)
        return chosen, self.succession.scores(rows, config.prefix_tokens)

    @cached_property
    def shards(self) -> str:
        """Stage 5: route every document and write the token files."""
        outputs = self.markers.stage(
            "shards", self._shards_hash, self._make_shards, self._has_shards
        )
        return str(outputs["sha256"])

    def _has_shards(self, outputs: dict[str, Any]) -> bool:
        index = ShardIndex.model_validate_json(self.blobs.read(str(outputs["sha256"])))
        files = [(shard.train_sha256, shard.validation_sha256) for shard in index.paths]
        return all(self.blobs.has(sha256) for pair in files for sha256 in pair)

    def _make_shards(self) -> dict[str, Any]:
        builder = self._shard_builder()
        if self._holds_chats:
            self._say_what_is_cut()
        tools = RoutingTools(
            self.out, self.tokenizer, self.base, self.router, self.config.model,
            self.config.router.prefix_tokens, str(self.device),
        )  # fmt: skip
        with self.display.stage("shards") as progress:
            builder.build(
                *self.corpora, functools.partial(route, tools), mapped=self.options.workers.map,
                progress=lambda done, total: progress.update(done, total, "documents"),
            )  # fmt: skip
            check_shards(builder.summaries())
            index = builder.finish(self.blobs)
        return {"sha256": self.blobs.add_bytes(index.canonical_json())}

    def _say_what_is_cut(self) -> None:
        length, lengths = self.config.model.sequence_length, self.corpora[0].lengths()
        if cut := int((lengths > length).sum()):
            self.display.say(
                f"{cut:,} of {len(lengths):,} chats are longer than a row of {length:,} tokens; "
                f"the parts cut off no longer see the question (sequence_length under [model])"
            )

    @cached_property
    def _shards_hash(self) -> str:
        return inputs_hash(
            "shards", self._tokens_hash, self.base, self.router, self._paths,
            self.config.model.sequence_length, self.config.router.prefix_tokens,
            self.config.router.train_paths,
        )  # fmt: skip

    def _shard_builder(self) -> ShardBuilder:
        rows = RowShape(
            sequence_length=self.config.model.sequence_length,
            prefix_tokens=self.config.router.prefix_tokens,
            vocabulary_size=self.config.model.vocabulary_size,
            marked=self._holds_chats,
        )
        return ShardBuilder(
            self.work / "shards",
            rows,
            self._paths,
            self._shards_hash,
            train_paths=self.config.router.train_paths,
        )

    @cached_property
    def _corpus_hash(self) -> str:
        return corpus_fingerprint(self.config.data)

    @property
    def _paths(self) -> int:
        return self.config.grid.path_count

    @property
    def _base_source(self) -> BaseSource | None:
        """Where the frozen base comes from, with adapters."""
        if self.predecessor is not None:
            return self.predecessor.plan.base_source
        if self.config.model.adapters is None:
            return None
        assert self.imported is not None  # a RUN.toml with adapters names a base
        return self.imported.source(self.config.base.name or self.imported.folder.name)

    def _summarise(self, plan: RunPlan, is_new: bool) -> None:
        index, summaries = self.folder.shard_index(plan), self._shard_builder().summaries()
        self.display.shards(index.paths, summaries)
        report = report_routing(plan, index, summaries)
        atomic_write(self.out / "routing.json", report.model_dump_json(indent=1).encode())
        self.display.routing(report)
        perplexity, tokens = self._base_perplexity(plan)
        if tokens:
            self.display.say(
                f"Base model: validation perplexity {perplexity:.2f} over {tokens:,} tokens"
            )
        if self.succession:
            self.succession.say_where_it_stands(self.folder, plan)
        self._say_how_to_start(plan, is_new)

    def _say_how_to_start(self, plan: RunPlan, is_new: bool) -> None:
        self.display.run(plan, parameter_counts(self.folder.grid(plan)), str(self.out))
        if not is_new:
            self.display.say(
                "Everything is done already and the manifest is unchanged. For a new "
                "start give --start-in-s S --replace"
            )
        elif any((self.out / "states").glob("*")):
            self.display.say(
                f"{self.out / 'states'} holds states of an earlier run of this folder; move it "
                f"away unless you mean to inspect them"
            )

    def _base_perplexity(self, plan: RunPlan) -> tuple[float, int]:
        """Score the base model on some held-out sequences of every path."""
        each = summary_sequences(plan.model, self._paths)
        total_nll, total_tokens = 0.0, 0
        with self.display.stage("base model's perplexity") as progress:
            for path in range(self._paths):
                rows = self.folder.validation_tokens(plan, path)[:each]
                if len(rows):
                    nll, count = sum_losses(
                        self.base_model, rows, plan.routing.prefix_tokens, device=self.device
                    )
                    total_nll, total_tokens = total_nll + nll, total_tokens + count
                progress.update(path + 1, self._paths, "paths")
        return math.exp(total_nll / max(1, total_tokens)), total_tokens


def check_shards(summaries: tuple[PathSummary, ...]) -> None:
    """Raise CorpusError if a path has no training document."""
    empty = [str(summary.path) for summary in summaries if not summary.train_documents]
    if empty:
        which = f"path {empty[0]} is" if len(empty) == 1 else f"paths {', '.join(empty)} are"
        raise CorpusError(
            f"the shard of {which} empty, so there would be nothing to train there; under [router] "
            f"write balanced = true (k-means) or a higher least_share (discriminative), choose "
            f"fewer modules_per_level under [grid], or give more data"
        )
