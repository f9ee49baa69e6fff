"""What the members of a group tell each other before any byte moves, and how it is checked. Pure.

A meeting gathers one small row from every member. The rows give the weights, the order of
summation and who reduces how much, so everybody must hold the same rows; the id under which the
all-reduce runs is therefore a hash of them (`agree`), and a member that was told other rows is
in another group.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from fractions import Fraction

import msgpack
from dipaco.dht.admission import Admission, Gate
from dipaco.dht.records import RecordError
from dipaco.modules.grid import module_name_is_valid
from dipaco.modules.outer import UNKNOWN, Contribution, Usual, bounded_table, canonical_table
from dipaco.modules.plan import PROTOCOL_VERSION
from dipaco.peer.member.reception import GREATEST_GROUP


def averager_prefix(run_id: str, level: str) -> str:
    """Return the namespace of a level's averagers on libp2p, the same on every peer."""
    return f"dipaco-{PROTOCOL_VERSION}/{run_id}/{level}"


def meeting_key(module: str, round_index: int, attempt: int, anchor_digest: str) -> str:
    """Return the name of the meeting of one attempt at one outer step.

    Peers with another name never meet. `anchor_digest` is the 64 hexadecimal digits of the state
    that the outer gradient was taken from. Raises ValueError for what cannot be.
    """
    if not re.fullmatch(r"[0-9a-f]{64}", anchor_digest):
        raise ValueError(f"anchor digest must be 64 hexadecimal digits, got {anchor_digest!r}")
    if not module_name_is_valid(module):
        raise ValueError(f"module must be a name such as L0.E3, got {module!r}")
    for name, value in (("round", round_index), ("attempt", attempt)):
        if not 0 <= value < 2**32:
            raise ValueError(f"{name} must lie in [0, 2**32), got {value}")
    return f"{module}/{round_index}/{attempt}/{anchor_digest}"


ROW_BYTES = 512
GREATEST_BANDWIDTH_MBIT = 1_000_000
_SHARE_UNITS = 2**20


class BadRowError(ValueError):
    """A row that cannot be accepted. `peer` is the member that it came from."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(peer, reason)
        self.peer = peer
        self.reason = reason

    def __str__(self) -> str:
        return f"peer {self.peer}: {self.reason}"


@dataclass(frozen=True)
class GatherRow:
    """One member's row: what it averages, from which anchor, and how much work is in it."""

    protocol: int
    module: str
    round_index: int
    anchor: str
    """Digest of the state that the outer gradient was taken from."""
    path: int
    peer: str
    """The member's libp2p peer id in base58."""
    tokens: int
    """Tokens trained since the anchor: the contribution's weight."""
    bandwidth_mbit: int
    """Upload of the member; 0 cannot be reached, so it reduces nothing."""
    commitment: bytes = b""
    """Root of the hashes of its contribution; empty where reducers are not checked."""
    admission: bytes = b""
    """In a run by invitation; an open run's row is without this field."""

    def to_bytes(self) -> bytes:
        """Return the row as msgpack."""
        values = astuple(self)
        return msgpack.packb(values if self.admission else values[:-1])

    @classmethod
    def from_bytes(cls, data: bytes) -> GatherRow:
        """Read a stranger's row. Raises ValueError unless every field has its type."""
        if len(data) > ROW_BYTES:
            raise ValueError(f"row of {len(data)} bytes, at most {ROW_BYTES}")
        try:
            values = msgpack.unpackb(data, use_list=False, raw=False, max_ext_len=0)
        except Exception as error:
            raise ValueError(f"row is not msgpack ({type(error).__name__})") from None
        most = len(fields(cls))
        if type(values) is not tuple or len(values) not in (most - 1, most):
            raise ValueError("row does not have the fields of this protocol")
        if len(values) == most and not values[-1]:
            raise ValueError("row has an empty admission")
        for field, value in zip(fields(cls), values, strict=False):
            if type(value).__name__ != field.type:
                raise ValueError(f"row: {field.name} is not {field.type}")
        return cls(*values)


@dataclass(frozen=True)
class GroupRules:
    """What this peer accepts in the group of one attempt."""

    own: GatherRow
    paths: frozenset[int]
    """Paths through the module."""
    greatest_tokens: int
    """No contribution can have more tokens than this."""
    usual: Usual = UNKNOWN
    """What the rows' anchor says, which bounds what they count."""
    gate: Gate | None = None
    """Of a run by invitation: who may come."""

    def check_place(self, peer: str, came: dict[str, Admission]) -> None:
        """Let a caller whose row is good have a place of its invitation in this meeting.

        Raises BadRowError when others that `came` have them all.
        """
        said = self.gate.admission_of(peer) if self.gate is not None else None
        if said is None:
            return
        before = [p for p, a in came.items() if a.invitation == said.invitation and p != peer]
        if len(before) >= said.places:
            raise BadRowError(peer, f"the places of its invitation {said.invitation} are taken")
        came[peer] = said

    def check_row(self, data: bytes, sender: str) -> GatherRow:
        """Read the row that `sender` gave, or raise BadRowError that says what is wrong."""
        try:
            row = GatherRow.from_bytes(data)
        except ValueError as error:
            raise BadRowError(sender, str(error)) from None
        own = self.own
        # A stranger's text is shown only where it is known to be short and plain.
        if row.protocol != own.protocol:
            raise BadRowError(sender, f"speaks protocol {row.protocol}, not {own.protocol}")
        if row.peer != sender:
            raise BadRowError(sender, "its row names another peer")
        if row.module != own.module:
            raise BadRowError(sender, f"averages another module than {own.module}")
        if row.round_index != own.round_index:
            raise BadRowError(sender, f"is in round {row.round_index}, not {own.round_index}")
        if row.anchor != own.anchor:
            shown = row.anchor[:8] if re.fullmatch(r"[0-9a-f]{64}", row.anchor) else "no digest"
            raise BadRowError(sender, f"starts from anchor {shown}, not {own.anchor[:8]}")
        if row.path not in self.paths:
            raise BadRowError(sender, f"path {row.path} does not run through {own.module}")
        if not 0 < row.tokens <= self.greatest_tokens:
            raise BadRowError(
                sender, f"{row.tokens} tokens is not between 1 and {self.greatest_tokens}"
            )
        if not 0 <= row.bandwidth_mbit <= GREATEST_BANDWIDTH_MBIT:
            raise BadRowError(sender, f"bandwidth {row.bandwidth_mbit} Mbit/s is impossible")
        if len(row.commitment) != len(own.commitment):
            raise BadRowError(sender, f"a commitment of {len(row.commitment)} bytes is none")
        if self.gate is None and row.admission:
            raise BadRowError(sender, "has an admission, in an open run")
        if self.gate is not None:
            try:
                self.gate.check(sender, row.admission)
            except RecordError as error:
                raise BadRowError(sender, str(error)) from None
        return row


