"""One call of the averager: what the host asks of its process, and what it gets."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from dipaco.modules.outer import Contribution
from hivemind.utils.timed_storage import get_dht_time

from .exact_parts import AveragingFailed
from .group_table import BadRowError, GroupRules


@dataclass(frozen=True)
class AveragingOutcome:
    """What every member of the group holds now: the same bits, the same table."""

    average: torch.Tensor
    """Flat fp32; the caller's own."""
    table: tuple[Contribution, ...]
    """Canonical rows of all contributions in the average."""
    matchmaking_s: float = 0.0
    reduce_s: float = 0.0

    @property
    def peers(self) -> tuple[str, ...]:
        """Peer ids of the members, in the order of the table."""
        return tuple(row.peer for row in self.table)


@dataclass(frozen=True)
class AveragingRequest:
    """One call of `average`, as the averager's process gets it. Doubles as Hivemind's step."""

    rules: GroupRules
    group_bits: str
    scheduled_time: float
    deadline: float
    """When matchmaking gives up (DHT time)."""
    end_s: float
    """When the all-reduce gives up (DHT time)."""
    expected_peers: int | None
    notices: list[str] = field(default_factory=list)

    @property
    def data_for_gather(self) -> bytes:
        return self.rules.own.to_bytes()

    def get_timeout(self) -> float:
        return max(0.0, self.deadline - get_dht_time())


def as_failure(
    error: Exception, members: tuple[str, ...], notices: tuple[str, ...]
) -> AveragingFailed:
    """Turn whatever went wrong in the averager's process into what the host is told."""
    if isinstance(error, AveragingFailed):
        return AveragingFailed(error.reason, error.peers_seen or members, error.culprits, notices)
    if isinstance(error, BadRowError):
        return AveragingFailed(f"group refused: {error}", members, (error.peer,), notices)
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return AveragingFailed(text, members, (), notices)
