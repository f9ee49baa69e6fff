"""How a peer takes the heaviest chain of a module (design 4.4, chain).

Replay, or fetch; check; adopt.

The usual case is the next step on top of the own head. A chain that parted from the own one, a
newcomer's first state and one that was missed for long are the same: whichever is fewer bytes is
done, steps are computed from their files or the state is fetched.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from dipaco.protocol.chain import Head, Row, Step
from dipaco.protocol.chain_book import Link

from .actions import (
    Adopt,
    Ask,
    Check,
    Compute,
    FetchState,
    Forget,
    Gather,
    Publish,
    Serve,
    Warn,
)
from .events import Answered, Checked, Event, Failed, Gathered, Published, StateHere
from .knowledge import Knowledge
from .outer_round import RECENT_STEPS, REMEMBERED_STEPS, OuterRound, Role

# A state that makes the held-out loss worse by more nats than this is not believed.
MUCH_WORSE_NATS = 0.5
# Steps that are replayed at most: the files of older ones are gone anywhere.
GREATEST_REPLAY = 3
# What could not be had is left alone for so long, the first time, and doubled so often.
UNAVAILABLE_S, MOST_DOUBLINGS = 15.0, 4
TELLERS = 8
# A newcomer asks so many holders what their chain is, and waits so long.
FIRST_ASKED, ANSWER_LIMIT_S = 3, 6.0


@dataclass
class _Taking:
    """A chain that is about to be taken."""

    target: str
    since_s: float
    steps: tuple[Step, ...] = ()
    """To be computed on top of `base`; none if the state is fetched."""
    base: str = ""
    missing: dict[str, Row] = field(default_factory=dict)
    """Files that are not here yet."""
    head: Head | None = None
    """The state, once it is here."""


class Strand(OuterRound):
    """All that a member knows and does of one module."""

    def __init__(self, known: Knowledge, module: str) -> None:
        super().__init__(known, module)
        self.is_wanted = False
        """A state is wanted to begin with; it waits in `ready`."""
        self.ready: Head | None = None
        self.taking: _Taking | None = None
        self._kept: Head | None = None
        """The anchor before the present one, which is on the disk."""
        self._refused: set[str] = set()
        """Steps that a file of is no contribution."""
        self._doubted: set[str] = set()
        """Steps whose states made the held-out loss much worse."""
        self._unavailable: dict[str, float] = {}
        self._fetches_in_vain = 0
        self._tellers: dict[str, dict[str, None]] = {}
        self._held: dict[str, Head] = {}
        """States as their holders say them, by step."""
        self._corrected = ""
        self._wanted_s = 0.0

    def handle(self, event: Event) -> None:
        """Take note of what concerns this module."""
        match event:
            case Published():
                self.published(event.row)
            case Gathered():
                self.files.add(event.file)
                self._has_come(event.file)
                self._propose_if_due()
            case Answered():
                self._hear_answer(event)
            case StateHere():
                self._here(event.head)
            case Checked():
                self._checked(event)
            case Failed(action=Publish()):
                self.publish_failed(event)
            case Failed(action=Gather(rows=rows)):
                self._gather_failed(rows[0].file, event.is_final)
            case Failed(action=Ask(peer=peer)):
                self._unanswered.discard(peer)
            case Failed(action=Compute(steps=steps)):
                self._compute_failed(steps[-1].name)
            case Failed(action=FetchState(head=head)):
                self._fetch_failed(head.step)

    # -- what is heaviest

    def heaviest(self) -> Link:
        """Return the heaviest chain that is not refused and can be had at the moment. What was
        doubted counts again as soon as most of those who counted are in it."""
        now_s = self.known.now_s
        without = self._refused | {n for n, s in self._unavailable.items() if s > now_s}
        best = self.book.heaviest(self.module, without)
        if self._doubted and not self._is_of_most(best.name):
            best = self.book.heaviest(self.module, without | self._doubted)
        return best

    def note_teller(self, step: str, peer: str) -> None:
        """Remember who told of a step: it may have the state."""
        tellers = self._tellers.setdefault(step, {})
        if len(tellers) < TELLERS and peer != self.known.me:
            tellers[peer] = None

    def _hear_answer(self, event: Answered) -> None:
        self._unanswered.discard(event.peer)
        if event.held is not None:
            self._held.setdefault(event.held.step, event.held)
            self.note_teller(event.held.step, event.peer)
        self.hear_steps(event.steps, event.peer)
        self.hear_rows(event.rows, event.peer)
        if event.has_more and event.steps and event.steps[-1].name in self.book:
            locator = self.book.locator(event.steps[-1].name)
            self._unanswered.add(event.peer)
            self.known.do(Ask(event.peer, self.module, locator))

    # -- taking

    def consider(self) -> None:
        """Take the heaviest chain if it is not the own, nor on top of what is being taken."""
        best = self.heaviest()
        if self.taking is not None:
            taken = self.book.link(self.taking.target)
            is_heavier = best.rank < taken.rank and not self.book.stands_on(best.name, taken.name)
            if not is_heavier and taken.name not in self._refused | self._doubted:
                return
            self._give_up()
        if not self.is_wanted and self._is_early(best):
            return
        if self.role is Role.MAILBOX and not self.is_wanted:
            self._stand_on(best)
            return
        if self.is_wanted and self._unanswered and not self._is_late:
            return  # Holders that were asked for the chain may still answer.
        current = self.ready if self.is_wanted else self.head
        if current is None or best.rank < self.book.link(current.step).rank:
            self._begin_to_take(best)

    def on_time(self) -> None:
        """Time has passed."""
        self.open_as_heard()
        self._hurry()
        self._ask_if_due()
        self._propose_if_due()
        self.consider()

    def _hurry(self) -> None:
        """Go on with the round when a heavier chain takes long to get: its holder may be silent.
        What is on its way still comes, and is taken then."""
        known, taking = self.known, self.taking
        if taking is None or self.is_wanted or taking.head is not None:
            return
        if known.now_s - taking.since_s < known.gather_s + 3 * known.grace_s:
            return
        if taking.missing:
            self._fetch(self.book.link(taking.target))
        else:
            self.taking = None
            self._leave_alone(taking.target)

    def _stand_on(self, link: Link) -> None:
        """Of a mailbox: know the chain, without a state."""
        if link.name != self.stand:
            self.stand = link.name
            self.known.do(Serve(self.module, link.name))
            self.book.prune(self.module, link.name, REMEMBERED_STEPS)

    def _begin_to_take(self, best: Link) -> None:
        base = self._base_for(best)
        if base is None:
            self._fetch(best)
            return
        steps = self.book.steps_between(base.step, best.name)
        rows = {row.file: row for step in steps for row in step.rows}
        if any(row.file in self.refused_files for row in rows.values()):
            self._refuse(best.name, self._refused, "a file in it is no contribution")
            return
        missing = {file: row for file, row in rows.items() if file not in self.files}
        if base.bytes and sum(row.bytes for row in missing.values()) > base.bytes:
            self._fetch(best)
            return
        self.taking = _Taking(best.name, self.known.now_s, steps, base.step, missing)
        if missing:
            self.gather(missing.values(), tuple(self._tellers.get(best.name, ())))
        else:
            self.known.do(Compute(self.module, base.step, steps))

    def _base_for(self, best: Link) -> Head | None:
        """Return a state that is here and from which a few steps lead to `best`."""
        for base in (self.ready or self.head, self._kept):
            if base is None or not 0 < best.version - base.version <= GREATEST_REPLAY:
                continue
            if self.book.stands_on(best.name, base.step):
                return base
        return None

    def _has_come(self, file: str) -> None:
        taking = self.taking
        if taking is not None and file in taking.missing:
            del taking.missing[file]
            if not taking.missing:
                self.known.do(Compute(self.module, taking.base, taking.steps))

    def _gather_failed(self, file: str, is_refused: bool) -> None:
        """A file is no contribution, or nobody gave it; then it may be asked for again. A step
        that needs it is refused, or its state fetched."""
        self._asked_for.pop(file, None)
        if is_refused:
            self.refused_files.add(file)
        taking = self.taking
        if taking is None or file not in taking.missing:
            return
        if is_refused:
            self._refuse(taking.target, self._refused, "a file in it is no contribution")
        else:
            self._fetch(self.book.link(taking.target))

    def _compute_failed(self, step: str) -> None:
        """What was gathered is gone again, or no state comes out of it."""
        if self.taking is not None and self.taking.target == step:
            self._fetch(self.book.link(step))

    def _fetch(self, link: Link) -> None:
        """Fetch the newest state of a chain that somebody is known to hold; the steps after it are
        computed. Where none is known, those who told of the chain are asked for what they hold.
        A copy of what is near the genesis is computed from there: nobody has to be believed."""
        known, view, current = self.known, self.known.view, self.ready or self.head
        base = current.step if current else self.book.genesis(self.module)
        is_near = not (current or self.is_wanted) and link.version <= GREATEST_REPLAY
        newest = self.book.link(base) if is_near else self._newest_held(link)
        head = view.agreed_head(self.module, newest.name) or self._held.get(newest.name)
        if newest.step is None:
            head = newest.head("", 0)  # Its digest is not known before it is here.
        told = [*view.holders(self.module, newest.name), *self._tellers.get(newest.name, ())]
        told += self._tellers.get(link.name, ())
        holders = tuple(peer for peer in dict.fromkeys(told) if peer != known.me)
        if head is None or (current and newest.rank >= self.book.link(base).rank):
            for peer in holders[:2]:
                self.ask(peer)
            self.taking = None
            if not (self.is_wanted and self._unanswered):
                fork = self.book.ancestor(link.name, base).name
                self._leave_alone(self.book.steps_between(fork, link.name)[0].name)
            return
        self.taking = _Taking(newest.name, known.now_s)
        known.do(FetchState(newest.head(head.digest, head.bytes), holders))

    def _newest_held(self, link: Link) -> Link:
        """Return the newest step of a chain whose state others are known to hold, or `link`."""
        said = self.known.view.holdings.get(self.module, ())
        held = {h.head.step for h in said if h.peer_id != self.known.me} | self._held.keys()
        found = [self.book.link(step) for step in held if self.book.stands_on(link.name, step)]
        return min((f for f in found if f.version), key=lambda f: f.rank, default=link)

    def _fetch_failed(self, step: str) -> None:
        """Nobody gave the state: try again later, or what is heaviest by then."""
        if self.taking is not None and self.taking.target == step:
            self.taking = None
            self._held.pop(step, None)
            self._leave_alone(step)

    def _leave_alone(self, step: str) -> None:
        """Go on without a state that nobody gives, twice as long as the last time."""
        self._unavailable[step] = self.known.now_s + UNAVAILABLE_S * 2.0**self._fetches_in_vain
        self._fetches_in_vain = min(self._fetches_in_vain + 1, MOST_DOUBLINGS)

    def _give_up(self) -> None:
        taking, self.taking = self.taking, None
        if taking is not None and taking.head is not None:
            self.known.do(Forget(self.module, taking.target))

    def _refuse(self, step: str, among: set[str], reason: str) -> None:
        """Do not take a step, nor what stands on it."""
        self._give_up()
        among.add(step)
        self.known.do(Warn(f"{self.module}: a state is refused: {reason}"))

    # -- a state is here

    def _here(self, head: Head) -> None:
        """The state is here: check it where it comes from elsewhere, then take it."""
        taking = self.taking
        if head.step == self._corrected == self.stand:
            self._take(head)
            return
        self._unavailable.pop(head.step, None)
        if taking is None and self.book.link(head.step).rank < self.link.rank:
            taking = self.taking = _Taking(head.step, self.known.now_s)
        if taking is None or head.step != taking.target:
            # It may have been asked for twice, and be what the path begins with.
            if self.ready is None or self.ready.step != head.step:
                self.known.do(Forget(self.module, head.step))
            return
        taking.head = head
        if self._is_to_be_checked(head.step):
            self.known.do(Check(self.module, head.step))
        else:
            self._taken(head)

    def _is_to_be_checked(self, step: str) -> bool:
        """Tell whether a state was made by others without this peer's chain in it, or by few."""
        if self.head is None:
            return self.is_wanted and self.book.link(step).version > 0
        is_fork = not self.book.stands_on(step, self.stand)
        is_of_few = not self._is_good_link(self.book.link(step))
        return (self.role is Role.TRAINER or self.is_wanted) and (is_fork or is_of_few)

    def _checked(self, event: Checked) -> None:
        """Held-out documents say what the state is worth."""
        taking = self.taking
        if taking is None or taking.head is None or event.step != taking.target:
            return
        before, after = event.loss_before, event.loss_after
        is_worse = before is not None and after is not None and not after < before + MUCH_WORSE_NATS
        if is_worse and not self._is_of_most(event.step):
            reason = f"held-out loss {before:.3f}, with it {after:.3f}"
            self._refuse(event.step, self._doubted, reason)
        else:
            self._taken(taking.head)

    def _is_of_most(self, step: str) -> bool:
        """Tell whether half of those who counted where two chains parted and still train, or more,
        are in one of them. Where two began apart, or a split was even, each side fits the documents
        of the other worse, by many nats: that says nothing."""
        if self.head is None:
            return False
        fork = self.book.ancestor(step, self.stand).name
        voters = self.book.contributors(fork, RECENT_STEPS) & self.known.trainers(self.module)
        made = {p for found in self.book.steps_between(fork, step) for p in found.peers}
        return 2 * len(voters & made) >= len(voters)

    def _taken(self, head: Head) -> None:
        if self.taking is not None and not self.taking.steps:
            self._fetches_in_vain = 0
        self.taking = None
        if self.is_wanted:
            if self.ready is not None and self.ready.step != head.step:
                self.known.do(Forget(self.module, self.ready.step))
            self.ready = head
        else:
            self._take(head)
        self.consider()

    def _take(self, head: Head) -> None:
        """Make a state the one that this peer stands on."""
        known, before = self.known, self.stand
        is_next = self.book.stands_on(head.step, before)
        steps = self.book.steps_between(before, head.step) if is_next else ()
        is_round = self.is_open and head.round_index >= self.round_index
        self.is_open = self.is_open and not is_round
        is_own_in = any(known.me in step.peers for step in steps)
        known.do(Adopt(head, is_round, len(self.awaited()), is_own_in))
        if head.step != before:
            self._kept = self.head
        self.head, self.stand = head, head.step
        self._doubted = {n for n in self._doubted if not self.book.stands_on(head.step, n)}
        known.do(Serve(self.module, head.step))
        self.book.prune(self.module, head.step, REMEMBERED_STEPS)
        self._forget_gone()

    def trim(self) -> None:
        """Forget what others invent beyond a bound, and nothing that is used here."""
        target, ready = self.taking and self.taking.target, self.ready and self.ready.step
        if self.book.trim(self.module, {n for n in (self.stand, target, ready) if n}):
            self._forget_gone()

    def _forget_gone(self) -> None:
        self._refused = {step for step in self._refused if step in self.book}
        for about in (self._tellers, self._held, self._unavailable):
            for step in [step for step in about if step not in self.book]:
                del about[step]

    # -- the view

    def on_view(self) -> None:
        """See whether somebody holds a heavier chain, or another state after the same step."""
        known, view = self.known, self.known.view
        if not view.covers_module(self.module):
            return
        mine = self.heaviest().rank
        heavier = {
            holding.peer_id: holding.head.rank
            for holding in view.holdings.get(self.module, ())
            if holding.head.rank < mine
            and holding.peer_id != known.me
            and holding.head.step not in self._refused | self._doubted
        }
        # The longest unasked first: what some say of their chains may be untrue.
        asked_s = {peer: self._asked_s.get(peer, -math.inf) for peer in heavier}
        for peer in sorted(heavier, key=lambda peer: (asked_s[peer], heavier[peer], peer))[:2]:
            self.ask(peer, known.gather_s)
        self._compare_digests()

    def _compare_digests(self) -> None:
        """A digest that most others do not have is that of a broken machine: fetch theirs."""
        head, view = self.head, self.known.view
        if head is None or self.taking is not None or self._corrected == head.step:
            return
        agreed, held = view.agreed_head(self.module, head.step), view.holdings.get(self.module, ())
        holders = tuple(holding.peer_id for holding in held if holding.head == agreed)
        if agreed is None or agreed.digest == head.digest or len(holders) < 2:
            return
        self._corrected = head.step
        what = f"{self.module}: this machine computed another state than {len(holders)} others"
        self.known.do(Warn(f"{what}; its memory or processor may be broken; takes theirs"))
        self.known.do(FetchState(agreed, holders))

    # -- roles

    def want(self) -> None:
        """Get a state to begin with; what is held is as good as the chain that it is of."""
        self.is_wanted, self.ready, self._wanted_s = True, self.head, self.known.now_s
        self._unavailable.clear()
        held = sorted(
            self.known.view.holdings.get(self.module, ()),
            key=lambda h: (h.head.rank, not self.known.is_callable(h.peer_id), h.peer_id),
        )
        others = dict.fromkeys(h.peer_id for h in held if h.peer_id != self.known.me)
        for peer in list(others)[:FIRST_ASKED]:
            self.ask(peer, 0.0)

    @property
    def is_settled(self) -> bool:
        """Whether a state to begin with is here, and none of a heavier chain may still come."""
        return bool(self.ready and not self.taking) and (not self._unanswered or self._is_late)

    @property
    def _is_late(self) -> bool:
        """Whether holders that were asked for the chain had long enough."""
        return self.known.now_s - self._wanted_s >= ANSWER_LIMIT_S

    def follow(self, role: Role) -> None:
        """Train the module from `ready` on, or keep it, or only know it."""
        self.role, self.is_wanted = role, False
        if role is Role.TRAINER and self.ready is not None:
            self.head, self.stand = self.ready, self.ready.step
            self.known.do(Serve(self.module, self.stand))
        if role is Role.MAILBOX:
            self.head = self._kept = None
        self.ready, self.is_open = None, False
        self._give_up()

    def keep(self) -> None:
        """Hold a copy from now on."""
        if self.head is None and self.role is Role.MAILBOX:
            self.role, self.is_wanted = Role.KEEPER, False
            self._begin_to_take(self.heaviest())

    def restore(self, head: Head, steps: Collection[Step]) -> None:
        """Begin with what is on this disk: the state is held, as a copy."""
        for step in steps:
            self.book.add(step)
        if head.step in self.book:
            self.head, self.stand, self.role = head, head.step, Role.KEEPER
            self.known.do(Serve(self.module, head.step))

    def last_step(self) -> tuple[Step, ...]:
        """Return the step that the head is of, if it is not the genesis."""
        return (self.link.step,) if self.link.step else ()
