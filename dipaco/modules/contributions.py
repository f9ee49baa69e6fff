"""Contributions: how an outer gradient becomes a file, and what everybody reads in it.

See design 4.2, publish. Encoding need not be reproducible, decoding is: small integers times an
fp32 scale, one rounding. A file has no header. Its length follows from the number of values, its
kind from the manifest. The scales of all blocks come first (as the upper half of fp32), then the
codes; any range of whole chunks of `CHUNK_VALUES` can be decoded alone. The format is described in
`docs/protocol.md`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch

from dipaco.base.errors import IntegrityError
from dipaco.protocol.config import CodecName

Data = bytes | bytearray | memoryview
"""Anything with a buffer, such as a mapped file."""


class Numbers(Protocol):
    """Flat fp32 numbers that are asked for in pieces: a tensor, or what is computed on demand."""

    def numel(self) -> int: ...

    def __getitem__(self, part: slice, /) -> torch.Tensor: ...


# Every codec's blocks fit into it whole, so a file can be decoded piece by piece in little memory.
CHUNK_VALUES = 4096
# No honest scale, or number where there are none, is greater. So no step of checked files gives
# what fp32 cannot hold, which would be the same for everybody and stop the module.
MAX_SCALE = 2.0**100
# Its upper half as fp32; those of greater scales, of negative ones and of what is no number are
# greater.
_MAX_HALF = int(np.float32(MAX_SCALE).view(np.uint32)) >> 16
# Values that are encoded at a time.
_PIECE_VALUES = 2**18


class Codec(ABC):
    """One way to write numbers. `values` is always how many a whole file has."""

    name: CodecName
    block_values: int
    """Values that share a scale; divides `CHUNK_VALUES`."""
    bits: int
    """The bits of a code."""

    def blocks(self, values: int) -> int:
        """Return how many scales a file has."""
        return -(-values // self.block_values)

    def file_bytes(self, values: int) -> int:
        """Return how long every file of so many values is."""
        return 2 * self.blocks(values) + self._padded(values) * self.bits // 8

    def _padded(self, values: int) -> int:
        return self.blocks(values) * self.block_values

    def encode(self, flat: Numbers) -> bytearray:
        """Return the file of finite numbers."""
        values = flat.numel()
        data = bytearray(self.file_bytes(values))
        scales = np.frombuffer(data, "<u2", self.blocks(values))
        codes = np.frombuffer(data, np.uint8, offset=scales.nbytes)
        done = 0
        for begin, end in pieces(values):
            piece = flat[begin:end]
            padding = self._padded(end - begin) - (end - begin)
            blocks = torch.nn.functional.pad(piece, (0, padding)).view(-1, self.block_values)
            found = self._scales(blocks)
            if padding:  # It has no part in the scale of the last block.
                found[-1:] = self._scales(blocks[-1:, : self.block_values - padding])
            scale = _upper_half(found)
            scales[self.blocks(begin) :][: len(scale)] = scale
            code = self._codes(blocks, _fp32_of(scale)).view(np.uint8).reshape(-1)
            codes[done : done + len(code)] = code
            done += len(code)
        return data

    def check(self, data: Data, values: int) -> None:
        """Check that a file may be decoded. Raises `IntegrityError`."""
        expected = self.file_bytes(values)
        if len(data) != expected:
            raise IntegrityError(
                f"a contribution of {values} values has {expected} bytes, not {len(data)}"
            )
        halves = np.frombuffer(data, "<u2", self.blocks(values))
        # Also false of what is not a number, and of a negative zero.
        if not bool((halves <= _MAX_HALF).all()):
            raise IntegrityError("a contribution has a scale that no encoder writes")
        if not halves.any():
            raise IntegrityError("a contribution is empty: all its scales are 0")

    def decode(
        self, data: Data, values: int, begin: int = 0, end: int | None = None
    ) -> torch.Tensor:
        """Return the values from `begin` to `end`, flat fp32 in new memory.

        `begin` is a multiple of `CHUNK_VALUES`, and so is `end` unless it is `values`. The file was
        checked.
        """
        end = values if end is None else end
        first, last = begin // self.block_values, -(-end // self.block_values)
        scales = _fp32_of(np.frombuffer(data, "<u2", last - first, 2 * first))
        where = 2 * self.blocks(values)
        numbers = self._numbers(data, where, first, last).view(last - first, self.block_values)
        return numbers.mul_(scales.unsqueeze(1)).view(-1)[: end - begin]

    @abstractmethod
    def _scales(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the scale of each block of values [blocks, block_values]."""

    @abstractmethod
    def _codes(self, blocks: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
        """Return the codes of blocks by their scales, as bytes."""

    @abstractmethod
    def _numbers(self, data: Data, where: int, first: int, last: int) -> torch.Tensor:
        """Return the integers of some blocks, as fp32 in new memory; codes begin at `where`."""


class _Float32(Codec):
    """The numbers themselves: for tests, and as what others are measured by."""

    name: CodecName = "float32"
    block_values = CHUNK_VALUES
    bits = 32

    def file_bytes(self, values: int) -> int:
        return 4 * values

    def encode(self, flat: Numbers) -> bytearray:
        data = bytearray(4 * flat.numel())
        numbers = np.frombuffer(data, "<f4")
        for begin, end in pieces(flat.numel()):
            numbers[begin:end] = flat[begin:end].add(0.0).numpy()  # No negative zeros.
        return data

    def check(self, data: Data, values: int) -> None:
        if len(data) != 4 * values:
            raise IntegrityError(f"{values} values have {4 * values} bytes, not {len(data)}")
        numbers = np.frombuffer(data, "<f4")
        # Also false of what is not a number.
        if not bool((np.abs(numbers) <= MAX_SCALE).all()):
            raise IntegrityError("a contribution has numbers beyond all that training makes")
        if bool((np.signbit(numbers) & (numbers == 0)).any()):
            raise IntegrityError("a contribution has a negative zero")
        if not numbers.any():
            raise IntegrityError("a contribution is empty: all its numbers are 0")

    def decode(
        self, data: Data, values: int, begin: int = 0, end: int | None = None
    ) -> torch.Tensor:
        end = values if end is None else end
        return torch.from_numpy(np.frombuffer(data, "<f4", end - begin, 4 * begin).astype("f4"))

    def _scales(self, blocks: torch.Tensor) -> torch.Tensor:
        raise AssertionError("there are no scales")

    def _codes(self, blocks: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
        raise AssertionError("there are no codes")

    def _numbers(self, data: Data, where: int, first: int, last: int) -> torch.Tensor:
        raise AssertionError("there are no codes")


class _Int4(Codec):
    """Blocks of 64, the greatest of a block is 7; two codes a byte, each 8 more than its number."""

    name: CodecName = "int4"
    block_values = 64
    bits = 4

    def _scales(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks.abs().amax(1).div_(7)

    def _codes(self, blocks: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
        return _packed(_rounded(blocks, scales).add_(8).to(torch.uint8).numpy(), 4)

    def _numbers(self, data: Data, where: int, first: int, last: int) -> torch.Tensor:
        return _unpacked(data, where, first, last, self.block_values, _TABLES[4])


class _Int2(Codec):
    """Blocks of 128; a code is -3, -1, 1 or 3 times half the root mean square."""

    name: CodecName = "int2"
    block_values = 128
    bits = 2

    def _scales(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks.square().mean(1).sqrt_().mul_(0.5)

    def _codes(self, blocks: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
        return _packed(_odd_codes(blocks, scales.unsqueeze(1)), 2)

    def _numbers(self, data: Data, where: int, first: int, last: int) -> torch.Tensor:
        return _unpacked(data, where, first, last, self.block_values, _TABLES[2])


class Sign(Codec):
    """Blocks of 128; every value becomes the mean of their absolutes, with its sign."""

    name: CodecName = "sign"
    block_values = 128
    bits = 1

    def _scales(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks.abs().mean(1)

    def _codes(self, blocks: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
        return np.packbits((blocks >= 0).numpy().reshape(-1), bitorder="little")

    def _numbers(self, data: Data, where: int, first: int, last: int) -> torch.Tensor:
        return _unpacked(data, where, first, last, self.block_values, _TABLES[1])


CODECS: dict[str, Codec] = {codec.name: codec for codec in (_Float32(), _Int4(), _Int2(), Sign())}


def contribution_norm(codec: Codec, data: Data, values: int) -> float:
    """Return the L2 norm of a file's values, the same bits on every machine."""
    return exact_norm(lambda begin, end: codec.decode(data, values, begin, end), values)


def exact_norm(read: Callable[[int, int], torch.Tensor], values: int) -> float:
    """Return the L2 norm of fp32 numbers that are read a piece at a time, the same bits everywhere.

    Squares of fp32 numbers are exact in fp64. Of each chunk they are added in halves, so that the
    order is the same however wide a machine's vectors are; the chunks are added exactly.
    """
    sums: list[float] = []
    memory = torch.empty(_PIECE_VALUES, dtype=torch.float64)
    for begin, end in pieces(values):
        flat = memory[: end - begin + -end % CHUNK_VALUES]
        flat[: end - begin] = read(begin, end)
        flat[end - begin :] = 0.0
        chunks = flat.mul_(flat).view(-1, CHUNK_VALUES)
        half = CHUNK_VALUES // 2
        while half:
            chunks[:, :half].add_(chunks[:, half : 2 * half])
            half //= 2
        sums += chunks[:, 0].tolist()
    return math.sqrt(math.fsum(sums))


def pieces(values: int, piece_values: int = _PIECE_VALUES) -> Iterator[tuple[int, int]]:
    """Yield where each piece of so many values begins and ends."""
    for begin in range(0, values, piece_values):
        yield begin, min(begin + piece_values, values)


# -- bits


def _table(bits: int, numbers: list[int]) -> np.ndarray:
    """Return for each byte of codes [256] its fp32 numbers as one item, lowest bits first."""
    codes = 8 // bits
    rows = [[numbers[byte >> bits * k & 2**bits - 1] for k in range(codes)] for byte in range(256)]
    return np.array(rows, dtype=np.float32).view(f"V{4 * codes}")[:, 0]


_TABLES = {
    1: _table(1, [-1, 1]),
    2: _table(2, [-3, -1, 1, 3]),
    4: _table(4, [code - 8 for code in range(16)]),
}


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return codes of so many bits as bytes, the first in the lowest bits."""
    rows = codes.reshape(-1, 8 // bits)
    packed = rows[:, 0].copy()
    for k in range(1, 8 // bits):
        packed |= rows[:, k] << np.uint8(bits * k)
    return packed


def _unpacked(
    data: Data, where: int, first: int, last: int, block_values: int, table: np.ndarray
) -> torch.Tensor:
    block_bytes = block_values // (table.itemsize // 4)
    codes = np.frombuffer(data, np.uint8, (last - first) * block_bytes, where + first * block_bytes)
    # Every byte is in the table; told to clip, numpy does not look first.
    return torch.from_numpy(np.take(table, codes, mode="clip").view(np.float32))


def _rounded(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the nearest integers from -7 to 7 of blocks by their scales; 0 where a scale is 0."""
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    return blocks.mul(inverse.unsqueeze(1)).round_().clamp_(-7, 7)


def _odd_codes(values: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """Return codes 0 to 3 for the nearest of -3, -1, 1 and 3 times the scales."""
    greater = (values.abs() > 2 * scales).to(torch.uint8)
    return torch.where(values >= 0, 2 + greater, 1 - greater).to(torch.uint8).numpy()


def _upper_half(scales: torch.Tensor) -> np.ndarray:
    """Return the upper 16 bits of fp32 scales, rounded to nearest."""
    clamped = scales.clamp(max=MAX_SCALE / 2)
    return clamped.to(torch.bfloat16).view(torch.int16).numpy().astype("<i2").view("<u2")


def _fp32_of(halves: np.ndarray) -> torch.Tensor:
    return torch.from_numpy((halves.astype(np.uint32) << 16).view(np.float32))
