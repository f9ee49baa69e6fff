"""Writing the adapters of a run's paths, which other tools put on the run's unchanged base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dipaco.base.errors import ConfigurationError
from dipaco.inference.sources import StateSource, path_states
from dipaco.protocol.config import AdaptersConfig
from dipaco.protocol.plan import RunPlan

from .adapter_gguf import adapter_modelfile, write_adapter_gguf
from .adapter_peft import write_peft
from .form import ExportForm
from .path_exporter import Exporter, path_provenance, write_export
from .path_gguf import gguf_library, gguf_name

# What the Modelfile calls the base's file, which the user puts beside the adapter.
BASE_GGUF = "base.gguf"


class AdapterExporter:
    """Writes the adapters of paths of one source: PEFT's folder, or a file for llama.cpp.

    `base` is what PEFT's folder calls the base, by default its name in the plan.
    Raises ConfigurationError if the run has no adapters, or a library is not installed.
    """

    rounding = None
    """Nothing is merged, so nothing is lost."""

    def __init__(self, source: StateSource, form: ExportForm, *, base: str | None = None) -> None:
        self.source = source
        self._form = form
        self._adapters, name = adapters_of(source.plan)
        self.base = base or name
        """What PEFT's folder calls the base."""
        if form.gguf is not None:
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
            adapter=self._form.gguf or "peft",
            dtype=self._form.dtype_name,
            base=self.base,
        )

        def fill(staging: Path) -> None:
            tensors = {
                name: view
                for state in states.values()
                for name, view in state.layout.views(state.parameters).items()
            }
            alpha = self._adapters.scale * self._adapters.rank
            gguf = self._form.gguf
            if gguf is None:
                write_peft(tensors, alpha, self.base, staging, self._form.dtype)
                return
            file = staging / gguf_name(plan.name, path, gguf)
            write_adapter_gguf(tensors, alpha, plan.model, file, stored=gguf, name=file.stem)
            content = adapter_modelfile(file.name, BASE_GGUF)
            (staging / "Modelfile").write_text(content, encoding="utf-8")

        is_new = write_export(folder, provenance, fill, readme and (lambda: readme(path)))
        self.source.forget(path)
        return is_new


def open_exporter(
    source: StateSource, form: ExportForm, *, base: str | None, share_in: Path | None = None
) -> Exporter | AdapterExporter:
    """Return what writes paths in a form; `base` is for adapters alone, `share_in` for whole
    paths. Raises ConfigurationError."""
    if form.adapters_alone:
        return AdapterExporter(source, form, base=base)
    return Exporter(source, form, share_in=share_in)


def adapters_of(plan: RunPlan) -> tuple[AdaptersConfig, str]:
    """Return the adapters of a run, and the name of its base. Raises ConfigurationError."""
    if plan.model.adapters is None or plan.base_source is None:
        raise ConfigurationError(
            f"run '{plan.name}' has no adapters; give --format llama, for whole paths"
        )
    return plan.model.adapters, plan.base_source.name
