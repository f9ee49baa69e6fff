"""The stages of a run: what they are, what each depends on, and what is refused before them."""

from __future__ import annotations

from dataclasses import dataclass

from dipaco.base.errors import ConfigurationError, CorpusError
from dipaco.bootstrap.import_base import ImportedBase
from dipaco.bootstrap.run_config import check_chats
from dipaco.protocol.plan import BaseSource, RunBlobs
from dipaco.routing.routers.fitting import check_installed
from dipaco.routing.routers.kinds import ROUTER_KINDS

from .base_stage import BaseStage
from .corpus_stages import Corpus, TokenizerStage, TokensStage
from .genesis_stage import GenesisStage
from .predecessor import Predecessor
from .routing_stages import (
    RouterStage,
    ShardsStage,
    scored_origins,
)
from .score_stages import NearestPath
from .stages import Job


@dataclass(frozen=True)
class Stages:
    """The stages of a preparation, each done when it is first asked for what it makes."""

    imported: ImportedBase | None
    """The checkpoint that the base is imported from, if it is."""
    base_source: BaseSource | None
    """Where a frozen base comes from."""
    tokenizer: TokenizerStage
    tokens: tuple[TokensStage, ...]
    """The tokens of the run's corpus, or of each path that is added."""
    base: BaseStage
    router: RouterStage
    shards: ShardsStage
    nearest: tuple[NearestPath, ...]
    """The old path that each added path begins as."""
    genesis: GenesisStage | None

    def blobs(self) -> RunBlobs:
        """Run all stages and return the blobs that they have made."""
        for stage in (self.tokenizer, *self.tokens, self.base, self.router, self.shards):
            stage.do()
        return RunBlobs(
            tokenizer=self.tokenizer.sha256,
            router=self.router.sha256,
            base=self.base.sha256,
            shards=self.shards.sha256,
            genesis=self.genesis.sha256 if self.genesis else None,
        )


def stages_of(job: Job) -> Stages:
    """Return the stages of a run. Nothing is made yet."""
    config, before, grown = job.config, job.before, job.grown
    imported = None
    if config.base.checkpoint is not None:
        own_tokenizer = config.tokenizer.model_file is None
        imported = ImportedBase(config.base.checkpoint, own_tokenizer=own_tokenizer)
    corpora = [Corpus(config.data)]
    parts = [""]
    if grown is not None:
        files = config.data.train
        corpora = [Corpus(config.data.model_copy(update={"train": (f,)}), added=f) for f in files]
        parts = [f"-P{path}" for path in range(grown.grid.path_count, config.grid.path_count)]
    tokenizer = TokenizerStage(job, corpora[0], imported)
    tokens = tuple(
        TokensStage(job, corpus, tokenizer, part)
        for corpus, part in zip(corpora, parts, strict=True)
    )
    base = BaseStage(job, tokens, imported)
    router = RouterStage(job, tokens, base)
    shards = ShardsStage(job, tokenizer, tokens, base, router)
    nearest = tuple(NearestPath(job, grown, one) for one in tokens) if grown is not None else ()
    genesis = GenesisStage(job, before, nearest) if before is not None else None
    return Stages(
        imported, _base_source(job, imported), tokenizer, tokens, base, router, shards, nearest,
        genesis,
    )  # fmt: skip


def _base_source(job: Job, imported: ImportedBase | None) -> BaseSource | None:
    if job.before is not None:
        return job.before.plan.base_source
    if job.config.model.adapters is None or imported is None:
        return None
    return imported.source(job.config.base.name or imported.folder.name)


def check(job: Job, stages: Stages) -> None:
    """Refuse impossible runs before any work. Raises ConfigurationError, CorpusError."""
    config, before, grown = job.config, job.before, job.grown
    kind = config.router.kind
    if grown is not None:
        marked = grown.folder.shard_index(grown.plan).marked
        for tokens in stages.tokens:
            _check_form(tokens.corpus, grown, marked=marked)
        return
    if ROUTER_KINDS[kind].needs_features and config.grid.path_count > 1:
        check_installed()
    if ROUTER_KINDS[kind].fitted_on_scores:
        if before is None:
            raise ConfigurationError(
                f"a router of kind '{kind}' is trained on the losses that trained paths have on "
                f"documents; train a run with kind = 'kmeans' under [router] first, and give it "
                f"with --from RUN"
            )
        scored_origins(job, before)
    if before is None and stages.tokens[0].corpus.holds_chats:
        check_chats(config)


def _check_form(corpus: Corpus, grown: Predecessor, *, marked: bool) -> None:
    """Raise CorpusError for chats in a run of texts, and for texts in a run of chats."""
    if corpus.holds_chats != marked:
        theirs, ours = ("texts", "chats") if marked else ("chats", "texts")
        with corpus.named():
            raise CorpusError(
                f"it holds {theirs}, but {grown.path} trains on {ours}, and a run has shards of "
                f"one kind; give {ours}"
            )
