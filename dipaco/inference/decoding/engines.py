"""What gives the tokens of a path: PyTorch and NumPy here, or llama.cpp, and which of them when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from dipaco.base.errors import ConfigurationError
from dipaco.inference.export.path_gguf import GGUF_TYPES, lack_of_llama_cpp

from .decoder import Decoder, decoder_bytes
from .llama_cpp import INSTALL, PACKAGE, VERSION
from .text_decoder import TextDecoder

if TYPE_CHECKING:
    from dipaco.modules.transformer import PathModel
    from dipaco.protocol.config import ModelConfig
    from dipaco.protocol.plan import RunPlan

EngineName = Literal["torch", "llama.cpp"]


@dataclass(frozen=True)
class DecodingEngine:
    """Makes decoders of whole paths, of so many slots."""

    name: EngineName
    decoder: Callable[[PathModel, int], TextDecoder]
    size_bytes: Callable[[ModelConfig, int, int], int]
    """What a decoder takes: by the model, its parameters, and the slots."""


TORCH: Final = DecodingEngine("torch", Decoder, decoder_bytes)


def llama_cpp_engine(dtype: str) -> DecodingEngine:
    """Return llama.cpp, with matrices in memory as `dtype`. The wheel must be installed."""
    from .llama_cpp_decoder import LlamaCppDecoder, llama_cpp_bytes

    stored = GGUF_TYPES[dtype]
    return DecodingEngine(
        "llama.cpp",
        partial(LlamaCppDecoder, stored=stored),
        partial(llama_cpp_bytes, stored=stored),
    )


def llama_cpp_obstacle(plan: RunPlan, device: str, installed: str | None) -> str | None:
    """Return why llama.cpp cannot serve a run, None if it can.

    :param device: where is to be computed, "cpu" or another
    :param installed: the version of the wheel, None where there is none
    """
    if plan.model.adapters is not None:
        return f"run '{plan.name}' has adapters over one base, which only --engine torch serves"
    if device != "cpu":
        return f"llama.cpp computes on the CPU here, not on --device {device}"
    if installed is None:
        return f"the engine llama.cpp is not installed; {INSTALL}"
    if installed != VERSION:
        return f"{PACKAGE} {installed} is installed, and {VERSION} is needed; {INSTALL}"
    return lack_of_llama_cpp(plan.model)


def chosen_engine(asked: str, dtype: str, obstacle: str | None) -> EngineName:
    """Return the engine for what was asked for: "auto", "torch" or "llama.cpp".

    Raises ConfigurationError where that is not possible, with the obstacle of llama.cpp.
    """
    is_whole = dtype == "float32"
    if asked == "torch" and not is_whole:
        raise ConfigurationError(f"--dtype {dtype} is for llama.cpp; leave out --engine torch")
    if asked != "torch" and obstacle is None:
        return "llama.cpp"
    if asked == "llama.cpp" or not is_whole:
        option = f"--dtype {dtype}" if asked != "llama.cpp" else "--engine llama.cpp"
        raise ConfigurationError(f"{option}: {obstacle}")
    return "torch"
