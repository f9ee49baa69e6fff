"""How a text is continued, without the command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """At most so many tokens, each chosen among the likeliest; `SamplingSettings` explains them."""

    max_tokens: int = 128
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0
