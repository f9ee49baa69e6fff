"""Routers without features: by a label of the data, or by chance."""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dipaco.base.errors import ConfigurationError

from .router import FitConfig, Prefixes, Router, RouterSample

# The finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class _SeededRouter(Router):
    """What routers without arrays have in common: a number of paths, and a seed to draw by."""

    def __init__(self, path_count: int, seed: int) -> None:
        if not (isinstance(path_count, int) and path_count >= 1):
            raise ValueError(f"{path_count!r} is not a number of paths")
        if not (isinstance(seed, int) and 0 <= seed < 2**32):
            raise ValueError(f"the seed {seed!r} is not from 0 to 2^32 - 1")
        self._path_count = path_count
        self._seed = seed

    @property
    def path_count(self) -> int:
        """Number of paths."""
        return self._path_count

    def arrays(self) -> dict[str, np.ndarray]:
        """Return nothing: the settings are all there is."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Return the number of paths and the seed."""
        return {"paths": self._path_count, "seed": self._seed}


class LabelRouter(_SeededRouter):
    """Routing by a domain, a language or a source.

    Every label belongs to one path, and a path has one or several labels.

    cost[i, p] is 0 for the path of the document's label and 1 for the others. A document without a
    label, or with one that nobody had when the router was fitted, goes where the hash of its first
    tokens says (`_random_costs`).
    """

    kind = "label"
    needs_labels = True

    def __init__(self, path_count: int, seed: int, paths: Mapping[str, int]) -> None:
        super().__init__(path_count, seed)
        if not all(isinstance(path, int) and 0 <= path < path_count for path in paths.values()):
            raise ValueError("a label has a path that does not exist")
        self._paths = dict(paths)

    @classmethod
    def from_sample(
        cls, sample: RouterSample, config: FitConfig, levels: tuple[int, ...], seed: int
    ) -> LabelRouter:
        """Share out the labels of the sample: the largest first, each to the path with the least so
        far."""
        path_count, weights = math.prod(levels), sample.weights
        labels = sample.labels if sample.labels is not None else [None] * len(weights)
        sizes: Counter[str] = Counter()
        for label, weight in zip(labels, weights.tolist(), strict=True):
            if label is not None:
                sizes[label] += weight
        if len(sizes) < path_count:
            raise ConfigurationError(
                f"kind = 'label' needs at least {path_count} labels, one for each path, and the "
                f"documents have {len(sizes)} ({', '.join(sorted(sizes)[:8]) or 'none'}); choose "
                f"fewer modules_per_level under [grid], another label_field under [data], or "
                f"another kind under [router]"
            )
        loads: list[tuple[float, int]] = [(0, path) for path in range(path_count)]
        paths: dict[str, int] = {}
        for label, size in sorted(sizes.items(), key=lambda entry: (-entry[1], entry[0])):
            load, paths[label] = heapq.heappop(loads)
            heapq.heappush(loads, (load + size, paths[label]))
        return cls(path_count, seed, paths)

    def costs(self, prefixes: Prefixes) -> np.ndarray:
        """Return 0 for a document's own path and 1 for others, float64 [N, paths]."""
        if prefixes.labels is None or prefixes.tokens is None:
            raise ValueError("a router of kind 'label' needs the labels and tokens of documents")
        own = np.array([self._known_path(label) for label in prefixes.labels], dtype=np.int64)
        for index in np.flatnonzero(own < 0):
            drawn = _random_costs([prefixes.tokens[index]], self._path_count, self._seed)
            own[index] = int(np.argmin(drawn[0]))
        return (np.arange(self._path_count)[None, :] != own[:, None]).astype(np.float64)

    def _known_path(self, label: str | None) -> int:
        return -1 if label is None else self._paths.get(label, -1)

    def settings(self) -> dict[str, Any]:
        """Return the number of paths, the seed, and the path of every label."""
        return {**super().settings(), "labels": self._paths}

    @classmethod
    def from_file(
        cls, arrays: Mapping[str, np.ndarray], settings: Mapping[str, Any]
    ) -> LabelRouter:
        """Make a router from the number of paths, the seed, and the path of every label."""
        if not isinstance(settings["labels"], dict):
            raise ValueError("its labels are not an object")
        return cls(settings["paths"], settings["seed"], settings["labels"])


class RandomRouter(_SeededRouter):
    """Every path gets the same mixture of data, which is the DiLoCo baseline of section 4.

    The path is drawn by a hash of the seed and the document's first tokens.

    cost[i, p] is uniform in [0, 1) and independent for every document and path, so the paths get
    data of one distribution, the n cheapest paths are n different random ones, and a document has
    the same path whenever and wherever it is routed. Documents with equal prefixes stay together.
    """

    kind = "random"

    @classmethod
    def from_sample(
        cls, sample: RouterSample, config: FitConfig, levels: tuple[int, ...], seed: int
    ) -> RandomRouter:
        """Take the number of paths and the seed: there is nothing to learn."""
        return cls(math.prod(levels), seed)

    def costs(self, prefixes: Prefixes) -> np.ndarray:
        """Return random numbers in [0, 1) that depend on the tokens alone, float64 [N, paths]."""
        if prefixes.tokens is None:
            raise ValueError("a router of kind 'random' needs the tokens of the documents")
        return _random_costs(prefixes.tokens, self._path_count, self._seed)

    @classmethod
    def from_file(
        cls, arrays: Mapping[str, np.ndarray], settings: Mapping[str, Any]
    ) -> RandomRouter:
        """Make a router from the number of paths and the seed."""
        return cls(settings["paths"], settings["seed"])


def _random_costs(
    prefixes: Sequence[Sequence[int] | np.ndarray], path_count: int, seed: int
) -> np.ndarray:
    """Return numbers in [0, 1) by seed, tokens and path, float64 [N, path_count]."""
    key = seed.to_bytes(8, "little")
    digests = b"".join(
        hashlib.blake2b(np.asarray(tokens, dtype="<u4").tobytes(), digest_size=8, key=key).digest()
        for tokens in prefixes
    )
    words = np.frombuffer(digests, dtype="<u8").astype(np.uint64)[:, None]
    words = words + np.arange(1, path_count + 1, dtype=np.uint64)[None, :] * _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    words = words ^ (words >> np.uint64(31))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
