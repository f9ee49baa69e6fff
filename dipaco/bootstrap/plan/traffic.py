"""What a peer sends and receives in a round: the traffic that `plan` shows.

It is counted for a calm swarm, in which nobody comes, goes or moves, with at least one peer for
each path. A peer that can be called also keeps copies and leads modules, now and then; what that
takes is counted by the copy and by the turn, and on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dipaco.protocol.chain.steps import MAX_ROWS
from dipaco.protocol.config import RoundsConfig
from dipaco.protocol.coverage import SAMPLED_AT_ONCE, bucket_count
from dipaco.protocol.member.group import MAILBOXES
from dipaco.protocol.records import RENEWED_AFTER, record_life_s, refresh_period_s
from dipaco.protocol.wire_sizes import (
    CALL_BYTES,
    ENTRY_BYTES,
    HELD_BYTES,
    MODULE_BYTES,
    NODES_STORED,
    NODES_VISITED,
    PEER_BYTES,
    PROGRESS_BYTES,
    ROW_BYTES,
    VISIT_BYTES,
)

# A peer that cannot be called asks a mailbox for rows and steps once or twice in a round.
_ASKS_OF_CLOSED = 1.5
# An answer has the rows of so many rounds, beside the last step.
_ROUNDS_IN_ANSWER, _ROWS_IN_ANSWER = 3, 128
SENT, RECEIVED = 0, 1
# Contributions; rows and steps told, asked for and answered, and requests for files; the DHT.
FILES, MESSAGES, DHT = 0, 1, 2

Traffic = np.ndarray
"""Bytes of a round, float64 [2, 3]: sent and received, of files, messages and the DHT."""


@dataclass(frozen=True)
class Crowd:
    """The peers of a swarm."""

    peers: int
    """The peers that train."""
    closed_share: float = 0.2
    """The share of them that cannot be called."""
    bootstrap_nodes: int = 1


@dataclass(frozen=True)
class LevelLoad:
    """The modules of a level, as far as traffic goes."""

    modules: int
    path_share: float
    """The part of all paths that leads through one of them."""
    file_bytes: int
    """The bytes of a contribution."""


@dataclass(frozen=True)
class SwarmTraffic:
    """What moves in a round of a swarm, by what a peer does."""

    trains: Traffic
    """A peer that trains and can be called."""
    trains_closed: Traffic
    """A peer that trains and cannot be called."""
    keeps: Traffic
    """In addition: one copy of a module that is not trained here."""
    leads: Traffic
    """In addition: a turn as the first mailbox of a module."""
    serves: Traffic
    """A bootstrap node."""
    copies: float
    """The copies that a peer which can be called keeps, on average."""
    turns: float
    """The turns as first mailbox that it has in a round, on average."""

    @property
    def called(self) -> Traffic:
        """The traffic of a peer that trains and can be called, with its copies and turns."""
        return self.trains + self.keeps * self.copies + self.leads * self.turns


@dataclass(frozen=True)
class _Group:
    """The numbers of peers that follow one module of a level."""

    load: LevelLoad
    trainers: float
    closed: float
    """The trainers that cannot be called."""
    kept: float
    """Copies at peers that do not train it."""
    kept_for_closed: float
    """The same, where it is known of a trainer that it cannot be called."""
    mailboxes: int
    """The mailboxes that a peer which cannot be called gives its file to."""

    @property
    def followers(self) -> float:
        """The number of peers that fetch all files."""
        return self.trainers + self.kept

    @property
    def listeners(self) -> float:
        """Followers who are told of rows and steps."""
        return self.followers - self.closed

    @property
    def file_bytes(self) -> float:
        return CALL_BYTES + self.load.file_bytes

    @property
    def step_bytes(self) -> float:
        return CALL_BYTES + ROW_BYTES * min(self.trainers, MAX_ROWS)

    @property
    def answer_bytes(self) -> float:
        rows = min(_ROUNDS_IN_ANSWER * self.trainers, _ROWS_IN_ANSWER)
        return ROW_BYTES * rows + self.step_bytes


def swarm_traffic(
    levels: Sequence[LevelLoad], path_count: int, rounds: RoundsConfig, crowd: Crowd
) -> SwarmTraffic:
    """Return what the peers of a swarm move."""
    groups = [_group(level, rounds, crowd) for level in levels]
    modules = np.array([group.load.modules for group in groups], dtype=np.float64)
    copies = modules * [group.kept for group in groups]
    # Where no copies are needed, what a copy of any module would cost.
    kept = copies if copies.sum() else modules
    dht = _Dht(path_count, rounds, crowd)
    trains = sum(dht.hold(group, is_trained=True) for group in groups) + dht.train()
    holds = [_keep(group) + dht.hold(group, is_trained=False) for group in groups]
    keeps = np.average(holds, axis=0, weights=kept)
    node, able = dht.look_and_say(), _able(crowd)
    whole = trains * crowd.peers + node * crowd.bootstrap_nodes + keeps * copies.sum()
    answers = np.zeros((2, 3))
    # Those who can be called answer what is read in the DHT, and take what is stored, equally.
    answers[:, DHT] = whole[::-1, DHT] / able
    return SwarmTraffic(
        trains=sum(_train(group) for group in groups) + trains + answers,
        trains_closed=sum(_train_closed(group) for group in groups) + trains,
        keeps=keeps,
        leads=np.average([_lead(group) for group in groups], axis=0, weights=modules),
        serves=node + answers,
        copies=float(copies.sum() / able),
        turns=float(modules.sum() / able),
    )


def _moved(
    sent_files: float = 0.0,
    sent_messages: float = 0.0,
    received_files: float = 0.0,
    received_messages: float = 0.0,
    *,
    stored: float = 0.0,
    read: float = 0.0,
) -> Traffic:
    return np.array(
        [
            [sent_files, sent_messages, stored],
            [received_files, received_messages, read],
        ]
    )


def _able(crowd: Crowd) -> float:
    """Return how many peers can be called."""
    return max(1.0, crowd.peers * (1 - crowd.closed_share) + crowd.bootstrap_nodes)


def _group(load: LevelLoad, rounds: RoundsConfig, crowd: Crowd) -> _Group:
    able = _able(crowd)
    trainers = max(1.0, crowd.peers * load.path_share)
    open_share = 1 - crowd.closed_share
    # Beside one that cannot be called, more of the others can.
    open_others = min(1.0, crowd.peers * open_share / max(1.0, crowd.peers - 1))

    def kept(open_trainers: float) -> float:
        return max(0.0, min(rounds.copies, able) - open_trainers)

    return _Group(
        load=load,
        trainers=trainers,
        closed=trainers * crowd.closed_share,
        kept=kept(trainers * open_share),
        kept_for_closed=kept((trainers - 1) * open_others),
        mailboxes=min(MAILBOXES, int(able)),
    )


def _train(group: _Group) -> Traffic:
    """A peer tells all others its row, and they fetch its file; the same holds for theirs."""
    others, fetched, told = group.followers - 1, group.trainers - 1, CALL_BYTES + ROW_BYTES
    return _moved(
        others * group.file_bytes,
        max(0.0, group.listeners - 1) * told + fetched * CALL_BYTES,
        fetched * group.file_bytes,
        fetched * told + group.step_bytes + others * CALL_BYTES,
    )


def _train_closed(group: _Group) -> Traffic:
    """This peer's file is given to the mailboxes, which are asked for rows and steps."""
    fetched, told = group.trainers - 1, CALL_BYTES + ROW_BYTES
    return _moved(
        group.mailboxes * group.file_bytes,
        group.listeners * told + (fetched + _ASKS_OF_CLOSED) * CALL_BYTES,
        fetched * group.file_bytes,
        _ASKS_OF_CLOSED * group.answer_bytes,
    )


