"""Robust means: averages that a few of many contributions can move only so far (design 4.3).

Everything gives the same bits on every machine: fp32 on the CPU, each operation rounded by itself,
in the order of the rows.

A path has one vote, with the weight of all its replicas: they are combined first, in the same way,
and count alike, because nobody can check how many tokens one of them has trained. Of fewer than
three voters none can be told from the others, so that their weighted mean is taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import torch

from .contributions import CHUNK_VALUES

# Numbers that are sorted at a time, so that 256 contributions need 50 MB.
SORTED_VALUES = 2**14
# Centered clipping measures distances in blocks of so many numbers of a part. Part of the protocol.
MEASURED_VALUES = CHUNK_VALUES
LEAST_VOTERS = 3

Mean = Callable[[Sequence[torch.Tensor], Sequence[float]], torch.Tensor]


def of_paths(
    contributions: Sequence[torch.Tensor],
    weights: Sequence[float],
    paths: Sequence[int],
    mean: Mean,
) -> torch.Tensor:
    """Return the mean of the paths, of each of which the mean of its replicas is taken first: each
    of them counts alike there, and in the vote of its path as it is weighted.

    :param contributions: flat fp32 of one shape, in canonical order, so that replicas are together
    :param paths: the path of each
    :param mean: of some voters, whose weights need not sum to 1
    """
    voters, votes = [], []
    for _, group in itertools.groupby(range(len(paths)), key=paths.__getitem__):
        places = list(group)
        voters.append(mean([contributions[place] for place in places], [1.0] * len(places)))
        votes.append(sum(weights[place] for place in places))
    return mean(voters, votes)


def trim_count(voters: int, share: float) -> int:
    """Return how many of the greatest, and of the least, of so many values are left out.

    The share of them, rounded up, as long as one or two remain: of three values one, of two none.
    """
    return min(math.ceil(Fraction(str(share)) * voters), (voters - 1) // 2)


def weighted_mean(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the weighted mean, in new memory unless there is one value."""
    if len(values) == 1:
        return values[0]
    whole = sum(weights)
    total = torch.zeros_like(values[0])
    for value, weight in zip(values, weights, strict=True):
        total.add_(value.mul(fp32(weight / whole)))
    return total


def trimmed_mean(
    values: Sequence[torch.Tensor], weights: Sequence[float], share: float
) -> torch.Tensor:
    """Return, for each coordinate, the weighted mean of what lies between the extremes.

    As long as no more than `trim_count` voters lie, every coordinate is within what others say.
    """
    trimmed = trim_count(len(values), share)
    if not trimmed:
        return weighted_mean(values, weights)
    return _by_blocks(values, SORTED_VALUES, lambda piece: _between(piece, weights, trimmed))


def centered_clipping(
    values: Sequence[torch.Tensor], weights: Sequence[float], multiple: float
) -> torch.Tensor:
    """Return the weighted mean of what each voter differs from the median, which is clipped.

    Block by block, a distance from the median of the coordinates is at most `multiple` times the
    lower median of all distances. Where none is greater, that is the weighted mean.
    """
    if len(values) < LEAST_VOTERS:
        return weighted_mean(values, weights)
    return _by_blocks(
        values, MEASURED_VALUES, lambda block: _clipped_mean(block, weights, multiple)
    )


def _by_blocks(
    values: Sequence[torch.Tensor],
    block_values: int,
    mean: Callable[[Sequence[torch.Tensor]], torch.Tensor],
) -> torch.Tensor:
    result = torch.empty_like(values[0])
    blocks = zip(*(value.split(block_values) for value in (*values, result)), strict=True)
    for *block, into in blocks:
        into.copy_(mean(block))
    return result


def _clipped_mean(
    values: Sequence[torch.Tensor], weights: Sequence[float], multiple: float
) -> torch.Tensor:
    centre = _between(values, weights, (len(values) - 1) // 2)
    ways = [value - centre for value in values]
    distances = [exact_norm(way) for way in ways]
    most = multiple * sorted(distances)[(len(distances) - 1) // 2]
    if max(distances) <= most:
        return weighted_mean(values, weights)
    whole = sum(weights)
    for way, weight, distance in zip(ways, weights, distances, strict=True):
        if distance > most:
            way.mul_(fp32(most / distance))
        centre.add_(way.mul_(fp32(weight / whole)))
    return centre


def _between(
    values: Sequence[torch.Tensor], weights: Sequence[float], trimmed: int
) -> torch.Tensor:
    """Return the weighted mean of all but the `trimmed` greatest and least values, by coordinate.

    Of equal values the earlier row is the lesser. Rounding does not lead out of what remains.
    """
    ordered, places = torch.stack(tuple(values)).sort(dim=0, stable=True)
    kept = ordered[trimmed : len(values) - trimmed]
    shares = torch.tensor([fp32(weight) for weight in weights])[places]
    total, whole = torch.zeros_like(kept[0]), torch.zeros_like(kept[0])
    for value, share in zip(kept, shares[trimmed : len(values) - trimmed], strict=True):
        total.add_(value.mul(share))
        whole.add_(share)
    return total.div_(whole).clamp_(kept[0], kept[-1])


def exact_norm(part: torch.Tensor) -> float:
    """Return the L2 norm of a flat fp32 tensor, the same bits on every machine.

    Squares of fp32 numbers are exact in fp64; they are added in halves, so that the order is the
    same however wide a machine's vectors are.
    """
    squares = part.double()
    squares.mul_(squares)
    while (count := squares.numel()) > 1:
        half = (count + 1) // 2
        squares[: count - half].add_(squares[half:])
        squares = squares[:half]
    return math.sqrt(squares.item()) if part.numel() else 0.0


def fp32(value: float) -> float:
    """Round to fp32, so that the scalar is the same however a kernel widens it."""
    return float(np.float32(value))
