"""What every decoder can be asked, whatever computes it and however many paths it has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from dipaco.protocol.config import ModelConfig


class TextDecoder(Protocol):
    """What gives the tokens of a path, or of several; `Decoder` says what each part does."""

    config: ModelConfig

    @property
    def lengths(self) -> list[int]: ...

    @property
    def free_slots(self) -> int: ...

    def read(
        self, slot: int, tokens: Sequence[int], *, every: bool = False
    ) -> Iterator[torch.Tensor]: ...

    def step(self, tokens: Sequence[int | None]) -> torch.Tensor: ...

    def copy(self, slot: int, length: int) -> list[torch.Tensor]: ...

    def paste(self, slot: int, text: list[torch.Tensor]) -> None: ...

    def free(self, slot: int) -> None: ...


class PathDecoder:
    """What decoders of one path have alike that store their texts themselves."""

    def __init__(self, config: ModelConfig, slots: int) -> None:
        self.config = config
        self.lengths = [0] * slots
        """Tokens that are stored of each text; 0 in a free slot."""

    @property
    def free_slots(self) -> int:
        """How many texts more can be taken."""
        return self.lengths.count(0)
