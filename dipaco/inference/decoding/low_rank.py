"""What low-rank adapters add to the maps of a path, for one text or for several together."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class LowRank:
    """What adapters add to a map: `a` [in, parts * r], and `b` [r, out] of each part, whose outputs
    follow each other. In front there may be a dimension of texts. PyTorch's or NumPy's."""

    a: Any
    b: tuple[Any, ...]

    def add(self, inputs: Any, mapped: Any) -> None:
        """Add it to [B, T, outputs], mapped from `inputs`."""
        inner, first = inputs @ self.a, 0
        for number, b in enumerate(self.b):
            rank, last = b.shape[-2], first + b.shape[-1]
            mapped[..., first:last] += inner[..., number * rank : (number + 1) * rank] @ b
            first = last

    def arrays(self) -> LowRank:
        """Return the same in NumPy."""
        return LowRank(self.a.numpy(), tuple(b.numpy() for b in self.b))


@dataclass(frozen=True)
class BlockAdapters:
    """What is added to the maps of a block."""

    inputs: LowRank | None = None
    output: LowRank | None = None
    gate_and_up: LowRank | None = None
    down: LowRank | None = None

    def maps(self) -> tuple[LowRank | None, ...]:
        """Return them one after the other."""
        return self.inputs, self.output, self.gate_and_up, self.down


PathAdapters = Mapping[int, BlockAdapters]
"""By the number of the block."""

NOTHING = BlockAdapters()


@dataclass(frozen=True)
class StackedAdapters:
    """The adapters of several texts together, for one computation of all of them."""

    texts: Sequence[PathAdapters | None]
    """What they were stacked of: each text's own."""
    blocks: PathAdapters

    @classmethod
    def of(cls, texts: Sequence[PathAdapters | None], as_arrays: bool) -> StackedAdapters:
        """Stack the adapters of texts, as NumPy's arrays or not; those of a slot that is free are
        anything."""
        return cls(texts, _stacked(texts, as_arrays))

    def is_of(self, texts: Sequence[PathAdapters | None]) -> bool:
        """Return whether it is what these texts need."""
        return len(texts) == len(self.texts) and all(map(operator.is_, texts, self.texts))


def _stacked(texts: Sequence[PathAdapters | None], as_arrays: bool) -> PathAdapters:
    """Return the adapters of several texts together; those of a slot that is free are anything."""
    given = [text for text in texts if text is not None]
    if not given:
        return {}
    filled = [given[0] if text is None else text for text in texts]
    together = {}
    for number in given[0]:
        blocks = [text[number].maps() for text in filled]
        maps = [_stacked_map(several) for several in zip(*blocks, strict=True)]
        found = [one.arrays() if one is not None and as_arrays else one for one in maps]
        together[number] = BlockAdapters(*found)
    return together


def _stacked_map(several: Sequence[LowRank | None]) -> LowRank | None:
    given = [one for one in several if one is not None]
    if all(one is given[0] for one in given):
        return given[0]  # read once for all texts
    parts = zip(*(one.b for one in given), strict=True)
    return LowRank(torch.stack([o.a for o in given]), tuple(torch.stack(part) for part in parts))
