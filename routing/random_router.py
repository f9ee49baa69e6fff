"""Random routing: every path gets the same mixture of data (the DiLoCo baseline of section 4)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .router import Prefixes, Router

# The finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class RandomRouter(Router):
    """The path is drawn by a hash of the seed and the document's first tokens.

    cost[i, p] is uniform in [0, 1) and independent for every document and path, so the paths get
    data of one distribution, the n cheapest paths are n different random ones, and a document has
    the same path whenever and wherever it is routed. Documents with equal prefixes stay together.
    """

    kind = "random"

    def __init__(self, path_count: int, seed: int) -> None:
        if not (isinstance(path_count, int) and path_count >= 1):
            raise ValueError(f"{path_count!r} is no number of paths")
        if not (isinstance(seed, int) and 0 <= seed < 2**32):
            raise ValueError(f"the seed {seed!r} is not from 0 to 2^32 - 1")
        self._path_count = path_count
        self._seed = seed

    @property
    def path_count(self) -> int:
        """Number of paths."""
        return self._path_count

    def costs(self, prefixes: Prefixes) -> np.ndarray:
        """Return random numbers in [0, 1) that depend on the tokens alone, float64 [N, paths]."""
        if prefixes.tokens is None:
            raise ValueError("a router of kind 'random' needs the tokens of the documents")
        return random_costs(prefixes.tokens, self._path_count, self._seed)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return nothing: the settings are all there is."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Return the number of paths and the seed."""
        return {"paths": self._path_count, "seed": self._seed}

    @classmethod
    def from_file(
        cls, arrays: Mapping[str, np.ndarray], settings: Mapping[str, Any]
    ) -> RandomRouter:
        """Make a router from the number of paths and the seed."""
        return cls(settings["paths"], settings["seed"])


def random_costs(
    prefixes: Sequence[Sequence[int] | np.ndarray], path_count: int, seed: int
) -> np.ndarray:
    """Return numbers in [0, 1) by seed, tokens and path, float64 [N, path_count].

    Called by the routers that leave the choice of a path to chance.
    """
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
