"""The form in which an export stores its paths."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class ExportForm:
    """How every path of an export is stored."""

    dtype: torch.dtype = torch.float32
    """The type of the parameters. With `gguf` it is the one that is nearest in size."""
    gguf: str | None = None
    """One of `GGUF_TYPES`: a path is one file for llama.cpp, whose matrices are of this type."""
    adapters_alone: bool = False
    """Without the base that they belong to, which is merged with them otherwise."""
    exact_tokenizer: bool = True
    """Off leaves `tokenizer.json` out, for a tokenizer that cannot be written with its ids."""

    @property
    def dtype_name(self) -> str:
        """What people call the type of the parameters."""
        return name_of(self.dtype)

    @property
    def stored(self) -> str:
        """What people call the way in which matrices are stored."""
        return self.gguf or self.dtype_name


def name_of(dtype: torch.dtype) -> str:
    """Return what people call a type."""
    return str(dtype).removeprefix("torch.")
