"""How a step is taken: its files, the state before it, the state after it, and a look.

See design 4.4, chain.

    stage        what happens             next
    IDLE         a heavier step           GETTING
    GETTING      all of it is here        COMPUTING
                 a file is none           IDLE; the step is refused
                 it is late, or failed    GETTING from a state that rows vouch for; then IDLE, and
                                          the step is absent
    COMPUTING    the state is here        CHECKING where this peer trains, and the state was fetched
                                          or left its chain; else IDLE, and it is taken
                 a file is gone           GETTING, once
                 nobody can compute it    IDLE; the step is refused
                 it failed otherwise      as if it had not come
    CHECKING     it was fetched, and is   IDLE; the step is refused
                 much worse than the genesis
                 it is much worse         IDLE; the step is doubted
                 otherwise                IDLE, and it is taken

Nobody takes a state over its own computation. Arithmetic is exact, so where a step names another
state than the one here, one of both is a fault or a lie: this peer's step is computed once more,
and with the same digest the other step is refused.

A step is computed from a state that is held here, if a few steps lead from there, or else from one
whose digest the rows of a step in the chain name. No state is taken on anybody's word: the last
step of a chain is always computed here, from its files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from dipaco.protocol.chain.chain_book import MAX_REPLAY, Link
from dipaco.protocol.chain.steps import Head, Row, Step

from .actions import Check, Compute, FetchState, Forget, Warn
from .asking import Asking
from .events import Checked, StateHere
from .gathering import Gathering
from .group import Group
from .quorums import is_majority
from .situation import Role, Situation

# A state that makes the held-out loss worse by more nats than this is not believed.
_MUCH_WORSE_NATS = 0.5
# A step whose state nobody gave is tried again after so many rounds.
_ABSENT_ROUNDS = 1.0


def is_much_worse(loss: float | None, than: float | None) -> bool:
    """Tell whether a held-out loss is much worse than another; no, where one of them is unknown, or
    the other is no number: nothing is worse than that."""
    if loss is None or than is None or not math.isfinite(than):
        return False
    return not loss < than + _MUCH_WORSE_NATS


def ruined_by(loss: float | None, with_genesis: Mapping[str, float]) -> str:
    """Return the module whose state is to blame for a held-out loss, "" where none is.

    :param with_genesis: the loss with the genesis in place of each module's state

    A state of huge numbers makes each loss that it is in no number, so it would be blamed on others
    if that counted as a loss. Only where none is a number the first is blamed.
    """
    better = {m: found for m, found in with_genesis.items() if is_much_worse(loss, found)}
    if not better and loss is not None and not math.isfinite(loss):
        return next(iter(with_genesis), "")
    return min(better, key=better.__getitem__, default="")


class Stage(Enum):
    """How far a step has been taken."""

    IDLE = auto()
    GETTING = auto()
    COMPUTING = auto()
    CHECKING = auto()


@dataclass
class _Plan:
    """The plan to get the state after a step."""

    target: str
    base: Head
    """The state that it is computed from."""
    steps: tuple[Step, ...]
    """The steps on top of it, the oldest first; none where the target is a genesis."""
    begun_s: float
    is_vouched: bool = False
    """Whether the base is named by rows, and not held here."""
    way: int = 0
    """Which of the ways in which the state is vouched for is being tried (`ChainBook.vouched`)."""
    is_base_here: bool = True
    missing: dict[str, Row] = field(default_factory=dict)
    """Rows whose files are not here yet, by name."""
    head: Head | None = None
    """The state after the target, once it is here."""
    is_repeated: bool = False
    """Whether the target is the step that this peer stands on, which is computed once more."""


class Taking:
    """Takes one step of one module at a time. `on_taken` hears of a state that is to be stood on,
    and of the one before it if that is here."""

    def __init__(
        self,
        situation: Situation,
        group: Group,
        asking: Asking,
        gathering: Gathering,
        on_taken: Callable[[Head, Head | None], None],
    ) -> None:
        self._at, self._known, self._rows = situation, situation.known, situation.rows
        self._group, self._asking, self._gathering = group, asking, gathering
        self._on_taken = on_taken
        self._plan: _Plan | None = None
        self.stage = Stage.IDLE
        self._sure_of = ""
        """The step whose state was computed twice, or cannot be again."""
        self._fetched_again = ""
        """The last step whose files were gone from the disk."""
        self.contradicted = ""
        """The last step by most others that names another state than was computed here."""

    @property
    def target(self) -> str:
        """Name of the step that is being taken; empty for none."""
        return self._plan.target if self._plan is not None else ""

    @property
    def is_fetching(self) -> bool:
        """Whether a state is on its way."""
        return self._plan is not None and not self._plan.is_base_here

    # -- IDLE -> GETTING

    def begin(self, target: Link) -> None:
        """Begin to take a step: compute it from here, fetch its base, or refuse it."""
        self.give_up()
        contradicting = self._contradicting(target)
        if contradicting is None:
            self._enter(self._plan_from_here(target) or self._plan_from_vouched(target))
        elif contradicting.parent == self._sure_of or not self._repeat(contradicting.parent):
            self._note_contradicted(contradicting)
            self.refuse(contradicting.name, "it names another state than was computed here")

    def _contradicting(self, target: Link) -> Link | None:
        """Return the step of a chain that names another state than the one held here."""
        at = self._at
        held = [head.version for head in (at.head, at.before) if head is not None]
        for link in at.book.back_from(target.name):
            if not held or link.version <= min(held):
                break
            if at.contradicts(link):
                return link
        return None

    def _note_contradicted(self, link: Link) -> None:
        voters = self._at.voters(link.parent) | {self._known.me}
        if link.step is not None and is_majority(link.step.peers, voters):
            self.contradicted = link.name

    def _repeat(self, step: str) -> bool:
        """Compute this peer's step once more, if that can be done; return whether it is."""
        head, before, link = self._at.head, self._at.before, self._at.book.link(step)
        if head is None or before is None or link.step is None:
            return False
        if head.step != step or before.step != link.parent:
            return False
        plan = self._plan_of(link, before, (link.step,))
        plan.is_repeated = True
        self._enter(plan)
        return True

    def _repeated(self, head: Head) -> None:
        """Compare the result of this peer's step, which has been computed once more."""
        self._drop_plan()
        own = self._at.head
        if own is None or own.step != head.step:
            self._known.do(Forget(head.module, head.step))
        elif own.digest == head.digest:
            self._sure_of = head.step
            self._known.do(Forget(head.module, head.step))
        else:
            what = f"{self._at.module}: a second computation gave another state"
            self._known.do(Warn(f"{what}; the memory or processor of this machine may be broken"))
            self._on_taken(head, self._at.before)

    def _plan_from_here(self, target: Link) -> _Plan | None:
        """Plan from a state that is held and from which a few steps lead to the target."""
        at, book = self._at, self._at.book
        for base in (at.head, at.before):
            if base is None or not 0 < target.version - base.version <= MAX_REPLAY:
                continue
            if not book.stands_on(target.name, base.step):
                continue
            steps = book.steps_between(base.step, target.name)
            can_be_had = not any(step.name in at.notes.absent for step in steps[:-1])
            if can_be_had and steps[0].state == base.digest:
                return self._plan_of(target, base, steps)
        return None

    def _plan_from_vouched(self, target: Link, way: int = 0) -> _Plan:
        """Plan from a state that rows of the chain name, in one of the ways that there are."""
        found = self._at.book.vouched(target.name)[way]
        base = found.before.head(found.digest, 0)
        plan = self._plan_of(target, base, found.steps, is_vouched=True)
        plan.way = way
        return plan

    def _plan_of(
        self, target: Link, base: Head, steps: tuple[Step, ...], *, is_vouched: bool = False
    ) -> _Plan:
        here = self._rows.here
        missing = {row.name: row for step in steps for row in step.rows if row.name not in here}
        plan = _Plan(target.name, base, steps, self._known.now_s, is_vouched, missing=missing)
        plan.is_base_here = not is_vouched
        return plan

    def _enter(self, plan: _Plan) -> None:
        self._plan, self.stage = plan, Stage.GETTING
        if not plan.is_base_here:
            base = self._at.book.link(plan.base.step)
            self._known.do(FetchState(plan.base, self._asking.sources(base, plan.target)))
        if plan.missing:
            self._gathering.gather_for(plan.missing.values(), plan.target, plan.target)
        self._compute_if_here()

    # -- GETTING -> COMPUTING

    def file_came(self, name: str) -> None:
        """Go on, because the file of a row is here."""
        if self._plan is not None and self._plan.missing.pop(name, None) is not None:
            self._compute_if_here()

    def _compute_if_here(self) -> None:
        plan = self._plan
        if plan is None or self.stage is not Stage.GETTING:
            return
        if plan.missing or not plan.is_base_here:
            return
        if not plan.steps:
            self._state_after(plan, plan.base)
            return
        self.stage = Stage.COMPUTING
        self._known.do(Compute(self._at.module, plan.base, plan.steps))

    def file_failed(self, row: Row, *, is_refused: bool) -> None:
        """Refuse steps whose file is no contribution, or go on without a file that nobody gave."""
        plan = self._plan
        if plan is None or row.name not in plan.missing:
            return
        if is_refused:
            self.give_up()
            self._warn("a file in it is no contribution")
        else:
            self._failed(plan)

    def fetch_failed(self, step: str) -> None:
        """Try again, because nobody gave a state."""
        plan = self._plan
        if plan is not None and plan.base.step == step and not plan.is_base_here:
            self._failed(plan)

    def compute_failed(self, step: str, *, is_refused: bool) -> None:
        """What was gathered is gone again, another state comes out than rows name, or nobody can
        compute the step: that one is refused.

        Files that are gone were told of before. They are fetched again once: a disk may be too
        small for all of them.
        """
        plan = self._plan
        if is_refused:
            if plan is not None and step in (taken.name for taken in plan.steps):
                self.refuse(step, "its files give no state")
            return
        if plan is None or plan.target != step:
            return
        here = self._rows.here
        rows = [row for taken in plan.steps for row in taken.rows if row.name not in here]
        if rows and self._fetched_again != step:
            self._fetched_again = step
            plan.missing = {row.name: row for row in rows}
            self._enter(plan)
        else:
            self._failed(plan)

    def hurry(self) -> None:
        """Leave a step whose files do not come within G. A state may take as long as it takes: a
        slow line is no lie."""
        plan = self._plan
        if plan is None or self.stage is not Stage.GETTING or not plan.missing:
            return
        if self._known.now_s - plan.begun_s >= self._known.gather_s:
            self._failed(plan)

    def _failed(self, plan: _Plan) -> None:
        """Try from a vouched state, if that needs other files; otherwise the step is absent, and
        a peer that kept a file of it back is passed over for a while."""
        self._drop_plan()
        if plan.is_repeated:
            self._sure_of = plan.target
            return
        target = self._at.book.link(plan.target)
        rows = target.step.rows if target.step is not None else ()
        lacking = [row for row in rows if row.name in plan.missing]
        for row in lacking:
            self._group.withheld(row.peer)
        if lacking:
            self._at.notes.leave(target.name)
            self._gathering.see_what_lacks_files()
        elif not plan.is_vouched:
            self._enter(self._plan_from_vouched(target))
        elif plan.way + 1 < len(self._at.book.vouched(target.name)):
            self._enter(self._plan_from_vouched(target, plan.way + 1))
        else:
            rounds_s = _ABSENT_ROUNDS * self._known.schedule.duration_s
            self._at.notes.leave(target.name, self._known.now_s + rounds_s)

    # -- COMPUTING -> CHECKING

    def state_here(self, event: StateHere) -> None:
        """Take in a state that was fetched or computed."""
        plan, head = self._plan, event.head
        if plan is None or head.step not in (plan.base.step, plan.target):
            self._known.do(Forget(head.module, head.step))
        elif head.step == plan.base.step and self.stage is Stage.GETTING:
            if plan.base.digest in ("", head.digest):
                plan.base, plan.is_base_here = head, True
                self._compute_if_here()
        elif head.step == plan.target and self.stage is Stage.COMPUTING:
            self._state_after(plan, head)

    def _state_after(self, plan: _Plan, head: Head) -> None:
        if plan.is_repeated:
            self._repeated(head)
            return
        plan.head = head
        at = self._at
        if plan.steps:
            at.computed.add(head.step)
        is_fork = at.head is not None and not at.book.stands_on(head.step, at.stand)
        is_fetched = plan.is_vouched and plan.base.version > 0
        is_strange = is_fetched or (is_fork and not at.is_of_own_round(head.step))
        # The states that a path begins with are scored when all of them are here (`Joining`).
        if is_strange and at.role is Role.TRAINER:
            self.stage = Stage.CHECKING
            self._known.do(Check(at.module, head.step))
        else:
            self._taken(head)

    # -- CHECKING -> IDLE

    def checked(self, event: Checked) -> None:
        """Take in what held-out documents say about a state that others made without this peer."""
        plan = self._plan
        if plan is None or plan.head is None or event.step != plan.target:
            return
        before, after, first = event.loss_before, event.loss_after, event.loss_of_genesis
        is_worse = is_much_worse(after, before)
        # Modules that were trained apart may fit each other worse than at their genesis.
        is_comparable = self._known.path in self._at.book.link(event.step).paths
        if plan.is_vouched and is_comparable and is_much_worse(after, first):
            self.refuse(event.step, f"held-out loss {after:.3f}, with the genesis {first:.3f}")
        elif is_worse and not self._at.is_of_most(event.step):
            self.give_up()
            self._at.notes.doubt(event.step)
            self._warn(f"held-out loss {before:.3f}, with it {after:.3f}")
        else:
            self._taken(plan.head)

    def _taken(self, head: Head) -> None:
        plan = self._plan
        self._drop_plan()
        before = plan.base if plan is not None and len(plan.steps) == 1 else self._at.head
        self._on_taken(head, before)

    # -- -> IDLE

    def give_up(self) -> None:
        """Stop taking the present step."""
        plan = self._plan
        if plan is not None and plan.head is not None:
            self._known.do(Forget(self._at.module, plan.target))
        self._drop_plan()

    def _drop_plan(self) -> None:
        self._plan, self.stage = None, Stage.IDLE

    def refuse(self, step: str, reason: str) -> None:
        """Never take a step, nor what stands on it."""
        self.give_up()
        self._at.notes.refuse(step)
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        self._known.do(Warn(f"{self._at.module}: a state is refused: {reason}"))
