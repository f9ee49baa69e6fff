"""What a bootstrap node prints of the swarm, and whom it lets in."""

import threading
from types import SimpleNamespace

from dipaco.bootstrap.bootstrap_node import _look_until_stopped
from dipaco.protocol.view import SwarmView
from support.swarms.swarm_views import plan_of, record

PLAN, GRID = plan_of(2, 2)


def look(refresher, stopping, say, list_manifests=list):
    """Let a node look at the swarm until it is stopped."""
    directory = SimpleNamespace(look_up_random_key=lambda key: None, list_manifests=list_manifests)
    held = SimpleNamespace(all=lambda: ())
    node = SimpleNamespace(me="me", plan=PLAN, grid=GRID, directory=directory, held=held)
    _look_until_stopped(node, refresher, SimpleNamespace(say=say), stopping)


def test_a_line_comes_only_when_something_other_than_the_round_has_changed():
    stopping, said = threading.Event(), []

    class Refresher:
        """Shows one round after the other, in the last of which a peer has come."""

        period_s = 0.0
        rounds = iter(range(3))

        @property
        def view(self):
            number = next(self.rounds)
            if number == 2:
                stopping.set()
            names = ("me", "other")[: 1 + (number == 2)]
            peers = {name: record(name, "serving") for name in names}
            return SwarmView(PLAN.start_s + number * PLAN.rounds.duration_s, peers=peers)

    look(Refresher(), stopping, said.append)
    what = "0 of 4 paths in training, 0 states held here"
    lines = [line.partition(" ")[2] for line in said]
    assert lines == [f"round 0: 0 other peers, {what}", f"round 2: 1 other peer, {what}"]


def test_each_look_lets_the_nodes_of_a_successor_in():
    stopping = threading.Event()

    class Refresher:
        """Ends the test if the manifests were not read before the view."""

        period_s = 0.0

        @property
        def view(self):
            assert stopping.is_set()
            return SwarmView(0.0)

    look(Refresher(), stopping, print, list_manifests=stopping.set)
