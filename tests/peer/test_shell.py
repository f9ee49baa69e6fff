"""The shell: who carries out what a member wants, and how a node lives and leaves."""

import threading
from types import SimpleNamespace

import pytest
import torch

from dipaco.base.errors import NetworkError
from dipaco.peer.background import Background
from dipaco.peer.peer_settings import PeerSettings
from dipaco.peer.presence.own_status import PeerStatus
from dipaco.peer.shell import session
from dipaco.peer.shell.messenger import Messenger
from dipaco.peer.shell.outer_steps import OuterSteps
from dipaco.peer.shell.running_node import RunningNode
from dipaco.peer.shell.session import Session
from dipaco.peer.shell.shell import Shell
from dipaco.protocol.member import actions as a
from dipaco.protocol.member import events as e
from dipaco.protocol.member.knowledge import MemberSettings
from support.runs.tiny_run import make_tiny_run
from support.swarms.fake_swarm import FakeSwarm, peer_id
from support.wire.outer_peer import MODULE, Peer


def test_every_action_is_carried_out_by_one_part_of_a_training_peer():
    parts = [
        Messenger.__new__(Messenger).handlers(),
        OuterSteps.__new__(OuterSteps).handlers(),
        OuterSteps.__new__(OuterSteps).model_handlers(),
        Session.__new__(Session)._model_handlers(),
    ]
    assert sum(map(len, parts)) == len(set().union(*parts))
    # `Left` is what `Shell.run` returns.
    assert set().union(*parts) == set(a.Action.__subclasses__()) - {a.Left}


class Mailbox:
    """A node that trains nothing, and what its member was told."""

    def __init__(self, folder):
        self.peer = Peer(make_tiny_run(folder / "run"), folder / "peer", None)
        self.background, self.stopping = Background(), threading.Event()
        swarm = FakeSwarm()
        listeners = []
        self.peer.node.exchange.listen = listeners.append
        self.shell = Shell(
            RunningNode(self.peer.node, PeerStatus(), swarm, self.background, self.peer.events, self.stopping),
            MemberSettings(self.peer.me, trains=False),
            next_turn=self._next_turn,
        )
        (self.tell,) = listeners
        self.heard = []
        handle = self.shell.member.handle

        def note(event, now_s):
            self.heard.append(event)
            return handle(event, now_s)

        self.shell.member.handle = note
        self.next_turns = iter(())

    def _next_turn(self):
        next(self.next_turns, self.stopping.set)()
        return e.Turn()


@pytest.fixture
def mailbox(tmp_path):
    made = Mailbox(tmp_path)
    yield made
    made.peer.outer.stop()


def test_what_is_reported_happens_in_order_and_leaving_is_told_once(mailbox):
    told = [e.Told(peer_id(number), MODULE) for number in (1, 2)]
    mailbox.next_turns = iter([lambda: mailbox.tell(told[0]), lambda: mailbox.tell(told[1])])
    assert mailbox.shell.run() == a.Left(to_successor=False)
    assert [event for event in mailbox.heard if isinstance(event, e.Told)] == told
    assert mailbox.heard.count(e.LeaveWanted()) == 1


def test_what_is_known_at_once_happens_before_the_next_event(mailbox):
    check = a.Check(MODULE, "5" * 64)
    checked = e.Checked(MODULE, "5" * 64, None, None)
    heard = []

    def handle(event, now_s):
        heard.append(event)
        return (check, a.Wait("", 0.0)) if isinstance(event, e.Turn) else ()

    mailbox.shell.member.handle = handle
    assert mailbox.shell.happen(e.Turn()) == a.Wait("", 0.0)
    assert heard == [e.Turn(), checked]


def test_what_ended_a_background_thread_ends_the_node(mailbox):
    mailbox.next_turns = iter([lambda: mailbox.background.fail(NetworkError("it died"))] * 2)
    with pytest.raises(NetworkError, match="it died"):
        mailbox.shell.run()


class Trainee:
    """A training peer whose inner steps are the test's, as is what its member answers."""

    def __init__(self, folder, inner_step, **options):
        self.peer = Peer(make_tiny_run(folder / "run"), folder / "peer", None)
        self.peer.node.exchange.listen = lambda report: None
        self.trainer = SimpleNamespace(
            inner_step=inner_step, path=None, path_step=1, tokens_per_step=8, device=torch.device("cpu"), modules=()
        )
        swarm = FakeSwarm()
        swarm.refresh_too = lambda watch: None
        swarm.stop = lambda withdraw: None
        self.stopping = threading.Event()
        running = RunningNode(self.peer.node, PeerStatus(), swarm, Background(), self.peer.events, self.stopping)
        settings = PeerSettings(**options.pop("settings", {}))
        self.session = Session(settings, running, self.trainer, **options)
        self.shell = self.session._shell

    def run(self, handle):
        self.shell.member.handle = handle
        assert self.session.run() is None
        self.peer.outer.stop()


def test_others_are_heard_while_a_step_is_taken(tmp_path):
    """On a slow machine a step takes longer than others wait for an answer."""
    happened = []
    time_passed, may_end = threading.Event(), threading.Event()

    def inner_step():
        happened.append("step begins")
        assert time_passed.wait(30)
        trainee.shell.report(e.Told(peer_id(1), MODULE))
        assert may_end.wait(30)
        happened.append("step ends")
        return 0.0

    trainee = Trainee(tmp_path, inner_step)
    trainee.trainer.discard = lambda module: happened.append("back to the anchor")

    def handle(event, now_s):
        if isinstance(event, e.Stepped):
            trainee.stopping.set()
        if isinstance(event, e.Meanwhile):
            time_passed.set()
        if isinstance(event, e.Told):
            happened.append(event)
            threading.Timer(0.1, may_end.set).start()
            return (a.Discard(MODULE),)
        if not isinstance(event, e.Turn):
            return ()
        return (a.Left(to_successor=False),) if trainee.stopping.is_set() else (a.TakeStep(None),)

    trainee.run(handle)
    # What concerns the model waits for the end of the step.
    told = e.Told(peer_id(1), MODULE)
    assert happened == ["step begins", told, "step ends", "back to the anchor"]


def test_a_peer_that_rests_hears_what_its_owner_and_others_want(tmp_path, monkeypatch):
    steps, now = [], [0.0]
    # Time that a step takes alone: the rest after it does not end.
    monkeypatch.setattr(session, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def inner_step():
        now[0] += 0.3
        steps.append(0.3)
        return 0.0

    looks = []
    pauses = SimpleNamespace(change=lambda: looks.append(len(steps)), tell=lambda state, path, why: None)
    trainee = Trainee(tmp_path, inner_step, settings={"duty": 1.0}, pauses=pauses)
    stopping = trainee.stopping

    def handle(event, now_s):
        if len(looks) >= 4:
            stopping.set()
        if not isinstance(event, e.Turn):
            return ()
        return (a.Left(to_successor=False),) if stopping.is_set() else (a.TakeStep(None),)

    trainee.run(handle)
    assert looks == [0, 1, 1, 1]
