"""The frozen base that adapters stand on: tensors that are not trained, one copy in a process.

On a CPU they are the mapped file, so several processes share them and nothing is copied. A GPU gets
a copy, which all models of the process share and which goes when the last of them does.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F

from .device import format_of_products, load_bitsandbytes

FILE_FORMATS: Final = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "nf4": torch.bfloat16,
    "float32": torch.float32,
}
"""How the file of a base stores numbers, by how the base lies in memory."""

_NF4_BLOCK = 64
# bf16 has two bytes; nf4 has half a byte, and of each block a scale in eight bits, which blocks of
# 256 have a scale in fp32 of.
NF4_BYTES: Final = 0.5 + 1 / _NF4_BLOCK + 4 / (256 * _NF4_BLOCK)


@dataclass(frozen=True)
class Nf4Weight:
    """A matrix in 4 bits, as bitsandbytes packs it, with its scales quantised too."""

    packed: torch.Tensor
    state: Any
    """Scales and shape."""

    @staticmethod
    def of(weight: torch.Tensor) -> Nf4Weight:
        """Quantise a matrix where it is."""
        load_bitsandbytes()
        from bitsandbytes.functional import quantize_4bit

        return Nf4Weight(
            *quantize_4bit(
                weight.contiguous(),
                blocksize=_NF4_BLOCK,
                quant_type="nf4",
                compress_statistics=True,
            )
        )

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the matrix in full."""
        from bitsandbytes.functional import dequantize_4bit

        whole: torch.Tensor = dequantize_4bit(self.packed, self.state)
        return whole.to(dtype)


Weight = torch.Tensor | Nf4Weight


class FrozenBase:
    """Tensors by their Hugging Face names on one device; `on` gives those of another.

    Matrices are in the base's format; vectors, which are small, in fp32.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        base_format: str,
        device: torch.device | None = None,
        origin: FrozenBase | None = None,
    ) -> None:
        """Hold `tensors` as they are in the file; with an `origin`, a copy of it for a `device`."""
        self.device = device or torch.device("cpu")
        self.base_format = base_format
        self._tensors = tensors
        self._origin = origin
        self._lock = threading.Lock()
        self._elsewhere: weakref.WeakValueDictionary[str, FrozenBase] = (
            weakref.WeakValueDictionary()
        )
        self._weights: dict[str, Weight] | None = None

    @property
    def weights(self) -> Mapping[str, Weight]:
        """Everything by name, on this device; made when it is first asked for."""
        with self._lock:
            if self._weights is None:
                self._weights = {n: self._placed(n, tensor) for n, tensor in self._tensors.items()}
            return self._weights

    def _placed(self, name: str, tensor: torch.Tensor) -> Weight:
        if tensor.ndim < 2:
            return tensor.to(self.device, torch.float32)
        placed = tensor.to(self.device)
        is_of_block = ".layers." in name
        return Nf4Weight.of(placed) if self.base_format == "nf4" and is_of_block else placed

    def on(self, device: torch.device) -> FrozenBase:
        """Return this base on another device: one copy for all who ask."""
        origin, device = self._origin or self, torch.empty(0, device=device).device
        if device == self.device:
            return self
        if device == origin.device:
            return origin
        with origin._lock:
            found = origin._elsewhere.get(str(device))
            if found is None:
                found = FrozenBase(origin._tensors, self.base_format, device, origin)
                origin._elsewhere[str(device)] = found
        return found


def product(
    inputs: torch.Tensor, weight: torch.Tensor | Nf4Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `inputs` [..., in] times a weight [out, in], in the number format of the pass.

    A frozen weight of another format is converted in the forward and in the backward pass: kept in
    between is only what is in memory anyway.
    """
    wanted = format_of_products(inputs)
    if isinstance(weight, torch.Tensor) and (weight.requires_grad or weight.dtype == wanted):
        return F.linear(inputs, weight, bias)
    converted: torch.Tensor = _Converted.apply(inputs, weight, bias, wanted)  # type: ignore[no-untyped-call]
    return converted


class _Converted(torch.autograd.Function):
    """A product with a frozen weight, which has no gradient."""

    @staticmethod
    def forward(
        context: Any,
        inputs: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        context.weight, context.dtype = weight, inputs.dtype
        bias = None if bias is None else bias.to(dtype)
        return F.linear(inputs.to(dtype), weight.to(dtype), bias)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        weight = context.weight.to(gradient.dtype)
        return (gradient @ weight).to(context.dtype), None, None, None
