"""What an outer step added to a module, for those who hold the state before it.

Whoever missed a step needs parameters and momentum of the state after it: eight bytes a number. The
averaged outer gradient that all members of the group hold is two bytes in float16, or one, and with
the state before it and the table of its certificate it makes the same state, bit for bit (design
4.3). So members keep the averages of the latest steps and serve them beside their states, and who
is a few steps behind fetches these, takes the steps itself, and compares the digest. An average has
no hash that anybody has signed, so it is asked for by a name made of the digest that it leads to,
and what does not lead there is dropped: the state is fetched as ever.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from dipaco.dht.certificates import Certificate, CommitStatement
from dipaco.modules.codecs import BLOCK_VALUES, CODEBOOK_VALUES, CODECS, Codec
from dipaco.modules.device import load_bitsandbytes
from dipaco.modules.errors import DipacoError, IntegrityError
from dipaco.modules.grid import Grid
from dipaco.modules.outer import outer_step
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import ModuleState, StateReference

from .transfer import LEAST_RATE_BYTES_S, SLOW_GRACE_S, spread

logger = logging.getLogger("dipaco.peer.exchange.steps")

# Of a module as many steps are kept, and replayed, as have this part of a state's bytes together;
# one at least.
SHARE_OF_A_STATE = 0.5
# Of all modules together, in memory; the oldest go first.
GREATEST_HELD_BYTES = 2**30
# Holders that are asked for one step. Where none of them gives it, the state is fetched.
MOST_ASKED = 3
# For holders that are busy, and for all steps that are made up for at once, beside what their bytes
# take at the least rate.
GREATEST_WAIT_S = 120.0
# A step comes in pieces: on a full line, behind reduces, each has its time.
PIECE_BYTES = 2**18
BUSY_WAIT_S = 1.0

_NAME = "dipaco-step/1"
_BLOCKS_AT_ONCE = 256
_LEAST_SCALE = torch.finfo(torch.float32).tiny


def step_name(digest: str) -> str:
    """Return the name, 64 hexadecimal digits, of the average that led to a state."""
    return hashlib.sha256(f"{_NAME}\n{digest}".encode()).hexdigest()


def packed_bytes(codec: Codec, values: int) -> int:
    """Return what a packed average of so many values has."""
    if codec.name != "blockwise8bit":
        return codec.value_bytes * values
    return 4 * (-(-values // BLOCK_VALUES) + CODEBOOK_VALUES) + values


def kept_steps(step_bytes: int, values: int) -> int:
    """Return how many steps of a module of so many parameters are kept and replayed."""
    state_bytes = 8 * values
    return max(1, int(SHARE_OF_A_STATE * state_bytes / step_bytes))


def pack(average: torch.Tensor, codec: Codec) -> bytes | None:
    """Return a flat fp32 average that has been through `codec` in its bytes, without loss.

    Little-endian: the values; with 8 bits the scale of each block and the codebook, then an index
    for each value. None when these bytes would not give the same bits.
    """
    if codec.name == "none":
        packed = average.numpy().astype("<f4").tobytes()
    elif codec.name == "float16":
        packed = average.half().numpy().astype("<f2").tobytes()
    else:
        packed = _pack_8_bits(average)
    same = torch.equal(
        unpack(packed, codec, average.numel()).view(torch.int32), average.view(torch.int32)
    )
    return packed if same else None


def unpack(packed: bytes, codec: Codec, values: int) -> torch.Tensor:
    """Return the average, flat fp32 [values]. Raises IntegrityError for any other length."""
    if len(packed) != packed_bytes(codec, values):
        raise IntegrityError(
            f"an average of {values} numbers has {packed_bytes(codec, values)} bytes, "
            f"not {len(packed)}"
        )
    if codec.name != "blockwise8bit":
        dtype = f"<f{codec.value_bytes}"
        return torch.from_numpy(np.frombuffer(packed, dtype=dtype).astype(np.float32))
    blocks = -(-values // BLOCK_VALUES)
    numbers = np.frombuffer(packed, dtype="<f4", count=blocks + CODEBOOK_VALUES)
    indices = np.frombuffer(packed, dtype=np.uint8, offset=numbers.nbytes)
    scales, codebook = torch.from_numpy(numbers.astype(np.float32)).split([blocks, CODEBOOK_VALUES])
    decoded = codebook[torch.from_numpy(indices.astype(np.int64))]
    return decoded.mul_(scales.repeat_interleave(BLOCK_VALUES)[:values])


def _pack_8_bits(average: torch.Tensor) -> bytes:
    """Find scales and indices again: which they were, the decoded numbers do not say directly."""
    load_bitsandbytes()
    from bitsandbytes.functional import create_dynamic_map

    codebook = create_dynamic_map()
    padded = torch.nn.functional.pad(average, (0, -len(average) % BLOCK_VALUES))
    scales, indices = [], []
    for blocks in padded.view(-1, BLOCK_VALUES).split(_BLOCKS_AT_ONCE):
        found_scales, found_indices = _scales_of(blocks, codebook)
        scales.append(found_scales)
        indices.append(found_indices)
    numbers = torch.cat((*scales, codebook)).numpy().astype("<f4").tobytes()
    return numbers + torch.cat(indices).flatten()[: len(average)].numpy().tobytes()


def _scales_of(blocks: torch.Tensor, codebook: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale of each row, fp32 [rows], and the indices, uint8 [rows, values].

    The number that set a row's scale became one end of the codebook times it. Dividing by that end
    again may miss it by a unit in the last place or two.
    """
    between = (codebook[1:] + codebook[:-1]) / 2
    guess = torch.maximum(blocks.amax(1) / codebook[-1], blocks.amin(1) / codebook[0])
    scales = guess.clone()
    indices = torch.empty(blocks.shape, dtype=torch.uint8)
    open_rows = torch.ones(len(blocks), dtype=torch.bool)
    for units in (0, 1, -1, 2, -2):
        if not bool(open_rows.any()):
            break
        tried = (guess[open_rows].view(torch.int32) + units).view(torch.float32)
        rows = blocks[open_rows]
        found = torch.bucketize(rows / tried.clamp(min=_LEAST_SCALE)[:, None], between)
        scales[open_rows], indices[open_rows] = tried, found.to(torch.uint8)
        is_wrong = (codebook[found] * tried[:, None] != rows).any(1)
        open_rows[open_rows.clone()] = is_wrong
    return scales, indices


