"""What is trained, as entities that can be counted: no tensors, but the same algebra.

An inner step is numbered by its peer, and stands for its tokens. What a state, a snapshot or the
local parameters hold is a *content*: how often each step of each peer is in it. Sums and
differences of parameters are sums and differences of contents, so work that is lost, or merged
twice, shows as a count other than one. Weights, momentum and learning rates are left out: a step
that is in an average is in the state, once.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dipaco.dht.certificates import Certificate, CommitStatement
from dipaco.modules.grid import Grid
from dipaco.modules.outer import Contribution, advanced_progress
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import PathProgress, StateReference, last_round

# The steps from `begin` to `end` of a peer are {(peer, begin): 1, (peer, end): -1}: neighbouring
# ranges merge by themselves, and a sum is a sum.
Content = dict[tuple[str, int], int]

# Outer steps that are remembered: all members of a group take the same one.
GREATEST_STEPPED = 512


def add(into: Content, other: Mapping[tuple[str, int], int], times: int = 1) -> Content:
    """Add `times` a content to another one in place, and return it."""
    for key, count in other.items():
        count = into.get(key, 0) + times * count
        if count:
            into[key] = count
        else:
            into.pop(key, None)
    return into


def steps_in(content: Mapping[tuple[str, int], int]) -> int:
    """Return how many steps a content has, each as often as it is in it."""
    return -sum(position * count for (_, position), count in content.items())


def contents_by_peer(content: Mapping[tuple[str, int], int]) -> dict[str, Content]:
    """Return the contents of each peer's steps: together they are the whole."""
    found: dict[str, Content] = {}
    for (peer, position), count in content.items():
        found.setdefault(peer, {})[peer, position] = count
    return found


def counts_of(content: Mapping[tuple[str, int], int], peer: str) -> list[tuple[int, int, int]]:
    """Return (begin, end, count) of the steps of a peer that are in a content, in order."""
    marks = sorted((position, count) for (who, position), count in content.items() if who == peer)
    found, total = [], 0
    for (begin, count), (end, _) in itertools.pairwise(marks):
        total += count
        if total:
            found.append((begin, end, total))
    return found


@dataclass(frozen=True, eq=False)
class SimulatedState:
    """An anchor. `is_sound` is whether its loss is that of an honest state."""

    reference: StateReference
    content: Mapping[tuple[str, int], int]
    progress: Mapping[int, PathProgress]
    parent: str = ""
    statement: CommitStatement | None = None
    is_sound: bool = True


@dataclass(frozen=True)
class Snapshot:
    """A module at a boundary: the work that is not in its anchor."""

    anchor: SimulatedState
    shift: Content
    tokens: int
    parts: tuple[int, ...] = ()


@dataclass
class ModuleWork:
    """What one machine knows of one module of its path: as `peer.trainer` keeps it."""

    anchor: SimulatedState
    counted_steps: int
    """Steps of this machine that are in `shift`, or were before it was merged."""
    shift: Content = field(default_factory=dict)
    """Local minus anchor."""
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    parts: dict[int, Content] = field(default_factory=dict)
    """Work between two cuts, by the round of the later one."""
    unmerged: tuple[int, ...] = ()
    """Parts that are not in the anchor: together with what came after the last cut, `shift`."""

    def count(self, peer: str, steps: int) -> None:
        """Take note of the steps that the machine has done by now."""
        if steps > self.counted_steps:
            add(self.shift, {(peer, self.counted_steps): 1, (peer, steps): -1})
            self.counted_steps = steps

    def cut(self, round_index: int, tokens: int) -> None:
        """Copy the work, and begin a new part."""
        part = self.tail()
        if round_index in self.parts:
            add(self.parts[round_index], part)
        else:
            self.parts[round_index] = part
            self.unmerged = (*self.unmerged, round_index)
        self.snapshots[round_index] = Snapshot(self.anchor, dict(self.shift), tokens, self.unmerged)

    def tail(self) -> Content:
        """Return what came after the last cut."""
        tail = dict(self.shift)
        for part in self.unmerged:
            add(tail, self.parts[part], -1)
        return tail

    def forget(self, round_index: int, *, keeps_part: bool) -> None:
        """Do without a snapshot; unless its part is kept, undo the cut."""
        self.snapshots.pop(round_index, None)
        if not keeps_part and self.parts.pop(round_index, None) is not None:
            self.unmerged = tuple(part for part in self.unmerged if part != round_index)

    def join(self, older: int, newer: int) -> None:
        """Keep two parts as one. KeyError for a part that is not here."""
        add(self.parts[newer], self.parts.pop(older))
        self.unmerged = tuple(part for part in self.unmerged if part != older)

    def drop(self, part: int) -> None:
        """Remember a part no more. KeyError for one that is not here."""
        del self.parts[part]
        self.unmerged = tuple(kept for kept in self.unmerged if kept != part)

    def discard(self) -> None:
        """Go back to the anchor."""
        for part in self.unmerged:
            del self.parts[part]
        self.unmerged = ()
        self.shift.clear()

    def commit(self, state: SimulatedState, round_index: int) -> None:
        """Make a state the anchor that has the snapshot of a round in it."""
        snapshot = self.snapshots.pop(round_index)
        add(self.shift, snapshot.shift, -1)
        if snapshot.anchor is not self.anchor:
            add(self.shift, self.anchor.content)
            add(self.shift, snapshot.anchor.content, -1)
        self.unmerged = tuple(part for part in self.unmerged if part not in snapshot.parts)
        self.anchor = state

    def adopt(self, state: SimulatedState, on_top: Iterable[int]) -> None:
        """Put a foreign state under the parts that it lacks and what came after the last cut.

        KeyError for a part that is not here.
        """
        self.shift, self.unmerged = self.tail(), tuple(on_top)
        for part in self.unmerged:
            add(self.shift, self.parts[part])
        self.anchor = state


