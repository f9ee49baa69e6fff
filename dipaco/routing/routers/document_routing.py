"""From a document to its path: what the router needs of its prefix, and what it decides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dipaco.base.errors import ConfigurationError
from dipaco.modules.transformer import PathModel
from dipaco.routing.tokens.tokenizer import Tokenizer

from .router import Prefixes, Router


@torch.no_grad()
def prefix_features(
    model: PathModel,
    documents: Sequence[Sequence[int] | np.ndarray],
    prefix_tokens: int,
    batch: int = 64,
) -> np.ndarray:
    """Return float32 [N, H]: per document the mean, over its first `prefix_tokens` tokens, of the
    hidden states after the last block of the base model.

    A shorter document is averaged over the tokens it has. Every row is padded to `prefix_tokens`
    at its end, where a causal model cannot see it, so a document's features do not depend on what
    else is in its batch. Computed in fp32 without autocast, on the device of the model, because
    everybody who routes must come to the same path.

    Raises ValueError for a document without tokens.
    """
    device = model.device
    features = np.empty((len(documents), model.config.hidden_size), dtype=np.float32)
    was_training = model.training
    model.eval()
    try:
        for start in range(0, len(documents), batch):
            tokens, lengths = _padded(documents[start : start + batch], prefix_tokens)
            with torch.autocast(device.type, enabled=False):
                hidden = model.hidden_states(tokens.to(device)).float()
            seen = torch.arange(tokens.shape[1])[None, :] < lengths[:, None]
            summed = (hidden * seen.to(device).unsqueeze(-1)).sum(dim=1)
            means = summed / lengths.to(device).unsqueeze(-1)
            features[start : start + len(tokens)] = means.cpu().numpy()
    finally:
        model.train(was_training)
    return features


def _padded(
    documents: Sequence[Sequence[int] | np.ndarray], prefix_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first tokens of the documents, int64 [B, prefix_tokens], and their lengths."""
    # Nothing sees what is behind it, so any token fills a row up.
    tokens = torch.zeros((len(documents), prefix_tokens), dtype=torch.int64)
    lengths = torch.empty(len(documents), dtype=torch.int64)
    for row, document in enumerate(documents):
        prefix = np.asarray(document[:prefix_tokens], dtype=np.int64)
        if not len(prefix):
            raise ValueError("a document without tokens cannot be routed; give it its begin token")
        tokens[row, : len(prefix)] = torch.from_numpy(prefix)
        lengths[row] = len(prefix)
    return tokens, lengths


class DocumentRouter:
    """Routes documents by their first `prefix_tokens` tokens (DiPaCo section 2.4).

    The base model stays on its device, and runs only if the router needs features.
    """

    def __init__(
        self, tokenizer: Tokenizer, base_model: PathModel, router: Router, prefix_tokens: int
    ) -> None:
        self.tokenizer = tokenizer
        self.base_model = base_model
        self.router = router
        self.prefix_tokens = prefix_tokens

    def nearest_paths(
        self,
        documents: Sequence[Sequence[int] | np.ndarray],
        count: int,
        labels: Sequence[str | None] | None = None,
    ) -> np.ndarray:
        """Return the `count` best paths of each document, int64 [N, count], the best first.

        Documents are tokens with their begin. `labels` are those of the documents, None for one
        that has none; only a router of kind "label" looks at them. More than one path is for
        overlapping training shards (section 2.4.4).

        Raises ConfigurationError if the router needs labels and there are none, ValueError for a
        document without tokens.
        """
        if self.router.path_count == count == 1:
            return np.zeros((len(documents), 1), dtype=np.int64)
        return self.router.nearest(self.prefixes(documents, labels), count)

    def prefixes(
        self,
        documents: Sequence[Sequence[int] | np.ndarray],
        labels: Sequence[str | None] | None = None,
    ) -> Prefixes:
        """Return what the router needs to see of the documents. Raises as `nearest_paths` does."""
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
