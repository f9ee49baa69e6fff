"""What concerns other peers: each message reports one outcome, failures too."""

import logging
import queue
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from dipaco.base.errors import NetworkError
from dipaco.base.index import Index
from dipaco.peer.exchange.chain_store import ChainStore
from dipaco.peer.presence.own_status import PeerStatus
from dipaco.peer.shell.messenger import PUTS_AT_ONCE, Messenger
from dipaco.protocol.chain.steps import Row, Step, genesis_name
from dipaco.protocol.member import actions as a
from dipaco.protocol.member import events as e
from support.swarms.fake_swarm import ME, FakeSwarm, peer_id
from support.wire.exchanges import rows_in

OTHER, MODULE, RUN = peer_id(1), "L0.E0", "0123456789abcdef"
WAIT_S, ROUND_S = 30.0, 100.0
ROW = Row(MODULE, 0, genesis_name(RUN, MODULE), "5" * 64, 0, OTHER, 64, "f" * 64, 10)
STEP = Step.of([ROW])
ANSWER = e.Answered(OTHER, MODULE, (STEP,), (ROW,), has_more=True)


class Others:
    """Other peers: what they are told, and what they answer."""

    def __init__(self):
        self.told = []
        self.put_to = queue.SimpleQueue()
        self.answer = ANSWER
        self.refusing = set()
        self.putting = threading.Event()
        self.putting.set()

    def tell(self, *said):
        self.told.append(said)

    def ask(self, peer, module, locator):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def put(self, peer, row, file, timeout_s):
        self.put_to.put(peer)
        assert 0 < timeout_s <= ROUND_S
        self.putting.wait(WAIT_S)
        return peer not in self.refusing


class Peer:
    def __init__(self):
        self.swarm, self.others, self.status = FakeSwarm(), Others(), PeerStatus()
        self.chains = ChainStore(RUN, [MODULE], Index(Path("nowhere")))
        self.reported = queue.SimpleQueue()
        node = SimpleNamespace(
            exchange=self.others,
            chains=self.chains,
            contributions=SimpleNamespace(find=lambda sha256: Path("file")),
            plan=SimpleNamespace(rounds=SimpleNamespace(duration_s=ROUND_S)),
        )
        running = SimpleNamespace(node=node, refresher=self.swarm, status=self.status)
        self.messenger = Messenger(running, self.reported.put)

    def do(self, action):
        assert self.messenger.handlers()[type(action)](action) is None

    def outcome(self, action):
        self.do(action)
        return self.reported.get(timeout=WAIT_S)


@pytest.fixture
def peer():
    made = Peer()
    yield made
    made.messenger.stop()


def test_what_others_do_again_and_again_is_said_now_and_then(peer, caplog):
    """Somebody who tells one bad step after the other does not fill the log."""
    for number in range(1000):
        peer.do(a.Warn(f"{MODULE}: a state is refused"))
        peer.do(a.Warn(f"{MODULE}: the held-out loss is {number}"))
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said.count(f"{MODULE}: a state is refused") == 1
    assert len(said) < 50


def test_what_is_told_is_kept_too_also_when_nobody_hears_it(peer):
    peer.do(a.Tell((), MODULE, rows=(ROW,), steps=(STEP,)))
    assert rows_in(peer.chains, MODULE) == (ROW,)
    assert peer.others.told == []
    peer.do(a.Tell((OTHER,), MODULE, steps=(STEP,), keep=True))
    assert peer.others.told == [((OTHER,), MODULE, (), (STEP,), True)]


def test_an_answer_a_silence_and_a_failure_are_told(peer):
    ask = a.Ask(OTHER, MODULE, (ROW.parent,))
    found = peer.outcome(ask)
    assert found == ANSWER
    for answer in (None, NetworkError("it does not answer"), RuntimeError("unforeseen")):
        peer.others.answer = answer
        failed = peer.outcome(ask)
        assert isinstance(failed, e.Failed)
        assert failed.action == ask


def test_a_file_is_pushed_to_every_mailbox(peer):
    peer.do(a.Put((OTHER, ME), ROW, 2))
    assert {peer.others.put_to.get(timeout=WAIT_S) for _ in range(2)} == {OTHER, ME}


def test_a_mailbox_that_takes_no_file_is_made_up_for_by_the_next(peer):
    peer.others.refusing = {OTHER, "dead"}
    peer.do(a.Put((OTHER, "dead", ME, "last"), ROW, 1))
    asked = [peer.others.put_to.get(timeout=WAIT_S) for _ in range(3)]
    assert asked == [OTHER, "dead", ME]
    peer.do(a.Put(("another",), ROW, 1))
    assert peer.others.put_to.get(timeout=WAIT_S) == "another"


def test_a_look_that_fails_is_told(peer):
    assert peer.outcome(a.Look()) == e.Viewed(peer.swarm.view, is_answer=True)

    def fail():
        raise NetworkError("the DHT did not answer")

    peer.swarm.on_refresh = fail
    assert peer.outcome(a.Look()) == e.Failed(a.Look(), "the DHT did not answer")


def test_what_takes_seconds_never_waits_behind_files_on_a_slow_line(peer):
    """A peer that cannot be called learns the step by asking, while its files are still on their way."""
    peer.others.putting.clear()
    for round_index in range(2 * PUTS_AT_ONCE):
        row = Row(MODULE, round_index, genesis_name(RUN, MODULE), "5" * 64, 0, ME, 64, "f" * 64, 10)
        peer.do(a.Put((OTHER, peer_id(2)), row, 2))
    assert peer.outcome(a.Ask(OTHER, MODULE, ())) == ANSWER
    assert peer.outcome(a.Look()).is_answer
    peer.others.putting.set()


def test_a_file_whose_round_is_over_is_given_to_nobody(peer):
    peer.messenger._node.plan.rounds.duration_s = -1.0
    peer.do(a.Put((OTHER,), ROW, 1))
    peer.messenger._puts.shutdown()
    assert peer.others.put_to.empty()