class HeldSteps:
    """The averages of the latest steps, by name. Thread-safe."""

    def __init__(self, greatest_bytes: int = GREATEST_HELD_BYTES) -> None:
        self._greatest_bytes = greatest_bytes
        self._lock = threading.Lock()
        self._held: OrderedDict[str, tuple[str, bytes]] = OrderedDict()

    def hold(self, state: ModuleState, packed: bytes | None) -> None:
        """Serve the average that led to a state, if it could be packed, in place of the oldest ones
        of its module."""
        if packed is None:
            return
        with self._lock:
            self._held[step_name(state.digest)] = (state.module, packed)
            of_module = [name for name, (of, _) in self._held.items() if of == state.module]
            for name in of_module[: -kept_steps(len(packed), state.layout.size)]:
                del self._held[name]
            used_bytes = sum(len(packed) for _, packed in self._held.values())
            while used_bytes > self._greatest_bytes:
                used_bytes -= len(self._held.popitem(last=False)[1][1])

    def lookup(self, name: str) -> bytes | None:
        """Return the average of this name, if it is here."""
        with self._lock:
            found = self._held.get(name)
        return found[1] if found is not None else None


class Holder(Protocol):
    """What this peer holds: `HeldStates`."""

    steps: HeldSteps

    def get(self, module: str) -> StateReference | None: ...

    def load(self, module: str) -> ModuleState | None: ...


class Chains(Protocol):
    """Knows certificates: the certifier."""

    def chain(self, module: str, digest: str) -> tuple[Certificate, ...]:
        """Return those of a state and of the states before it, the newest first."""
        ...


class StepAsker(Protocol):
    """Asks other peers: the exchange."""

    @property
    def peer_id(self) -> str: ...

    def sample(
        self, peer: str, sha256: str, offset: int, count: int, timeout_s: float
    ) -> bytes | None:
        """Return bytes of a content; None when the peer is busy. Raises `DipacoError`."""
        ...


