"""One simulated peer: a path's local parameters, AdamW state and unmerged work.

All workers may share one `Workbench`, a model with its inner loop. A worker that is not on the
bench is *parked*: its local parameters and AdamW state are on a `WorkerShelf`, its anchors among
the states of the simulation. Copies are bit for bit, so a shared bench and any shelf compute
exactly what a bench for each worker computes (`tests/simulator/test_simulator.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dipaco.base.errors import IntegrityError
from dipaco.modules.compose import gather_module, scatter_module
from dipaco.modules.contributions import Codec, Data
from dipaco.modules.grid import Grid
from dipaco.modules.outer import Contribution, OuterGradient, encode_in_place
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import StateSummary
from dipaco.modules.transformer import PathModel
from dipaco.routing.batches import BatchStream
from dipaco.routing.run_folder import RunFolder
from dipaco.training.inner import InnerLoop, KeptOptimizer

from .settings import SimulatedPeer, SimulatorSettings
from .storage import KeptStates, Luggage, Storage, WorkerShelf


class Workbench:
    """A model and its inner loop, used by one worker at a time; compiled on CUDA, as in peers."""

    def __init__(self, plan: RunPlan, settings: SimulatorSettings) -> None:
        device = torch.device(settings.device)
        self.model = PathModel(plan.model).to(device)
        self.inner = InnerLoop(
            self.model,
            plan.inner,
            device,
            optimizer=settings.optimizer,
            micro_batch_size=settings.micro_batch_size,
            compile_model=device.type == "cuda",
        )
        self.occupant: PathWorker | None = None


class PathWorker:
    """Trains one path as `dipaco.training.trainer` does.

    `number` is its place on the shelf, `states` the anchors, which the swarm keeps. A worker of
    which the shelf has notes goes on from them.
    """

    def __init__(
        self,
        bench: Workbench,
        stream: BatchStream,
        number: int,
        peer: SimulatedPeer,
        grid: Grid,
        states: KeptStates,
        shelf: WorkerShelf,
    ) -> None:
        self._bench, self._stream = bench, stream
        self.number = number
        self.peer = peer
        self.modules = grid.modules_of_path(peer.path)
        self.unmerged_tokens = dict.fromkeys(self.modules, 0)
        self.round_index = -1
        self.round_losses: list[float] = []
        """Of the inner steps of round `round_index` so far, nats a token."""
        self._grid = grid
        self._tokens_per_batch = stream.tokens_per_batch
        self._states = states
        self._shelf = shelf
        summaries = {module: states.summary(module) for module in self.modules}
        self._versions = {module: summary.version for module, summary in summaries.items()}
        self.path_step = max(map(self._counted_steps, summaries.values()))
        notes = shelf.notes(number)
        if notes is not None:
            self.take_up(notes)

    def begin_round(self, round_index: int) -> None:
        """Forget the losses of the last round; a round already begun continues."""
        if self.round_index != round_index:
            self.round_index = round_index
            self.round_losses = []

    def contribution(self, module: str) -> Contribution:
        """Return this worker's row in the table of an outer step."""
        return Contribution(self.peer.path, self.peer.peer, self.unmerged_tokens[module])

    def publish(self, module: str, codec: Codec) -> Data:
        """Return the file of this worker's outer gradient; what its encoding lost is kept."""
        gradient = self.outer_gradient(module)
        local = gradient.local.clone()
        data = encode_in_place(gradient, codec)
        self._shelf.keep_lost(self.number, module, local.sub_(gradient.local))
        return data

    def commit(self, module: str) -> None:
        """Go on from the newest state of a module, which contains all of this worker's steps, and
        from what their encoding lost."""
        summary = self._states.summary(module)
        self._versions[module] = summary.version
        self.unmerged_tokens[module] = 0
        # Replicas advance the schedule of their path together.
        self.path_step = max(self.path_step, self._counted_steps(summary))
        if self._bench.occupant is self:
            scatter_module(self._bench.model, self._grid, module, self._begun(module))
        else:
            self._shelf.forget_local(self.number, module)

    def take_up(self, notes: Mapping[str, Any]) -> None:
        """Go on from notes: what was not merged then is now, if the module has a newer state."""
        self.round_index = int(notes["round"])
        self.round_losses = [float(loss) for loss in notes["losses"]]
        summaries = {module: self._states.summary(module) for module in self.modules}
        for module, summary in summaries.items():
            same = int(notes["versions"][module]) == summary.version
            self.unmerged_tokens[module] = int(notes["unmerged_tokens"][module]) if same else 0
        self._versions = {module: summary.version for module, summary in summaries.items()}
        counted = max(map(self._counted_steps, summaries.values()))
        self.path_step = max(int(notes["path_step"]), counted)

    def _count_step(self, loss: float) -> None:
        self.round_losses.append(loss)
        self.path_step += 1
        for module in self.modules:
            self.unmerged_tokens[module] += self._tokens_per_batch

    def _counted_steps(self, state: StateSummary) -> int:
        """Return how many inner steps of this worker's path a state has counted."""
        progress = state.progress.get(self.peer.path)
        return progress.tokens // self._tokens_per_batch if progress else 0

    def train(self, steps: int) -> None:
        """Do the steps, on the bench."""
        if steps <= 0:
            return
        self._take_bench()
        for _ in range(steps):
            batch = self._stream.batch(self.path_step, self.peer.replica)
            self._count_step(self._bench.inner.step(batch, self.path_step))
        if self._shelf.writes_through:
            self._put_on_shelf()

    def outer_gradient(self, module: str) -> OuterGradient:
        """Return the anchor minus a copy of the local parameters, from the bench or the shelf."""
        if self._bench.occupant is self:
            local = gather_module(self._bench.model, self._grid, module)
        elif self.unmerged_tokens[module]:
            kept = self._shelf.local(self.number, module)
            if kept is None:
                raise IntegrityError(f"the local {module} of path {self.peer.path} is lost")
            local = kept.to("cpu", copy=True)
        else:
            local = self._begun(module).clone()
        return OuterGradient(self._states[module].parameters, local)

    def _begun(self, module: str) -> torch.Tensor:
        """Return the local parameters before the first step on an anchor: what the encoding of the
        last contribution lost is in them."""
        anchor, lost = self._states[module].parameters, self._shelf.lost(self.number, module)
        return anchor if lost is None else lost + anchor

    def park(self) -> None:
        """Leave the bench, if this worker is on it."""
        if self._bench.occupant is not self:
            return
        if not self._shelf.writes_through:
            self._put_on_shelf()
        self._bench.occupant = None

    def _put_on_shelf(self) -> None:
        """Store what is on the bench. A module without new steps is as it was begun."""
        bench, shelf = self._bench, self._shelf
        local = {
            module: gather_module(bench.model, self._grid, module, shelf.device)
            for module in self.modules
            if self.unmerged_tokens[module]
        }
        if shelf.keeps_optimizers:
            shelf.put(self.number, self._notes(), Luggage(local, bench.inner.exchange_optimizer()))
        else:
            shelf.put(self.number, self._notes(), Luggage(local, bench.inner.state_dict()))

    def _take_bench(self) -> None:
        """Put this worker's parameters and AdamW state on the bench."""
        bench = self._bench
        if bench.occupant is self:
            return
        if bench.occupant is not None:
            bench.occupant.park()
        luggage = self._shelf.take(self.number)
        for module in self.modules:
            # What was put aside before the last outer step of a module is part of its anchor.
            flat = luggage.local.get(module) if self.unmerged_tokens[module] else None
            if flat is None:
                flat = self._begun(module)
            scatter_module(bench.model, self._grid, module, flat)
        if luggage.optimizer is None:
            bench.inner.reset()
        elif isinstance(luggage.optimizer, KeptOptimizer):
            bench.inner.exchange_optimizer(luggage.optimizer)
        elif not bench.inner.load_state_dict(luggage.optimizer):
            raise IntegrityError(f"the kept state of path {self.peer.path} does not fit this run")
        bench.occupant = self

    def _notes(self) -> dict[str, Any]:
        return {
            "path_step": self.path_step,
            "round": self.round_index,
            "losses": list(self.round_losses),
            "versions": dict(self._versions),
            "unmerged_tokens": dict(self.unmerged_tokens),
        }


def open_workers(
    run: RunFolder, peers: Sequence[SimulatedPeer], bench: Workbench, storage: Storage
) -> tuple[PathWorker, ...]:
    """Return a worker for each peer. They take turns on `bench`."""
    plan = run.plan()
    grid = run.grid(plan)
    streams = {
        path: BatchStream(
            run.train_tokens(plan, path),
            seed=plan.seed,
            path=path,
            batch_sequences=plan.inner.batch_sequences,
        )
        for path in {peer.path for peer in peers}
    }
    return tuple(
        PathWorker(bench, streams[peer.path], number, peer, grid, storage.states, storage.shelf)
        for number, peer in enumerate(peers)
    )
