"""One path being trained: model, inner loop, anchors, and snapshots at boundaries.

No network here. The session calls `inner_step` between boundaries, `snapshot` at a boundary, and
`adopt` when there is a new state: the step of the round, or what others made. Nothing is kept by
name (design 4.5, lost): what was trained before the snapshot is in the new state or lost, and local
becomes `new anchor + (local - snapshot)`. A snapshot that was encoded is what its file says, so
the difference is what was trained since and what the encoding lost. Where a round brought no state,
nothing is called, and the next snapshot holds everything since the anchor.

In main memory, for a parameter: the anchor has 8 bytes until it is on the disk, a snapshot 4 until
its round has ended.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from dipaco.modules.compose import (
    add_to_module,
    gather_module,
    lent_parameters,
    load_path,
    scatter_module,
)
from dipaco.modules.contributions import Codec
from dipaco.modules.device import return_freed_memory
from dipaco.modules.memory import release_memory
from dipaco.modules.outer import OuterGradient, encode_in_place
from dipaco.modules.state import ModuleState
from dipaco.modules.transformer import PathModel
from dipaco.protocol.grid import Grid
from dipaco.protocol.plan import RunPlan
from dipaco.routing.batches import BatchStream
from dipaco.training.inner import InnerLoop
from dipaco.training.interruption import end_passes_when
from dipaco.training.scoring import LossSum, scoring_at_once, sum_losses


@dataclass
class Snapshot:
    """A module at a boundary: what its contribution is made of."""

    module: str
    path: int
    anchor: ModuleState
    local: torch.Tensor
    """The parameters as trained; once they are encoded, as the contribution says."""
    tokens: int
    """Trained since the last snapshot that a state was adopted for, or since the anchor."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Held by a thread that overwrites `local`, or reads it as the base of what follows."""

    def outer_gradient(self) -> OuterGradient:
        """Return anchor minus local. What is not finite there is not finite here."""
        return OuterGradient(self.anchor.parameters, self.local)

    def encode(self, codec: Codec) -> bytearray:
        """Return the file of the contribution; from then on `local` is what the file says.

        Any thread may call it. A state that came in another way can be adopted at any time: that
        waits until the file is made, so `local` is never half of one and half of the other.
        """
        with self.lock:
            return encode_in_place(self.outer_gradient(), codec)


@dataclass
class _Module:
    """What the trainer knows of one module of its path."""

    anchor: ModuleState
    tokens: int = 0
    """Trained since the base of the next contribution."""
    snapshot: Snapshot | None = None


