"""Rows and steps: the signed lines about contributions, and the chain that they make.

See design 4.4, chain.

A *row* says that a peer has published a file with its outer gradient of a module in a round, and
which state it stands on. A *step* is an ordered list of rows on top of a parent step; its name is
the hash of that, and it is the next version of the module. Nothing else has to be agreed: the same
rows give the same state everywhere, and all who are in a step have signed the digest of the state
before it. Names and signatures cover the run, through the name of the genesis. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgpack
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dipaco.protocol.grid import Grid
from dipaco.protocol.identity import (
    SIGNATURE_BYTES,
    is_signed,
    peer_id_of_public_key,
    public_key_of_peer_id,
    raw_public_key,
)
from dipaco.protocol.record_errors import MAX_COUNT, RecordError

from .outer_row import OuterRow

MAX_ROWS = 64
_MAX_ROUND = 2**31
_ROW_PREFIX = b"dipaco-row/8\n"
_MARK_PREFIX = b"dipaco-file/8\n"
_STEP_PREFIX = b"dipaco-step/8\n"
_GENESIS_PREFIX = b"dipaco-genesis/8\n"
NAME_BYTES = 32
# Bytes of the mark at the beginning of a file.
MARK_BYTES = 32
# Rows have a field named `bytes`.
Packed = bytes


@dataclass(frozen=True)
class Row:
    """One peer's contribution to a module in a round: which file, and how much work is in it."""

    module: str
    round_index: int
    parent: str
    """Name of the step that the outer gradient is taken from, 64 hexadecimal digits."""
    state: str
    """Digest of the state after it, as this peer has it: the row vouches for it."""
    path: int
    peer: str
    tokens: int
    """Trained since the last boundary that the peer's work is counted from."""
    file: str
    """SHA-256 of the encoded contribution, 64 hexadecimal digits."""
    bytes: int
    """The length of the file."""
    has_own_texts: bool = field(default=False, kw_only=True)
    """Whether texts of the peer's owner are among what it trained on (design 4.14, texts), as it
    says. Nothing is decided by it, so nobody gains by a lie."""
    signature: Packed = field(default=b"", compare=False)

    @property
    def outer_row(self) -> OuterRow:
        """What the outer step needs to know about it."""
        return OuterRow(self.path, self.peer, self.tokens)

    @property
    def content(self) -> list[Any]:
        """What is signed, as plain values for msgpack."""
        return [
            self.module,
            self.round_index,
            bytes.fromhex(self.parent),
            bytes.fromhex(self.state),
            self.path,
            self.peer,
            # The sign says whether own texts are among them, in no more bytes.
            -self.tokens if self.has_own_texts else self.tokens,
            bytes.fromhex(self.file),
            self.bytes,
        ]

    @cached_property
    def statement(self) -> Packed:
        """The bytes that are signed."""
        packed: Packed = msgpack.packb(self.content, use_bin_type=True)
        return _ROW_PREFIX + packed

    @cached_property
    def name(self) -> str:
        """SHA-256 of the statement, which tells rows apart, even two that name the same file."""
        return hashlib.sha256(self.statement).hexdigest()

    @cached_property
    def mark(self) -> Packed:
        """What the file begins with: so it belongs to one row of one peer, and to no copy."""
        fields = (self.module, self.round_index, self.parent, self.state, self.path, self.peer)
        packed: Packed = msgpack.packb(fields, use_bin_type=True)
        return hashlib.sha256(_MARK_PREFIX + packed).digest()


@dataclass(frozen=True)
class Step:
    """What makes the next version of a module: rows of one round on top of a parent step."""

    module: str
    round_index: int
    parent: str
    rows: tuple[Row, ...]
    """The rows in canonical order: by path, then by peer."""

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Step:
        """Return the step that takes in `rows`, of one module, round, parent and state.

        Of more than `MAX_ROWS` the caller chooses which. Raises ValueError for rows that do not
        belong together.
        """
        ordered = tuple(sorted(rows, key=lambda row: (row.path, row.peer)))
        first = ordered[0]
        step = cls(first.module, first.round_index, first.parent, ordered)
        _check_step(step)
        return step

    @cached_property
    def name(self) -> str:
        """SHA-256 over the parent's name and the rows, without signatures."""
        hasher = hashlib.sha256(_STEP_PREFIX + bytes.fromhex(self.parent))
        for row in self.rows:
            hasher.update(bytes.fromhex(row.name))
        return hasher.hexdigest()

    @property
    def state(self) -> str:
        """Digest of the state that it stands on, which all its rows name."""
        return self.rows[0].state

    @cached_property
    def peers(self) -> frozenset[str]:
        """The peers whose rows are in it."""
        return frozenset(row.peer for row in self.rows)

    @property
    def outer_rows(self) -> tuple[OuterRow, ...]:
        """What the outer step needs to know about the rows, in their order."""
        return tuple(row.outer_row for row in self.rows)


