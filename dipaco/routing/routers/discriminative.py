"""Discriminative routing: a linear classifier of the path that models a document best.

DiPaCo sections 2.4.2 and 7.2.1: every path scores the router documents, the label of a document is
the path with the greatest summed log-likelihood, and multinomial logistic regression on the prefix
features learns to predict it. The paper then trains a bias "to match the target document-to-path
distribution" without saying how; here the biases are the duals of the transport problem with that
distribution (`balance_biases`), which is exact on the sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dipaco.base.errors import ConfigurationError

from .balancing import balance_biases
from .fitting import fit_classes
from .router import FeatureRouter, FitConfig, RouterSample, standardisation

# The least documents of the sample for a path, unless that is more than half of an equal share: a
# share estimated from fewer documents may turn out to be nothing in the corpus.
_LEAST_DOCUMENTS = 8
# Of the spread of the scores: decides between paths that score alike, and nothing else.
_TIE_BREAK = 1e-6


class DiscriminativeRouter(FeatureRouter):
    """cost[i, p] = -(weight_p . standardised feature_i + bias_p): minus the logits of the paths."""

    kind = "discriminative"
    fitted_on_scores = True

    def __init__(
        self, mean: np.ndarray, scale: np.ndarray, weight: np.ndarray, bias: np.ndarray
    ) -> None:
        super().__init__(mean, scale)
        self._weight = np.asarray(weight, dtype=np.float64)
        self._bias = np.asarray(bias, dtype=np.float64)
        if self._weight.ndim != 2 or self._weight.shape[1] != self.feature_size:
            raise ValueError("the weight is not rows of the width of mean and scale")
        if self._bias.shape != (self.path_count,) or self.path_count < 1:
            raise ValueError("there is not one bias for each path")
        self._check_finite()

    @classmethod
    def from_sample(
        cls, sample: RouterSample, config: FitConfig, levels: tuple[int, ...], seed: int
    ) -> DiscriminativeRouter:
        """Fit to the features of the sample and what the paths make of its documents.

        The biases are calibrated (section 7.2.1): the paths get documents in proportion to the
        labels, but no path less than `least_share` of an equal share, because a path that no
        document prefers would stay empty and could never be trained to become better.

        `seed` decides only which of several paths with equal scores, as untrained ones have, a
        document counts for (`preferred_paths`).
        """
        features, nll, paths = sample.required_features(), sample.nll, math.prod(levels)
        if nll is None:
            raise ConfigurationError(
                "a router of kind 'discriminative' learns from what trained paths make of the "
                "documents; train a run with kind = 'kmeans' under [router] first, and give it "
                "with --from RUN"
            )
        if nll.ndim != 2 or len(nll) != len(features) or not np.isfinite(nll).all():
            raise ValueError(f"scores of shape {nll.shape} do not fit features {features.shape}")
        if nll.shape[1] != paths:
            raise ConfigurationError(
                f"the grid {' x '.join(map(str, levels))} has {paths} paths, the scores are of "
                f"shape {nll.shape}; score every path of this grid"
            )
        if len(nll) < paths:
            raise ConfigurationError(
                f"the router needs at least {paths} documents with scores, one for each path, and "
                f"has {len(nll)}; give more training_documents under [router]"
            )
        mean, scale, points = standardisation(features)
        targets = label_targets(np.argmin(nll, axis=1), paths, config.least_share)
        labels = preferred_paths(nll, targets, seed)
        weight, bias = fit_classes(points, labels, paths)
        costs = -(points @ weight.T + bias)
        calibration = balance_biases(costs, np.ones(len(nll)), targets=targets)
        return cls(mean, scale, weight, bias - calibration)

    @property
    def path_count(self) -> int:
        """Number of classes."""
        return len(self._weight)

    def point_costs(self, points: np.ndarray) -> np.ndarray:
        """Return minus the logits, float64 [N, paths]."""
        return -(points @ self._weight.T + self._bias)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return mean, scale, weight and bias, float64."""
        return {
            "bias": self._bias,
            "mean": self._mean,
            "scale": self._scale,
            "weight": self._weight,
        }

    @classmethod
    def from_file(
        cls, arrays: Mapping[str, np.ndarray], settings: Mapping[str, Any]
    ) -> DiscriminativeRouter:
        """Make a router from mean, scale, weight and bias."""
        return cls(arrays["mean"], arrays["scale"], arrays["weight"], arrays["bias"])


def label_targets(labels: np.ndarray, paths: int, least_share: float) -> np.ndarray:
    """Return the shares of documents [paths] that sum to 1: those of the labels, but none below
    `least_share` of an equal share or a few documents; the others give up what that takes, in
    proportion."""
    shares = np.bincount(labels, minlength=paths) / len(labels)
    few = min(_LEAST_DOCUMENTS / len(labels), 0.5 / paths)
    floor = max(least_share / paths, few, min(1 / len(labels), 1 / paths))
    low = np.zeros(paths, dtype=bool)
    while (found := (shares < floor) & ~low).any():
        low |= found
        shares[low] = floor
        shares[~low] *= (1.0 - floor * low.sum()) / shares[~low].sum()
    return shares


def preferred_paths(nll: np.ndarray, targets: np.ndarray, seed: int) -> np.ndarray:
    """Return the path that models each document best, int64 [N], every path being best for some.

    A path that is best for hardly any document gets those on which it is the least behind,
    `targets` [paths] of them: classes without examples would all get the same weights, and no bias
    could tell them apart again. Between paths with equal scores, chance decides.
    """
    documents, paths = nll.shape
    best = np.argmin(nll, axis=1)
    if (np.bincount(best, minlength=paths) >= np.maximum(1, np.floor(targets * documents))).all():
        return best
    spread = float(np.std(nll - nll.mean(axis=1, keepdims=True))) or 1.0
    noise = np.random.default_rng(seed).normal(size=nll.shape)
    costs = nll + _TIE_BREAK * spread * noise
    return np.argmin(costs + balance_biases(costs, np.ones(documents), targets=targets), axis=1)
