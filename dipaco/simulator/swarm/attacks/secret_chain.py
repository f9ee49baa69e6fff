"""Attack 7: a chain from the genesis, of more identities than steps have rows, published late."""

from __future__ import annotations

from typing import Any

from dipaco.protocol.chain import Step
from dipaco.protocol.member.actions import Action, Adopt, Serve

from ..world import Content
from .insider import Insider, names

# Of the rounds of a history: when it is published.
PUBLISHED_SHARE = 0.7


class SecretChain(Insider):
    """Its owner's many identities make a chain of their own, of poisoned work, and tell it late."""

    poison: Content = "poison"

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._is_arranged = self._is_published = False

    def start(self) -> None:
        """Begin, and arrange when the chain is published."""
        super().start()
        if not self._is_arranged:
            self._is_arranged = True
            rounds, duration_s = self.world.rounds, self.world.plan.rounds.duration_s
            at_s = self.world.plan.start_s + PUBLISHED_SHARE * rounds * duration_s
            self.world.engine.at(at_s, self._publish)

    def act(self, action: Action) -> None:
        """Serve the own chain from then on, whatever its member finds."""
        if not (self._is_published and isinstance(action, Adopt | Serve)):
            super().act(action)

    def _publish(self) -> None:
        self._is_published = True
        peers = names("i", len(self.world.machines) + 1)
        self.add_identities(peers)
        for module in list(self.works):
            steps = self._chain(module, peers)
            self.store.serve(module, steps[-1].name, steps)
            self.store.held[module] = self.world.head(steps[-1].name)
            for begin in range(0, len(steps), 16):
                self.later(0.1 * begin, self._tell_part, module, steps[begin : begin + 16])

    def _tell_part(self, module: str, steps: tuple[Step, ...]) -> None:
        self.tell(module, steps=steps)

    def _chain(self, module: str, peers: tuple[str, ...]) -> tuple[Step, ...]:
        """Make a step of every round up to the newest step that it knows."""
        parent, steps = self.world.book.genesis(module), []
        for round_index in range(self.store.held[module].round_index + 1):
            place, state = (module, round_index, parent), self.world.head(parent).digest
            rows = [self.make_row(place, state, peer=p, content=self.poison) for p in peers]
            step = Step.of(rows)
            self.carrying.take((), (step,))
            self.store.at_hand[step.name] = self.world.head(step.name)
            steps.append(step)
            parent = step.name
        return tuple(steps)


class SubtleSecretChain(SecretChain):
    """The same, of work that makes the held-out loss worse by less than is noticed."""

    poison = "subtle"
