"""The shell around a member: events one after the other, answers before what comes later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from dipaco.peer.member import actions as a
from dipaco.peer.member import events as e
from dipaco.peer.shell import Shell

WAIT_S = 30.0


class Member:
    """Remembers what it is told, and wants what the test says."""

    def __init__(self) -> None:
        self.events: list[e.Event] = []
        self.threads: set[int] = set()
        self.wants: dict[type, list[a.Action]] = {}
        self.inside = False

    def handle(self, event: e.Event, now_s: float) -> list[a.Action]:
        assert not self.inside
        self.inside = True
        self.events.append(event)
        self.threads.add(threading.get_ident())
        self.inside = False
        return self.wants.get(type(event), [])


class Rig:
    """A shell whose actions are answered by what the test says."""

    def __init__(self) -> None:
        self.member = Member()
        self.done: list[a.Action] = []
        self.answers: dict[type, Callable[[Any], e.Event | None]] = {}
        member: Any = self.member
        self.shell = Shell(member, lambda: 7.0, self._carry_out)

    def _carry_out(self, action: a.Action) -> e.Event | None:
        self.done.append(action)
        answer = self.answers.get(type(action))
        return answer(action) if answer is not None else None


def test_what_was_reported_happens_in_order_before_the_turn() -> None:
    rig = Rig()
    for tokens in range(3):
        rig.shell.report(e.Stepped(tokens))
    rig.shell.turn(e.Turn())
    assert rig.member.events == [e.Stepped(0), e.Stepped(1), e.Stepped(2), e.Turn()]


def test_what_is_done_at_once_is_answered_before_later_events() -> None:
    rig = Rig()
    rig.member.wants[e.LeaveWanted] = [a.TakeSnapshot("L0.E0", 3, 0.0), a.SaveAll()]
    rig.answers[a.TakeSnapshot] = lambda action: e.SnapshotTaken(action.module, 3, 10, True)
    rig.shell.report(e.LeaveWanted())
    rig.shell.report(e.Stepped(1))
    rig.shell.turn(e.Turn())
    assert [event.kind for event in rig.member.events] == [
        "leave_wanted",
        "snapshot_taken",
        "stepped",
        "turn",
    ]
    assert rig.done == [a.TakeSnapshot("L0.E0", 3, 0.0), a.SaveAll()]


def test_answers_of_answers_come_in_order_too() -> None:
    rig = Rig()
    rig.member.wants[e.Turn] = [a.TakeSnapshot("L0.E0", 1, 0.0), a.CheckState("L0.E0", "d")]
    rig.member.wants[e.SnapshotTaken] = [a.TakeSnapshot("L1.E0", 1, 0.0)]
    rig.answers[a.CheckState] = lambda action: e.Checked("L0.E0", "d", 1.0, 1.0)

    def taken(action: a.TakeSnapshot) -> e.Event:
        if action.module == "L1.E0":
            del rig.member.wants[e.SnapshotTaken]
        return e.SnapshotTaken(action.module, 1, 1, True)

    rig.answers[a.TakeSnapshot] = taken
    rig.shell.turn(e.Turn())
    assert [getattr(event, "module", "") for event in rig.member.events] == [
        "",
        "L0.E0",
        "L0.E0",
        "L1.E0",
    ]


def test_the_answer_to_a_turn_is_what_to_do_next() -> None:
    rig = Rig()
    step = a.TakeStep(0.0)
    rig.member.wants[e.Turn] = [a.SaveAll(), step]
    assert rig.shell.turn(e.Turn()) == step
    assert rig.done == [a.SaveAll()]


def test_an_instruction_may_come_with_the_answer_to_an_action() -> None:
    rig = Rig()
    left = a.Left((), to_successor=False)
    rig.member.wants[e.Turn] = [a.TakeSnapshot("L0.E0", 1, 0.0)]
    rig.member.wants[e.SnapshotTaken] = [left]
    rig.answers[a.TakeSnapshot] = lambda action: e.SnapshotTaken("L0.E0", 1, 1, True)
    assert rig.shell.turn(e.Turn()) == left


def test_without_an_instruction_the_shell_waits() -> None:
    assert Rig().shell.turn(e.Turn()) == a.Wait("", 0.0)


def test_what_is_reported_while_an_event_is_carried_out_waits_for_the_next_turn() -> None:
    rig = Rig()
    rig.member.wants[e.Turn] = [a.Look()]

    def look(action: a.Action) -> None:
        rig.shell.report(e.LookFailed("no answer"))

    rig.answers[a.Look] = look
    rig.shell.turn(e.Turn())
    assert rig.member.events == [e.Turn()]
    rig.shell.turn(e.Turn())
    assert rig.member.events == [e.Turn(), e.LookFailed("no answer"), e.Turn()]


def test_a_wait_ends_with_a_report_which_has_happened_by_then() -> None:
    rig = Rig()
    reporter = threading.Thread(target=rig.shell.report, args=(e.Stepped(1),))
    reporter.start()
    rig.shell.wait(WAIT_S)
    reporter.join(WAIT_S)
    assert rig.member.events == [e.Stepped(1)]


def test_waking_ends_a_wait_and_is_no_event() -> None:
    rig = Rig()
    rig.shell.wake()
    rig.shell.wake()
    rig.shell.wait(WAIT_S)
    rig.shell.turn(e.Turn())
    assert rig.member.events == [e.Turn()]


def test_a_wait_without_a_report_ends_by_itself() -> None:
    rig = Rig()
    rig.shell.wait(0.0)
    rig.shell.wait(-1.0)
    assert rig.member.events == []


def test_nothing_is_lost_between_threads_and_each_threads_order_stays() -> None:
    rig = Rig()
    threads, each = 8, 200
    begin = threading.Barrier(threads)

    def report(number: int) -> None:
        begin.wait(WAIT_S)
        for count in range(each):
            rig.shell.report(e.Stepped(number * each + count))

    reporters = [threading.Thread(target=report, args=(number,)) for number in range(threads)]
    for reporter in reporters:
        reporter.start()
    while any(reporter.is_alive() for reporter in reporters):
        rig.shell.wait(0.01)
        rig.shell.turn(e.Turn())
    rig.shell.turn(e.Turn())
    steps = [event.tokens for event in rig.member.events if isinstance(event, e.Stepped)]
    assert sorted(steps) == list(range(threads * each))
    for number in range(threads):
        own = [tokens for tokens in steps if tokens // each == number]
        assert own == sorted(own)
    assert rig.member.threads == {threading.get_ident()}


def test_every_call_of_the_member_is_recorded_with_its_time() -> None:
    rig = Rig()
    rig.member.wants[e.Turn] = [a.SaveAll()]
    calls: list[tuple[float, e.Event, list[a.Action]]] = []

    class Recorder:
        def record(self, now_s: float, event: e.Event, actions: Any) -> None:
            calls.append((now_s, event, list(actions)))

    member: Any = rig.member
    shell = Shell(member, lambda: 7.0, rig._carry_out, Recorder())
    shell.report(e.Stepped(1))
    shell.turn(e.Turn())
    assert calls == [(7.0, e.Stepped(1), []), (7.0, e.Turn(), [a.SaveAll()])]
