"""The whole corpus of a run as one stream that a killed preparation takes up where it was."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dipaco.modules.files import atomic_write

from .corpus import CorpusConfig, Document, DocumentReader, Part, is_held_out
from .plan import canonical_json


class CorpusStream:
    """All documents, first those to train on, each with whether it is held out.

    `position` is what `position()` of an earlier stream of the same data returned; this one yields
    what comes behind. `counts` says how many documents of each kind lie before where it is: held
    out (True) or not. Raises CorpusError as `iterate_documents` does. Called by preparation.
    """

    def __init__(self, config: CorpusConfig, position: Mapping[str, Any] | None = None) -> None:
        self._config = config
        found = position or {"train": 0, "held_out": 0, "part": "train", "reader": None}
        self.counts: dict[bool, int] = {False: found["train"], True: found["held_out"]}
        self._part: Part = found["part"]
        self._reader = DocumentReader(config, self._part, found["reader"])

    def position(self) -> dict[str, Any]:
        """Return where the last document that was yielded ends, in plain values for JSON."""
        return {
            "train": self.counts[False],
            "held_out": self.counts[True],
            "part": self._part,
            "reader": self._reader.position(),
        }

    def __iter__(self) -> Iterator[tuple[Document, bool]]:
        config = self._config
        if self._part == "train":
            for document in self._reader:
                held_out = not config.has_validation and is_held_out(
                    document, config.held_out_fraction
                )
                self.counts[held_out] += 1
                yield document, held_out
            if not config.has_validation:
                return
            self._part, self._reader = "validation", DocumentReader(config, "validation")
        for document in self._reader:
            self.counts[True] += 1
            yield document, True


class CorpusBookmark:
    """Where a `CorpusStream` was when all before it had been written, in a file.

    `inputs` is a hash of everything that the stream depends on.
    """

    def __init__(self, path: Path, inputs: str) -> None:
        self._path = path
        # The readers' own state is part of a position, and its form is theirs to change.
        self._inputs = [inputs, importlib.metadata.version("datasets")]

    def save(self, position: Mapping[str, Any]) -> None:
        """Replace the bookmark. Raises StorageError if the disk is full."""
        atomic_write(
            self._path, canonical_json({"inputs": self._inputs, "position": dict(position)})
        )

    def load(self, train: int, held_out: int) -> dict[str, Any] | None:
        """Return the bookmark, or None if there is none for these inputs that is of use to a
        writer that has so many documents of each kind: not beyond what it has."""
        try:
            found = json.loads(self._path.read_bytes())
            position: dict[str, Any] = found["position"]
            usable = found["inputs"] == self._inputs
            usable &= position["train"] <= train and position["held_out"] <= held_out
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return position if usable else None
