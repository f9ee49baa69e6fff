"""Writing the adapters of a run's paths, which other tools put on the run's unchanged base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from dipaco.base.errors import ConfigurationError
from dipaco.inference.sources import StateSource, path_states
from dipaco.modules.config import AdaptersConfig
from dipaco.modules.plan import RunPlan

from .adapter_gguf import adapter_modelfile, write_adapter_gguf
from .adapter_peft import write_peft
from .path_exporter import path_provenance, write_export
from .path_gguf import gguf_library, gguf_name

# What the Modelfile calls the base's file, which whoever has it puts beside the adapter.
BASE_GGUF = "base.gguf"


class AdapterExporter:
    """Writes the adapters of paths of one source: PEFT's folder, stored as `dtype`, or with `gguf`
    (one of `GGUF_TYPES`) a file for llama.cpp.

    `base` is what PEFT's folder calls the base, by default its name in the plan.
    Raises ConfigurationError if the run has no adapters, or a library is not installed.
    """

    def __init__(
        self,
        source: StateSource,
        dtype: torch.dtype,
        *,
        gguf: str | None = None,
        base: str | None = None,
    ) -> None:
        self.source = source
        self._dtype, self._gguf = dtype, gguf
        self._adapters, name = adapters_of(source.plan)
        self.base = base or name
        """What PEFT's folder calls the base."""
        if gguf is not None:
            gguf_library()

    def write_path(
        self, path: int, folder: Path, readme: Callable[[int], str] | None = None
    ) -> bool:
        """Write the adapters of a path to `folder`; False if the same export lies there already.

        Raises as `Exporter.write_path` does.
        """
        states = path_states(self.source, path)
        plan = self.source.plan
        provenance = path_provenance(
            plan,
            path,
            states,
            adapter=self._gguf or "peft",
            dtype=str(self._dtype).removeprefix("torch."),
            base=self.base,
        )

        def fill(staging: Path) -> None:
            tensors = {
                name: view
                for state in states.values()
                for name, view in state.layout.views(state.parameters).items()
            }
            alpha = self._adapters.scale * self._adapters.rank
            if self._gguf is None:
                write_peft(tensors, alpha, self.base, staging, self._dtype)
                return
            file = staging / gguf_name(plan.name, path, self._gguf)
            write_adapter_gguf(tensors, alpha, plan.model, file, stored=self._gguf, name=file.stem)
            content = adapter_modelfile(file.name, BASE_GGUF)
            (staging / "Modelfile").write_text(content, encoding="utf-8")

        is_new = write_export(folder, provenance, fill, readme and (lambda: readme(path)))
        self.source.forget(path)
        return is_new


def adapters_of(plan: RunPlan) -> tuple[AdaptersConfig, str]:
    """Return the adapters of a run, and the name of its base. Raises ConfigurationError."""
    if plan.model.adapters is None or plan.base_source is None:
        raise ConfigurationError(
            f"run '{plan.name}' has no adapters; give --format llama, for whole paths"
        )
    return plan.model.adapters, plan.base_source.name
