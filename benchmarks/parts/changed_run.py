"""A prepared run with a few fields of its plan changed, and a reference that loses work."""

from __future__ import annotations

import gzip
import json
import math
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dipaco.base.errors import ConfigurationError
from dipaco.modules.compose import load_path
from dipaco.modules.device import autocast_for, training_format
from dipaco.modules.state import ModuleState
from dipaco.protocol.chain.outer_row import OuterRow
from dipaco.protocol.config import parse_config
from dipaco.protocol.plan import RunPlan, ShardIndex
from dipaco.routing.run_folder import RunFolder
from dipaco.routing.tokens.token_files import scoring_windows
from dipaco.simulator.reference import ReferenceSwarm
from dipaco.training.scoring import row_losses

Changes = Mapping[str, Any]
"""New values of fields of the plan, by "section.field" or "field"."""

# The plan of one path that has all shards: a single module, which replicas share as in DiLoCo.
ONE_PATH: Changes = {
    "grid.modules_per_level": [1],
    "grid.private_blocks": [],
    "grid.private_embedding": False,
    "rounds.level_offsets": None,
}


def read_changes(texts: list[str]) -> dict[str, Any]:
    """Read "outer.momentum=0.5"; a value is JSON, or else a text."""
    changes: dict[str, Any] = {}
    for text in texts:
        field, found, value = text.partition("=")
        if not found:
            raise ConfigurationError(f"'{text}' is no change; write outer.momentum=0.5")
        try:
            changes[field] = json.loads(value)
        except ValueError:
            changes[field] = value
    return changes


class ChangedRun(RunFolder):
    """A run folder with another plan.

    :param one_path: a single path has all shards and all held-out sequences
    :param held_out_every: one of so many held-out parts is scored, the same of every grid
    :param texts: the held-out documents. Then a part is a document, and not a sequence
    """

    def __init__(
        self,
        folder: Path,
        changes: Changes,
        *,
        one_path: bool = False,
        held_out_every: int = 1,
        texts: Path | None = None,
    ) -> None:
        super().__init__(folder)
        self._source = RunFolder(folder)
        self._one_path = one_path
        self._held_out_every = held_out_every
        values = self._source.plan().model_dump(mode="json")
        for field, value in ({**ONE_PATH, **changes} if one_path else changes).items():
            section, _, name = field.rpartition(".")
            (values[section] if section else values)[name] = value
        self._plan = parse_config(RunPlan, values, "--set")
        self._part_of: dict[bytes, int] = {}
        self._labels: dict[int, str] = {}
        if texts is not None:
            self._read_documents(texts)

    def _read_documents(self, texts: Path) -> None:
        """Note which document each held-out sequence is of, and what its "domain" is."""
        tokenizer, plan = self.tokenizer(self._plan), self._plan
        with gzip.open(texts, "rt", encoding="utf-8") as lines:
            for line in map(json.loads, lines):
                mark = zlib.crc32(line["text"].encode())
                self._labels[mark] = line.get("domain", "")
                tokens = tokenizer.document_tokens(line["text"])
                length, prefix = plan.model.sequence_length, plan.routing.prefix_tokens
                for row in scoring_windows(tokens, length, prefix, plan.model.padding_token):
                    self._part_of[row.tobytes()] = mark

    def plan(self) -> RunPlan:
        """Return the plan as it is changed."""
        return self._plan

    def shard_index(self, plan: RunPlan) -> ShardIndex:
        """Return the shards; those of one path together."""
        index = self._source.shard_index(self._source.plan())
        if not self._one_path:
            return index
        sequences = sum(shard.train_sequences for shard in index.paths)
        whole = index.paths[0].model_copy(update={"train_sequences": sequences})
        return index.model_copy(update={"paths": (whole,)})

    def train_tokens(self, plan: RunPlan, path: int) -> np.ndarray:
        """Return the training sequences of a path."""
        return self._of_path(self._source.train_tokens, path)

    def validation_tokens(self, plan: RunPlan, path: int) -> np.ndarray:
        """Return the held-out sequences of a path."""
        return self._of_path(self._source.validation_tokens, path)

    def _of_path(self, read: Callable[[RunPlan, int], np.ndarray], path: int) -> np.ndarray:
        plan = self._source.plan()
        if not self._one_path:
            return read(plan, path)
        paths = range(self._source.grid(plan).path_count)
        return np.concatenate([read(plan, path) for path in paths])

    def held_out(self, path: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the held-out sequences of a path by which is chosen, and those that are told.

        Each with the marks of the parts that they are of. Which they are follows from what is in
        a part: they are the same however paths divide them.
        """
        rows = np.asarray(self.validation_tokens(self._plan, path)).astype(np.int64)
        marks = np.array([self._mark(row) for row in rows], dtype=np.int64)
        halves = marks % (2 * self._held_out_every)
        return [(rows[halves == half], marks[halves == half]) for half in range(2)]

    def _mark(self, row: np.ndarray) -> int:
        data = row.tobytes()
        return self._part_of[data] if self._part_of else zlib.crc32(data)

    def scores(
        self, states: Mapping[str, ModuleState], device: str = "cpu", *, exact: bool = True
    ) -> dict[str, Any]:
        """Return the losses of every path's states on its held-out sequences, nats a token.

        With the nats and the targets of each part whose loss is told, in an order that every grid
        has, and their perplexities by domain.
        """
        halves = self._losses(states, torch.device(device), exact)
        chosen_by, told = (np.concatenate(rows) for rows in zip(*halves, strict=True))
        marks, of = np.unique(told[:, 0].astype(np.int64), return_inverse=True)
        nats, targets = (np.bincount(of, told[:, column], len(marks)) for column in (1, 2))
        found = {
            **{name: _loss(rows) for name, rows in (("chosen_by", chosen_by), ("loss", told))},
            "nats": nats.round(2).tolist(),
            "targets": targets.astype(int).tolist(),
        }
        labels = np.array([self._labels.get(mark, "") for mark in marks.tolist()])
        if self._labels:
            found["perplexities"] = {
                str(label): round(math.exp(nats[labels == label].sum() / count), 3)
                for label in sorted(set(labels))
                if (count := targets[labels == label].sum())
            }
        return found

    def _losses(
        self, states: Mapping[str, ModuleState], device: torch.device, exact: bool
    ) -> Iterator[list[np.ndarray]]:
        """Yield the halves of each path: mark, nats and targets of each sequence, [N, 3]."""
        plan = self._plan
        grid, model = self.grid(plan), self.path_model(plan, device).eval()
        for path in range(grid.path_count):
            load_path(model, grid, path, states)
            with autocast_for(device, training_format(device, exact=exact)):
                yield [
                    np.stack((marks, *row_losses(model, rows, plan.routing.prefix_tokens)), axis=1)
                    for rows, marks in self.held_out(path)
                ]


def _loss(rows: np.ndarray) -> float:
    targets = rows[:, 2].sum()
    return round(rows[:, 1].sum() / targets, 5) if targets else math.nan


class LossyReference(ReferenceSwarm):
    """The reference, but steps miss contributions. The same ones whatever the codec."""

    dropped = 0.0

    def _gather(self, module: str, rows: list[OuterRow]) -> list[OuterRow]:
        chance = random.Random(f"{self.next_round}/{module}/{self.plan.seed}")
        return [row for row in rows if chance.random() >= self.dropped]