class Stock:
    """Every state that anybody ever made, by its digest. What a machine has are references."""

    def __init__(self, plan: RunPlan, grid: Grid, state_bytes: int) -> None:
        self.plan = plan
        self.grid = grid
        self.run_id = plan.run_id
        self.state_bytes = state_bytes
        self.states: dict[str, SimulatedState] = {}
        self._of_module: dict[str, dict[str, SimulatedState]] = {}
        self.genesis: dict[str, SimulatedState] = {}
        self._complete: dict[str, Certificate] = {}
        self._stepped: dict[tuple[str, int, int], tuple[Mapping[str, Content], SimulatedState]] = {}
        for module in grid.modules():
            state = self.invent(module, 0, f"genesis of {module}", 0, -1)
            self.genesis[module] = state

    def invent(
        self, module: str, version: int, name: str, tokens: int, round_index: int
    ) -> SimulatedState:
        """Make a state that no step led to: a genesis state, or one that a liar made."""
        digest = hashlib.sha256(name.encode()).hexdigest()
        reference = StateReference(module, version, digest, tokens, round_index, self.state_bytes)
        paths = self.grid.paths_of_module(module)
        progress = {paths[0]: PathProgress(tokens, round_index)} if tokens else {}
        return self._keep(SimulatedState(reference, {}, progress, is_sound=version == 0))

    def _keep(self, state: SimulatedState) -> SimulatedState:
        digest = state.reference.digest
        self.states[digest] = state
        self._of_module.setdefault(state.reference.module, {})[digest] = state
        return state

    def states_of(self, module: str) -> list[SimulatedState]:
        """Return the states that there are of a module, its genesis state first."""
        return list(self._of_module[module].values())

    def shared(self, certificate: Certificate) -> Certificate:
        """Return the one certificate that has all signatures, if this has, or the same."""
        if len(certificate.signers) < len(certificate.statement.table):
            return certificate
        return self._complete.setdefault(certificate.statement.digest, certificate)

    def step(
        self,
        anchor: SimulatedState,
        table: Sequence[Contribution],
        shifts: Mapping[str, Content],
        round_index: int,
    ) -> SimulatedState:
        """Return the state after an outer step; the same to the digest wherever it is taken."""
        place = (anchor.reference.digest, round_index, id(shifts))
        if place not in self._stepped:
            # The shifts are kept too, so that no others can have their place.
            self._stepped[place] = shifts, self._step(anchor, table, shifts, round_index)
            while len(self._stepped) > GREATEST_STEPPED:
                del self._stepped[next(iter(self._stepped))]
        return self._stepped[place][1]

    def _step(
        self,
        anchor: SimulatedState,
        table: Sequence[Contribution],
        shifts: Mapping[str, Content],
        round_index: int,
    ) -> SimulatedState:
        content = dict(anchor.content)
        text = [anchor.reference.digest, str(round_index)]
        for row in table:
            shift = shifts[row.peer]
            add(content, shift)
            text.append(f"{row.path} {row.peer} {row.tokens} {sorted(shift.items())}")
        digest = hashlib.sha256("\n".join(text).encode()).hexdigest()
        if digest in self.states:
            return self.states[digest]
        before = anchor.reference
        progress = advanced_progress(anchor.progress, table, round_index)
        reference = StateReference(
            before.module,
            before.version + 1,
            digest,
            sum(entry.tokens for entry in progress.values()),
            last_round(progress),
            self.state_bytes,
        )
        statement = CommitStatement(
            self.run_id,
            before.module,
            before.version + 1,
            before.digest,
            digest,
            round_index,
            tuple(table),
        )
        state = SimulatedState(
            reference, content, progress, before.digest, statement, anchor.is_sound
        )
        return self._keep(state)


def signature(peer: str, statement: CommitStatement) -> bytes:
    """Return what a peer signs a statement with. Nobody makes it for another: see `is_signed`."""
    return f"{peer}:{statement.digest}".encode()


def is_signed(certificate: Certificate, checked: Certificate | None = None) -> bool:
    """Tell whether the signatures are those of the peers that they name.

    Those that `checked` has too need no second look.
    """
    known = checked.signatures if checked is not None else {}
    return all(
        made == signature(peer, certificate.statement)
        for peer, made in certificate.signatures.items()
        if peer not in known
    )
