"""The shell: who carries out what a member wants, and how a node lives and leaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fake_swarm import FakeSwarm, peer_id
from support.outer_peer import MODULE, Peer
from support.tiny_run import make_tiny_run

from dipaco.base.errors import NetworkError
from dipaco.peer.background import Background
from dipaco.peer.messenger import Messenger
from dipaco.peer.outer_steps import OuterSteps
from dipaco.peer.own_status import PeerStatus
from dipaco.peer.session import Session
from dipaco.peer.settings import PeerSettings
from dipaco.peer.shell import Shell
from dipaco.protocol.member import actions as a
from dipaco.protocol.member import events as e
from dipaco.protocol.member.knowledge import MemberSettings


def test_every_action_is_carried_out_by_one_part_of_a_training_peer() -> None:
    parts = [
        Messenger.__new__(Messenger).handlers(),
        OuterSteps.__new__(OuterSteps).handlers(),
        Session.__new__(Session)._handlers(),
    ]
    assert sum(map(len, parts)) == len(set().union(*parts))
    # `Left` is what `Shell.run` returns.
    assert set().union(*parts) == set(a.Action.__subclasses__()) - {a.Left}


class Mailbox:
    """A node that trains nothing, and what its member was told."""

    def __init__(self, folder: Path) -> None:
        self.peer = Peer(make_tiny_run(folder / "run"), folder / "peer", None)
        self.background, self.stopping = Background(), threading.Event()
        swarm: Any = FakeSwarm()
        listeners: list[Callable[[e.Event], None]] = []
        self.peer.node.exchange.listen = listeners.append
        self.shell = Shell(
            self.peer.node,
            MemberSettings(self.peer.me, trains=False),
            PeerStatus(),
            swarm,
            self.background,
            self.peer.events,  # type: ignore[arg-type]
            self.stopping,
            next_turn=self._next_turn,
        )
        (self.tell,) = listeners
        self.heard: list[e.Event] = []
        handle = self.shell.member.handle

        def note(event: e.Event, now_s: float) -> Any:
            self.heard.append(event)
            return handle(event, now_s)

        self.shell.member.handle = note  # type: ignore[method-assign]
        self.next_turns: Iterator[Callable[[], None]] = iter(())

    def _next_turn(self) -> e.Turn:
        next(self.next_turns, self.stopping.set)()
        return e.Turn()


@pytest.fixture
def mailbox(tmp_path: Path) -> Iterator[Mailbox]:
    made = Mailbox(tmp_path)
    yield made
    made.peer.outer.stop()


def test_what_is_reported_happens_in_order_and_leaving_is_told_once(mailbox: Mailbox) -> None:
    told = [e.Told(peer_id(number), MODULE) for number in (1, 2)]
    mailbox.next_turns = iter([lambda: mailbox.tell(told[0]), lambda: mailbox.tell(told[1])])
    assert mailbox.shell.run() == a.Left(to_successor=False)
    assert [event for event in mailbox.heard if isinstance(event, e.Told)] == told
    assert mailbox.heard.count(e.LeaveWanted()) == 1


def test_what_is_known_at_once_happens_before_the_next_event(mailbox: Mailbox) -> None:
    check = a.Check(MODULE, "5" * 64)
    checked = e.Checked(MODULE, "5" * 64, None, None)
    heard: list[e.Event] = []

    def handle(event: e.Event, now_s: float) -> tuple[a.Action, ...]:
        heard.append(event)
        return (check, a.Wait("", 0.0)) if isinstance(event, e.Turn) else ()

    mailbox.shell.member.handle = handle  # type: ignore[assignment, method-assign]
    assert mailbox.shell.happen(e.Turn()) == a.Wait("", 0.0)
    assert heard == [e.Turn(), checked]


def test_what_ended_a_background_thread_ends_the_node(mailbox: Mailbox) -> None:
    mailbox.next_turns = iter([lambda: mailbox.background.fail(NetworkError("it died"))] * 2)
    with pytest.raises(NetworkError, match="it died"):
        mailbox.shell.run()


def test_an_action_that_nobody_carries_out_is_an_error(mailbox: Mailbox) -> None:
    mailbox.shell.member.handle = lambda event, now_s: [a.Discard(MODULE)]  # type: ignore
    with pytest.raises(AssertionError, match="nobody carries out"):
        mailbox.shell.happen(e.Turn())


def test_a_peer_that_rests_hears_what_its_owner_and_others_want(tmp_path: Path) -> None:
    peer = Peer(make_tiny_run(tmp_path / "run"), tmp_path / "peer", None)
    peer.node.exchange.listen = lambda report: None
    peer.node.states = SimpleNamespace()
    steps: list[float] = []

    def inner_step() -> float:
        time.sleep(0.3)
        steps.append(0.3)
        return 0.0

    trainer: Any = SimpleNamespace(
        inner_step=inner_step,
        path=None,
        path_step=1,
        tokens_per_step=8,
        device=torch.device("cpu"),
        modules=(),
    )
    stopping, swarm, looks = threading.Event(), FakeSwarm(), list[int]()
    swarm.refresh_too = lambda watch: None  # type: ignore[attr-defined]
    swarm.stop = lambda withdraw: None  # type: ignore[attr-defined]
    pauses: Any = SimpleNamespace(
        change=lambda: looks.append(len(steps)), tell=lambda state, path, why: None
    )
    session = Session(
        PeerSettings(duty=1.0),
        peer.node,
        trainer,
        PeerStatus(),
        swarm,  # type: ignore[arg-type]
        Background(),
        peer.events,  # type: ignore[arg-type]
        stopping,
        pauses,
    )

    def handle(event: e.Event, now_s: float) -> tuple[a.Action, ...]:
        if len(looks) >= 4:
            stopping.set()
        if isinstance(event, e.LeaveWanted):
            return ()
        return (a.Left(to_successor=False),) if stopping.is_set() else (a.TakeStep(None),)

    session._shell.member.handle = handle  # type: ignore[assignment, method-assign]
    assert session.run() is None
    assert looks == [0, 1, 1, 1]
    peer.outer.stop()
