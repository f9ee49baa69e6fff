"""The part of a run that a peer reads, so that its cost does not grow with the swarm.

See design 4.8, DHT. Paths are dealt out to buckets of about `BUCKET_PATHS`. What a peer says of
itself, and how far paths are, stands under the key of a bucket; who holds and trains a module under
the key of the module. A run of few paths has one bucket, and everybody sees everybody. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from .grid import Grid

BUCKET_PATHS = 64
# Buckets beside a peer's own that it reads at a time, to find peers or paths that need one.
SAMPLED_AT_ONCE = 4
# With fewer peers in its own bucket it reads the next ones too: somebody has to keep copies.
ENOUGH_PEERS = 8


@dataclass(frozen=True)
class Scope:
    """The part of the swarm that one view reads."""

    modules: tuple[str, ...]
    """The modules whose trainers and holders are read."""
    buckets: tuple[int, ...]
    """The buckets whose peers and progress are read."""
    bucket_count: int
    """Buckets of the run."""

    @cached_property
    def _module_set(self) -> frozenset[str]:
        return frozenset(self.modules)

    @cached_property
    def _bucket_set(self) -> frozenset[int]:
        return frozenset(self.buckets)

    def covers_module(self, module: str) -> bool:
        """Tell whether the trainers and holders of a module are read."""
        return module in self._module_set

    def covers_path(self, path: int) -> bool:
        """Tell whether the claims on a path, and how far it is, are read."""
        return path % self.bucket_count in self._bucket_set

    def covers_peer(self, peer: str) -> bool:
        """Tell whether the record of a peer without a path is read."""
        return home_bucket(peer, None, self.bucket_count) in self._bucket_set

    def paths(self, path_count: int) -> list[int]:
        """Return which of so many paths are covered."""
        buckets = (range(bucket, path_count, self.bucket_count) for bucket in self.buckets)
        return sorted(path for bucket in buckets for path in bucket)

    def paths_in_sight(self, grid: Grid) -> set[int]:
        """Return the paths whose claims are read, through their bucket or a module."""
        by_bucket = self.paths(grid.path_count)
        return set(by_bucket).union(*map(grid.paths_of_module, self.modules))

    def with_buckets(self, buckets: Iterable[int]) -> Scope:
        """Return a scope that reads further buckets too."""
        return replace(self, buckets=tuple(sorted({*self.buckets, *buckets})))


def scope_of(modules: Iterable[str], buckets: Iterable[int], grid: Grid) -> Scope:
    """Return a scope in its one spelling: sorted, each once."""
    count = bucket_count(grid.path_count)
    return Scope(tuple(sorted(set(modules))), tuple(sorted(set(buckets))), count)


def whole_scope(grid: Grid) -> Scope:
    """Return the scope of everything that is published, for tools that show or fetch everything."""
    return scope_of(grid.modules(), range(bucket_count(grid.path_count)), grid)


def bucket_count(path_count: int) -> int:
    """Return how many buckets the paths of a run are in."""
    return -(-path_count // BUCKET_PATHS)


def home_bucket(peer: str, path: int | None, count: int) -> int:
    """Return the bucket in which a peer publishes: that of the path it claims, if it claims one."""
    if path is not None:
        return path % count
    return int.from_bytes(hashlib.sha256(peer.encode()).digest()[:8], "big") % count


def next_buckets(home: int, count: int) -> tuple[int, ...]:
    """Return the buckets after `home`, all of them a ring: where one with few peers looks on."""
    return tuple((home + step) % count for step in range(1, min(SAMPLED_AT_ONCE, count - 1) + 1))


def sampled_buckets(peer: str, attempt: int, home: int, count: int) -> tuple[int, ...]:
    """Return a few buckets other than `home`, which differ for each peer and at each attempt."""
    others = (bucket for bucket in range(count) if bucket != home)

    def place(bucket: int) -> bytes:
        return hashlib.sha256(f"{peer}/{attempt}/{bucket}".encode()).digest()

    return tuple(sorted(others, key=place)[:SAMPLED_AT_ONCE])
