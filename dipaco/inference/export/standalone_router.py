"""What finds the adapter for a text where dipaco is not installed.

Every router that sees features is an affine map of them, up to what all paths have in common: the
path with the greatest `weight @ features + bias`. So one file of two arrays, the public base and a
script that people can read take the place of the router's own file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors.numpy

from dipaco.base.errors import ConfigurationError
from dipaco.base.files import atomic_write
from dipaco.protocol.config import BEGIN_TOKEN
from dipaco.protocol.plan import RunPlan
from dipaco.routing.routers.router import FeatureRouter, Prefixes, Router

from .tokenizer_files import json_bytes

SCRIPT = Path(__file__).with_name("route.py.txt")
SCRIPT_NAME = "route.py"


def linear_router(router: FeatureRouter) -> tuple[np.ndarray, np.ndarray]:
    """Return weight, float64 [paths, H], and bias, float64 [paths], for the features of a text."""

    def costs(features: np.ndarray) -> np.ndarray:
        found = router.costs(Prefixes(features=features))
        return found - found[:, :1]  # what all paths have in common is gone

    at_zero = costs(np.zeros((1, router.feature_size)))
    slopes = costs(np.eye(router.feature_size)) - at_zero
    return -slopes.T, -at_zero[0]


def write_standalone_router(
    router: Router, plan: RunPlan, folder: Path, base: str, names: list[str]
) -> bool:
    """Write `route.py` and what it reads to `folder`; False if the router sees no features.

    `names` are the folders of the paths. Raises StorageError.
    """
    if not isinstance(router, FeatureRouter):
        return False
    weight, bias = linear_router(router)
    content = safetensors.numpy.save({"bias": bias, "weight": np.ascontiguousarray(weight)})
    atomic_write(folder / "linear.safetensors", content)
    settings = {
        "base": base,
        "begin_token": begin_row(plan),
        "prefix_tokens": plan.routing.prefix_tokens,
        "adapters": names,
    }
    atomic_write(folder / "route.json", json_bytes(settings))
    atomic_write(folder / SCRIPT_NAME, SCRIPT.read_bytes())
    return True


def begin_row(plan: RunPlan) -> int:
    """Return the number that the token in front of every document has in the base."""
    assert plan.base_source is not None
    place = BEGIN_TOKEN
    for first, count in plan.base_source.rows:
        if place < count:
            if first >= 0:
                return first + place
            break
        place -= count
    raise ConfigurationError(
        f"the run's base {plan.base_source.name} has no token that begins a text"
    )
