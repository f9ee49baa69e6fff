"""From a document to its path: what the router needs of its prefix, and what it decides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from dipaco.modules.errors import ConfigurationError
from dipaco.modules.transformer import PathModel

from .features import prefix_features
from .router import Prefixes, Router
from .tokenizer import Tokenizer


class DocumentRouter:
    """Routes documents by their first `prefix_tokens` tokens (DiPaCo section 2.4).

    The base model stays on the device it is on, and runs only if the router needs features. Called
    by preparation, evaluation and generation.
    """

    def __init__(
        self, tokenizer: Tokenizer, base_model: PathModel, router: Router, prefix_tokens: int
    ) -> None:
        self.tokenizer = tokenizer
        self.base_model = base_model
        self.router = router
        self.prefix_tokens = prefix_tokens

    def route_tokens(
        self,
        documents: Sequence[Sequence[int] | np.ndarray],
        labels: Sequence[str | None] | None = None,
    ) -> np.ndarray:
        """Return the path of each document, int64 [N]. Documents are tokens with their begin.

        `labels` are those of the documents, None for one that has none; only a router of kind
        "label" looks at them.

        Raises ConfigurationError if the router needs labels and there are none, ValueError for a
        document without tokens.
        """
        return self.nearest_paths(documents, 1, labels)[:, 0]

    def nearest_paths(
        self,
        documents: Sequence[Sequence[int] | np.ndarray],
        count: int,
        labels: Sequence[str | None] | None = None,
    ) -> np.ndarray:
        """Return the `count` best paths of each document, int64 [N, count], the best first.

        More than one is for overlapping training shards (section 2.4.4). Raises as `route_tokens`
        does. Called by `ShardBuilder`.
        """
        return self.router.nearest(self.prefixes(documents, labels), count)

    def route_texts(
        self, texts: Sequence[str], labels: Sequence[str | None] | None = None
    ) -> np.ndarray:
        """Return the path of each text, int64 [N]. Raises ConfigurationError as `route_tokens`."""
        return self.route_tokens([self.tokenizer.document_tokens(text) for text in texts], labels)

    def prefixes(
        self,
        documents: Sequence[Sequence[int] | np.ndarray],
        labels: Sequence[str | None] | None = None,
    ) -> Prefixes:
        """Return what the router needs to see of the documents. Raises as `route_tokens` does."""
        if self.router.needs_labels and labels is None:
            raise ConfigurationError(
                "this run routes documents by their label, and none was given; name the field that "
                "holds it with --label-field, or the path with --path"
            )
        tokens = [document[: self.prefix_tokens] for document in documents]
        if not all(len(prefix) for prefix in tokens):
            raise ValueError("a document without tokens cannot be routed; give it its begin token")
        features = None
        if self.router.needs_features:
            features = prefix_features(self.base_model, tokens, self.prefix_tokens)
        return Prefixes(features, tokens, labels)
