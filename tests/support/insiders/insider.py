"""An insider: one admitted peer that trains like anybody, and attacks the others meanwhile.

By itself it attacks nobody: the swarm that attacks are compared with has it, too.
"""

from dipaco.protocol.chain.steps import Row
from dipaco.protocol.member.actions import Publish, Tell
from dipaco.protocol.member.events import Answered, Told
from dipaco.simulator.swarm.machine import Machine
from dipaco.simulator.swarm.network import Link
from dipaco.simulator.swarm.world import FILE_BYTES


class Insider(Machine):
    """An admitted peer. It hears at once what is told; its inner steps keep it from nothing.

    A *place* is where a row belongs: a module, a round, and the step that it stands on.
    """

    is_honest = False
    honest = Machine
    """What the others of its swarm are."""

    def __init__(self, *given, rounds, **options):
        super().__init__(*given, **options)
        self.rounds = rounds
        self.rows = {}
        """All that it knows, by place and peer."""
        self.victims = {}
        """Of each module: the honest peer that it would like to leave out."""

    # -- what it learns

    def deliver(self, event):
        """Hear of an event, before its member does."""
        if isinstance(event, Told | Answered) and self.is_alive:
            for step in event.steps:
                self.on_step(step)
            self._note(event.rows)
        super().deliver(event)

    def act(self, action):
        """Carry out what its member wants."""
        if isinstance(action, Tell):
            self._note(row for row in action.rows if row.peer == self.peer)
            action = self.told(action)
            if not (action.rows or action.steps):
                return
        super().act(action)
        if isinstance(action, Publish):
            self.on_boundary(action)

    def _note(self, rows):
        for row in rows:
            place = row.module, row.round_index, row.parent
            known = self.rows.setdefault(place, {})
            if row.peer not in known:
                known[row.peer] = row
                self._choose_victim(row.module, known)
                self.on_rows(place, known)

    def _choose_victim(self, module, rows):
        """The first honest peer that contributes beside this one is the victim, for good."""
        machines = self.world.machines
        honest = sorted(p for p in rows if p in machines and machines[p].is_honest)
        if honest and self.peer in rows:
            self.victims.setdefault(module, honest[0])

    # -- what an attack does

    def told(self, action):
        """Return what is told in place of what its member wants to tell."""
        return action

    def on_boundary(self, action):
        """A boundary of its own has come."""

    def on_rows(self, place, rows):
        """A row was heard of, or is its own; `rows` are all of its place."""

    def on_step(self, step):
        """A step was heard of."""

    # -- what it can do

    @property
    def others(self):
        """All other peers that run."""
        return tuple(m.peer for m in self.world.machines.values() if m is not self and m.is_alive)

    def tell(self, module, *, rows=(), steps=(), peers=None):
        """Tell everybody, or some."""
        told = Tell(self.others if peers is None else peers, module, rows, steps)
        self.world.say(self.peer, "lies", told)
        self.carrying.do(told)

    def make_row(self, place, state, *, peer="", content="good"):
        """Make a contribution of nothing, its own or of another identity of its owner."""
        module, round_index, parent = place
        paths = self.world.grid.paths_of_module(module)
        path = self.path if self.path in paths else next(iter(paths))
        blank = Row(module, round_index, parent, state, path, peer or self.peer, 1, "", FILE_BYTES)
        row = self.world.make_file(blank, 0, 0, content)
        self.store.files.add(row.file)
        return row

    def add_identities(self, names):
        """Let further identities answer calls, each as this one does."""
        for name in names:
            self.world.network.join(name, Link(), self.serve)


def names(prefix, count):
    """Return the names of further identities."""
    return tuple(f"{prefix}{number}" for number in range(count))
