"""Attack 3: many identities that announce the state of a step with another digest."""

from __future__ import annotations

from typing import Any

from dipaco.protocol.chain import Head
from dipaco.protocol.records import HeldState, ModuleRecord, record_life_s

from ..network import Link
from ..world import FORGED_LOSS, STATE_BYTES, SUBTLE_LOSS
from .insider import Insider, names


class FalseDigests(Insider):
    """As many silent admitted identities as there are peers announce the newest step that it has
    with another digest, and serve a state of that digest, much or a little worse."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.loss = self.world.engine.random.choice((FORGED_LOSS, SUBTLE_LOSS))
        self._names: tuple[str, ...] = ()

    def start(self) -> None:
        """Begin, and begin to announce."""
        super().start()
        if not self._names:
            self._names = names("s", len(self.world.machines))
            for name in self._names:
                self.world.network.join(name, Link(), self._serve_forged)
        self.later(0.0, self._announce)

    def _forged(self, module: str) -> Head | None:
        head = self.head_of(module)
        if head is None or not head.version:
            return None
        return self.world.forge(self.world.head(head.step), self.loss)

    def _announce(self) -> None:
        """Write a record for each of them, as often as an honest peer would."""
        for module in list(self.store.held):
            head = self._forged(module)
            if head is None:
                continue
            for name in self._names:
                record = ModuleRecord.model_construct(
                    peer_id=name,
                    module=module,
                    held=HeldState.of(head),
                    state="serving",
                    path=None,
                    since_s=0.0,
                    round=max(0, head.round_index),
                    pinned=False,
                    reachable="direct",
                )
                life_s = record_life_s(self.refresh_period_s)
                self.world.directory.write(name, f"modules/{module}", record, life_s)
        self.later(0.25 * self.refresh_period_s, self._announce)

    def _serve_forged(self, caller: str, verb: str, content: Any) -> tuple[Any, int]:
        if verb == "ask":
            steps, rows, has_more, _, trains = self.serve(caller, verb, content)[0]
            return (steps, rows, has_more, self._forged(content[0]), trains), 0
        if verb == "state":
            head = self.world.forge(self.world.head(content.step), self.loss)
            return (head, STATE_BYTES) if content.digest in ("", head.digest) else (None, 0)
        return self.serve(caller, verb, content)
