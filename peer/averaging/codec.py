"""Parts of an outer gradient on the wire: Hivemind's codecs, with strict and exact decoding.

Hivemind's decoders believe what a message says about itself: its codec, shape, type and lengths.
Here all of these are known beforehand, so anything else is refused before it is decoded. Decoding
uses only casts and separately rounded fp32 operations: the same bytes are the same numbers on any
hardware.
"""

from __future__ import annotations

import numpy as np
import torch
from dipaco.modules.codecs import BLOCK_VALUES, CODEBOOK_VALUES, Codec, CodecName
from dipaco.modules.device import load_bitsandbytes
from hivemind.compression import (
    BlockwiseQuantization,
    CompressionBase,
    CompressionInfo,
    Float16Compression,
    NoCompression,
)
from hivemind.proto import runtime_pb2

# What is shown of a part when a reducer is checked; whole blocks of every codec.
PIECE_VALUES = BLOCK_VALUES
_HEADER_BYTES = 16
_COMPRESSIONS: dict[CodecName, type[CompressionBase]] = {
    "none": NoCompression,
    "float16": Float16Compression,
    "blockwise8bit": BlockwiseQuantization,
}


class PartCodec:
    """One of `dipaco.modules.codecs` on the wire.

    Used by the exact all-reduce for every part, the reducer's own included.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.compression = _COMPRESSIONS[codec.name]()
        if codec.name == "blockwise8bit":
            # Imported before averagers are forked: importing it takes seconds.
            load_bitsandbytes()

    def encode(self, part: torch.Tensor) -> runtime_pb2.Tensor:
        """Return a flat fp32 part as a message."""
        return self.compression.compress(part, CompressionInfo.from_tensor(part))

    def decode(self, message: runtime_pb2.Tensor, elements: int) -> torch.Tensor:
        """Return the flat fp32 part of exactly `elements` finite values in `message`.

        Raises ValueError that says what is wrong with any other message.
        """
        if message.compression != self.compression.compression_type:
            raise ValueError(f"a part is not encoded with {self.codec.name}")
        if list(message.size) != [elements] or message.dtype != "float32":
            shape = "x".join(map(str, message.size))
            raise ValueError(f"a part is {message.dtype[:16]} {shape}, not float32 {elements}")
        expected_bytes = self.codec.encoded_bytes(elements)
        if len(message.buffer) != expected_bytes:
            raise ValueError(f"a part has {len(message.buffer)} bytes, not {expected_bytes}")
        part = self._decode_buffer(message.buffer, elements)
        if not is_finite(part):
            raise ValueError("a part is not finite")
        return part

    def round_trip(self, part: torch.Tensor) -> torch.Tensor:
        """Return what others see of `part`; always a new tensor.

        Raises ValueError when that is not finite.
        """
        return self.decode(self.encode(part), part.numel())

    def cut(self, buffer: bytes, elements: int, piece: int) -> bytes:
        """Return a piece of an encoded part, itself encoded as a part."""
        begin, end = piece * PIECE_VALUES, min(elements, (piece + 1) * PIECE_VALUES)
        if self.codec.name != "blockwise8bit":
            width = self.codec.value_bytes
            return buffer[begin * width : end * width]
        scales = _HEADER_BYTES + 4 * -(-elements // BLOCK_VALUES)
        codes = scales + 4 * CODEBOOK_VALUES
        return b"".join(
            (
                np.array([1, CODEBOOK_VALUES], dtype="<i8").tobytes(),
                buffer[_HEADER_BYTES + 4 * piece : _HEADER_BYTES + 4 * piece + 4],
                buffer[scales:codes],
                buffer[codes + begin : codes + end],
            )
        )

    def decode_piece(self, data: bytes, elements: int) -> torch.Tensor:
        """Return the flat fp32 piece of exactly `elements` finite values. Raises ValueError."""
        if len(data) != self.codec.encoded_bytes(elements):
            raise ValueError(f"a piece has {len(data)} bytes")
        piece = self._decode_buffer(data, elements)
        if not is_finite(piece):
            raise ValueError("a piece is not finite")
        return piece

    def _decode_buffer(self, buffer: bytes, elements: int) -> torch.Tensor:
        if self.codec.name == "none":
            return torch.from_numpy(np.frombuffer(buffer, dtype="<f4").astype(np.float32))
        if self.codec.name == "float16":
            return torch.from_numpy(np.frombuffer(buffer, dtype="<f2").astype(np.float32))
        return _decode_blockwise(buffer, elements)


def is_finite(flat: torch.Tensor) -> bool:
    """Tell whether every value is finite, without a mask as large as the tensor."""
    low, high = torch.aminmax(flat)
    return bool(torch.isfinite(low)) and bool(torch.isfinite(high))


def _decode_blockwise(buffer: bytes, elements: int) -> torch.Tensor:
    """Decode Hivemind's layout: two counts, a scale for each block, a codebook, the indices."""
    blocks = -(-elements // BLOCK_VALUES)
    counts = np.frombuffer(buffer, dtype="<i8", count=2).tolist()
    if counts != [blocks, CODEBOOK_VALUES]:
        raise ValueError(f"a part has {counts} scales and codes, not {[blocks, 256]}")
    values = np.frombuffer(
        buffer, dtype="<f4", count=blocks + CODEBOOK_VALUES, offset=_HEADER_BYTES
    ).astype(np.float32)
    indices = np.frombuffer(buffer, dtype=np.uint8, offset=_HEADER_BYTES + values.nbytes)
    scales, codebook = torch.from_numpy(values).split([blocks, CODEBOOK_VALUES])
    decoded = codebook[torch.from_numpy(indices.astype(np.int64))]
    return decoded.mul_(scales.repeat_interleave(BLOCK_VALUES)[:elements])
