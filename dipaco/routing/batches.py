"""Which sequences a path's step trains on: a pure function, the same on every machine.

A shard is read as an endless stream of epochs, each a permutation of the whole shard. All replicas
of a path share the stream and read different places of it (design 4.6, claims), so two peers on
one path do not repeat each other's work.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from dipaco.base.errors import CorpusError


def batch_indices(
    seed: int, path: int, place: int, batch_sequences: int, shard_sequences: int
) -> np.ndarray:
    """Return the rows of the shard in batch number `place`, int64 [batch_sequences].

    The batch begins at position `place * batch_sequences` of the stream; it may cross epochs, or
    hold several.

    Raises CorpusError if the shard is empty, ValueError for a negative argument.
    """
    if min(seed, path, place) < 0 or batch_sequences < 1:
        raise ValueError(
            f"a batch needs seed, path and place of 0 or more and at least one sequence, "
            f"got {seed}, {path}, {place} and {batch_sequences}"
        )
    if shard_sequences < 1:
        raise CorpusError(
            f"the shard of path {path} is empty, so there is nothing to train on; prepare the run "
            f"with 'balanced = true' under [router], or with fewer paths"
        )
    parts = []
    position, missing = place * batch_sequences, batch_sequences
    while missing:
        epoch, offset = divmod(position, shard_sequences)
        part = _epoch_order(seed, path, epoch, shard_sequences)[offset : offset + missing]
        parts.append(part)
        position, missing = position + len(part), missing - len(part)
    return np.concatenate(parts)


@functools.lru_cache(maxsize=4)
def _epoch_order(seed: int, path: int, epoch: int, sequences: int) -> np.ndarray:
    """Return one epoch's permutation of the shard, int64 [sequences], read-only.

    It sorts raw words of a bit generator, because NumPy promises that these never change between
    versions and makes no such promise for `Generator.permutation`.
    """
    words = np.random.PCG64(np.random.SeedSequence((seed, path, epoch)))
    order = np.argsort(words.random_raw(sequences), kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


class BatchStream:
    """The batches of one path's shard.

    `tokens` is [N, T] of any unsigned type, usually the memory map of `open_tokens`; only the rows
    of a batch are read.
    """

    def __init__(self, tokens: np.ndarray, *, seed: int, path: int, batch_sequences: int) -> None:
        self._tokens = tokens
        self._seed = seed
        self._path = path
        self._batch_sequences = batch_sequences

    @property
    def sequences(self) -> int:
        """Rows of the shard."""
        return len(self._tokens)

    @property
    def batches_per_epoch(self) -> int:
        """Batches, rounded up, after which the whole shard was read."""
        return -(-len(self._tokens) // self._batch_sequences)

    def batch(self, place: int) -> torch.Tensor:
        """Return the tokens of batch number `place`, int64 [batch, T] on the CPU.

        Raises CorpusError if the shard is empty.
        """
        rows = batch_indices(
            self._seed, self._path, place, self._batch_sequences, len(self._tokens)
        )
        return torch.from_numpy(self._tokens[rows].astype(np.int64))
