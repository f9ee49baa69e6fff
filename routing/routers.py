"""The kinds of routers, and reading a router file. A further kind is added to `ROUTER_KINDS`."""

from __future__ import annotations

from dipaco.modules.canonical_file import read_arrays
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
    header, arrays = read_arrays(data, "router", ROUTER_FORMAT, "the router file")
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
