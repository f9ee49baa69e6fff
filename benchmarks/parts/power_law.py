"""A power law through a few points, `gap = factor * length ** -exponent`, and where it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

# What is below has no useful logarithm; a drawing may have a gap of nothing, or less.
LEAST_GAP = 1e-4


@dataclass(frozen=True)
class PowerLaws:
    """The law of each of several curves over the same lengths: factors and exponents, [...]."""

    log_factors: np.ndarray
    exponents: np.ndarray
    scatter: np.ndarray
    """The standard deviation of the logarithms of gaps about the law."""

    def lengths_at(self, gap: float) -> np.ndarray:
        """Return after which length each law has the gap; infinite where gaps do not fall."""
        falls = self.exponents > 0
        powers = (self.log_factors - math.log(gap)) / np.where(falls, self.exponents, 1.0)
        with np.errstate(over="ignore"):
            return np.where(falls, np.exp(powers), np.inf)


def fit(lengths: np.ndarray, gaps: np.ndarray) -> PowerLaws:
    """Fit a law to each curve of `gaps` [..., N] over `lengths` [N] by least squares of log gaps.

    Raises ValueError for fewer than three lengths, which would lie on a law whatever they are.
    """
    if len(lengths) < 3:
        raise ValueError(f"a law needs three lengths or more, not {len(lengths)}")
    x, y = np.log(lengths), np.log(np.maximum(gaps, LEAST_GAP))
    middle, mean = x.mean(), y.mean(axis=-1, keepdims=True)
    slopes = ((x - middle) * (y - mean)).sum(axis=-1) / ((x - middle) ** 2).sum()
    factors = mean[..., 0] - slopes * middle
    left = y - factors[..., None] - slopes[..., None] * x
    scatter = np.sqrt((left**2).sum(axis=-1) / (len(lengths) - 2))
    return PowerLaws(factors, -slopes, scatter)


def scattered(lengths: np.ndarray, gaps: np.ndarray, scatter: float) -> np.ndarray:
    """Return drawn curves [R, N] with every gap multiplied by a chance of its own.

    So an interval says what another training would have given, if trainings lie about the law as
    these do.
    """
    chance = np.random.default_rng(0).normal(0.0, scatter, (gaps.shape[0], len(lengths)))
    return np.maximum(gaps, LEAST_GAP) * np.exp(chance)
