"""The stage of preparation that makes tokens of all documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dipaco.base.errors import CorpusError
from dipaco.bootstrap.run_config import RunConfig
from dipaco.routing.documents.corpus import Document, corpus_documents, files_in_both
from dipaco.routing.tokens.token_corpus import (
    EncodedDocument,
    LeftOut,
    TokenCorpus,
    TokenCorpusWriter,
    write_token_corpora,
)

from .predecessor import Predecessor
from .prepare_options import PrepareOptions
from .stages import StageMarkers

PARTS = ("train", "validation")


@dataclass
class TokenStage:
    """Made for one preparation; `inputs` is the hash of what the tokens depend on."""

    config: RunConfig
    work: Path
    markers: StageMarkers
    options: PrepareOptions
    inputs: str
    encode: Callable[[Sequence[tuple[Document, bool]]], Sequence[EncodedDocument]]
    chat_prefix_tokens: int | None = None
    """Of chats, how many tokens routing sees."""

    def corpora(self, predecessor: Predecessor | None) -> tuple[TokenCorpus, TokenCorpus]:
        """Return all documents as tokens, training and held-out. Raises CorpusError."""
        if predecessor and self._folder() is None:
            reused = predecessor.tokens_folder(self.inputs)
            if reused is not None:
                self.options.display.say(
                    f"tokens: taken from {reused}, because the corpus is the same"
                )
                self.markers.mark("tokens", self.inputs, {"folder": str(reused)})
        self.markers.stage(
            "tokens", self.inputs, self._make, lambda outputs: self._folder() is not None
        )
        folder = self._folder()
        assert folder is not None
        size = self.config.model.vocabulary_size
        train, validation = (TokenCorpus(folder / part, size) for part in PARTS)
        for corpus in (train, validation):
            for reason, left_out in corpus.left_out.items():
                self.options.display.say(_said(reason, left_out))
        if not len(train) and train.left_out:
            reasons = [_said(reason, left_out) for reason, left_out in train.left_out.items()]
            raise CorpusError(f"no chat of [data] can be trained on: {'; '.join(reasons)}")
        if not len(train):
            raise CorpusError(
                "all documents were held out; give more data, or name validation files under [data]"
            )
        return train, validation

    def _folder(self) -> Path | None:
        """Return where the corpus lies as tokens, here or in the run before; None if nowhere."""
        found = self.markers.done("tokens", self.inputs)
        folder = self.work / (found.get("folder") or "tokens") if found else None
        return folder if folder is not None and folder.is_dir() else None

    def _make(self) -> dict[str, Any]:
        size = self.config.model.vocabulary_size
        train, validation = (
            TokenCorpusWriter(
                self.work / "tokens" / part,
                size,
                self.inputs,
                chat_prefix_tokens=self.chat_prefix_tokens,
            )
            for part in PARTS
        )
        data, both = self.config.data, 0

        def left_out(document: Document) -> None:
            nonlocal both
            both += 1

        if files := files_in_both(data):
            self.options.display.say(
                f"data: {', '.join(path.name for path in files)} of validation "
                f"{'are' if len(files) > 1 else 'is'} not trained on, though train names it too"
            )
        with self.options.display.stage("tokens") as progress:
            for documents, tokens in write_token_corpora(
                corpus_documents(data, left_out), self.encode, train, validation,
                mapped=self.options.workers.map,
            ):  # fmt: skip
                progress.update(documents, None, f"documents, {tokens:,} tokens")
        if both:
            self.options.display.say(
                f"data: {both:,} documents of train are in validation as well; they are not "
                f"trained on"
            )
        if dropped := train.dropped + validation.dropped:
            self.options.display.say(
                f"tokens: {dropped:,} characters were left out of the texts, because the "
                f"tokenizer of the base cannot write them (control characters, unused ones)"
            )
        return {"train": train.tokens, "held_out": validation.tokens, "folder": "tokens"}


def _said(reason: str, left_out: LeftOut) -> str:
    count = f"{left_out.chats:,} chat{'s' * (left_out.chats > 1)}"
    where = "at" if left_out.chats == 1 else "first at"
    return f"{count} left out ({where} {left_out.first}): {reason}"
