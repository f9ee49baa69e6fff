"""The processes that share the work of one simulation, and what passes between them.

Every process runs the same `ReferenceSwarm` over all workers. It trains those that fall to it, and
counts the steps of the others (`path_worker.DistantWorker`), so all agree without a word on which
module steps when, and with whose work. One process, the *lead*, takes every outer step: it asks
for one outer gradient after another, in the order of the canonical table, as a process that is
alone does, and hands the new state to all. It also prints, and writes what is not a worker's own.

So the bits are those of one process. What passes between them is plain JSON and flat fp32 tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Protocol

import torch
from dipaco.modules.grid import Grid
from dipaco.modules.state import ModuleState, PathProgress

from .storage import KeptStates

_LEAD = 0
_NO_MORE = -1


class Line(Protocol):
    """Carries tensors between the processes, in order between each two. Both calls wait."""

    rank: int
    count: int

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a contiguous tensor on the CPU."""

    def receive(self, tensor: torch.Tensor, sender: int) -> None:
        """Fill a tensor with what the sender sent next, which has its size and type."""


class Worker(Protocol):
    """What a crew knows of a `path_worker.WorkerCounters`."""

    number: int
    round_losses: list[float]

    def outer_gradient(self, module: str) -> torch.Tensor:
        """Return its outer gradient."""


class Crew:
    """All processes of a simulation, seen from this one. Without a line it is alone."""

    def __init__(self, line: Line | None = None) -> None:
        self._line = line
        self.rank = line.rank if line else _LEAD
        self.count = line.count if line else 1

    @property
    def leads(self) -> bool:
        """Whether this process takes outer steps, prints and writes."""
        return self.rank == _LEAD

    def has(self, number: int) -> bool:
        """Tell whether this process does the work with this number: it goes round."""
        return number % self.count == self.rank

    def gathered(self, value: Any) -> list[Any]:
        """Return the value that each process gave, plain JSON, in the order of ranks."""
        if self._line is None:
            return [value]
        if not self.leads:
            self._send_value(value, _LEAD)
            values: list[Any] = self._receive_value(_LEAD)
            return values
        values = [value, *map(self._receive_value, self._others)]
        for rank in self._others:
            self._send_value(values, rank)
        return values

    def wait(self) -> None:
        """Wait until every process has come this far."""
        self.gathered(None)

    @contextmanager
    def lead_first(self) -> Iterator[None]:
        """Let the lead do something before the others do it, which then find what it made."""
        if not self.leads:
            self.wait()
        yield
        if self.leads:
            self.wait()
        self.wait()

    def outer_gradient(self, number: int, size: int) -> torch.Tensor:
        """Return what the process of a worker answers in `step_module`. Called in the lead."""
        assert self._line is not None
        sender = number % self.count
        self._line.send(torch.tensor([number]), sender)
        gradient = torch.empty(size)
        self._line.receive(gradient, sender)
        return gradient

    def step_module(
        self,
        module: str,
        grid: Grid,
        states: KeptStates,
        workers: Sequence[Worker],
        new_state: Callable[[], ModuleState],
    ) -> None:
        """Give every process the state of a module that `new_state` computes in the lead.

        Meanwhile the others answer with the outer gradients that it looks at.
        """
        if self.leads:
            states.put(new_state())
            self._hand_out(states, module)
            return
        assert self._line is not None
        number = torch.empty(1, dtype=torch.int64)
        while True:
            self._line.receive(number, _LEAD)
            if int(number) == _NO_MORE:
                break
            self._line.send(workers[int(number)].outer_gradient(module), _LEAD)
        if states.are_files:
            states.read_again(module)
        else:
            states.put(self._receive_state(module, grid))

    def share_losses(self, workers: Sequence[Worker]) -> None:
        """Note the losses of a round in all workers, wherever they were trained."""
        own = [[w.number, w.round_losses] for w in workers if self.has(w.number)]
        for number, losses in chain.from_iterable(self.gathered(own)):
            workers[number].round_losses = list(losses)

    def _hand_out(self, states: KeptStates, module: str) -> None:
        """Send the others a new state; if it is in a file, only that it is there."""
        for rank in self._others:
            assert self._line is not None
            self._line.send(torch.tensor([_NO_MORE]), rank)
            if states.are_files:
                continue
            state = states[module]
            progress = [[p, entry.tokens, entry.last_round] for p, entry in state.progress.items()]
            self._send_value([state.version, progress], rank)
            self._line.send(state.parameters, rank)
            self._line.send(state.momentum, rank)

    def _receive_state(self, module: str, grid: Grid) -> ModuleState:
        assert self._line is not None
        layout = grid.layout(module)
        version, progress = self._receive_value(_LEAD)
        parameters, momentum = torch.empty(layout.size), torch.empty(layout.size)
        self._line.receive(parameters, _LEAD)
        self._line.receive(momentum, _LEAD)
        counts = {path: PathProgress(tokens, last) for path, tokens, last in progress}
        return ModuleState(module, version, parameters, momentum, counts, layout)

    @property
    def _others(self) -> range:
        return range(1, self.count)

    def _send_value(self, value: Any, rank: int) -> None:
        assert self._line is not None
        data = bytearray(json.dumps(value).encode())
        self._line.send(torch.tensor([len(data)]), rank)
        self._line.send(torch.frombuffer(data, dtype=torch.uint8), rank)

    def _receive_value(self, rank: int) -> Any:
        assert self._line is not None
        length = torch.empty(1, dtype=torch.int64)
        self._line.receive(length, rank)
        data = torch.empty(int(length), dtype=torch.uint8)
        self._line.receive(data, rank)
        return json.loads(data.numpy().tobytes())
