"""Getting ready for a successor: nobody moves to a run that is not at hand."""

import logging
from types import SimpleNamespace

import pytest

from dipaco.base.errors import NetworkError
from dipaco.peer.background import Background
from dipaco.peer.shell import successor
from dipaco.peer.shell.successor import SuccessorWatch
from dipaco.protocol.manifest import sign_manifest
from dipaco.protocol.plan import PROTOCOL_VERSION
from support.runs.operators import KEY, STRANGER, manifest
from support.waiting import wait_until

FIRST = manifest(1, 100.0)
SECOND = manifest(2, 200.0, FIRST.plan.run_id)
THIRD = manifest(3, 300.0, SECOND.plan.run_id)


class StandIn:
    """A node: of the run, or of one that was opened to succeed it."""

    def __init__(self, signed, content):
        self.manifest, self.run_id, self.plan = signed, signed.plan.run_id, signed.plan
        self.content = content
        self.opened = []
        self.released = False
        self.fetcher = SimpleNamespace(blob=self.blob)
        self.is_loaded = False

    def open_successor(self, signed):
        self.opened.append(StandIn(signed, self.content))
        return self.opened[-1]

    def admit(self):
        """It is an open run."""

    def blob(self, sha256, what):
        if not self.content["is there"]:
            raise NetworkError(f"could not fetch {what}")

    def load_shard_index(self):
        """Look for it again and again, and say so each time."""
        self.is_loaded = True

    def release(self):
        self.released = True


class Listing:
    """A directory that lists manifests."""

    def __init__(self, *manifests):
        self.manifests = list(manifests)
        self.foreign_manifests = ()

    def list_manifests(self):
        return self.manifests


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(successor, "RETRY_AFTER_S", 0.01)


def watch_of(node, events, **options):
    log = SimpleNamespace(emit=lambda kind, **values: events.append(values))
    return SuccessorWatch(node, log, Background(), **options)


def test_it_goes_straight_to_the_newest_run():
    node, events = StandIn(FIRST, {"is there": True}), []
    watch = watch_of(node, events)
    listing = Listing(FIRST)
    watch.read(listing)
    assert (watch.take(), events) == (None, [])
    listing.manifests = [THIRD, FIRST, SECOND, manifest(9, 900.0, FIRST.plan.run_id, STRANGER)]
    watch.read(listing)
    watch.read(listing)
    wait_until(lambda: "ready" in [event["state"] for event in events])
    taken = watch.take()
    assert taken.manifest == THIRD
    assert not taken.released
    watch.stop()
    assert not taken.released
    assert [event["state"] for event in events] == ["found", "ready", "moving"]
    assert {event["run"] for event in events} == {THIRD.plan.run_id}


def test_a_run_without_content_moves_nobody_and_a_newer_one_takes_its_place(caplog):
    content = {"is there": False}
    node, events = StandIn(FIRST, content), []
    watch = watch_of(node, events)
    listing = Listing(FIRST, SECOND)
    watch.read(listing)
    wait_until(lambda: len(node.opened) > 3)
    assert watch.take() is None
    assert not any(other.is_loaded for other in node.opened)
    assert len(caplog.messages) == 1, "it is tried again without a word"
    listing.manifests.append(THIRD)
    watch.read(listing)
    content["is there"] = True
    wait_until(lambda: "ready" in [event["state"] for event in events])
    kept = node.opened[-1]
    assert kept.manifest == THIRD
    assert all(other.released for other in node.opened if other is not kept)
    # The peer leaves instead of moving: another process may use the folder.
    watch.stop()
    assert kept.released


def test_who_stays_is_told_once():
    node, events = StandIn(FIRST, {"is there": True}), []
    watch = watch_of(node, events, follow=False)
    listing = Listing(FIRST, SECOND)
    watch.read(listing)
    watch.read(listing)
    assert (node.opened, watch.take()) == ([], None)
    assert [event["state"] for event in events] == ["found"]
    watch.stop()


@pytest.mark.parametrize(
    ("step", "said"), [(1, "this dipaco is the older one: install"), (-1, "this dipaco is the newer one: install")]
)
def test_a_peer_is_told_once_that_its_run_goes_on_in_another_protocol(step, said, caplog):
    other = PROTOCOL_VERSION + step
    node, events = StandIn(FIRST, {"is there": True}), []
    watch, listing = watch_of(node, events), Listing(FIRST)
    with caplog.at_level(logging.WARNING):
        listing.foreign_manifests = (
            b"no manifest",
            # Of another operator, and of another run: nobody needs to know.
            upgraded(manifest(2, 200.0, FIRST.plan.run_id, STRANGER), STRANGER, other),
            upgraded(manifest(3, 200.0), KEY, other),
        )
        watch.read(listing)
        assert caplog.messages == []
        listing.foreign_manifests = (upgraded(SECOND, KEY, other),)
        watch.read(listing)
        watch.read(listing)
    [line] = caplog.messages
    assert f"in protocol {other}, this dipaco speaks {PROTOCOL_VERSION}" in line
    assert "the peer stays here" in line
    assert said in line
    assert "\n" not in line
    # It trains on.
    assert (watch.take(), events) == (None, [{"what": line}])


def upgraded(signed, key, protocol):
    """Return a manifest as another version of the protocol would sign it."""
    plan = signed.plan.model_copy(update={"protocol_version": protocol})
    return sign_manifest(plan, key)


def test_a_successor_that_breaks_what_reads_it_ends_nobody(caplog):
    """Attack: an operator signs a successor with content that nobody has foreseen."""
    node, events = StandIn(FIRST, {"is there": True}), []

    def broken(signed):
        node.opened.append(signed)
        raise RecursionError("nested too deeply")

    node.open_successor = broken
    watch = watch_of(node, events)
    watch.read(Listing(FIRST, SECOND))
    wait_until(lambda: len(node.opened) > 2)
    watch.stop()
    assert watch.take() is None
    assert len(caplog.messages) == 1
    watch._background.check()
