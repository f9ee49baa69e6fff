"""Reading a run from a swarm, through whatever peers it has, and then the run that continues it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from dipaco.base.errors import NetworkError
from dipaco.peer.reader import SwarmReader
from dipaco.protocol.chain.steps import Step
from dipaco.protocol.manifest import SignedManifest
from dipaco.protocol.plan import RunPlan
from dipaco.protocol.view import SwarmView

from .summary import status_of


class RunReader:
    """Reads one run after the other: it goes on to the successor once nobody is left in a run. A
    context manager.

    One thread reads statuses; another one may read the chains meanwhile.
    """

    def __init__(self, initial_peers: tuple[str, ...], *, run: str | None = None) -> None:
        """Raises what joining a swarm raises."""
        self._reader = SwarmReader(initial_peers, run=run)
        self._view: SwarmView | None = None
        self._next: SignedManifest | None = None
        """The run that is read from the next time on."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._reader.close()

    @property
    def plan(self) -> RunPlan:
        """The plan of the run that was read last."""
        return self._reader.plan

    @property
    def view(self) -> SwarmView:
        """The swarm as it was read last; read now if it never was."""
        if self._view is None:
            self.read()
        assert self._view is not None
        return self._view

    def read(self) -> dict[str, Any]:
        """Read everything once, and return the status. Raises `NetworkError`."""
        reader = self._reader
        if self._next is not None:
            reader.follow(self._next)
            self._next = None
        reader.look_again()
        view, successor = reader.view(), reader.successor()
        status = status_of(
            view,
            reader.manifest,
            reader.grid,
            successor=successor,
            gate=reader.gate,
        )
        self._view = view
        if status["finished"]:
            self._next = successor
        return status

    def chains(self) -> Mapping[str, tuple[Step, ...]]:
        """Return the steps of the heaviest chain of each module that anybody serves, oldest first.

        Raises `NetworkError` when another run is read meanwhile.
        """
        plan, view = self.plan, self.view
        found = {module: self._reader.chain(module, view) for module in self._reader.grid.modules()}
        if plan != self.plan:
            raise NetworkError("the run that continues this one is read now")
        return found
