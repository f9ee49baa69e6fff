"""From a document to its path: the base model reads the first tokens, the router decides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from dipaco.modules.transformer import PathModel

from .features import prefix_features
from .routers import Router
from .tokenizer import Tokenizer


class DocumentRouter:
    """Routes documents by their first `prefix_tokens` tokens (DiPaCo section 2.4).

    The base model stays on the device it is on. Called by preparation, evaluation and generation.
    """

    def __init__(
        self, tokenizer: Tokenizer, base_model: PathModel, router: Router, prefix_tokens: int
    ) -> None:
        self.tokenizer = tokenizer
        self.base_model = base_model
        self.router = router
        self.prefix_tokens = prefix_tokens

    def route_tokens(self, documents: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
        """Return the path of each document, int64 [N]. Documents are tokens with their begin.

        Raises ValueError for a document without tokens.
        """
        return self.router.route(prefix_features(self.base_model, documents, self.prefix_tokens))

    def route_texts(self, texts: Sequence[str]) -> np.ndarray:
        """Return the path of each text, int64 [N]."""
        return self.route_tokens([self.tokenizer.document_tokens(text) for text in texts])
