"""What a bootstrap node prints of the swarm."""

import threading
from types import SimpleNamespace

from dipaco.bootstrap.bootstrap_node import _look_until_stopped
from dipaco.protocol.view import SwarmView
from support.swarms.swarm_views import plan_of, record


def test_a_line_comes_only_when_something_other_than_the_round_has_changed():
    plan, grid = plan_of(2, 2)
    node = SimpleNamespace(
        me="me",
        plan=plan,
        grid=grid,
        directory=SimpleNamespace(look_up_random_key=lambda key: None, list_manifests=list),
        held=SimpleNamespace(all=lambda: ()),
    )
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
            return SwarmView(plan.start_s + number * plan.rounds.duration_s, peers=peers)

    _look_until_stopped(node, Refresher(), SimpleNamespace(say=said.append), stopping)
    what = "0 of 4 paths in training, 0 states held here"
    lines = [line.partition(" ")[2] for line in said]
    assert lines == [f"round 0: 0 other peers, {what}", f"round 2: 1 other peer, {what}"]


def test_each_look_lets_the_nodes_of_a_successor_in():
    stopping = threading.Event()
    directory = SimpleNamespace(look_up_random_key=lambda key: None, list_manifests=stopping.set)

    class Refresher:
        """Ends the test if the manifests were not read before the view."""

        period_s = 0.0

        @property
        def view(self):
            assert stopping.is_set()
            return SwarmView(0.0)

    plan, grid = plan_of(2, 2)
    node = SimpleNamespace(me="me", plan=plan, grid=grid, directory=directory, held=SimpleNamespace(all=lambda: ()))
    _look_until_stopped(node, Refresher(), SimpleNamespace(say=lambda line: None), stopping)
