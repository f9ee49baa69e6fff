"""The kinds of routers, and reading a router file. A further kind is added to `ROUTER_KINDS`."""

from __future__ import annotations

import json
from typing import Any

import safetensors
import safetensors.numpy
from dipaco.modules.errors import IntegrityError

from .discriminative import DiscriminativeRouter
from .kmeans import KMeansRouter
from .label_router import LabelRouter
from .product_kmeans import ProductKMeansRouter
from .random_router import RandomRouter
from .router import ROUTER_FORMAT, Prefixes, Router

__all__ = ["ROUTER_KINDS", "KMeansRouter", "Prefixes", "RandomRouter", "Router", "load_router"]

ROUTER_KINDS: dict[str, type[Router]] = {
    kind.kind: kind
    for kind in (
        KMeansRouter,
        ProductKMeansRouter,
        DiscriminativeRouter,
        LabelRouter,
        RandomRouter,
    )
}


def load_router(data: bytes) -> Router:
    """Read a router file. Raises IntegrityError if it is broken or of an unknown kind."""
    try:
        header = _header(data)
        arrays = safetensors.numpy.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"the router file is broken: {error}") from None
    if header.get("format") != ROUTER_FORMAT:
        raise IntegrityError(
            f"the router file has format {header.get('format')!r}, this version reads "
            f"{ROUTER_FORMAT!r}"
        )
    kind = ROUTER_KINDS.get(str(header.get("kind")))
    if kind is None:
        raise IntegrityError(
            f"the router is of kind {header.get('kind')!r}, this version knows "
            f"{', '.join(sorted(ROUTER_KINDS))}; a newer version of dipaco may be needed"
        )
    try:
        settings = header.get("settings", {})
        if not isinstance(settings, dict):
            raise ValueError("its settings are not an object")
        return kind.from_file(arrays, settings)
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"the router file is broken: {error}") from None


def _header(data: bytes) -> dict[str, Any]:
    """Return our entry in the metadata of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    header = json.loads(metadata["router"])
    if not isinstance(header, dict):
        raise ValueError("its metadata is not an object")
    return header
