"""What a member commits to before a reduce, and how a piece of it is shown afterwards. Pure.

A contribution is cut into its parts and each encoded part into *pieces* of 4,096 numbers. A part's
*node* is a hash of its norm and of the Merkle root over its pieces; the *commitment*, which stands
in the member's row, is the Merkle root over its parts' nodes. So a reducer that has a part can show
any piece of it, with the norm by which it was clipped, in a few hundred bytes more, and cannot show
another one.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import msgpack
import torch
from dipaco.modules.outer import AveragingRule, exact_norm

from .codec import PIECE_VALUES, PartCodec

HASH_BYTES = 32


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """Return the root over hashes; a hash without a neighbour moves up as it is."""
    level = list(leaves)
    while len(level) > 1:
        level = [_join(*level[place : place + 2]) for place in range(0, len(level), 2)]
    return level[0]


def merkle_way(leaves: Sequence[bytes], place: int) -> tuple[bytes, ...]:
    """Return the hashes that lead from a leaf to the root, from below."""
    level, way = list(leaves), []
    while len(level) > 1:
        if place ^ 1 < len(level):
            way.append(level[place ^ 1])
        level = [_join(*level[left : left + 2]) for left in range(0, len(level), 2)]
        place //= 2
    return tuple(way)


def root_of(leaf: bytes, place: int, count: int, way: Sequence[bytes]) -> bytes:
    """Return the root that a way leads to. Raises ValueError when it has another length."""
    left = list(way)
    while count > 1:
        if place ^ 1 < count:
            if not left:
                raise ValueError("a proof is too short")
            other = left.pop(0)
            leaf = _join(other, leaf) if place % 2 else _join(leaf, other)
        place, count = place // 2, (count + 1) // 2
    if left:
        raise ValueError("a proof is too long")
    return leaf


def _join(left: bytes, right: bytes | None = None) -> bytes:
    return left if right is None else hashlib.sha256(b"\x01" + left + right).digest()


def _leaf(piece: bytes) -> bytes:
    return hashlib.sha256(b"\x00" + piece).digest()


def pieces_of(elements: int) -> int:
    """Return how many pieces a part has."""
    return max(1, -(-elements // PIECE_VALUES))


def leaves_of(codec: PartCodec, buffer: bytes, elements: int) -> list[bytes]:
    """Return the hashes of the pieces of an encoded part."""
    count = pieces_of(elements)
    return [_leaf(codec.cut(buffer, elements, piece)) for piece in range(count)]


def norm_of(rule: AveragingRule, decoded: torch.Tensor) -> float:
    """Return the norm by which a part is clipped; 0 where none is."""
    return exact_norm(decoded) if rule.clip_multiple else 0.0


def node_of(norm: float, leaves: Sequence[bytes]) -> bytes:
    """Return the node of a part with such a norm and such pieces."""
    root = merkle_root(leaves)
    return hashlib.sha256(b"\x02" + struct.pack("<d", norm) + root).digest()


def nodes_of(codec: PartCodec, rule: AveragingRule, flat: torch.Tensor) -> tuple[bytes, ...]:
    """Return the nodes of all parts of a contribution; the commitment is their `merkle_root`."""
    nodes = []
    for part in flat.split(rule.part_sizes(flat.numel())):
        encoded = codec.encode(part)
        decoded = codec.decode(encoded, part.numel())
        leaves = leaves_of(codec, encoded.buffer, part.numel())
        nodes.append(node_of(norm_of(rule, decoded), leaves))
    return tuple(nodes)


def split_nodes(data: bytes, parts: int, commitment: bytes) -> tuple[bytes, ...]:
    """Read the nodes that a member sends first. Raises ValueError if it committed to others."""
    if len(data) != parts * HASH_BYTES:
        raise ValueError(f"{len(data)} bytes of hashes for {parts} parts")
    nodes = tuple(data[begin : begin + HASH_BYTES] for begin in range(0, len(data), HASH_BYTES))
    if merkle_root(nodes) != commitment:
        raise ValueError("its hashes are not those that it committed to")
    return nodes


@dataclass(frozen=True)
class ShownPiece:
    """A piece of one member's contribution to a part, as a reducer shows it."""

    data: bytes
    norm: float
    way: tuple[bytes, ...]
    """From the piece to its part's root."""
    way_of_part: tuple[bytes, ...]

    def to_bytes(self) -> bytes:
        """Return what is sent."""
        return msgpack.packb((self.data, self.norm, self.way, self.way_of_part))

    @classmethod
    def from_bytes(cls, data: bytes) -> ShownPiece:
        """Read what somebody shows. Raises ValueError."""
        try:
            piece, norm, way, way_of_part = msgpack.unpackb(data, use_list=False, max_ext_len=0)
        except Exception as error:  # msgpack has no common base class for what it raises
            raise ValueError(f"what it shows is no piece ({type(error).__name__})") from None
        ways = (way, way_of_part)
        if type(piece) is not bytes or type(norm) is not float or not 0 <= norm < math.inf:
            raise ValueError("what it shows is no piece")
        if not all(
            type(one) is tuple and all(type(h) is bytes and len(h) == HASH_BYTES for h in one)
            for one in ways
        ):
            raise ValueError("what it shows has no proof")
        return cls(piece, norm, way, way_of_part)

    def check(self, commitment: bytes, sizes: Sequence[int], part: int, piece: int) -> None:
        """Raise ValueError unless a member with this commitment contributed it."""
        root = root_of(_leaf(self.data), piece, pieces_of(sizes[part]), self.way)
        node = node_of(self.norm, (root,))
        if root_of(node, part, len(sizes), self.way_of_part) != commitment:
            raise ValueError("a piece is not what its member committed to")