def _keep(group: _Group) -> Traffic:
    """All files are fetched, and all rows and the step are told."""
    files, told = group.trainers, CALL_BYTES + ROW_BYTES
    received = files * told + group.step_bytes
    return _moved(0.0, files * CALL_BYTES, files * group.file_bytes, received)


def _lead(group: _Group) -> Traffic:
    """The files of those who cannot be called are given to all who have not got them, the step is
    told, and questions are answered. It needs these files itself, so it receives no more of them.
    """
    others = group.trainers - 1 + group.kept_for_closed
    files = group.closed * max(0.0, others - group.mailboxes)
    asked = _ASKS_OF_CLOSED * group.closed
    told = max(0.0, group.listeners - 1) * group.step_bytes + asked * group.answer_bytes
    return _moved(files * group.file_bytes, told, 0.0, (files + asked) * CALL_BYTES)


class _Dht:
    """Traffic with the DHT: what is read counts as received, and what is stored counts as sent."""

    def __init__(self, path_count: int, rounds: RoundsConfig, crowd: Crowd) -> None:
        period_s = refresh_period_s(rounds)
        self._refreshes = rounds.duration_s / period_s
        # The refresh after a step may find that the record of its state is hardly older.
        self._not_skipped = max(0.0, 1 - RENEWED_AFTER * record_life_s(period_s) / period_s)
        self._nodes = min(NODES_VISITED, max(1, crowd.peers + crowd.bootstrap_nodes - 1))
        self._storing = min(NODES_STORED, self._nodes)
        buckets = bucket_count(path_count)
        in_bucket = crowd.peers / buckets
        peers = self._read(PEER_BYTES * (in_bucket + crowd.bootstrap_nodes / buckets))
        self._bucket = peers + self._read((PROGRESS_BYTES + ENTRY_BYTES) * in_bucket)
        # Where a peer sees only a part of the paths, it looks at others too: once a dwell, and in
        # each round where others train its path as well.
        spare = max(0.0, 1 - path_count / crowd.peers)
        self._looks = spare + (1 - spare) / rounds.dwell_rounds if buckets > 1 else 0.0
        self._looked_at = 1 + min(SAMPLED_AT_ONCE, buckets - 1)

    def look_and_say(self) -> Traffic:
        """This peer's bucket is read, and it is said who this is, in each refresh."""
        return self._bucket * self._refreshes + self._write(PEER_BYTES) * self._refreshes

    def train(self) -> Traffic:
        """Besides, how far the path is, once a round, and looks at other paths."""
        looked = self._bucket * (self._looks * self._looked_at)
        return self.look_and_say() + looked + self._write(PROGRESS_BYTES + ENTRY_BYTES)

    def hold(self, group: _Group, *, is_trained: bool) -> Traffic:
        """Of a module that is followed: its trainers and holders are read in each refresh, and that
        this peer is one is written in each and after each step."""
        reads = self._refreshes + (self._looks if is_trained else 0.0)
        writes = self._refreshes + self._not_skipped
        size = MODULE_BYTES + HELD_BYTES
        return self._read(size * group.followers) * reads + self._write(size) * writes

    def _read(self, key_bytes: float) -> Traffic:
        return _moved(read=self._nodes * VISIT_BYTES + self._storing * key_bytes)

    def _write(self, record_bytes: float) -> Traffic:
        return _moved(stored=self._storing * record_bytes, read=self._nodes * VISIT_BYTES)
