"""Inner training: AdamW or Muon on batches of a path's shard, with that path's own schedule.

The published method leaves betas, clipping and the cosine's floor open; here they are settings
of the run (`InnerConfig`). The same loop trains the base model, the peers and the simulator.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from dipaco.base.errors import ConfigurationError, DipacoError, nearest_name
from dipaco.modules.device import (
    Fetched,
    autocast_for,
    load_bitsandbytes,
    sent,
    training_format,
)
from dipaco.modules.marked_tokens import are_marked, documents_apart
from dipaco.modules.memory import (
    ADAMW_BYTES,
    FP32_BYTES,
    USABLE_SHARE,
    AtOnce,
    fitting_sequences,
    free_bytes,
    head_bytes,
    is_out_of_memory,
)
from dipaco.modules.transformer import (
    PathModel,
    Rotation,
    head_losses,
    head_pieces,
    logits_at_once,
    rotation_of,
    target_mask,
)
from dipaco.protocol.config import InnerConfig

from .muon import Muon, is_for_muon

logger = logging.getLogger(__name__)

_OPTIMIZERS = ("adamw", "adamw8bit")

_Passes = tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]


def learning_rate_at(
    config: InnerConfig, path_step: int, steps_since_fresh: int | None = None
) -> float:
    """Return the learning rate of a path's inner step `path_step` (from 0 in each run).

    The schedule is `first_step` steps ahead, for a run that continues another. Linear warmup of
    the path, then the peak, or a cosine from the peak to the floor, which then stays.
    `steps_since_fresh` counts the steps since AdamW began without state, and adds a warmup of its
    own; None when the state was kept.
    """
    path_step += config.first_step
    factor = 1.0
    if path_step < config.warmup_steps:
        factor = (path_step + 1) / config.warmup_steps
    elif config.decay_steps:
        done = min(1.0, (path_step - config.warmup_steps) / config.decay_steps)
        cosine = 0.5 * (1.0 + math.cos(math.pi * done))
        factor = config.floor_ratio + (1.0 - config.floor_ratio) * cosine
    if steps_since_fresh is not None and steps_since_fresh < config.fresh_state_warmup_steps:
        factor *= (steps_since_fresh + 1) / config.fresh_state_warmup_steps
    return config.learning_rate * factor


class InnerLoop:
    """Trains `model`, which must be on `device`, batch by batch. Not for several threads at once.

    A batch that does not fit in memory is split into halves until it does; the loss is normalised
    over the whole batch, so the split changes rounding only. Passes are in the number format
    of the device, weights and AdamW state in fp32; with fp16 the loss is scaled, by a factor that
    follows from which gradients overflow. With `exact` a CPU computes in fp32, AdamW operation by
    operation. The model's parameters may be overwritten in place between steps. `optimizer` is how
    AdamW keeps its state; whether Muon has the matrices of blocks is for `config` to say.

    Raises `ConfigurationError` for an unknown optimizer.
    """

    def __init__(
        self,
        model: PathModel,
        config: InnerConfig,
        device: torch.device,
        *,
        optimizer: str = "adamw",
        micro_batch_size: int | None = None,
        compile_model: bool = False,
        exact: bool = True,
    ) -> None:
        if optimizer not in _OPTIMIZERS:
            guess = nearest_name(optimizer, _OPTIMIZERS) or " or ".join(_OPTIMIZERS)
            raise ConfigurationError(f"optimizer '{optimizer}' is unknown; did you mean {guess}?")
        self.model = model
        self.config = config
        self.device = device
        self._adamw_kind = optimizer
        self.kind = optimizer if config.optimizer == "adamw" else f"{config.optimizer}+{optimizer}"
        self.steps_since_fresh = 0
        self.skipped_steps = 0
        self._unread: deque[tuple[int, Fetched]] = deque()
        self._newest_loss = math.nan
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.dtype = training_format(device, exact=exact)
        self._fused = device.type != "cpu" or not exact
        self._optimizers, self._scaler = self._new_optimizers(), self._new_scaler()
        self._at_once = AtOnce(
            min(micro_batch_size or self._first_micro_batch(), config.batch_sequences),
            device,
            "training",
            remedy="--optimizer adamw8bit or --device cpu",
        )
        self._compiled: _Passes | None = None
        if compile_model:
            # Not `dynamic=False`, which compiles each size of a piece, and at most eight of them.
            self._compiled = torch.compile(self._blocks), torch.compile(self._head)

    @property
    def micro_batch_size(self) -> int:
        """How many sequences are on the device at once."""
        return self._at_once.count

    def _first_micro_batch(self) -> int:
        """Return how many sequences fit beside gradients, AdamW and logits, as far as that is
        known."""
        free, batch = free_bytes(self.device), self.config.batch_sequences
        if free is None:
            return batch
        each = FP32_BYTES + ADAMW_BYTES[self._adamw_kind]
        kept = each * sum(p.numel() for p in self._parameters)
        head = head_bytes(self.model.config, batch, logits_at_once(self.device))
        usable = USABLE_SHARE * free - kept - head
        return fitting_sequences(self.model.config, batch, usable)

    def step(self, tokens: torch.Tensor, path_step: int) -> float:
        """Train on one batch and return its mean loss in nats a token, before the update.

        `tokens` is int64 [B, T] on the CPU; `path_step` is the path's own step, for the schedule.
        A batch whose loss or gradient is not finite changes nothing and is logged. Where
        AdamW is fused it is the loss of the step before, from the second step on: the optimizers
        leave an update out, and nobody waits for a GPU. With 8 bits bitsandbytes waits after each
        tensor. Raises `ConfigurationError` when not even one sequence fits in memory.
        """
        targets = int(target_mask(tokens, self.model.config.padding_token).sum())
        if targets == 0:
            raise ValueError("a batch needs at least one token to predict")
        loss = self._backward_in_memory(tokens, targets)
        rate = learning_rate_at(self.config, path_step, self.steps_since_fresh)
        for optimizer in self._optimizers.values():
            self._scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(self._parameters, self.config.gradient_clip or float("inf"))
        finite = torch.isfinite(loss + norm)
        on_device = all(
            getattr(optimizer, "_step_supports_amp_scaling", False)
            for optimizer in self._optimizers.values()
        )
        if on_device or finite:
            self._update(rate, finite if on_device else None)
        self._scaler.update()
        self._forget_gradients()
        self.steps_since_fresh += 1
        self._unread.append((path_step, Fetched(torch.stack((loss, finite.to(loss.dtype))))))
        return self._read(later=1 if on_device else 0)

    def _read(self, later: int = 0) -> float:
        """Wait for all steps but the last `later` ones; return the newest loss that is known."""
        while len(self._unread) > later or (self._unread and math.isnan(self._newest_loss)):
            path_step, numbers = self._unread.popleft()
            self._newest_loss, is_finite = numbers.read()
            if not is_finite:
                self.steps_since_fresh -= 1
                self._report_skipped(path_step, self._newest_loss)
        return self._newest_loss

    def _backward_in_memory(self, tokens: torch.Tensor, targets: int) -> torch.Tensor:
        """Accumulate the gradients of a batch in as few pieces as memory allows."""
        apart = are_marked(tokens)
        while True:
            try:
                return self._at_once.attempt(
                    lambda sequences: self._backward(tokens.split(sequences), targets, apart),
                    tokens.shape[1],
                )
            except Exception as error:
                if not self._can_do_with_less(error):
                    raise

    def _can_do_with_less(self, error: Exception) -> bool:
        """Return whether a pass may be tried again, without compilation or with less memory."""
        if isinstance(error, ConfigurationError) and not self.model.recomputes:
            logger.warning(
                "one sequence does not fit in the memory of %s; its blocks are computed twice, "
                "which is a third slower",
                self.device,
            )
            self.model.recomputes = True
            return True
        if self._compiled is None or isinstance(error, DipacoError):
            return False
        logger.warning(
            "compiling the model failed (%s); continuing without, somewhat slower",
            type(error).__name__,
        )
        logger.debug("compilation error", exc_info=error)
        self._compiled = None
        return True

    def _forget_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _backward(
        self, pieces: Iterable[torch.Tensor], targets: int, apart: bool = False
    ) -> torch.Tensor:
        """Compute the gradients of the mean over `targets`, and return it; `apart` is whether the
        documents of a row do not see each other.

        The head has its backward pass piece by piece, before the blocks have theirs: the logits of
        one piece are in memory at a time.
        """
        self._forget_gradients()
        blocks, head = self._compiled or (self._blocks, self._head)
        total = torch.zeros((), device=self.device)
        for piece in pieces:
            tokens = sent(piece, self.device)
            padding = self.model.config.padding_token
            seen = documents_apart(tokens, padding) if apart else None
            rotation = rotation_of(self.model.config, tokens.shape[1], self.device)
            hidden = blocks(tokens, seen, rotation)
            gradients: list[torch.Tensor] = []
            for part, wanted in head_pieces(self.model.config, hidden.detach(), tokens):
                loss = head(part.requires_grad_(), wanted) / targets
                self._scaler.scale(loss).backward()
                total += loss.detach()
                assert part.grad is not None
                gradients.append(part.grad)
            hidden.backward(torch.cat(gradients).view_as(hidden))
        return total

    def _blocks(
        self, tokens: torch.Tensor, seen: torch.Tensor | None, rotation: Rotation
    ) -> torch.Tensor:
        with autocast_for(self.device, self.dtype):
            return self.model.hidden_states(tokens, seen, rotation)

    def _head(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with autocast_for(self.device, self.dtype):
            return head_losses(self.model, hidden, targets).sum()

    def _update(self, rate: float, finite: torch.Tensor | None) -> None:
        """Take a step, if `finite`, which the optimizers look at themselves."""
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = rate
            if finite is not None:
                # As `GradScaler` does, but for all: one optimizer's gradients may overflow alone.
                optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        try:
            for optimizer in self._optimizers.values():
                optimizer.step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise ConfigurationError(
                f"the optimizer's state does not fit in the memory of {self.device}; try "
                f"--optimizer adamw8bit or --device cpu"
            ) from error

    def _report_skipped(self, path_step: int, loss: float) -> None:
        if self._scaler.is_enabled() and math.isfinite(loss):
            return  # Its gradients were scaled by too much; the next will be by less.
        self.skipped_steps += 1
        # Once a power of two: a diverged model would fill the log otherwise.
        if self.skipped_steps & (self.skipped_steps - 1) == 0:
            logger.warning(
                "step %d left out: its loss (%s) or gradient is not finite (%d such steps so far)",
                path_step,
                loss,
                self.skipped_steps,
            )

    def _new_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Build the optimizers without state, by their names in a kept state; weight decay is for
        matrices only."""
        trained = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        by_muon = [p for n, p in trained if self._is_for_muon(n, p)]
        others = [p for n, p in trained if not self._is_for_muon(n, p)]
        rate, decay = self.config.learning_rate, self.config.weight_decay
        groups = [
            {"params": [p for p in others if p.ndim >= 2], "weight_decay": decay},
            {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
        ]
        built = {"optimizer": self._new_adamw(groups, rate)}
        if by_muon:
            built["muon"] = Muon(by_muon, lr=rate, weight_decay=decay)
        return built

    def _new_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)

    def _is_for_muon(self, name: str, parameter: torch.Tensor) -> bool:
        return self.config.optimizer == "muon" and is_for_muon(name, parameter.shape)

    def _new_adamw(self, groups: list[dict[str, Any]], rate: float) -> torch.optim.Optimizer:
        betas = (self.config.beta1, self.config.beta2)
        if self._adamw_kind == "adamw8bit":
            load_bitsandbytes()
            from bitsandbytes.optim import AdamW8bit

            return AdamW8bit(groups, lr=rate, betas=betas)
        return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=self._fused)

    def reset(self) -> None:
        """Forget the optimizer's state and warm up again; for a path whose state is not here."""
        self._optimizers, self._scaler = self._new_optimizers(), self._new_scaler()
        self._unread.clear()
        self._newest_loss = math.nan
        self.steps_since_fresh = 0

    def state_dict(self) -> dict[str, Any]:
        """Return a copy on the CPU of all that `load_state_dict` needs to go on bit for bit."""
        return {name: _copied_to_cpu(value) for name, value in self.lent_state_dict().items()}

    def lent_state_dict(self) -> dict[str, Any]:
        """Return the same without a copy, to be written before the next step changes it."""
        self._read()
        return {
            "kind": self.kind,
            "steps_since_fresh": self.steps_since_fresh,
            **({"scaler": self._scaler.state_dict()} if self._scaler.is_enabled() else {}),
            **{name: o.state_dict() for name, o in self._optimizers.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Go on with a kept state, and return whether it could be used.

        With a state of another optimizer or model it starts afresh, with a warning: losing it
        costs a few steps of warmup and is no reason to stop. `state` is copied.
        """
        self.reset()
        reason = self._unfit(state)
        if reason is not None:
            logger.warning("the kept optimizer state is not used (%s); starting afresh", reason)
            return False
        for name, optimizer in self._optimizers.items():
            # PyTorch takes settings from a kept state too, but they belong to this run and device,
            # and it would go on training the given tensors in place.
            groups = optimizer.state_dict()["param_groups"]
            kept = {"state": _copied_to_cpu(state[name]["state"]), "param_groups": groups}
            optimizer.load_state_dict(kept)
        if self._scaler.is_enabled() and state.get("scaler"):
            self._scaler.load_state_dict(state["scaler"])
        self.steps_since_fresh = int(state["steps_since_fresh"])
        return True

    def _unfit(self, state: Mapping[str, Any]) -> str | None:
        """Return why a kept state cannot be used, or None."""
        try:
            if state["kind"] != self.kind:
                return f"it is of {state['kind']}, not {self.kind}"
            for name, optimizer in self._optimizers.items():
                fresh, groups = optimizer.param_groups, state[name]["param_groups"]
                if [len(group["params"]) for group in groups] != [len(g["params"]) for g in fresh]:
                    return "it is of another model"
                ordered = [p for group in fresh for p in group["params"]]
                for index, entry in state[name]["state"].items():
                    if _first_moment(entry).shape != ordered[index].shape:
                        return "it is of another model"
            int(state["steps_since_fresh"])
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            return f"{type(error).__name__} in it"
        return None


def _first_moment(entry: Mapping[str, Any]) -> torch.Tensor:
    """Find a parameter's first moment; bitsandbytes puts it one dictionary deeper."""
    nested = [value for value in entry.values() if isinstance(value, Mapping)]
    for mapping in (entry, *nested):
        for key in ("exp_avg", "state1", "momentum"):
            if key in mapping:
                return mapping[key]
    raise KeyError("first moment")


def _copied_to_cpu(value: Any) -> Any:
    """Copy nested dictionaries and lists with their tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copied_to_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied_to_cpu(item) for item in value)
    return value
