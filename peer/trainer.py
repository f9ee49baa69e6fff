"""One path being trained: model, inner loop, anchors, and what of the work is not yet merged.

No network here. The session calls `inner_step` between boundaries, `snapshot` at a boundary, and
one of `commit`, `adopt` when an outer round ended; when it did not, nothing is called and the
work stays in `anchor - local` for the next round (design 4.4).

A module's local parameters go on changing while its outer round runs in the background, so a
commit sets `local = new anchor + (local - snapshot)`. Without steps in between the difference is
exactly zero and local becomes exactly the anchor, as in the simulator.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from dipaco.modules.best_parameters import BestParameters
from dipaco.modules.compose import add_to_module, gather_module, load_path, scatter_module
from dipaco.modules.device import release_memory, return_freed_memory
from dipaco.modules.evaluate import LossSum, sum_losses
from dipaco.modules.grid import Grid
from dipaco.modules.inner import InnerLoop
from dipaco.modules.outer import coasted, outer_gradient
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import ModuleState
from dipaco.modules.transformer import PathModel
from dipaco.routing.batches import BatchStream

logger = logging.getLogger("dipaco.peer.trainer")

# The longest of so many outer steps is the usual length of one.
RECENT_STEPS = 4


@dataclass(frozen=True)
class Snapshot:
    """A module at a boundary: what its outer round starts from. Immutable."""

    module: str
    path: int
    round_index: int
    anchor: ModuleState
    local: torch.Tensor
    tokens: int
    parts: tuple[int, ...] = ()
    """The parts of own work that are in `local` and not in the anchor."""

    @property
    def is_finite(self) -> bool:
        """Whether every local parameter is a finite number."""
        return bool(torch.isfinite(self.local).all())

    def outer_gradient(self) -> torch.Tensor:
        """Return anchor minus local, flat fp32."""
        return outer_gradient(self.anchor.parameters, self.local)


@dataclass
class _Part:
    """Own work between two cuts."""

    shift: torch.Tensor
    tokens: int


@dataclass
class _ModuleProgress:
    """What the trainer knows of one module of its path.

    local = anchor + the shifts of the unmerged parts + what came after the last cut.
    """

    anchor: ModuleState
    tail_tokens: int = 0
    """Trained since the last cut."""
    parts: dict[int, _Part] = field(default_factory=dict)
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    """Lengths of the last outer steps that this peer committed."""
    unmerged: tuple[int, ...] = ()

    @property
    def unmerged_tokens(self) -> int:
        return self.tail_tokens + sum(self.parts[part].tokens for part in self.unmerged)

    def cut_parameters(self) -> torch.Tensor:
        """Return the local parameters as they were at the last cut, in terms of the anchor."""
        base = self.anchor.parameters
        for part in self.unmerged:
            base = base + self.parts[part].shift
        return base


class Comparison(NamedTuple):
    """Held-out losses with the anchor of a module and with another state in its place.

    None where there is nothing to score with. `coasting` is one outer step further on, without a
    gradient; `steps_apart` is of the method of that name.
    """

    before: float | None = None
    after: float | None = None
    steps_apart: float | None = None
    coasting_before: float | None = None
    coasting_after: float | None = None
    is_undecided: bool = False
    """Nothing was scored yet; see the member's `Checked`."""


