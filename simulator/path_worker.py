"""One simulated peer: a path's local parameters, AdamW state and what of its work is not merged.

All workers may share one `Workbench`, a model with its inner loop. A worker that is not on the
bench is *parked*: its local parameters lie in flat CPU tensors and its AdamW state is kept aside.
Parameters are copied bit for bit in both directions, so a shared bench computes exactly what a
bench per worker computes; `tests/test_simulator.py` holds it to that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from dipaco.modules.compose import gather_module, scatter_module
from dipaco.modules.errors import IntegrityError
from dipaco.modules.grid import Grid
from dipaco.modules.inner import InnerLoop
from dipaco.modules.outer import Contribution, outer_gradient
from dipaco.modules.state import ModuleState
from dipaco.modules.transformer import PathModel
from dipaco.routing.batches import BatchStream
from dipaco.routing.plan import RunPlan


@dataclass(frozen=True)
class SimulatedPeer:
    """Who trains what. Several peers on one path are its replicas, numbered from 0 (the lead)."""

    path: int
    replica: int = 0
    name: str = ""
    """Peer ID in the swarm that is simulated; decides the order of summation among replicas."""

    @property
    def peer(self) -> str:
        """The name in contribution tables, unique within a swarm."""
        return self.name or f"{self.path}/{self.replica:06d}"


class Workbench:
    """A model and its inner loop, used by one worker at a time."""

    def __init__(
        self,
        plan: RunPlan,
        device: torch.device,
        *,
        optimizer: str = "adamw",
        micro_batch_size: int | None = None,
    ) -> None:
        self.model = PathModel(plan.model).to(device)
        self.inner = InnerLoop(
            self.model,
            plan.inner,
            device,
            optimizer=optimizer,
            micro_batch_size=micro_batch_size,
        )
        self.occupant: PathWorker | None = None


class PathWorker:
    """Trains one path as `dipaco.peer.trainer` does. Called by `ReferenceSwarm` alone."""

    def __init__(
        self,
        peer: SimulatedPeer,
        grid: Grid,
        bench: Workbench,
        stream: BatchStream,
        states: Mapping[str, ModuleState],
    ) -> None:
        self.peer = peer
        self.modules = grid.modules_of_path(peer.path)
        self.anchors = {module: states[module] for module in self.modules}
        self.unmerged_tokens = dict.fromkeys(self.modules, 0)
        self._grid = grid
        self._bench = bench
        self._stream = stream
        self._parked: dict[str, torch.Tensor] = {
            module: state.parameters for module, state in self.anchors.items()
        }
        self._optimizer_state: dict[str, Any] | None = None
        self.path_step = max(self._counted_steps(state) for state in self.anchors.values())

    def train(self, steps: int) -> list[float]:
        """Do `steps` inner steps and return the mean loss of each in nats a token."""
        if steps:
            self._take_bench()
        losses = []
        for _ in range(steps):
            batch = self._stream.batch(self.path_step, self.peer.replica)
            losses.append(self._bench.inner.step(batch, self.path_step))
            self.path_step += 1
            for module in self.modules:
                self.unmerged_tokens[module] += self._stream.tokens_per_batch
        return losses

    def contribution(self, module: str) -> Contribution:
        """Return this worker's row in the table of an outer step."""
        return Contribution(self.peer.path, self.peer.peer, self.unmerged_tokens[module])

    def outer_gradient(self, module: str) -> torch.Tensor:
        """Return anchor minus local of a module, flat fp32 on the CPU."""
        return outer_gradient(self.anchors[module].parameters, self._local(module))

    def commit(self, module: str, state: ModuleState) -> None:
        """Make `state`, which contains all of this worker's steps, anchor and local."""
        self.anchors[module] = state
        self.unmerged_tokens[module] = 0
        if self._bench.occupant is self:
            scatter_module(self._bench.model, self._grid, module, state.parameters)
        else:
            self._parked[module] = state.parameters
        # Replicas advance the schedule of their path together.
        self.path_step = max(self.path_step, self._counted_steps(state))

    def checkpoint(self) -> dict[str, Any]:
        """Return everything but the anchors, as plain values and tensors for `torch.save`."""
        self.park()
        return {
            "path_step": self.path_step,
            "unmerged_tokens": dict(self.unmerged_tokens),
            "local": dict(self._parked),
            "optimizer": self._optimizer_state,
        }

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        """Take up a `checkpoint`; the anchors are those given at construction."""
        self.park()
        self.path_step = int(checkpoint["path_step"])
        self.unmerged_tokens = {m: int(checkpoint["unmerged_tokens"][m]) for m in self.modules}
        self._parked = {module: checkpoint["local"][module] for module in self.modules}
        self._optimizer_state = checkpoint["optimizer"]

    def park(self) -> None:
        """Leave the bench, if this worker is on it."""
        if self._bench.occupant is not self:
            return
        for module in self.modules:
            self._parked[module] = gather_module(self._bench.model, self._grid, module)
        self._optimizer_state = self._bench.inner.state_dict()
        self._bench.occupant = None

    def _take_bench(self) -> None:
        """Put this worker's parameters and AdamW state on the bench."""
        bench = self._bench
        if bench.occupant is self:
            return
        if bench.occupant is not None:
            bench.occupant.park()
        for module, flat in self._parked.items():
            scatter_module(bench.model, self._grid, module, flat)
        if self._optimizer_state is None:
            bench.inner.reset()
        elif not bench.inner.load_state_dict(self._optimizer_state):
            raise IntegrityError(f"the AdamW state of path {self.peer.path} does not fit this run")
        bench.occupant = self
        self._parked, self._optimizer_state = {}, None

    def _local(self, module: str) -> torch.Tensor:
        if self._bench.occupant is self:
            return gather_module(self._bench.model, self._grid, module)
        return self._parked[module]

    def _counted_steps(self, state: ModuleState) -> int:
        """Return how many inner steps of this worker's path a state has counted."""
        progress = state.progress.get(self.peer.path)
        return progress.tokens // self._stream.tokens_per_batch if progress else 0
