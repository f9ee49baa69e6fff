"""The stage of preparation that makes tokens of all documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from dipaco.modules.errors import CorpusError
from dipaco.modules.progress import StageProgress
from dipaco.routing.corpus import CorpusBookmark, CorpusStream
from dipaco.routing.token_corpus import TokenCorpus, TokenCorpusWriter, write_token_corpora
from dipaco.routing.tokenizer import Tokenizer

from .display import Display
from .predecessor import Predecessor
from .run_config import RunConfig
from .stages import StageMarkers
from .team import SharedTokens, Team

PARTS = ("train", "validation")


@dataclass
class TokenStage:
    """Made for one preparation; `inputs` is the hash of what the tokens depend on."""

    config: RunConfig
    work: Path
    markers: StageMarkers
    display: Display
    inputs: str
    tokenizer: Callable[[], Tokenizer]

    def corpora(self, predecessor: Predecessor | None) -> tuple[TokenCorpus, TokenCorpus]:
        """Return all documents as tokens, training and held-out. Raises CorpusError."""
        if predecessor and self._folder() is None:
            reused = predecessor.tokens_folder(self.inputs)
            if reused is not None:
                self.display.say(f"tokens: taken from {reused}, the corpus is the same")
                self.markers.mark("tokens", self.inputs, {"folder": str(reused)})
        team = self.markers.team
        if team and SharedTokens.can_be(self.config.data):
            self._share(team)
        self.markers.stage(
            "tokens", self.inputs, self._make, lambda outputs: self._folder() is not None
        )
        folder = self._folder()
        assert folder is not None
        size = self.config.model.vocabulary_size
        train, validation = (TokenCorpus(folder / part, size) for part in PARTS)
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
        name = self.markers.own("tokens")
        folder, size = self.work / name, self.config.model.vocabulary_size
        writers = {part: TokenCorpusWriter(folder / part, size, self.inputs) for part in PARTS}
        with self.display.stage("tokens") as progress:
            if self.markers.team and SharedTokens.can_be(self.config.data):
                self._shared.merge(writers)
            else:
                self._read(folder, writers, progress)
        outputs = {"train": writers["train"].tokens, "held_out": writers["validation"].tokens}
        return {**outputs, "folder": name}

    def _read(
        self, folder: Path, writers: dict[str, TokenCorpusWriter], progress: StageProgress
    ) -> None:
        train, validation = writers["train"], writers["validation"]
        bookmark = CorpusBookmark(folder / "position.json", self.inputs)
        stream = CorpusStream(
            self.config.data, bookmark.load(train.documents, validation.documents)
        )
        for documents, tokens in write_token_corpora(
            stream, self.tokenizer(), train, validation,
            passed=stream.counts, threads=torch.get_num_threads(),
        ):  # fmt: skip
            bookmark.save(stream.position())
            progress.update(documents, None, f"documents, {tokens:,} tokens")

    @cached_property
    def _shared(self) -> SharedTokens:
        folder = self.work / "pieces" / self.inputs[:16]
        return SharedTokens(self.config.data, folder, self.config.model.vocabulary_size)

    def _share(self, team: Team) -> None:
        """Tokenise the files that no other machine does."""
        if self._folder() is not None:
            return
        tokenizer, shared = self.tokenizer(), self._shared
        with self.display.stage("tokens of files") as progress:
            team.share(
                list(shared.pieces),
                shared.is_done,
                lambda piece: shared.work(piece, tokenizer, torch.get_num_threads(), team.name),
                lambda: self._folder() is not None,
                lambda done, total: progress.update(done, total, "files"),
            )