class PathTrainer:
    """Trains one path at a time; `start_path` moves it to another. One thread calls it."""

    def __init__(
        self,
        plan: RunPlan,
        grid: Grid,
        device: torch.device,
        *,
        optimizer: str = "adamw",
        new_model: Callable[[], PathModel] | None = None,
        micro_batch_size: int | None = None,
        compile_model: bool = False,
        exact: bool | None = None,
        steps_per_round: int | None = None,
        is_interrupted: Callable[[], bool] | None = None,
    ) -> None:
        """Make the model. `exact` is for all who must get the same bits; by default that is so
        in a run with fixed steps. `steps_per_round` are those of a simulation, or the plan's.

        With adapters `new_model` gives one on the frozen base, for `device`. It is made when a
        path begins, because the base may not be here before. Once `is_interrupted`, a step or a
        scoring raises `PassInterrupted` within a block's time, unless it is compiled.
        """
        self.plan = plan
        self.grid = grid
        self.device = device
        self._optimizer, self._compile_model = optimizer, compile_model
        self._micro_batch_size = micro_batch_size
        self._exact = bool(plan.rounds.inner_steps) if exact is None else exact
        self._steps_per_round = steps_per_round or plan.rounds.inner_steps
        self._scoring = scoring_at_once(device)
        self._is_interrupted = is_interrupted
        self._new_model = new_model or (lambda: PathModel(plan.model).to(device))
        self._is_released = True
        if plan.model.adapters is None:
            self._make_model()
        self.path: int | None = None
        self.path_step = 0
        # This peer's place among the replicas of the path.
        self.replica = 0
        self._discarded_batches = 0
        self._stream: BatchStream | None = None
        self._modules: dict[str, _Module] = {}

    def _make_model(self) -> None:
        self.model = self._new_model()
        if self._is_interrupted is not None and not self._compile_model:
            end_passes_when(self._is_interrupted, self.model)
        self.inner = InnerLoop(
            self.model,
            self.plan.inner,
            self.device,
            optimizer=self._optimizer,
            micro_batch_size=self._micro_batch_size,
            compile_model=self._compile_model,
            exact=self._exact,
        )
        self._is_released = False

    def release(self) -> None:
        """Give the memory of model, optimizer and anchors back; `start_path` takes it again."""
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

    def anchor(self, module: str) -> ModuleState:
        """Return the anchor of one of the path's modules."""
        return self._modules[module].anchor

    def anchors(self) -> dict[str, ModuleState]:
        """Return the anchor of every module of the path."""
        return {module: progress.anchor for module, progress in self._modules.items()}

    def start_path(
        self,
        path: int,
        states: Mapping[str, ModuleState],
        stream: BatchStream,
        *,
        optimizer_state: dict[str, object] | None = None,
    ) -> None:
        """Begin to train `path` from `states`, with its kept optimizer state or a fresh one."""
        if self._is_released:
            self._make_model()
        load_path(self.model, self.grid, path, states)
        if optimizer_state is not None:
            self.inner.load_state_dict(optimizer_state)
        else:
            self.inner.reset()
        self.path, self.replica, self._stream = path, 0, stream
        self._discarded_batches = 0
        self._modules = {
            module: _Module(states[module]) for module in self.grid.modules_of_path(path)
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
        tokens = self._stream.batch(self._place())
        loss = self.inner.step(tokens, self.path_step)
        self.path_step += 1
        for progress in self._modules.values():
            progress.tokens += self.tokens_per_step
        return loss

    def _place(self) -> int:
        """Return the place in the shard, in batches (design 4.6, claims).

        Replicas read side by side: they begin where all of them were at the anchor, and each is as
        many batches further on as those before it read in a usual round. One module of the path
        decides, because the rounds of levels end at different times: that whose first round is the
        longest.
        """
        assert self.path is not None
        assert self._stream is not None
        reading = self._modules[self._reading_module]
        progress = reading.anchor.progress.get(self.path)
        if self._steps_per_round:
            apart = self._steps_per_round
        elif progress:
            apart = progress.usual // self.tokens_per_step
        else:
            # Nobody has counted yet what a round is: an eighth of the shard keeps most apart.
            apart = self._stream.batches_per_epoch // 8
        begin = progress.read // self.tokens_per_step if progress else 0
        own = self._discarded_batches + reading.tokens // self.tokens_per_step
        return begin + self.replica * apart + own

    @property
    def _reading_module(self) -> str:
        level_offset = self.grid.level_offset
        return max(self._modules, key=lambda module: level_offset(self.grid.level_of(module)))

    def snapshot(self, module: str) -> Snapshot:
        """Copy a module at a boundary, in place of an earlier copy."""
        assert self.path is not None
        progress = self._modules[module]
        progress.snapshot = None  # Its memory first.
        progress.snapshot = Snapshot(
            module,
            self.path,
            progress.anchor,
            gather_module(self.model, self.grid, module),
            progress.tokens,
        )
        return progress.snapshot

    def adopt(self, module: str, state: ModuleState) -> None:
        """Make a state the anchor, under what was trained since the snapshot.

        Without a snapshot since the last one was adopted, under all that was trained since then.
        """
        progress, taken = self._modules[module], self._modules[module].snapshot
        if taken is None:
            base = progress.anchor.parameters
            add_to_module(self.model, self.grid, module, state.parameters, base)
        else:
            with taken.lock:
                add_to_module(self.model, self.grid, module, state.parameters, taken.local)
            progress.tokens -= taken.tokens
        progress.anchor, progress.snapshot = state, None
        if module == self._reading_module:
            self._discarded_batches = 0
        # The schedule follows what all replicas of the path trained together.
        own_steps = progress.tokens // self.tokens_per_step
        self.path_step = max(self.path_step, self._counted_steps(state) + own_steps)

    def discard(self, module: str) -> None:
        """Go back to the anchor: the local parameters are no longer numbers."""
        progress = self._modules[module]
        scatter_module(self.model, self.grid, module, progress.anchor.parameters)
        if module == self._reading_module:
            # What made the parameters no numbers is not read again.
            self._discarded_batches += progress.tokens // self.tokens_per_step
        progress.snapshot = None
        progress.tokens = 0
        self.inner.reset()

    def loss_of(self, path: int, states: Mapping[str, ModuleState], rows: torch.Tensor) -> LossSum:
        """Return the loss of `rows` [sequences, length] of a path under states of its modules.

        The routing prefix is not scored. On a CPU the states' own memory is what is scored; else
        copies of them are on the device meanwhile. Raises `ConfigurationError` when they do not
        fit there.
        """
        if self._is_released:
            self._make_model()
        skip_tokens = self.plan.routing.prefix_tokens

        def score(_: int) -> tuple[float, int]:
            with lent_parameters(self.model, self.grid, path, states):
                return sum_losses(self.model, rows, skip_tokens, self._scoring, self.device)

        # For the copies; the rows are halved in `sum_losses`.
        return LossSum(*self._scoring.attempt(score, rows.shape[1]))

    def optimizer_state(self) -> dict[str, object]:
        """Return the optimizer's state, which the next step changes, to be kept on disk."""
        return self.inner.lent_state_dict()


# Long enough to even out single steps, short enough to show that a machine got slower.
_RATE_WINDOW_S = 30.0


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
        while len(self._steps) > 2 and now - self._steps[0][0] > _RATE_WINDOW_S:
            self._steps.popleft()

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of wall time, waiting included, over the last half minute."""
        if len(self._steps) < 2:
            return 0.0
        elapsed_s = max(time.monotonic() - self._steps[0][0], 1e-6)
        return sum(tokens for _, tokens in list(self._steps)[1:]) / elapsed_s