class StepReplay:
    """Makes states of those before them. Called where states are fetched, on any thread."""

    def __init__(
        self, plan: RunPlan, grid: Grid, held: Holder, asker: StepAsker, chains: Chains
    ) -> None:
        self._plan, self._grid = plan, grid
        self._codec = CODECS[plan.averaging.codec]
        self._held, self._asker, self._chains = held, asker, chains

    def is_near(self, wanted: StateReference) -> bool:
        """Tell whether what is held here may be few enough steps before a state: if not, its
        certificates need not be known before it is fetched."""
        held = self._held.get(wanted.module)
        return held is not None and 0 < wanted.version - held.version <= self._most(wanted.module)

    def _most(self, module: str) -> int:
        values = self._grid.layout(module).size
        return kept_steps(packed_bytes(self._codec, values), values)

    def state(self, wanted: StateReference, holders: Sequence[str]) -> ModuleState | None:
        """Return the state that is wanted, made of the one that is held here.

        None where too many steps are between them, or none of the holders gives one that leads
        there.
        """
        steps = self._missing(wanted, self._most(wanted.module))
        state = self._held.load(wanted.module) if steps else None
        count = len(steps) * packed_bytes(self._codec, self._grid.layout(wanted.module).size)
        until_s = time.monotonic() + GREATEST_WAIT_S + count / LEAST_RATE_BYTES_S
        for step in steps:
            if state is None or state.digest != step.parent:
                return None
            state = self._replay(state, step, holders, until_s)
        if state is not None:
            logger.info(
                "%s version %d was made of version %d and %d outer steps of others",
                wanted.module,
                wanted.version,
                wanted.version - len(steps),
                len(steps),
            )
        return state

    def _missing(self, wanted: StateReference, most: int) -> list[CommitStatement]:
        """Return the steps from what is held here, in order; none where that is no ancestor."""
        held = self._held.get(wanted.module)
        found: list[CommitStatement] = []
        for certificate in self._chains.chain(wanted.module, wanted.digest)[:most]:
            found.insert(0, certificate.statement)
            if held is not None and held.digest == certificate.statement.parent:
                return found
        return []

    def _replay(
        self, state: ModuleState, step: CommitStatement, holders: Sequence[str], until_s: float
    ) -> ModuleState | None:
        """Take a step that others took; whoever was in its group is asked first.

        Who is busy is asked again: the state would wait for the same lines, with more bytes.
        """
        members = {row.peer for row in step.table}
        order = spread(step.digest, holders, self._asker.peer_id)
        waiting = sorted(order, key=lambda peer: peer not in members)[:MOST_ASKED]
        busy_until_s = min(until_s, time.monotonic() + GREATEST_WAIT_S)
        while waiting and time.monotonic() < busy_until_s:
            for peer in list(waiting):
                found, is_busy = self._fetch(peer, step, state.layout.size, until_s)
                if not is_busy:
                    waiting.remove(peer)
                made = self._take(state, step, peer, found) if found is not None else None
                if made is not None:
                    return made
            if waiting:
                time.sleep(BUSY_WAIT_S)
        return None

    def _take(
        self, state: ModuleState, step: CommitStatement, peer: str, packed: bytes
    ) -> ModuleState | None:
        """Take a step with what a peer sent; None if it does not lead where it should."""
        try:
            average = unpack(packed, self._codec, state.layout.size)
            found = outer_step(state, average, step.table, self._plan.outer, step.round_index)
        except IntegrityError as error:
            logger.warning("peer %s: refused the step to %s: %s", peer, step.digest[:12], error)
            return None
        if found.digest == step.digest:
            self._held.steps.hold(found, packed)
            return found
        logger.warning(
            "peer %s: refused the step to %s: it leads to %s",
            peer,
            step.digest[:12],
            found.digest[:12],
        )
        return None

    def _fetch(
        self, peer: str, step: CommitStatement, values: int, until_s: float
    ) -> tuple[bytes | None, bool]:
        """Return a peer's average, None if it does not come, and whether that was as it is busy."""
        count, found = packed_bytes(self._codec, values), bytearray()
        has_failed, busy_until_s = False, until_s
        while len(found) < count:
            wanted = min(PIECE_BYTES, count - len(found))
            slow_s = SLOW_GRACE_S + wanted / LEAST_RATE_BYTES_S
            timeout_s = min(slow_s, until_s - time.monotonic())
            if timeout_s <= 0:
                return None, False
            try:
                piece = self._asker.sample(
                    peer, step_name(step.digest), len(found), wanted, timeout_s
                )
            except DipacoError as error:
                logger.debug("no step to %s: %s", step.digest[:12], error)
                if has_failed or not found:
                    return None, False
                has_failed = True
                continue
            if piece is None and not found:
                return None, True
            if piece is not None:
                found += piece
                has_failed, busy_until_s = False, time.monotonic() + GREATEST_WAIT_S
            elif time.monotonic() < busy_until_s:
                time.sleep(BUSY_WAIT_S)
            else:
                return None, False
        return bytes(found), False
