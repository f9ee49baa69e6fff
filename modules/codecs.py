"""The codecs of outer gradients on the wire: one table of names, sizes and what they do to numbers.

`dipaco.peer.averaging.codec` has Hivemind's class for each name; everything else that knows of
codecs reads it here. Importing this costs nothing: it is part of the configuration.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

CodecName = Literal["none", "float16", "blockwise8bit"]
MeanName = Literal["weighted_mean", "trimmed_mean", "centered_clipping"]

FLOAT16_GREATEST = 65504.0
BLOCK_VALUES = 4096
CODEBOOK_VALUES = 256


@dataclass(frozen=True)
class Codec:
    """One codec. An encoded part has `fixed_bytes`, then bytes for each block and each value."""

    name: CodecName
    round_trip: Callable[[torch.Tensor], torch.Tensor]
    """Returns a flat fp32 CPU tensor as its receiver sees it, in new memory. Equal to Hivemind's
    codec of this name, so that one process computes what a swarm does."""
    value_bytes: int
    block_values: int = 1
    """Values that share a scale. The parts of a swarm are whole blocks, as in a whole tensor:
    otherwise the blocks, and so the bits, would depend on where a part begins."""
    block_bytes: int = 0
    fixed_bytes: int = 0

    def part_values(self, part_bytes: int) -> int:
        """Return the values in a whole part; its scales and its header come on top."""
        blocks = max(1, part_bytes // (self.value_bytes * self.block_values))
        return blocks * self.block_values

    def part_sizes(self, values: int, part_bytes: int) -> tuple[int, ...]:
        """Return the values of each part that a vector is cut into: no more parts than it takes.

        They are whole blocks, as equal in number as can be, except for the end of the vector.
        """
        blocks = -(-values // self.block_values)
        count = max(1, -(-values // self.part_values(part_bytes)))
        ends = [number * blocks // count * self.block_values for number in range(1, count)]
        return tuple(end - begin for begin, end in itertools.pairwise((0, *ends, values)))

    def encoded_bytes(self, values: int) -> int:
        """Return the bytes that so many values become."""
        blocks = -(-values // self.block_values)
        return self.fixed_bytes + self.block_bytes * blocks + self.value_bytes * values


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


def _through_float16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clamp(-FLOAT16_GREATEST, FLOAT16_GREATEST).half().float()


def _through_8_bits(tensor: torch.Tensor) -> torch.Tensor:
    from .device import load_bitsandbytes

    load_bitsandbytes()
    from bitsandbytes.functional import dequantize_blockwise, quantize_blockwise

    quantized, state = quantize_blockwise(tensor, blocksize=BLOCK_VALUES, nested=False)
    return dequantize_blockwise(
        quantized, absmax=state.absmax, code=state.code, blocksize=BLOCK_VALUES
    )


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("none", _copy, value_bytes=4),
        Codec("float16", _through_float16, value_bytes=2),
        # A header of two counts, a scale for each block, the codebook, an index for each value.
        Codec(
            "blockwise8bit",
            _through_8_bits,
            value_bytes=1,
            block_values=BLOCK_VALUES,
            block_bytes=4,
            fixed_bytes=16 + 4 * CODEBOOK_VALUES,
        ),
    )
}