@dataclass(frozen=True)
class AgreedGroup:
    """A checked group: the same on every member that was told the same rows."""

    group_id: bytes
    peers: tuple[str, ...]
    """In the leader's order, in which parts are assigned."""
    table: tuple[Contribution, ...]
    """In the canonical order, in which contributions are summed; tokens as they count."""
    shares: tuple[int, ...]
    """For each of `peers`, how much of the vector it reduces; no meaning but their ratio."""
    usual: Usual = UNKNOWN
    """What the members' anchor says of contributions."""
    commitments: tuple[bytes, ...] = ()
    """Of each of `peers`; none where reducers are not checked."""
    mbit_per_s: tuple[int, ...] = ()
    """What each of `peers` states of its upload; 0 cannot be reached."""


def agree(
    key: bytes, peers: Sequence[str], rows: Sequence[bytes], rules: GroupRules
) -> AgreedGroup:
    """Check what the leader sent and return the group, or raise BadRowError naming who is bad.

    `key` is the name of the meeting.
    """
    own_peer = rules.own.peer
    if not 2 <= len(peers) <= GREATEST_GROUP or len(rows) != len(peers):
        raise BadRowError(own_peer, f"was put into a group of {len(peers)} with {len(rows)} rows")
    if len(set(peers)) != len(peers) or own_peer not in peers:
        raise BadRowError(own_peer, "was put into a group that repeats or lacks a peer")
    checked = [rules.check_row(row, peer) for row, peer in zip(rows, peers, strict=True)]
    if checked[list(peers).index(own_peer)] != rules.own:
        raise BadRowError(own_peer, "its row was changed by the group's leader")
    if not any(row.bandwidth_mbit for row in checked):
        raise BadRowError(own_peer, "was put into a group in which nobody can be reached")
    if rules.gate is not None:
        counted = rules.gate.counted_of(peers)
        for peer in peers:
            if peer not in counted:
                raise BadRowError(peer, "more peers of its invitation came than that is for")
    digest = hashlib.sha256(b"dipaco-group/2\n" + key + b"\n")
    for peer, row in zip(peers, rows, strict=True):
        digest.update(msgpack.packb((peer, row)))
    contributions = [Contribution(row.path, row.peer, row.tokens) for row in checked]
    return AgreedGroup(
        group_id=digest.digest(),
        peers=tuple(peers),
        table=bounded_table(canonical_table(contributions), rules.usual),
        shares=reduce_shares([row.bandwidth_mbit for row in checked]),
        usual=rules.usual,
        commitments=tuple(row.commitment for row in checked) if rules.own.commitment else (),
        mbit_per_s=tuple(row.bandwidth_mbit for row in checked),
    )


def reduce_shares(bandwidths: Sequence[int]) -> tuple[int, ...]:
    """Return how much of the vector each member reduces, as integers with the right ratios.

    A member that reduces the fraction f moves 1 + (n - 2) f times the vector, so the slowest
    member is as fast as can be when (1 + (n - 2) f) / bandwidth is the same for all that reduce
    anything, and the others reduce nothing. What a member states is not known to be true, so
    nobody gets more than twice an equal share among those that can be reached: the fastest get
    that, and the rest is dealt among the others in the same way. Solved exactly, in fractions:
    every member must find the same integers.
    Hivemind solves the problem without the limit with a linear program whose solver SciPy has
    since removed.
    """
    count = len(bandwidths)
    able = sorted((value for value in bandwidths if value > 0), reverse=True)
    if count <= 2 or able[0] == able[-1]:
        return tuple(int(value > 0) for value in bandwidths)
    most = min(Fraction(1), Fraction(2, len(able)))
    capped = 0
    while (level := _level(able[capped:], count, 1 - capped * most)) * able[capped] > (
        1 + (count - 2) * most
    ):
        capped += 1
    fractions = (min(most, (level * value - 1) / (count - 2)) for value in bandwidths)
    return tuple(max(0, int(fraction * _SHARE_UNITS)) for fraction in fractions)


def _level(able: Sequence[int], count: int, fraction: Fraction) -> Fraction:
    """Return (1 + (n - 2) f) / bandwidth of those that share `fraction` of the vector.

    `able` are their bandwidths, the fastest first; the slowest get nothing.
    """
    level = Fraction(0)
    for reducers in range(1, len(able) + 1):
        candidate = ((count - 2) * fraction + reducers) / sum(able[:reducers])
        if candidate * able[reducers - 1] <= 1:
            break
        level = candidate
    return level
