"""Checking what a reducer made of the contributions that it was sent (design 4.3). No network.

A reducer keeps the contributions, as they were encoded, until the step is over. Every member asks
for some pieces that it draws by itself, and makes their averages again.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgpack
import torch
from dipaco.modules.outer import AveragingRule

from .codec import PIECE_VALUES, PartCodec
from .commitment import (
    ShownPiece,
    leaves_of,
    merkle_way,
    node_of,
    norm_of,
    pieces_of,
    split_nodes,
)


class WrongAverage(Exception):
    """A reducer gave another average than what it was sent comes to."""


class KeptContributions:
    """What a reducer was sent, and what its senders had committed to.

    :param commitments: of each member
    :param sizes: the elements of each part
    """

    def __init__(
        self,
        codec: PartCodec,
        rule: AveragingRule,
        commitments: Sequence[bytes],
        sizes: Sequence[int],
    ) -> None:
        self._codec, self._rule = codec, rule
        self._commitments, self._sizes = commitments, sizes
        self._nodes: dict[int, tuple[bytes, ...]] = {}
        self._kept: dict[tuple[int, int], tuple[bytes, float, list[bytes]]] = {}

    def begin(self, member: int, nodes: bytes) -> None:
        """Take the hashes of a member's parts. Raises ValueError if it committed to others."""
        self._nodes[member] = split_nodes(nodes, len(self._sizes), self._commitments[member])

    def keep(self, member: int, part: int, buffer: bytes, decoded: torch.Tensor) -> float:
        """Keep an encoded part, and return the norm by which it is clipped.

        Raises ValueError if it is not what its sender committed to.
        """
        norm = norm_of(self._rule, decoded)
        leaves = leaves_of(self._codec, buffer, self._sizes[part])
        if node_of(norm, leaves) != self._nodes[member][part]:
            raise ValueError("it sent another part than it committed to")
        self._kept[member, part] = buffer, norm, leaves
        return norm

    def show(self, member: int, part: int, piece: int) -> bytes:
        """Return a piece of a member's contribution with its proof. Raises ValueError."""
        if (member, part) not in self._kept or not 0 <= piece < pieces_of(self._sizes[part]):
            raise ValueError("there is no such piece here")
        buffer, norm, leaves = self._kept[member, part]
        data = self._codec.cut(buffer, self._sizes[part], piece)
        ways = merkle_way(leaves, piece), merkle_way(self._nodes[member], part)
        return ShownPiece(data, norm, *ways).to_bytes()


class PieceChecker:
    """Makes the averages of pieces again.

    :param commitments: of the members in the order of summation, as `weights` and `paths` are
    :param flat: the averages that this member was given
    """

    def __init__(
        self,
        codec: PartCodec,
        rule: AveragingRule,
        commitments: Sequence[bytes],
        weights: Sequence[float],
        paths: Sequence[int],
        usual_norms: Sequence[float],
        sizes: Sequence[int],
        flat: torch.Tensor,
    ) -> None:
        self._codec, self._rule = codec, rule
        self._commitments = commitments
        self._weights, self._paths, self._usual_norms = weights, paths, usual_norms
        self._sizes, self._flat = sizes, flat
        self._begins = [0, *itertools.accumulate(sizes)]

    def check(self, part: int, piece: int, shown: Sequence[bytes]) -> None:
        """Compare what a reducer shows with what it gave.

        Raises WrongAverage for what anybody can find out by asking the same, and ValueError if it
        shows something else.
        """
        begin = self._begins[part] + piece * PIECE_VALUES
        end = min(begin + PIECE_VALUES, self._begins[part + 1])
        pieces, norms = [], []
        for data, commitment in zip(shown, self._commitments, strict=True):
            one = ShownPiece.from_bytes(data)
            one.check(commitment, self._sizes, part, piece)
            pieces.append(self._codec.decode_piece(one.data, end - begin))
            norms.append(one.norm)
        usual_norm = self._usual_norms[part] if self._usual_norms else 0.0
        self._rule.scale(pieces, norms, usual_norm)
        average = self._rule.combine_section(pieces, self._weights, self._paths)
        expected = self._codec.round_trip(average).view(torch.int32)
        if not torch.equal(expected, self._flat[begin:end].view(torch.int32)):
            raise WrongAverage(f"piece {piece} of part {part} is not the average of its inputs")


def draw(
    reducers: Sequence[int], sizes: Sequence[int], me: int, count: int
) -> list[tuple[int, int]]:
    """Return so many pieces, each as (part, piece), that others have averaged, by private chance.

    :param reducers: of each part
    """
    places = [
        (part, piece)
        for part, (reducer, size) in enumerate(zip(reducers, sizes, strict=True))
        if reducer != me
        for piece in range(pieces_of(size))
    ]
    return random.SystemRandom().sample(places, min(count, len(places)))


@dataclass(frozen=True)
class Accusation:
    """A piece that is wrong, or that its reducer does not show (properly)."""

    part: int
    piece: int
    is_refusal: bool


@dataclass(frozen=True)
class Verdict:
    """What a member says after its checks."""

    averages: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    """For each reducer, by its place in the group: a digest of what it gave, and its signature."""
    accusation: Accusation | None = None

    def to_bytes(self) -> bytes:
        """Return what is sent."""
        said = self.accusation
        return msgpack.packb(
            (
                [(place, *values) for place, values in self.averages.items()],
                said and (said.part, said.piece, said.is_refusal),
            )
        )

    @classmethod
    def from_bytes(cls, data: bytes, reducers: Sequence[int], sizes: Sequence[int]) -> Verdict:
        """Read what a member says. Raises ValueError."""
        try:
            averages, said = msgpack.unpackb(data, use_list=False, max_ext_len=0)
            found = {place: (digest, signature) for place, digest, signature in averages}
            accusation = None if said is None else Accusation(*said)
        except Exception as error:  # msgpack has no common base class for what it raises
            raise ValueError(f"no verdict ({type(error).__name__})") from None
        for place, (digest, signature) in found.items():
            if place not in reducers or type(digest) is not bytes or type(signature) is not bytes:
                raise ValueError("no verdict (a reducer)")
        if accusation is not None:
            places = (accusation.part, accusation.piece)
            if not all(type(place) is int for place in places) or not (
                0 <= accusation.part < len(sizes)
                and 0 <= accusation.piece < pieces_of(sizes[accusation.part])
                and type(accusation.is_refusal) is bool
            ):
                raise ValueError("no verdict (an accusation)")
        return cls(found, accusation)
