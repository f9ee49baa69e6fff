"""What is lost when adapters are merged into their base and the sum is stored in few bits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from dipaco.modules.frozen_base import Weight

_Named = tuple[str, torch.Tensor]


@dataclass(frozen=True)
class Rounding:
    """What is lost where merged weights are rounded to the format of the base."""

    unchanged: float
    """Share of the weights of blocks that are unchanged from the base."""
    error: float
    """Norm of what rounding adds, as a share of the norm of what the adapters add."""


class RoundingMeter:
    """Measures what is lost where sums of base and adapters are stored as `dtype`."""

    def __init__(self, base: Mapping[str, Weight], dtype: torch.dtype) -> None:
        self._base, self._dtype = base, dtype
        self._weights = self._unchanged = 0
        self._added = self._lost = 0.0

    def passing(self, merged: Iterable[_Named]) -> Iterator[_Named]:
        """Yield the sums, fp32 with their names, and measure them on the way."""
        for name, whole in merged:
            if whole.ndim > 1 and ".layers." in name:
                self._look(self._base[name].to(torch.float32), whole)
            yield name, whole

    def _look(self, before: torch.Tensor, whole: torch.Tensor) -> None:
        stored = whole.to(self._dtype).float()
        self._weights += whole.numel()
        self._unchanged += int((stored == before).sum())
        self._added += float((whole - before).square().sum(dtype=torch.float64))
        self._lost += float((stored - whole).square().sum(dtype=torch.float64))

    def rounding(self) -> Rounding:
        """Return what was lost in everything that passed."""
        error = math.sqrt(self._lost / self._added) if self._added else 0.0
        return Rounding(self._unchanged / max(1, self._weights), error)
