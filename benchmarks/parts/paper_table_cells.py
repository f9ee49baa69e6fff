"""The cells of the paper's table: what is trained, in the order of their importance.

Every cell is a model of the same base and the same inner steps per path; what differs is how many
paths there are, what they share and how documents find them (DiPaCo, Tab. 1-3 and Fig. 9-11).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["base", "dense", "swarm", "reroute"]

# Rerouting every so many tokens, as in the paper's Table 3.
REROUTE_WINDOWS = (128, 64, 32, 16)

# Sizes of a path, and of a dense model of about 8.7 times its parameters, as the paper's 1.3B
# beside its 150M. "small" is for machines that cannot spend the hours of "trial".
SHAPES: dict[str, dict[str, dict[str, int]]] = {
    "trial": {
        "path": {"block_count": 6, "hidden_size": 128, "head_count": 4},
        "large": {"block_count": 9, "hidden_size": 352, "head_count": 8},
    },
    "small": {
        "path": {"block_count": 6, "hidden_size": 64, "head_count": 2},
        "large": {"block_count": 6, "hidden_size": 220, "head_count": 5},
    },
}
VOCABULARY_SIZES = {"trial": 4096, "small": 2048}
# A wider model needs a lower learning rate; both stay the same from the base to the end.
LEARNING_RATES = {
    "trial": {"path": 2e-3, "large": 1e-3},
    "small": {"path": 3e-3, "large": 1.5e-3},
}

PRIVATE_BLOCKS = (0, 2, 3, 5)


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    name: str
    title: str
    kind: Kind
    model: Literal["path", "large"] = "path"
    levels: tuple[int, ...] = (1,)
    private: bool = False
    """Blocks 0, 2, 3, 5 and the embedding are path-specific."""
    router: str = "kmeans"
    train_paths: int = 1
    replicas: int = 1
    """Peers on every path; more than one is DiLoCo."""
    batch_factor: int = 1
    seed: int = 0
    """Of the order of the batches; base, router and shards are the same for all seeds."""
    shards_of: tuple[int, ...] = ()
    """Levels of the grid whose shards it is trained on; by default its own."""
    half_of: str | None = None
    """Trained from what this cell was after half of its steps, re-sharded."""
    of: str | None = None
    """The cell whose trained paths are scored in another way: nothing is trained."""
    outer: Mapping[str, float | bool] = field(default_factory=dict)
    """Settings of the outer optimization other than the paper's."""

    @property
    def path_count(self) -> int:
        """Paths of the grid."""
        return math.prod(self.levels)

    @property
    def workers(self) -> int:
        """Models that are trained."""
        return self.path_count * self.replicas

    def path_steps(self, size: Size) -> int:
        """Return the steps of a path, which are those of all its replicas: what its learning rate
        falls by."""
        return size.steps * self.replicas

    @property
    def routing(self) -> str:
        """Names the shards that this cell is trained on; cells of equal name share them."""
        levels = "x".join(map(str, self.shards_of or self.levels))
        overlap = f"-top{self.train_paths}" if self.train_paths > 1 else ""
        return f"{self.router}-{levels}{overlap}" if self.path_count > 1 else f"one-{self.model}"

    @property
    def needs(self) -> tuple[str, ...]:
        """Cells that must be finished before."""
        first = () if self.kind == "base" else (f"base-{self.model}",)
        return first + tuple(name for name in (self.half_of, self.of) if name)


def _private(name: str, title: str, levels: tuple[int, ...], **more: object) -> Cell:
    return Cell(name, title, "swarm", levels=levels, private=True, **more)  # type: ignore[arg-type]


_NO_ROOT: dict[str, float | bool] = {"sqrt_paths_rescaling": False}
# The new parameters are the mean of what the paths have: no outer optimizer.
_PLAIN_MEAN: dict[str, float | bool] = {**_NO_ROOT, "learning_rate": 1.0, "momentum": 0.0}

