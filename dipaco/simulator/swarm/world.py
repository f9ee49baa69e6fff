"""What all machines of a history share: the plan, the clock, and what every file really holds.

States are names: the digest of a state is a hash of its step's name, and its loss says only whether
most rows of some step before it were poison. A forged state has another digest than what comes out
of its step, and so has every state that is computed from it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dipaco.protocol.chain.chain_book import ChainBook
from dipaco.protocol.chain.steps import Head, Row, Step
from dipaco.protocol.grid import Grid
from dipaco.protocol.member.rounds import RoundSchedule
from dipaco.protocol.plan import RunPlan

from .engine import Engine
from .network import Network
from .simulated_directory import SimulatedDirectory
from .trace import QUIET, shown

# `machine.Machine` and `invariants.Invariants`, which stand on this file.
Machine = Any
_Invariants = Any
START_S = 1000.0
STATE_BYTES, FILE_BYTES, SHARD_BYTES = 2_000_000, 130_000, 4_000_000
# Held-out losses. What is subtle is worse by less than a check notices.
SOUND_LOSS, _POISONED_LOSS, FORGED_LOSS, SUBTLE_LOSS = 3.0, 11.0, 7.0, 3.3

Content = Literal["good", "poison", "subtle", "garbage"]
LOSSES: dict[Content, float] = {"good": SOUND_LOSS, "subtle": SUBTLE_LOSS}


@dataclass(frozen=True)
class File:
    """A contribution: the tokens that a peer trained from one count to another."""

    row: Row
    begin: int
    end: int
    content: Content = "good"


@dataclass
class World:
    """One history's plan, clock, network, directory, files, steps and machines."""

    plan: RunPlan
    engine: Engine
    log: list[str] | None = None
    """Gets a line for all that a machine hears, decides and does."""
    machines: dict[str, Machine] = field(default_factory=dict)
    files: dict[str, File] = field(default_factory=dict)
    revoked: set[str] = field(default_factory=set)
    """Identities whose rows do not count."""

    def __post_init__(self) -> None:
        self.grid = Grid(self.plan.model, self.plan.grid, self.plan.rounds.level_offsets)
        self.schedule = RoundSchedule(self.plan.rounds, self.grid, self.plan.start_s)
        self.network = Network(self.engine)
        self.directory = SimulatedDirectory(self.engine, self.network, self.plan, self.grid)
        self.run_id = self.plan.run_id
        self.book = ChainBook(self.run_id, self.grid.modules())
        """Every step that anybody ever made a state of."""
        self._losses: dict[str, float] = {}
        """By step: the loss of its state, where that is not sound."""
        self._forged: dict[str, float] = {}
        """Losses of forged states, by digest."""
        self._made = 0
        self.watch: _Invariants
        inner = self.plan.inner
        self.tokens_per_step = inner.batch_sequences * self.plan.model.sequence_length

    @property
    def now_s(self) -> float:
        """The true time."""
        return self.engine.now_s

    def say(self, peer: str, kind: str, what: Any) -> None:
        """Write a line of the log: who, in which direction, and what."""
        if self.log is not None and type(what).__name__ not in QUIET:
            time_s = self.now_s - START_S
            self.log.append(f"{time_s:9.2f} {peer:>6} {kind:<5} {shown(what)}")

    def make_file(self, row: Row, begin: int, end: int, content: Content = "good") -> Row:
        """Make a contribution; returns its row, which names the file from here on."""
        self._made += 1
        name = hashlib.sha256(f"{row.peer}/{self._made}".encode()).hexdigest()
        row = replace(row, file=name)
        self.files[name] = File(row, begin, end, content)
        return row

    def add(self, step: Step) -> None:
        """Take a step into the book of all steps, if its chain is known, and it can follow its
        parent."""
        if step.name in self.book:
            return
        try:
            if not self.book.add(step):
                return
        except ValueError:
            return
        contents = [self.files[row.file].content for row in step.rows if row.file in self.files]
        losses = sorted(LOSSES.get(content, _POISONED_LOSS) for content in contents) or [SOUND_LOSS]
        loss = max(self._losses.get(step.parent, SOUND_LOSS), losses[(len(losses) - 1) // 2])
        if loss > SOUND_LOSS:
            self._losses[step.name] = loss

    def head(self, step: str) -> Head:
        """Return the state after a step of the book, or a genesis."""
        link = self.book.link(step)
        digest = hashlib.sha256(f"state {step}".encode()).hexdigest()
        return Head(
            link.module, step, link.version, link.weight, link.round_index, digest, STATE_BYTES
        )

    def head_after(self, step: str, base: Head | None) -> Head:
        """Return the state that comes out of steps on top of another state, which may be wrong."""
        head = self.head(step)
        if base is None or base.digest == self.head(base.step).digest:
            return head
        digest = hashlib.sha256((base.digest + step).encode()).hexdigest()
        if base.digest in self._forged:
            self._forged[digest] = self._forged[base.digest]
        return replace(head, digest=digest)

    def forge(self, head: Head, loss: float) -> Head:
        """Return a state with bytes of somebody's choice in place of what comes out of a step."""
        digest = hashlib.sha256(f"forged {head.step}".encode()).hexdigest()
        self._forged[digest] = loss
        return replace(head, digest=digest)

    def is_forged(self, head: Head) -> bool:
        """Tell whether a state is forged, or computed from one that is."""
        return head.digest in self._forged

    def loss(self, head: Head) -> float:
        """Return the held-out loss of a state."""
        return self._forged.get(head.digest, self._losses.get(head.step, SOUND_LOSS))