class PathTrainer:
    """Trains one path at a time; `start_path` moves it to another. One thread calls it."""

    def __init__(
        self,
        plan: RunPlan,
        grid: Grid,
        device: torch.device,
        *,
        optimizer: str = "adamw",
        micro_batch_size: int | None = None,
        compile_model: bool = False,
    ) -> None:
        self.plan = plan
        self.grid = grid
        self.device = device
        self._optimizer, self._compile_model = optimizer, compile_model
        self._micro_batch_size = micro_batch_size
        self._make_model()
        self.path: int | None = None
        self.path_step = 0
        self.replica = 0
        self._stream: BatchStream | None = None
        self._modules: dict[str, _ModuleProgress] = {}

    def _make_model(self) -> None:
        self.model = PathModel(self.plan.model).to(self.device)
        self.inner = InnerLoop(
            self.model,
            self.plan.inner,
            self.device,
            optimizer=self._optimizer,
            micro_batch_size=self._micro_batch_size,
            compile_model=self._compile_model,
        )
        self._is_released = False

    def release(self) -> None:
        """Give the memory of model, AdamW and anchors back; `start_path` takes it again."""
        self.path, self._stream, self._modules = None, None, {}
        if not self._is_released:
            self._micro_batch_size = self.inner.micro_batch_size
            del self.model, self.inner
            self._is_released = True
        release_memory(self.device)
        return_freed_memory()

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one inner step."""
        return self.plan.inner.batch_sequences * self.plan.model.sequence_length

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules of the current path, in level order."""
        return tuple(self._modules)

    def anchor(self, module: str) -> ModuleState:
        """Return the last committed state of one of the path's modules."""
        return self._modules[module].anchor

    def anchors(self) -> dict[str, ModuleState]:
        """Return the last committed state of every module of the path."""
        return {module: progress.anchor for module, progress in self._modules.items()}

    def unmerged_tokens(self, module: str) -> int:
        """Return the tokens trained since this module's last merged boundary."""
        return self._modules[module].unmerged_tokens

    def start_path(
        self,
        path: int,
        states: Mapping[str, ModuleState],
        stream: BatchStream,
        *,
        optimizer_state: dict[str, object] | None = None,
    ) -> None:
        """Begin to train `path` from `states`, with its kept AdamW state or a fresh one."""
        if self._is_released:
            self._make_model()
        load_path(self.model, self.grid, path, states)
        if optimizer_state is not None:
            self.inner.load_state_dict(optimizer_state)
        else:
            self.inner.reset()
        self.path, self.replica, self._stream = path, 0, stream
        self._modules = {
            module: _ModuleProgress(states[module]) for module in self.grid.modules_of_path(path)
        }
        self.path_step = max(self._counted_steps(state) for state in states.values())

    def _counted_steps(self, state: ModuleState) -> int:
        """Return how many of this path's inner steps a state has counted."""
        assert self.path is not None
        progress = state.progress.get(self.path)
        return progress.tokens // self.tokens_per_step if progress else 0

    def inner_step(self) -> float:
        """Train one batch and return its mean loss in nats a token."""
        assert self._stream is not None
        tokens = self._stream.batch(self.path_step, self.replica)
        loss = self.inner.step(tokens, self.path_step)
        self.path_step += 1
        for progress in self._modules.values():
            progress.tail_tokens += self.tokens_per_step
        return loss

    def snapshot(self, module: str, round_index: int) -> Snapshot:
        """Copy a module at a boundary, and cut its work there."""
        assert self.path is not None
        progress = self._modules[module]
        local = gather_module(self.model, self.grid, module)
        shift, tokens = local - progress.cut_parameters(), progress.tail_tokens
        part = progress.parts.get(round_index)
        if part is None:
            progress.parts[round_index] = _Part(shift, tokens)
            progress.unmerged = (*progress.unmerged, round_index)
        else:
            part.shift.add_(shift)
            part.tokens += tokens
        progress.tail_tokens = 0
        return Snapshot(
            module=module,
            path=self.path,
            round_index=round_index,
            anchor=progress.anchor,
            local=local,
            tokens=progress.unmerged_tokens,
            parts=progress.unmerged,
        )

    def undo_cut(self, module: str, round_index: int) -> None:
        """Let the work before a cut and after it be one part: nobody averaged the snapshot."""
        progress = self._modules[module]
        part = progress.parts.pop(round_index, None)
        if part is not None:
            progress.unmerged = tuple(p for p in progress.unmerged if p != round_index)
            progress.tail_tokens += part.tokens

    def join_parts(self, module: str, older: int, newer: int) -> None:
        """Keep two parts as one, under the name of the newer."""
        progress = self._modules[module]
        part = progress.parts.pop(older)
        progress.parts[newer].shift.add_(part.shift)
        progress.parts[newer].tokens += part.tokens
        progress.unmerged = tuple(p for p in progress.unmerged if p != older)

    def drop_part(self, module: str, part: int) -> None:
        """Remember a part no more: it is in the anchor."""
        progress = self._modules[module]
        del progress.parts[part]
        progress.unmerged = tuple(p for p in progress.unmerged if p != part)

    def commit(self, snapshot: Snapshot, state: ModuleState) -> None:
        """Make `state` the anchor; it contains the work up to `snapshot`."""
        progress = self._modules[snapshot.module]
        progress.steps.append(_distance(state, snapshot.anchor))
        self._rebase(snapshot.module, state, snapshot.local)
        progress.unmerged = tuple(p for p in progress.unmerged if p not in snapshot.parts)
        self._advance_path_step(state, progress)

    def adopt(
        self, module: str, state: ModuleState, *, on_top: Sequence[int], weight: float = 1.0
    ) -> None:
        """Put a state that others made under this peer's own work (design 4.4).

        The parts `on_top` are not in it; they and what came after the last cut are put on top of
        it, the other parts are in it. `weight` shortens all that goes on top: work of long ago.
        """
        progress = self._modules[module]
        self._rebase(module, state, progress.cut_parameters())
        local = gather_module(self.model, self.grid, module)
        if weight != 1.0:
            local = state.parameters + (local - state.parameters) * weight
        for part in on_top:
            progress.parts[part].shift.mul_(weight)
            local = local + progress.parts[part].shift
        if on_top or weight != 1.0:
            scatter_module(self.model, self.grid, module, local)
        progress.unmerged = tuple(on_top)
        self._advance_path_step(state, progress)

    def steps_apart(self, module: str, state: ModuleState) -> float | None:
        """Return how far a foreign state is from the anchor, in outer steps of the usual length.

        That is of the longest of the last commits; None before the first. What the state's
        momentum would do without a gradient counts if it is further: parameters alone can look
        harmless.
        """
        progress, outer = self._modules[module], self.plan.outer
        usual = max(progress.steps, default=0.0)
        if usual <= 0.0:
            return None
        return (
            max(_distance(state, progress.anchor), _distance(coasted(state, outer), state)) / usual
        )

    def discard(self, module: str) -> None:
        """Go back to the anchor: the local parameters are no longer numbers."""
        progress = self._modules[module]
        scatter_module(self.model, self.grid, module, progress.anchor.parameters)
        for part in progress.unmerged:
            del progress.parts[part]
        progress.unmerged, progress.tail_tokens = (), 0
        self.inner.reset()

    def _rebase(self, module: str, state: ModuleState, base: torch.Tensor) -> None:
        """Set local = state + (local - base), and make `state` the anchor."""
        add_to_module(self.model, self.grid, module, state.parameters, base)
        self._modules[module].anchor = state

    def _advance_path_step(self, state: ModuleState, progress: _ModuleProgress) -> None:
        """Let the schedule follow what all replicas of the path trained together."""
        own_steps = progress.unmerged_tokens // self.tokens_per_step
        self.path_step = max(self.path_step, self._counted_steps(state) + own_steps)

    def loss_of_anchors(
        self,
        tokens: torch.Tensor,
        skip_tokens: int,
        replaced: Mapping[str, ModuleState] | None = None,
    ) -> LossSum:
        """Return the loss of `tokens` [sequences, length] under the path's committed states.

        `replaced` tries other states in place of some anchors. Local parameters are restored bit
        for bit.
        """
        assert self.path is not None
        states = {**self.anchors(), **(replaced or {})}
        with self.model_of(self.path, states) as model:
            return LossSum(*sum_losses(model, tokens, skip_tokens, device=self.device))

    def compare(
        self,
        module: str,
        state: ModuleState,
        tokens: torch.Tensor,
        path: int | None = None,
        others: Mapping[str, ModuleState] | None = None,
    ) -> Comparison:
        """Score another state of a module in place of the anchor, both also one step further on.

        `tokens` are rows [sequences, length], whose routing prefix is not scored: of the path in
        training, or of another `path` through the module, with these states of its `others`.
        """
        own, outer = self.anchor(module), self.plan.outer
        skip_tokens = self.plan.routing.prefix_tokens
        scored = self.path if path is None else path
        assert scored is not None

        def loss(one: ModuleState) -> float | None:
            states = {**self.anchors(), **(others or {}), module: one}
            with self.model_of(scored, states) as model:
                return LossSum(*sum_losses(model, tokens, skip_tokens, device=self.device)).loss

        return Comparison(
            before=loss(own),
            after=loss(state),
            steps_apart=self.steps_apart(module, state),
            coasting_before=loss(coasted(own, outer)),
            coasting_after=loss(coasted(state, outer)),
        )

    def loss_of_best(self, best: BestParameters, tokens: torch.Tensor, skip_tokens: int) -> LossSum:
        """Return the loss of `tokens` under the best states of the path, as `loss_of_anchors`."""
        assert self.path is not None
        with self.model_of(self.path, self.anchors()) as model:
            best.load_into(model)
            return LossSum(*sum_losses(model, tokens, skip_tokens, device=self.device))

    @contextlib.contextmanager
    def model_of(self, path: int, states: Mapping[str, ModuleState]) -> Iterator[PathModel]:
        """Lend the model with committed states of any path in it; no step may be taken meanwhile.

        Local parameters are restored bit for bit, and no second model takes memory.
        """
        local = {module: gather_module(self.model, self.grid, module) for module in self.modules}
        try:
            load_path(self.model, self.grid, path, states)
            yield self.model
        finally:
            for module, flat in local.items():
                scatter_module(self.model, self.grid, module, flat)

    def optimizer_state(self) -> dict[str, object]:
        """Return the AdamW state, to be kept on disk for a return to this path."""
        return self.inner.state_dict()


def _distance(one: ModuleState, other: ModuleState) -> float:
    return float(torch.linalg.vector_norm(one.parameters - other.parameters))


RATE_WINDOW_S = 30.0


class RateMeter:
    """How fast inner steps come. Fed after every one, by the session."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._steps: deque[tuple[float, int]] = deque()

    def step(self, seconds: float, tokens: int) -> None:
        """Count one inner step of `seconds` and `tokens`."""
        self.step_s = seconds if self.step_s == 0.0 else 0.9 * self.step_s + 0.1 * seconds
        now = time.monotonic()
        if not self._steps:
            self._steps.append((now - seconds, 0))
        self._steps.append((now, tokens))
        while len(self._steps) > 2 and now - self._steps[0][0] > RATE_WINDOW_S:
            self._steps.popleft()

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of wall time, waiting included, over the last half minute."""
        if len(self._steps) < 2:
            return 0.0
        elapsed_s = max(time.monotonic() - self._steps[0][0], 1e-6)
        return sum(tokens for _, tokens in list(self._steps)[1:]) / elapsed_s