CELLS = (
    Cell("base-path", "base of every path", "base"),
    Cell("dense", "dense, one path's size", "dense"),
    _private("dipaco-2x4-private", "DiPaCo 2x4, path-specific", (2, 4)),
    Cell("dipaco-2x4", "DiPaCo 2x4, shared only", "swarm", levels=(2, 4)),
    Cell("diloco-8", "DiLoCo, 8 replicas", "swarm", replicas=8),
    Cell("flat-8", "flat mixture of 8, nothing shared", "swarm", levels=(8,),
         shards_of=(2, 4)),
    Cell("base-large", "base of the large dense model", "base", model="large"),
    Cell("dense-large", "dense, about 8.7 times a path", "dense", model="large"),
    _private("dipaco-2x4-discriminative", "DiPaCo 2x4, path-specific, re-sharded discriminatively",
             (2, 4), router="discriminative", half_of="dipaco-2x4-private"),
    Cell("reroute-2x4-private", "DiPaCo 2x4, path-specific, rerouted", "reroute", levels=(2, 4),
         private=True, of="dipaco-2x4-private"),
    _private("dipaco-4x4-private", "DiPaCo 4x4, path-specific", (4, 4)),
    _private("dipaco-2x4-product", "DiPaCo 2x4, path-specific, product k-means", (2, 4),
             router="product_kmeans"),
    _private("dipaco-2x4-overlap", "DiPaCo 2x4, path-specific, top-2 overlap", (2, 4),
             train_paths=2),
    Cell("dense-seed1", "dense, one path's size", "dense", seed=1),
    _private("dipaco-2x4-private-seed1", "DiPaCo 2x4, path-specific", (2, 4), seed=1),
    Cell("dense-total-batch", "dense, batch of all 8 paths", "dense", batch_factor=8),
    Cell("dipaco-2x4-seed1", "DiPaCo 2x4, shared only", "swarm", levels=(2, 4), seed=1),
    Cell("diloco-8-seed1", "DiLoCo, 8 replicas", "swarm", replicas=8, seed=1),
    Cell("dipaco-4x4", "DiPaCo 4x4, shared only", "swarm", levels=(4, 4)),
    Cell("reroute-4x4-private", "DiPaCo 4x4, path-specific, rerouted", "reroute", levels=(4, 4),
         private=True, of="dipaco-4x4-private"),
    Cell("dipaco-2x4-no-sqrt", "DiPaCo 2x4, shared only, no root rescaling", "swarm",
         levels=(2, 4), outer=_NO_ROOT),
    _private("dipaco-2x4-private-no-sqrt", "DiPaCo 2x4, path-specific, no root rescaling", (2, 4),
             outer=_NO_ROOT),
    Cell("diloco-8-mean", "DiLoCo, 8 replicas, plain averaging", "swarm", replicas=8,
         outer=_PLAIN_MEAN),
    _private("dipaco-2x4-private-mean", "DiPaCo 2x4, path-specific, plain averaging", (2, 4),
             outer=_PLAIN_MEAN),
)  # fmt: skip

CELLS_BY_NAME = {cell.name: cell for cell in CELLS}


@dataclass(frozen=True)
class Size:
    """How long everything is trained and what it is scored on: the same for all cells."""

    steps: int
    """Inner steps of a path behind the base."""
    round_steps: int
    base_steps: int
    shape: str = "trial"
    """Which of `SHAPES` the models have."""
    batch_sequences: int = 8
    sequence_length: int = 256
    prefix_tokens: int = 32
    train_documents: int = 0
    """Documents of the corpus that are used, at most; 0 is all."""
    validation_documents: int = 0
    """Held-out documents scored, evenly spread; 0 is all."""
    reroute_documents: int = 500
    """Training documents that a rerouter is fitted to."""
    reroute_steps: int = 300

    @property
    def vocabulary_size(self) -> int:
        """Pieces of the tokenizer."""
        return VOCABULARY_SIZES[self.shape]

    @property
    def rounds(self) -> int:
        """Outer steps of a module."""
        return self.steps // self.round_steps

    @property
    def batch_tokens(self) -> int:
        """Tokens of one inner step of one path."""
        return self.batch_sequences * self.sequence_length


def matrix_parameters(model: str, size: Size) -> int:
    """Return the parameters of a path that multiply every token: its matrices, tied head
    included, embedding look-up and norms not."""
    shape = SHAPES[size.shape][model]
    hidden = shape["hidden_size"]
    feed_forward = -(-(hidden * 8 // 3) // 32) * 32
    block = 4 * hidden * hidden + 3 * hidden * feed_forward
    return shape["block_count"] * block + size.vocabulary_size * hidden


def training_flops(model: str, tokens: int, size: Size) -> float:
    """Return the floating-point operations of training on `tokens`: six for each of the matrices'
    parameters and token, and those of causal attention."""
    shape = SHAPES[size.shape][model]
    attention = 6 * shape["block_count"] * size.sequence_length * shape["hidden_size"]
    return float(tokens) * (6 * matrix_parameters(model, size) + attention)
