"""The form of an export: which tools read it, and how it stores numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dipaco.base.errors import ConfigurationError
from dipaco.protocol.plan import RunPlan

Format = Literal["transformers", "peft", "gguf"]
DType = Literal["float32", "bfloat16", "float16", "q8_0"]


@dataclass(frozen=True)
class ExportForm:
    """How every path of an export is stored."""

    format: Format = "transformers"
    dtype: DType = "float32"
    """Type of the matrices. Vectors of a GGUF are fp32."""
    is_adapter: bool = False
    """Whether paths are written without the base that they belong to."""
    base: str | None = None
    """What files and cards call the base of a run with adapters."""


def form_for(
    plan: RunPlan,
    format: Format | None = None,
    dtype: DType | None = None,
    base: str | None = None,
) -> ExportForm:
    """Return the form that is asked for, None standing for what suits the run.

    Raises ConfigurationError if the run does not have this form, or the form not this type.
    """
    adapters = plan.model.adapters
    if format is None:
        format = "transformers" if adapters is None else "peft"
    if format == "peft" and adapters is None:
        raise ConfigurationError(
            f"run '{plan.name}' has no adapters, which --format peft is for; give --format "
            f"transformers"
        )
    if dtype is None:
        # A merged path is stored as its base is.
        halves: dict[str, DType] = {"bf16": "bfloat16", "nf4": "bfloat16", "fp16": "float16"}
        dtype = "float32"
        if format == "transformers" and adapters is not None:
            dtype = halves.get(adapters.base_format, "float32")
    if base is None and plan.base_source is not None:
        base = plan.base_source.name
    is_adapter = adapters is not None and format != "transformers"
    return ExportForm(format, dtype, is_adapter, base)


def check_dtype(format: Format | None, dtype: DType | None) -> None:
    """Raise ConfigurationError if files of a format cannot store this type."""
    fits = ("float32", "float16", "q8_0" if format == "gguf" else "bfloat16")
    if dtype not in (*fits, None):
        raise ConfigurationError(
            f"--format {format or 'transformers'} cannot be stored as {dtype}; give --dtype "
            f"{', '.join(fits[:2])} or {fits[2]}"
        )