@dataclass(frozen=True)
class Head:
    """A module state that a peer can serve: which step it stands on, and its digest."""

    module: str
    step: str
    """Name of the step that it comes out of, or of the genesis."""
    version: int
    """Steps from the genesis to it."""
    weight: int
    """Rows in these steps."""
    round_index: int
    """Round of the last step; -1 of a genesis."""
    digest: str
    """SHA-256 of the state's bytes."""
    bytes: int
    """Their number."""

    @property
    def rank(self) -> tuple[int, str]:
        """Its place among the heads of the module (`rank`)."""
        return rank(self.weight, self.step)


def rank(weight: int, name: str) -> tuple[int, str]:
    """Return the sort key of a head; the least wins: the heavier, then the smaller name."""
    return -weight, name


def genesis_name(run_id: str, module: str) -> str:
    """Return the name that the first step of a module has as its parent."""
    return hashlib.sha256(_GENESIS_PREFIX + f"{run_id}\n{module}".encode()).hexdigest()


def _check_step(step: Step) -> None:
    """Check that a step has its one spelling and that its rows belong together. Raises
    ValueError."""
    if not 1 <= len(step.rows) <= MAX_ROWS:
        raise ValueError(f"a step has 1 to {MAX_ROWS} rows, not {len(step.rows)}")
    for row in step.rows:
        place = (row.module, row.round_index, row.parent, row.state)
        if place != (step.module, step.round_index, step.parent, step.state):
            raise ValueError("a row is of another module, round, parent or state than its step")
    order = [(row.path, row.peer) for row in step.rows]
    if order != sorted(order) or len({row.peer for row in step.rows}) != len(order):
        raise ValueError("rows are not in canonical order, or a peer has two of them")


# -- signing and checking


def sign_row(row: Row, key: Ed25519PrivateKey) -> Row:
    """Return the row, signed by the owner of `key`, whose row it must be."""
    if row.peer != peer_id_of_public_key(raw_public_key(key)):
        raise ValueError(f"the row is of {row.peer}, the key is not")
    return replace(row, signature=key.sign(row.statement))


def verify_row(row: Row, grid: Grid, *, max_bytes: int) -> None:
    """Check that a row may stand in the run's chains, and its signature. Raises `RecordError`.

    `max_bytes` is the most that a contribution to the module may have. Whether the peer is
    admitted, and whether so much work is plausible, is for the caller.
    """
    if row.module not in grid.modules():
        raise RecordError(f"the run has no module {row.module[:40]!r}")
    if row.path not in grid.paths_of_module(row.module):
        raise RecordError(f"path {row.path} does not go through {row.module}")
    if not 0 <= row.round_index < _MAX_ROUND:
        raise RecordError(f"a row of round {row.round_index}")
    if not 0 < row.tokens <= MAX_COUNT:
        raise RecordError(f"a row of {row.tokens} tokens")
    if not MARK_BYTES < row.bytes <= max_bytes:
        raise RecordError(f"a file of {row.bytes} bytes, at most {max_bytes} are possible")
    try:
        public_key = public_key_of_peer_id(row.peer)
    except ValueError:
        raise RecordError(f"a row of {row.peer[:64]!r}, which is not a peer id") from None
    if not is_signed(row.statement, row.signature, public_key):
        raise RecordError(f"a row of {row.peer} that it has not signed")


# -- the wire and the disk


def pack_row(row: Row) -> list[Any]:
    """Return a row as plain values for msgpack."""
    return [*row.content, row.signature]


def unpack_row(values: Any) -> Row:
    """Read a row that came from elsewhere; only its form is checked.

    Raises `RecordError`.
    """
    kinds = (str, int, bytes, bytes, int, str, int, bytes, int, bytes)
    if not isinstance(values, list) or len(values) != len(kinds):
        raise RecordError(f"a row has {len(kinds)} fields")
    if any(type(value) is not kind for value, kind in zip(values, kinds, strict=True)):
        raise RecordError("a field of a row is of another kind")
    module, round_index, parent, state, path, peer, tokens, file, size, signature = values
    lengths = (len(parent), len(state), len(file), len(signature))
    if lengths != (NAME_BYTES, NAME_BYTES, NAME_BYTES, SIGNATURE_BYTES):
        raise RecordError("a field of a row is of another length")
    if len(module) > 64 or len(peer) > 64:
        raise RecordError("a name in a row is too long")
    place = (module, round_index, parent.hex(), state.hex(), path, peer)
    fields = (*place, abs(tokens), file.hex(), size, signature)
    return Row(*fields, has_own_texts=tokens < 0)


def pack_step(step: Step) -> list[Any]:
    """Return a step as plain values for msgpack: its rows say the rest."""
    return [pack_row(row) for row in step.rows]


def unpack_step(values: Any) -> Step:
    """Read a step that came from elsewhere; signatures are not checked. Raises `RecordError`."""
    if not isinstance(values, list) or not 1 <= len(values) <= MAX_ROWS:
        raise RecordError(f"a step has 1 to {MAX_ROWS} rows")
    rows = tuple(unpack_row(value) for value in values)
    first = rows[0]
    step = Step(first.module, first.round_index, first.parent, rows)
    try:
        _check_step(step)
    except ValueError as error:
        raise RecordError(str(error)) from None
    return step
