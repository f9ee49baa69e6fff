"""The files that find the path of a text where dipaco is not installed.

Every router that sees features is an affine map of them, up to what all paths have in common: the
path with the greatest `weight @ features + bias`. So one file of two arrays, the run's base and a
script that people can read take the place of the run's own router.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch

from dipaco.base.files import atomic_write
from dipaco.inference.sources import StateSource
from dipaco.modules.llama import CONFIG_FILE, WEIGHTS_FILE, llama_config
from dipaco.routing.routers.kinds import load_router
from dipaco.routing.routers.router import FeatureRouter, Prefixes
from dipaco.routing.routers.simple_routers import LabelRouter
from dipaco.routing.tokens.tokenizer_kinds import read_tokenizer

from .checkpoint import save_tensors, without_padding
from .export_folder import note_of, read_note, whole_folder
from .tokenizer_files import json_bytes, tokenizer_files

_SCRIPT = Path(__file__).with_name("route.py.txt")
_BASE_FOLDER = "base"


def write_router(source: StateSource, folder: Path, base: str | None, names: list[str]) -> None:
    """Write what finds the path of a text to `folder`, of paths in folders with these `names`.

    `base` is where the public base of a run with adapters is. Another run's base is written.
    For a router that sees no text there is no script. Raises StorageError.
    """
    plan = source.plan
    data = source.blob(plan.blobs.router)
    router = load_router(data)
    settings: dict[str, Any] = {"paths": names}
    if isinstance(router, LabelRouter):
        labels = router.settings()["labels"]
        settings["labels"] = {label: names[path] for label, path in sorted(labels.items())}
    if isinstance(router, FeatureRouter):
        weight, bias = linear_router(router)
        content = safetensors.numpy.save({"bias": bias, "weight": np.ascontiguousarray(weight)})
        atomic_write(folder / "linear.safetensors", content)
        atomic_write(folder / "route.py", _SCRIPT.read_bytes())
        settings |= {
            "base": _BASE_FOLDER if plan.base_source is None else base,
            **_text_tokens(source),
            "prefix_tokens": plan.routing.prefix_tokens,
        }
        if plan.base_source is None:
            _write_base(source, folder / _BASE_FOLDER)
    atomic_write(folder / "router.safetensors", data)
    atomic_write(folder / "route.json", json_bytes(settings))


def linear_router(router: FeatureRouter) -> tuple[np.ndarray, np.ndarray]:
    """Return weight, float64 [paths, H], and bias, float64 [paths], for the features of a text."""

    def costs(features: np.ndarray) -> np.ndarray:
        found = router.costs(Prefixes(features=features))
        return found - found[:, :1]  # what all paths have in common is gone

    at_zero = costs(np.zeros((1, router.feature_size)))
    slopes = costs(np.eye(router.feature_size)) - at_zero
    return -slopes.T, -at_zero[0]


def _write_base(source: StateSource, folder: Path) -> None:
    """Write the model whose features the router sees, unless it is there: in fp32, and with a
    tokenizer that gives a document the tokens that it had in the run."""
    plan = source.plan
    note = note_of(plan, "base", states={"base": plan.blobs.base})
    if read_note(folder) == note:
        return
    tokenizer, model = source.blob(plan.blobs.tokenizer), plan.model
    files = tokenizer_files(tokenizer, model.context, as_in_run=True)
    config = llama_config(model.without_padding, torch.float32)
    # It neither ends nor pads texts, so its special tokens have no numbers.
    config |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    files[CONFIG_FILE] = json_bytes(config)
    parameters = source.base_model(torch.device("cpu")).iterate_whole()
    kept = ((name, without_padding(name, tensor, model)) for name, tensor in parameters)
    with whole_folder(folder, note) as staging:
        for name, content in files.items():
            (staging / name).write_bytes(content)
        save_tensors(kept, staging / WEIGHTS_FILE, torch.float32)


def _text_tokens(source: StateSource) -> dict[str, Any]:
    """Return what stands in front of every text, and what an empty text has where that is nothing
    (`Tokenizer.beginning`)."""
    tokenizer = read_tokenizer(source.blob(source.plan.blobs.tokenizer))
    return {"begin_tokens": tokenizer.begin, "end_token": tokenizer.end}
