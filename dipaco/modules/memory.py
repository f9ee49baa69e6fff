"""A device's memory: what is free, what a pass takes, and what to do when it runs out."""

from __future__ import annotations

import gc
import logging
import math
import re
from collections.abc import Callable
from typing import TypeVar

import torch

from dipaco.base.errors import ConfigurationError, DipacoError
from dipaco.protocol.config import ModelConfig

from .device import free_and_total_bytes, permitted_share
from .foreign_model import new_path
from .frozen_file import unfilled_base

logger = logging.getLogger(__name__)

_ResultT = TypeVar("_ResultT")

FP32_BYTES = 4
# First and second moment of a parameter, in fp32 or in 8 bits.
ADAMW_BYTES = {"adamw": 8, "adamw8bit": 2}
# Of memory that is free, what training may take: allocators and kernels want some as well.
USABLE_SHARE = 0.9
# What allocators, drivers and libraries say. Only PyTorch's own allocators have a class for it.
_RAN_OUT = re.compile(
    r"out of memory|_ALLOC_FAILED|OUT_OF_(DEVICE|HOST)_MEMORY|can't allocate memory"
    r"|not enough memory",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that memory of the device or the machine ran out.

    Also one that was raised because of such a one, as those of the compiler are; a `DipacoError`
    says itself what it means.
    """
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        found = waiting.pop()
        if found is None or id(found) in seen or isinstance(found, DipacoError):
            continue
        seen.add(id(found))
        if isinstance(found, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(found, RuntimeError) and _RAN_OUT.search(str(found)):
            return True
        waiting += [found.__cause__, getattr(found, "inner_exception", None)]
        waiting.append(None if found.__suppress_context__ else found.__context__)
    return False


def release_memory(device: torch.device) -> None:
    """Give back what a failed pass held, so that a smaller one finds room."""
    gc.collect()
    if device.type != "cpu":
        torch.cuda.empty_cache()


class AtOnce:
    """How many sequences, or tokens of them, a device computes at once; it remembers what fitted.

    Training, scoring and evaluation have one each. `name` is what the user knows it by, `remedy`
    what to try when not even one sequence fits.
    """

    def __init__(
        self,
        count: int,
        device: torch.device,
        name: str,
        *,
        in_tokens: bool = False,
        remedy: str = "--device cpu",
    ) -> None:
        self.count = count
        self._device = device
        self._name = name
        self._in_tokens = in_tokens
        self._remedy = remedy

    def attempt(self, compute: Callable[[int], _ResultT], sequence_length: int) -> _ResultT:
        """Return `compute(count)`, begun again with half the count as often as memory runs out.

        Raises `ConfigurationError` when not even one sequence of that many tokens fits.
        """
        least = sequence_length if self._in_tokens else 1
        while True:
            self.count = max(self.count, least)
            try:
                return compute(self.count)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            # Outside of the handler, whose traceback keeps the failed pass alive.
            release_memory(self._device)
            if self.count == least:
                raise ConfigurationError(
                    f"{self._name}: one sequence of {sequence_length} tokens does not fit in the "
                    f"memory of {self._device}; close other programs that use it, or try "
                    f"{self._remedy}"
                )
            self.count = max(least, (self.count + 1) // 2)
            logger.warning(
                "%s ran out of memory; %s goes on with %d %s at once",
                self._device,
                self._name,
                self.count,
                "tokens" if self._in_tokens else "sequences",
            )


def free_bytes(device: torch.device) -> int | None:
    """Return how much of a GPU's memory this process may still take; None for the CPU."""
    found, share = free_and_total_bytes(device), permitted_share(device)
    if found is None or share is None:
        return None
    free, total = found
    return min(free, int(share * total) - int(torch.cuda.memory_reserved(device)))


def fitting_sequences(config: ModelConfig, batch: int, usable_bytes: float) -> int:
    """Return how many sequences of a batch are computed at once in so much memory: at least one,
    and all pieces of a batch about alike."""
    fitting = max(1, min(batch, int(usable_bytes // pass_bytes(config))))
    return math.ceil(batch / math.ceil(batch / fitting))


def pass_bytes(config: ModelConfig, *, in_16_bits: bool = True) -> int:
    """Return what a forward pass of one sequence keeps for the backward one, beside parameters.

    It is made with tensors that have shapes but no memory: activations, and with `in_16_bits` the
    parameters in 16 bits, as a recent GPU has them. Kernels differ, so it is not exact.
    """
    # Not before it is used: importing it takes long.
    from torch._subclasses import FakeTensorMode

    if config.adapters is not None and config.adapters.base_format == "nf4":
        # A pass multiplies by a base in 4 bits as by one in 16, and keeps neither. A base in 4 bits
        # cannot be made of tensors without numbers.
        adapters = config.adapters.model_copy(update={"base_format": "bf16"})
        config = config.model_copy(update={"adapters": adapters})
    kept: dict[int, torch.UntypedStorage] = {}
    # transformers makes some small tensors by itself.
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = new_path(config, None if config.adapters is None else unfilled_base(config))
        parameters = {t.untyped_storage()._cdata for t in model.tensors()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in parameters:
                kept[storage._cdata] = storage
            return tensor

        tokens = torch.ones(1, config.sequence_length, dtype=torch.int64)
        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=in_16_bits),
        ):
            hidden = model.hidden_states(tokens)
    # The outputs of the last block, and their gradients.
    return sum(storage.nbytes() for storage in kept.values()) + 2 * FP32_BYTES * hidden.numel()


def least_pass_bytes(config: ModelConfig, *, in_16_bits: bool = True) -> int:
    """Return the same where blocks are computed twice: what is between them, and within one."""
    between = FP32_BYTES * config.block_count * config.sequence_length * config.hidden_size
    one_block = config.model_copy(update={"block_count": 1})
    return between + pass_bytes(one_block, in_16_bits=in_16_bits)


def head_bytes(config: ModelConfig, batch: int, at_once: int) -> int:
    """Return what the head takes on a GPU for a batch of sequences: logits of one piece, of so many
    at once, their log-likelihoods and the gradients of these, in fp32."""
    logits = batch * config.sequence_length * config.vocabulary_size
    return 3 * FP32_BYTES * min(at_once, logits)
