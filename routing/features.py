"""What routing sees of a document: the mean hidden state of its first tokens (section 7.2.1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from dipaco.modules.config import PAD_TOKEN
from dipaco.modules.transformer import PathModel


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

    Raises ValueError for a document without tokens. Called by `DocumentRouter`.
    """
    device = next(model.parameters()).device
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
    tokens = torch.full((len(documents), prefix_tokens), PAD_TOKEN, dtype=torch.int64)
    lengths = torch.empty(len(documents), dtype=torch.int64)
    for row, document in enumerate(documents):
        prefix = np.asarray(document[:prefix_tokens], dtype=np.int64)
        if not len(prefix):
            raise ValueError("a document without tokens cannot be routed; give it its begin token")
        tokens[row, : len(prefix)] = torch.from_numpy(prefix)
        lengths[row] = len(prefix)
    return tokens, lengths
