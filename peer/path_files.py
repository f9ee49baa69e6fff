"""The files that training one path needs: base model, shard, held-out split, genesis states."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from dipaco.modules.errors import CorpusError
from dipaco.modules.state import ModuleState
from dipaco.routing.batches import BatchStream
from dipaco.routing.token_files import check_tokens, even_sample

from .node import Node


@dataclass(frozen=True)
class PathData:
    """A path's batches and its held-out rows."""

    stream: BatchStream
    validation: torch.Tensor


class PathFiles:
    """Fetches what is missing, checks it by hash, and opens it."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._base: dict[str, torch.Tensor] | None = None

    def shard_weights(self) -> dict[int, int] | None:
        """Return the sequences of every path's shard, or None when paths weigh alike."""
        return self._node.shard_sequences() if self._node.plan.outer.shard_weights else None

    def replica_number(self, lead_rank: int) -> int:
        """Return which stream of batches a replica draws: 0 for the lead, its own otherwise.

        Two replicas whose views differ must not draw the same batches, so the number comes from
        the peer id and not from the rank.
        """
        if lead_rank == 0:
            return 0
        return 1 + zlib.crc32(self._node.me.encode()) % (2**31 - 2)

    def fetch(self, path: int, waiting: Callable[[str], None]) -> PathData:
        """Fetch and open the files of `path`; `waiting` is told what is fetched."""
        node, plan = self._node, self._node.plan
        shard = node.load_shard_index().paths[path]
        if shard.train_sequences == 0:
            raise CorpusError(
                f"path {path} has an empty shard, so it cannot be trained; the operator should "
                "prepare the run again with balanced = true in [router]"
            )
        waiting("the base model")
        node.fetcher.blob(plan.blobs.base, "the base model")
        waiting(f"the shard of path {path}")
        node.fetcher.blob(shard.train_sha256, f"the shard of path {path}")
        node.fetcher.blob(shard.validation_sha256, f"the held-out split of path {path}")
        tokens = node.run_directory.train_tokens(plan, path)
        check_tokens(tokens, plan.model.vocabulary_size, f"the shard of path {path}")
        stream = BatchStream(
            tokens, seed=plan.seed, path=path, batch_sequences=plan.inner.batch_sequences
        )
        return PathData(stream, self._validation_rows(path))

    def _validation_rows(self, path: int) -> torch.Tensor:
        """Return at most `validation_sequences` held-out rows, evenly spread over the split."""
        plan = self._node.plan
        rows = self._node.run_directory.validation_tokens(plan, path)
        check_tokens(rows, plan.model.vocabulary_size, f"the held-out split of path {path}")
        sample = even_sample(rows, plan.rounds.validation_sequences)
        return torch.from_numpy(np.asarray(sample, dtype=np.int64))

    def genesis_state(self, module: str) -> ModuleState:
        """Return the state a module starts from: of the successor's index, or of the base."""
        node, plan = self._node, self._node.plan
        if plan.blobs.genesis is not None:
            index = node.fetcher.blob(plan.blobs.genesis, "the genesis index")
            digest = json.loads(index.read_bytes()).get(module)
            if digest is not None:
                node.fetcher.blob(digest, f"the genesis state of {module}")
        elif self._base is None:
            self._base = node.run_directory.base_parameters(plan)
        return node.run_directory.genesis_state(plan, module, self._base)

    def release(self) -> None:
        """Forget the base model, which is as large as a path; called when training begins."""
        self._base = None
