"""A machine that fetches few files at once, as a real peer does: the other downloads wait."""

from collections import Counter

from dipaco.simulator.swarm.carrying import Carrying
from dipaco.simulator.swarm.machine import Machine

AT_ONCE, FROM_ONE = 8, 2


class SlottedCarrying(Carrying):
    """Of its downloads so many run at once, and so many of these from one source."""

    def __init__(self, machine):
        super().__init__(machine)
        self._running, self._waiting = Counter(), []

    def fetch(self, left, verb, content):
        """Take one of the peers that are left, of a file one that has room first."""
        if verb != "get":
            return super().fetch(left, verb, content)
        source = next(filter(self._has_room, left), left[0])
        left.remove(source)
        download = super().fetch([source], verb, content)

        def wait(hear):
            def ended(answer):
                self._running[source] -= 1
                self._go_on()
                hear(answer)

            self._waiting.append((source, lambda: download(ended)))
            self._go_on()

        return wait

    def _has_room(self, source):
        return self._running.total() < AT_ONCE and self._running[source] < FROM_ONE

    def _go_on(self):
        while (found := next((w for w in self._waiting if self._has_room(w[0])), None)) is not None:
            self._waiting.remove(found)
            self._running[found[0]] += 1
            found[1]()


class SlottedMachine(Machine):
    """An honest machine with few downloads at once."""

    carries = SlottedCarrying
