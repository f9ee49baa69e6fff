"""One followed module in drawn histories: no event stops it, and at rest it stands on the heaviest chain."""

import random

import pytest

from dipaco.protocol.chain.steps import Step
from dipaco.protocol.member import actions as a
from dipaco.protocol.member import events as e
from dipaco.protocol.member.situation import Role
from dipaco.protocol.member.taking import Stage
from support.runs.trainer import DURATION_S, MODULE, Trainer, name

EVENTS, ANSWERED = 120, (a.Compute, a.FetchState, a.Check, a.Gather, a.Ask, a.Publish)


class History:
    """Steps on branches, rows, wants, roles, jumps of time, and every action answered or failed."""

    def __init__(self, seed):
        self.random, self.member = random.Random(seed), Trainer("A", "ABCD")
        self.module, self.known = self.member.module, self.member.known
        self.genesis = self.module.stand
        self.steps, self.rounds = {}, {self.genesis: -1}
        self.pending = []

    def live(self):
        for _ in range(EVENTS):
            self.happen()
            self.collect()
            self.random.shuffle(self.pending)
            while self.pending and self.random.random() < 0.6:
                self.answer(self.pending.pop(), is_good=self.random.random() < 0.75)
                self.collect()
            self.check_that_something_is_awaited()

    def come_to_rest(self):
        """Let all be answered, until long after the last boundary."""
        self.module.stop_wanting()
        last_s = self.known.schedule.boundary(max(self.rounds.values()), self.module.level).time_s
        self.known.now_s = max(self.known.now_s, last_s)
        for _ in range(60):
            self.collect()
            while self.pending:
                self.answer(self.pending.pop(0), is_good=True)
                self.collect()
            self.known.now_s += 0.3 * DURATION_S
            self.module.on_time()
        self.collect()

    def happen(self):
        module, draw = self.module, self.random.random()
        if draw < 0.3:
            self.tell_steps()
        elif draw < 0.4:
            parents = list(self.rounds)[-3:]
            latest = max(self.rounds.values()) + 1
            rows = [
                self.member.row(p, round_index=self.random.randint(0, latest), parent=self.random.choice(parents))
                for p in self.random.sample("BCD", 2)
            ]
            module.hear_rows(rows, self.random.choice("BCD"))
        elif draw < 0.5:
            self.known.now_s += self.random.choice([0.25, 2, 10, 30])
            module.on_time()
        elif draw < 0.55:
            self.known.now_s += DURATION_S / 2
            module.publishing.begin(max(self.rounds.values()) + 1, self.known.now_s)
        elif draw < 0.58:
            module.want()
            module.consider()
        elif draw < 0.61:
            module.stop_wanting()
        elif draw < 0.63 and module.head is not None:
            module.follow(Role.TRAINER)
        elif draw < 0.64:
            module.follow(Role.KEEPER if module.head is not None else Role.ONLY_MAILBOX)

    def tell_steps(self):
        """Tell a new step and some of those that it stands on."""
        parent = self.random.choice(list(self.rounds)[-5:])
        round_index = self.rounds[parent] + self.random.choice([1, 1, 1, 2])
        rows = [
            self.member.row(
                peer,
                round_index=round_index,
                parent=parent,
                state=name(parent),
                file=name(f"{peer}{parent}{round_index}{self.random.randint(0, 1)}"),
            )
            for peer in self.random.sample("ABCD", self.random.randint(1, 4))
        ]
        step = Step.of(rows)
        self.steps[step.name], self.rounds[step.name] = step, round_index
        told, at, count = [], step.name, self.random.randint(1, 4)
        while at != self.genesis and len(told) < count:
            told.append(self.steps[at])
            at = self.steps[at].parent
        self.module.hear_steps(tuple(reversed(told)), self.random.choice("BCD"))

    def collect(self):
        self.pending += [action for action in self.known.actions if isinstance(action, ANSWERED)]
        self.known.actions = []

    def answer(self, action, *, is_good):
        handle = self.module.handle
        if isinstance(action, a.Gather):
            for row in action.rows:
                failed = e.Failed(a.Gather(MODULE, (row,)), "nobody gives it", self.random.random() < 0.1)
                handle(e.Gathered(MODULE, row) if is_good else failed)
        elif isinstance(action, a.Check):
            handle(e.Checked(MODULE, action.step, 1.0, self.random.choice([1.0, 1.0, 9.0, None]), 9.0))
        elif not is_good:
            handle(e.Failed(action, "it failed"))
        elif isinstance(action, a.Compute):
            book, target = self.member.module.book, action.steps[-1].name
            if target in book:
                handle(e.StateHere(MODULE, book.link(target).head(name(target), 10**6)))
            else:
                handle(e.Failed(action, "its step is forgotten"))
        elif isinstance(action, a.FetchState):
            head = action.head
            place = (head.version, head.weight, head.round_index)
            handle(e.StateHere(MODULE, type(head)(MODULE, head.step, *place, name(head.step), 10**6)))
        elif isinstance(action, a.Ask):
            handle(e.Answered(action.peer, MODULE, trains=self.random.random() < 0.9))
        elif isinstance(action, a.Publish):
            at = {"round_index": action.round_index, "parent": action.parent, "state": action.state}
            handle(e.Published(MODULE, self.member.row("A", **at, file=name(f"A{action.parent}{action.round_index}"))))

    def check_that_something_is_awaited(self):
        awaited = {Stage.COMPUTING: a.Compute, Stage.CHECKING: a.Check}.get(self.module.taking.stage)
        assert awaited is None or any(isinstance(action, awaited) for action in self.pending)


def run(seed):
    history = History(seed)
    history.live()
    history.come_to_rest()
    module = history.module
    assert module.taking.stage is Stage.IDLE
    if module.head is not None:
        assert module.best().rank >= module.link.rank


@pytest.mark.parametrize("first", range(0, 100, 10))
def test_no_history_stops_a_module(first):
    for seed in range(first, first + 10):
        run(seed)


@pytest.mark.nightly
def test_no_history_of_thousands_stops_a_module():
    for seed in range(100, 3000):
        run(seed)
