"""Liars: admitted peers that train like anybody, and do one thing wrong."""

import hashlib
from dataclasses import replace

from dipaco.protocol.chain.steps import Step
from dipaco.protocol.member.actions import Tell
from dipaco.protocol.view import max_contribution_tokens
from dipaco.simulator.swarm.machine import Machine
from dipaco.simulator.swarm.network import NO_ANSWER

KINDS = (
    "brags",
    "poisons",
    "sends garbage",
    "hides files",
    "silent",
    "equivocates",
    "two-faced",
    "alone",
    "floods",
    "miscomputes",
)
FLOOD = 40
CONTENTS = {"poisons": "poison", "sends garbage": "garbage"}


class Liar(Machine):
    """A machine that lies in one way."""

    is_honest = False

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self.lies = self.world.engine.random.choice(KINDS)
        self.content = CONTENTS.get(self.lies, "good")
        self.world.say(self.peer, "!", self.lies)

    def claimed(self, tokens, round_index):
        """Return how many tokens a row says: what was trained, or as many as are believed."""
        if self.lies not in ("brags", "alone"):
            return tokens
        return max_contribution_tokens(self.world.plan, self.believed_s - 1.0, round_index)

    def seen_digest(self, head):
        """Return a state as this machine computes it."""
        if self.lies != "miscomputes":
            return head
        return replace(head, digest=hashlib.sha256((self.peer + head.step).encode()).hexdigest())

    def serve(self, caller, verb, content):
        """Answer a call, but give no file of its own away."""
        if self.lies == "silent" and verb in ("get", "state", "shard"):
            return None, NO_ANSWER
        hides = self.lies == "hides files" and verb == "get"
        if hides and self.world.files[content].row.peer == self.peer:
            return None, 0
        return super().serve(caller, verb, content)

    def act(self, action):
        """Carry out what its member wants, in its own way."""
        if not isinstance(action, Tell) or not action.peers:
            super().act(action)
        elif self.lies == "equivocates" and action.rows:
            self._tell_each(action, [self._other_row(row) for row in action.rows])
        elif self.lies == "floods" and action.rows:
            row = action.rows[0]
            rows = [self._other_row(row, round_more=number) for number in range(FLOOD)]
            rows += [self._other_row(row, parent=f"{number:064x}") for number in range(FLOOD)]
            super().act(replace(action, rows=(*rows, *action.rows)))
        elif self.lies == "two-faced" and action.steps and len(action.steps[-1].rows) > 2:
            self._tell_many_steps(action)
        elif self.lies == "alone" and action.rows:
            own = [row for row in action.rows if row.peer == self.peer]
            super().act(replace(action, steps=tuple(Step.of([row]) for row in own[:1])))
        else:
            super().act(action)

    def _other_row(self, row, *, round_more=0, parent=""):
        """Return another contribution of its own in place of one."""
        if row.peer != self.peer:
            return row
        file = self.world.files[row.file]
        count, round_index = file.end - file.begin, row.round_index + round_more
        parent = parent or row.parent
        other = replace(row, round_index=round_index, tokens=count, parent=parent)
        made = self.world.make_file(other, file.begin, file.end)
        self.store.files.add(made.file)
        return made

    def _tell_each(self, action, others):
        """Tell some peers of some rows, the others of others."""
        super().act(replace(action, peers=action.peers[::2]))
        if action.peers[1::2]:
            super().act(replace(action, peers=action.peers[1::2], rows=tuple(others)))

    def _tell_many_steps(self, action):
        """Tell every peer of a step that lacks another row."""
        *before, last = action.steps
        for number, peer in enumerate(action.peers):
            missing = last.rows[number % len(last.rows)]
            step = Step.of(row for row in last.rows if row is not missing)
            super().act(replace(action, peers=(peer,), steps=(*before, step)))
