"""Routing of texts, as documents of a run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dipaco.routing.routers.document_routing import DocumentRouter


def route_texts(
    router: DocumentRouter, texts: Sequence[str], labels: Sequence[str | None] | None = None
) -> np.ndarray:
    documents = [router.tokenizer.document_tokens(text) for text in texts]
    return router.nearest_paths(documents, 1, labels)[:, 0]
