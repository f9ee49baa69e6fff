"""Attacks by rounds to come, by messages that end badly, and by what rows say of tokens and states."""

from dataclasses import replace

from dipaco.protocol.chain.steps import Step
from dipaco.protocol.member.actions import Put
from dipaco.simulator.swarm.world import FORGED_LOSS, STATE_BYTES

from .insider import Insider, names


class RoundToCome(Insider):
    """Attack 14: on top of every step it tells steps of one row of its own, of the next rounds: the heaviest there are,
    and not due."""

    def told(self, action):
        """Do the same on top of the steps that it proposes itself."""
        for step in action.steps:
            self.later(0.0, self.on_step, step)
        return action

    def on_step(self, step):
        """Tell them, once for each step."""
        if step.peers == {self.peer} or step.name not in self.world.book:
            return
        state = self.world.head(step.name).digest
        places = [(step.module, step.round_index + later, step.name) for later in (1, 2)]
        for place in places:
            if self.peer not in self.rows.setdefault(place, {}):
                self.rows[place][self.peer] = row = self.make_row(place, state)
                self.tell(step.module, steps=(Step.of([row]),))


class BadTells(Insider):
    """Attack 15: at each boundary it tells a burst of messages of three steps, which stand anywhere, and a fourth that
    cannot be."""

    messages = 20

    def on_boundary(self, action):
        """Tell them."""
        book, module = self.world.book, action.module
        near = [link for link in book.back_from(action.parent) if link.round_index < action.round_index][:8]
        for number in range(self.messages):
            link = near[number % len(near)]
            place = module, action.round_index, link.name
            state = self.world.head(link.name).digest
            steps = [Step.of([self.make_row(place, state)]) for _ in range(3)]
            # Of no later round than its parent, or on top of nothing that is known.
            parent = steps[0].name if number % 2 else f"{number:064x}"
            bad = replace(self.make_row((module, action.round_index, parent), state), state=state)
            self.tell(module, steps=(*steps, Step.of([bad])))


class InflatedTokens(Insider):
    """Attack 16: it trains nothing and claims nothing, and tells in every round an empty contribution of the path of
    whoever tells first, with as many tokens as are believed."""

    tokens_said = 10**9

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self.trains = False

    def on_rows(self, place, rows):
        """Tell its row beside the first one of a place."""
        if self.peer in rows:
            return
        first = next(iter(rows.values()))
        blank = replace(first, peer=self.peer, tokens=self.tokens_said)
        rows[self.peer] = row = self.world.make_file(blank, 0, 0, "good")
        self.store.files.add(row.file)
        self.tell(place[0], rows=(row,))


class InventedDigest(Insider):
    """Attack 17: with as many identities of its owner it outnumbers the honest trainers of every module. In every round
    they name another state than comes out of the step before, and make a step of their rows."""

    def start(self):
        """Begin, with the identities."""
        super().start()
        self._names = names("d", len(self.world.machines))
        self.add_identities(self._names)

    def act(self, action):
        """Put no files elsewhere."""
        if not isinstance(action, Put):
            super().act(action)

    def on_rows(self, place, rows):
        """Begin when the first honest row of a place is here."""
        module, round_index, parent = place
        if round_index < 2 or self._names[0] in rows or parent not in self.world.book:
            return
        state = self.world.forge(self.world.head(parent), FORGED_LOSS).digest
        for peer in self._names:
            rows[peer] = self.make_row(place, state, peer=peer)
        told = tuple(rows[peer] for peer in self._names)
        self.tell(module, rows=told, steps=(Step.of(told),))

    def serve(self, caller, verb, content):
        """Give the invented state to whoever asks for it."""
        if verb == "state":
            head = self.world.forge(self.world.head(content.step), FORGED_LOSS)
            if content.digest == head.digest:
                return head, STATE_BYTES
        return super().serve(caller, verb, content)
