"""A trimmed mean: a few of many contributions can move it only so far (design 4.3, step).

Everything gives the same bits on every machine: fp32 on the CPU, each operation rounded by itself,
in the order of the rows.

A path has one vote, with the weight of all its replicas: they are combined first, in the same way,
and count alike, because nobody can check how many tokens one of them has trained. Of fewer than
three voters none can be told from the others, so that their weighted mean is taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch

# Numbers that are sorted at a time, so that 256 contributions need 50 MB.
SORTED_VALUES = 2**14
LEAST_VOTERS = 3


def of_paths(
    contributions: Sequence[torch.Tensor],
    weights: Sequence[float],
    paths: Sequence[int],
    share: float,
) -> torch.Tensor:
    """Return the trimmed mean of the paths, of each of which that of its replicas is taken first:
    each of them counts alike there, and in the vote of its path as it is weighted.

    :param contributions: flat fp32 of one shape, in canonical order, so that replicas are together
    :param paths: the path of each
    :param share: what is left out at each end, as in `trim_count`
    """
    voters, votes = [], []
    for _, group in itertools.groupby(range(len(paths)), key=paths.__getitem__):
        places = list(group)
        replicas = [contributions[place] for place in places]
        voters.append(trimmed_mean(replicas, [1.0] * len(places), share))
        votes.append(math.fsum(weights[place] for place in places))
    return trimmed_mean(voters, votes, share)


def trim_count(voters: int, share: float) -> int:
    """Return how many of the greatest, and of the least, of so many values are left out.

    The share of them, rounded up, as long as one or two remain: of three values one, of two none.
    """
    return min(math.ceil(Fraction(str(share)) * voters), (voters - 1) // 2)


def weighted_mean(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the weighted mean, in new memory unless there is one value."""
    if len(values) == 1:
        return values[0]
    whole = math.fsum(weights)
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
    result = torch.empty_like(values[0])
    pieces = zip(*(value.split(SORTED_VALUES) for value in (*values, result)), strict=True)
    for *piece, into in pieces:
        into.copy_(_between(piece, weights, trimmed))
    return result


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


def fp32(value: float) -> float:
    """Round to fp32, so that the scalar is the same however a kernel widens it."""
    return float(np.float32(value))
