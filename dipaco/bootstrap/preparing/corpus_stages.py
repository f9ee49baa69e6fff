"""The stages that make tokens of documents: the tokenizer, and each corpus as tokens."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dipaco.base.errors import ConfigurationError, CorpusError
from dipaco.base.files import sha256_of_file, storage_errors
from dipaco.bootstrap.import_base import ImportedBase
from dipaco.routing.documents.corpus import (
    CorpusConfig,
    Document,
    Part,
    corpus_documents,
    corpus_files,
    files_in_both,
    holds_chats,
)
from dipaco.routing.tokens.sentencepiece_tokenizer import train_tokenizer
from dipaco.routing.tokens.token_corpus import (
    MAX_LABELS,
    LeftOut,
    TokenCorpus,
    TokenCorpusWriter,
    write_token_corpora,
)
from dipaco.routing.tokens.tokenizer_kinds import read_tokenizer

from .pieces import encode
from .stages import Job, Stage, inputs_hash, read_made

_PARTS = ("train", "validation")
# The keys of [data] by which the files of an added path are read. They need not have the labels of
# the run, which tell its paths apart in reports.
_HOW_ROWS_ARE_READ = ("text_field", "txt_documents", "held_out_fraction")


@dataclass
class Corpus:
    """The documents of a run, or of a path that is added to one (`added`)."""

    config: CorpusConfig
    added: str = ""
    """The file or the pattern that `--add-path` names."""

    @property
    def name(self) -> str:
        """What an added path is called for people."""
        return Path(self.added).name

    @cached_property
    def fingerprint(self) -> str:
        """A hash that changes when the documents may have changed.

        Of files it is name, size and time of change: reading a large corpus only to hash it would
        take as long as the work that is to be saved. Raises CorpusError if a file is missing.
        """
        with self.named():
            files = []
            for part, path in self._files():
                status = path.stat()
                files.append([part, path.name, status.st_size, status.st_mtime_ns])
        settings = self.config.model_dump(mode="json", exclude={"train", "validation"})
        return inputs_hash(settings, files)

    @cached_property
    def holds_chats(self) -> bool:
        with self.named():
            return holds_chats(self.config)

    def _files(self) -> list[tuple[str, Path]]:
        if self.config.hub:
            # A name of the Hub is no folder here, and gives none.
            files = sorted(Path(self.config.hub).rglob("*"))
            return [("hub", path) for path in files if path.is_file()]
        parts: tuple[Part, Part] = ("train", "validation")
        return [(part, path) for part in parts for path in corpus_files(self.config, part)]

    @contextmanager
    def named(self) -> Iterator[None]:
        """Say where documents come from that cannot be read."""
        try:
            yield
        except CorpusError as error:
            if not self.added:
                raise
            remedy = " (here --set data.KEY=VALUE)" if "[data]" in str(error) else ""
            raise CorpusError(f"--add-path {self.added}: {error}{remedy}") from None


class TokenizerStage(Stage):
    """Train a tokenizer, or take the one that is given, or that of the run before."""

    name = "tokenizer"

    def __init__(self, job: Job, corpus: Corpus, imported: ImportedBase | None) -> None:
        super().__init__(job)
        self._corpus, self._imported = corpus, imported

    def inputs(self) -> Sequence[Any]:
        config = self.job.config.tokenizer
        if self.job.before is not None:
            return [self._of_predecessor()]
        if self._given is not None:
            return [self._given.hex()]
        pieces = self.job.config.model.vocabulary_size
        source = [self._corpus.fingerprint, self.job.config.seed]
        return [config.training_characters, pieces, *source]

    def make(self) -> dict[str, Any]:
        blobs = self.job.blobs
        if self.job.before is not None:
            return {"sha256": self.job.before.copy_blob(self._of_predecessor(), blobs)}
        if self._given is not None:
            return {"sha256": blobs.add_bytes(self._given)}
        return {"sha256": self._train()}

    def _of_predecessor(self) -> str:
        """Return the hash of the old run's tokenizer. Raises ConfigurationError if another one is
        given in RUN.toml."""
        assert self.job.before is not None
        sha256 = self.job.before.plan.blobs.tokenizer
        given = self.job.config.tokenizer.model_file
        if given is not None and (not given.is_file() or sha256_of_file(given) != sha256):
            raise ConfigurationError(
                f"[tokenizer] model_file {given} is not the tokenizer of the run to continue, "
                f"and modules fit only the tokens that they were trained on; leave it out"
            )
        return sha256

    @cached_property
    def _given(self) -> bytes | None:
        """The SentencePiece model that is named, or the tokenizer of an imported base, if any."""
        path = self.job.config.tokenizer.model_file
        if path is None:
            tokenizer = self._imported.tokenizer if self._imported else None
            if tokenizer is not None:
                read_tokenizer(tokenizer)  # refuses what is no tokenizer for a run
            return tokenizer
        if not path.is_file():
            raise ConfigurationError(f"[tokenizer] model_file: there is no {path}")
        given, model = read_tokenizer(path), self.job.config.model
        if not model.adds_padding and model.padding_token not in given.never_chosen:
            raise ConfigurationError(
                f"{path} has no padding at {model.padding_token}, where a run without a base needs "
                f"it; train it with pad_id={model.padding_token}"
            )
        pieces = given.vocabulary_size
        if pieces > model.without_padding.vocabulary_size:
            raise ConfigurationError(
                f"{path} has {pieces} pieces; write vocabulary_size = {pieces} under [model]"
            )
        return path.read_bytes()

    def _train(self) -> str:
        config = self.job.config
        file = self.folder / "tokenizer.model"
        with self.job.display.stage("tokenizer") as progress:

            def texts() -> Iterator[str]:
                characters = 0
                for document, held_out in corpus_documents(self._corpus.config):
                    if not held_out:
                        characters += len(document.text)
                        progress.update(characters, None, "characters read")
                        yield document.text

            train_tokenizer(
                texts(),
                config.model.vocabulary_size,
                file,
                character_limit=config.tokenizer.training_characters,
                seed=config.seed,
                say=self.job.display.say,
            )
        return self.job.blobs.add_file(file, move=True)


class TokensStage(Stage):
    """Make tokens of all documents of a corpus.

    Those that the run before was made of are read there, if they are the same: no other folder than
    this one's own is ever written.
    """

    name = "tokens"

    def __init__(
        self,
        job: Job,
        corpus: Corpus,
        tokenizer: TokenizerStage,
        part: str = "",
    ) -> None:
        super().__init__(job, part)
        self.corpus = corpus
        self._tokenizer = tokenizer

    @property
    def _chat_prefix_tokens(self) -> int | None:
        """How many tokens of a chat routing sees."""
        return self.job.config.router.prefix_tokens if self.corpus.holds_chats else None

    def inputs(self) -> Sequence[Any]:
        chats = [self.job.config.router.prefix_tokens] if self.corpus.holds_chats else []
        return [self.corpus.fingerprint, self._tokenizer.sha256, *chats]

    @cached_property
    def corpora(self) -> tuple[TokenCorpus, TokenCorpus]:
        """Training and held-out documents. Raises CorpusError if there is nothing to train on."""
        self.do()
        size, say = self.job.config.model.vocabulary_size, self.job.display.say
        train, validation = (TokenCorpus(self.folder / part, size) for part in _PARTS)
        for corpus in (train, validation):
            for reason, left_out in corpus.left_out.items():
                say(_said(reason, left_out))
        if not len(train) and train.left_out:
            reasons = [_said(reason, left_out) for reason, left_out in train.left_out.items()]
            raise CorpusError(f"no chat of [data] can be trained on: {'; '.join(reasons)}")
        if not len(train):
            with self.corpus.named():
                raise CorpusError(
                    "all documents were held out; give more data, or name validation files under "
                    "[data]"
                )
        return train, validation

    def make(self) -> dict[str, Any]:
        if (outputs := self._link_to_predecessor()) is not None:
            return outputs
        size = self.job.config.model.vocabulary_size
        train, validation = (
            TokenCorpusWriter(self.folder / part, size, chat_prefix_tokens=self._chat_prefix_tokens)
            for part in _PARTS
        )
        data, say, both = self.corpus.config, self.job.display.say, 0

        def left_out(document: Document) -> None:
            nonlocal both
            both += 1

        if files := files_in_both(data):
            say(
                f"data: {', '.join(path.name for path in files)} of validation "
                f"{'are' if len(files) > 1 else 'is'} not trained on, though train names it too"
            )
        encoded = functools.partial(
            encode, self.job.out, self._tokenizer.sha256, self._chat_prefix_tokens
        )
        with self.job.display.stage("tokens") as progress, self.corpus.named():
            for documents, tokens in write_token_corpora(
                corpus_documents(data, left_out), encoded, train, validation,
                mapped=self.job.workers.map,
            ):  # fmt: skip
                progress.update(documents, None, f"documents, {tokens:,} tokens")
        if both:
            say(
                f"data: {both:,} documents of train are in validation as well; they are not "
                f"trained on"
            )
        if dropped := train.dropped + validation.dropped:
            say(
                f"tokens: {dropped:,} characters were left out of the texts, because the "
                f"tokenizer of the base cannot write them (control characters, unused ones)"
            )
        if unlabelled := train.unlabelled + validation.unlabelled:
            say(
                f"data: label_field = '{data.label_field}' has more than {MAX_LABELS:,} labels; "
                f"the {unlabelled:,} documents with further labels count as having none"
            )
        return {
            "train": train.tokens,
            "held_out": validation.tokens,
            "read": data.model_dump(mode="json", include=set(_HOW_ROWS_ARE_READ)),
        }

    def _link_to_predecessor(self) -> dict[str, Any] | None:
        """Let the folder be that of the run before, if that has the same tokens."""
        before = self.job.before
        if before is None or self.job.grown is not None:
            return None
        theirs = before.work / self.folder.relative_to(self.job.work)
        outputs = read_made(theirs)
        if outputs is not None:
            with storage_errors(self.folder):
                shutil.rmtree(self.folder)
                self.folder.symlink_to(theirs.resolve(), target_is_directory=True)
            self.job.display.say(
                f"tokens: taken from {theirs.resolve()}, because the corpus is the same"
            )
        return outputs


def _said(reason: str, left_out: LeftOut) -> str:
    count = f"{left_out.chats:,} chat{'s' * (left_out.chats > 1)}"
    where = "at" if left_out.chats == 1 else "first at"
    return f"{count} left out ({where} {left_out.first}): {reason}"
