"""Other ways to average adapters than A and B apart, as the reference that trains them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from dipaco.modules.adapters import LORA_A, LORA_B
from dipaco.modules.contributions import Data, contribution_norm
from dipaco.modules.device import own_pages
from dipaco.modules.layout import layout_of
from dipaco.modules.outer import OuterRule
from dipaco.modules.state import ModuleState
from dipaco.protocol.outer_row import OuterRow
from dipaco.routing.run_folder import RunFolder
from dipaco.simulator.round_report import RoundNotes
from dipaco.simulator.simulated_peers import SimulatedPeer
from dipaco.training.trainer import PathTrainer, Snapshot

from .changed_run import LossyReference


class ThreadedReference(LossyReference):
    """The reference, whose peers train at once: each has a thread."""

    def _train(self, steps: int, notes: RoundNotes) -> None:
        def train(peer: SimulatedPeer) -> None:
            notes.losses[peer] += [self.trainers[peer].inner_step() for _ in range(steps)]

        with ThreadPoolExecutor(len(self.trainers)) as pool:
            list(pool.map(train, self.trainers))


class HalfAdapters(ThreadedReference):
    """Of the adapters of a module only A or only B is trained and told at a time."""

    def __init__(self, run: RunFolder, **options: Any) -> None:
        super().__init__(run, **options)
        self._trained = dict.fromkeys(self.states, LORA_B)
        for trainer in self.trainers.values():
            trainer.snapshot = functools.partial(  # type: ignore[method-assign]
                self._snapshot, trainer.snapshot
            )
            for module in self.grid.modules_of_path(trainer.path or 0):
                self._freeze(trainer, module)

    def told(self, name: str) -> bool:
        """Return whether a parameter is in this round's contributions, or one of its size is."""
        return LORA_B in name

    def _freeze(self, trainer: PathTrainer, module: str) -> None:
        for name in layout_of(self.grid, module).names:
            trainer.model.get_parameter(name).requires_grad_(self._trained[module] in name)

    def _snapshot(self, take: Callable[[str], Snapshot], module: str) -> Snapshot:
        """Take a snapshot in which the frozen half is the anchor's: nothing is told of it."""
        snapshot = take(module)
        layout = snapshot.anchor.layout
        anchor = layout.views(snapshot.anchor.parameters)
        for name, view in layout.views(snapshot.local).items():
            if self._trained[module] not in name:
                view.copy_(anchor[name])
        return snapshot


class TurnsReference(HalfAdapters):
    """B is trained in one round and A in the next. B is first: it begins with zeros, under which A
    has no gradient."""

    def _step_module(self, module: str, notes: RoundNotes) -> None:
        super()._step_module(module, notes)
        self._trained[module] = LORA_A if self._trained[module] == LORA_B else LORA_B
        for peer, trainer in self.trainers.items():
            if peer.path in self.grid.paths_of_module(module):
                self._freeze(trainer, module)


class TiledReference(HalfAdapters):
    """A is a row of identities and stays so (MiSS); only B is trained. Rows of A have the length
    that they have on average when they are drawn."""

    def __init__(self, run: RunFolder, **options: Any) -> None:
        plan = run.plan()
        first = run.first_parameters(plan)
        for name, values in first.items():
            if LORA_A in name:
                rank, inputs = values.shape
                tiles = torch.eye(rank).repeat(1, math.ceil(inputs / rank))[:, :inputs]
                values.copy_(tiles * math.sqrt(rank / (3 * inputs)))
        states = {m: run.genesis_state(plan, m, first) for m in run.grid(plan).modules()}
        super().__init__(run, states=states, **options)


class ProductReference(ThreadedReference):
    """What peers average is B A, which becomes adapters of the run's rank again."""

    def __init__(self, run: RunFolder, **options: Any) -> None:
        super().__init__(run, **options)
        self._rule = ProductRule.of(self.plan, run.shard_index(self.plan))


class ProductRule(OuterRule):
    """The step by products. Nothing is to be multiplied: outer rate 1, no momentum, no root."""

    def step(
        self,
        state: ModuleState,
        files: Sequence[Data],
        rows: Sequence[OuterRow],
        round_index: int,
        paths: Collection[int] | None = None,
    ) -> ModuleState:
        """Return the state after one outer step."""
        outer = self.outer_of(state.module)
        assert (outer.learning_rate, outer.momentum, outer.sqrt_paths_rescaling) == (1.0, 0, False)
        stepped = super().step(state, files, rows, round_index, paths)
        if len(files) < 2:
            return stepped
        codec, size, layout = self.codec, state.layout.size, state.layout
        scales = self.scales([contribution_norm(codec, data, size) for data in files])
        locals_ = [
            layout.views(state.parameters - scale * codec.decode(data, size))
            for data, scale in zip(files, scales, strict=True)
        ]
        weights, anchor = self.weights(rows), layout.views(state.parameters)
        parameters = own_pages(size)
        averaged = layout.views(parameters)
        for name in layout.names:
            if LORA_A in name:
                other = name.replace(LORA_A, LORA_B)
                pairs = [(local[name], local[other]) for local in locals_]
                a, b = averaged_product(pairs, weights, anchor[name])
                averaged[name].copy_(a)
                averaged[other].copy_(b)
        return replace(stepped, parameters=parameters)


def averaged_product(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    weights: Sequence[float],
    anchor: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [r, in] and B [out, r] whose product is the nearest to the average of the products.

    Of all such A with rows of one length that are at right angles it is the one nearest to the
    anchor's, whose directions AdamW knows. So neither grows at the other's cost.
    """
    a = torch.cat([pair[0] for pair in pairs])
    b = torch.cat([weight * pair[1] for weight, pair in zip(weights, pairs, strict=True)], dim=1)
    left, inner_left = torch.linalg.qr(b)
    right, inner_right = torch.linalg.qr(a.T)
    u, s, v = torch.linalg.svd(inner_left @ inner_right.T)
    rank = len(anchor)
    directions = v[:rank] @ right.T
    w, _, z = torch.linalg.svd(anchor @ directions.T)
    length = anchor.norm() / rank**0.5
    product = left @ (u[:, :rank] * s[:rank])
    return length * w @ z @ directions, product @ (w @ z).T / length
