"""The outer step: weigh and average outer gradients, then one Nesterov step (DiPaCo Alg. 1).

Everything here gives the same bits on every machine: fp32 on the CPU, each operation rounded by
itself (no fused multiply-add), sums in canonical order. The averager of the swarm and the
simulator call the same functions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from . import robust_mean
from .codecs import CODECS, Codec, MeanName
from .config import OuterConfig
from .errors import IntegrityError
from .plan import RunPlan, ShardIndex
from .robust_mean import exact_norm, fp32
from .state import ModuleState, PathProgress

# A table with more rows is summed in sections, which a swarm does in two levels. Part of the
# protocol: with another number a larger group gets other bits.
SECTION_ROWS = 32
# What a row may count, as a multiple of the median row or of what a step of the module's busiest
# path usually has. Machines differ; a contribution can hold the work of several rounds.
GREATEST_LEAP = 16
# How far a replica may outweigh the median one of its path, and the usual step of that path.
GREATEST_OF_MEDIAN, GREATEST_OF_USUAL = 4, 2


T = TypeVar("T", int, float)


@dataclass(frozen=True)
class Contribution:
    """One row of the table that the members of a group gather: who contributes how much."""

    path: int
    peer: str
    tokens: int


def canonical_table(rows: Iterable[Contribution]) -> tuple[Contribution, ...]:
    """Return the rows in the order in which everybody sums them: by path, then by peer.

    Raises ValueError for an empty table, a path that is no natural number, tokens that are not
    positive, and a peer that occurs twice. The simulator's peers may have no name, if each path
    has only one.
    """
    table = tuple(rows)
    if not table:
        raise ValueError("a group needs at least one contribution")
    for row in table:
        if type(row.path) is not int or row.path < 0:
            raise ValueError(f"the contribution of '{row.peer}' has the path {row.path!r}")
        if type(row.tokens) is not int or row.tokens <= 0:
            raise ValueError(f"the contribution of '{row.peer}' has {row.tokens!r} tokens")
    owners = [row.peer or row.path for row in table]
    if len(set(owners)) != len(owners):
        raise ValueError("a peer contributes twice to one group")
    return tuple(sorted(table, key=lambda row: (row.path, row.peer)))


@dataclass(frozen=True)
class Usual:
    """What contributions to a module usually are, by its anchor: the same for all that hold it.

    Nobody can check how many tokens another peer has trained, so what is said is measured by what
    the module has seen. Of a genesis state nothing is known.
    """

    tokens: Mapping[int, int] = field(default_factory=dict)
    """For each path that contributed, its tokens in an outer step, on average over all steps."""
    norms: tuple[float, ...] = ()
    """Of an outer gradient, in each part. A contribution below them is never clipped."""

    @classmethod
    def of(cls, progress: Mapping[int, PathProgress], version: int) -> Usual:
        """Return the usual tokens of a state with these counts after `version` outer steps."""
        return cls({path: entry.tokens // max(1, version) for path, entry in progress.items()})


def bounded_table(table: Sequence[Contribution], usual: Usual) -> tuple[Contribution, ...]:
    """Return a canonical table in which no row counts more than is credible.

    Its rows are what weights, certificates and a state's counts are made of. A row counts up to
    `GREATEST_LEAP` times the median of all rows' tokens, or the usual tokens of the path with the
    most, whichever is more. A row that is alone is measured by the usual ones only, and cannot be
    measured at all with a genesis state.
    """
    most = max(usual.tokens.values(), default=0)
    if len(table) > 1 or not most:
        most = max(most, _lower_median([row.tokens for row in table]))
    most *= GREATEST_LEAP
    return tuple(replace(row, tokens=min(row.tokens, most)) for row in table)


def _lower_median(values: Sequence[T]) -> T:
    """Return the middle value, of two the lower: no single one of two can move it up."""
    return sorted(values)[(len(values) - 1) // 2]


def sections(rows: int, greatest: int = SECTION_ROWS) -> tuple[range, ...]:
    """Return the rows of a table, in order, in as few sections as hold at most `greatest` each.

    Their sizes differ by one at most.
    """
    count = max(1, -(-rows // greatest))
    bounds = [index * rows // count for index in range(count + 1)]
    return tuple(itertools.starmap(range, itertools.pairwise(bounds)))


def outer_gradient(anchor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return anchor minus local, both flat fp32 [size]: what inner training changed, negated."""
    return anchor - local


UNKNOWN = Usual()


@dataclass(frozen=True)
class AveragingRule:
    """How a group makes one average of its contributions: codec, weights, combining.

    One value for the swarm's averagers, for a peer that is alone in its group and for the
    simulator, so that all of them compute the same bits. `shard_sequences` are the sequences of
    each path's shard; None weighs paths alike. `section_rows` is another number in tests alone.

    The vector is cut into parts of `part_bytes` at most, whoever reduces them. In each part a
    contribution's norm is at most `clip_multiple` times the median of its section (0: no limit),
    so that a thousandfold gradient is an ordinary one. What is left is combined by `mean`. A robust
    mean needs all contributions to a part in one place, so that there are no sections.
    """

    codec: Codec
    shard_sequences: Mapping[int, int] | None = None
    section_rows: int = SECTION_ROWS
    part_bytes: int = 2**19
    clip_multiple: float = 10.0
    momentum: float = 0.9
    """Of the outer step."""
    mean: MeanName = "weighted_mean"
    trim_share: float = 0.2
    centre_multiple: float = 2.0
    check_pieces: int = 0
    """Pieces of others' averages that a member makes again before it commits."""

    @classmethod
    def of(cls, plan: RunPlan, index: ShardIndex) -> AveragingRule:
        """Return the rule of a run."""
        sizes = {shard.path: shard.train_sequences for shard in index.paths}
        return cls(
            CODECS[plan.averaging.codec],
            sizes if plan.outer.shard_weights else None,
            part_bytes=plan.averaging.part_bytes,
            clip_multiple=plan.averaging.clip_multiple,
            momentum=plan.outer.momentum,
            mean=plan.averaging.combine,
            trim_share=plan.averaging.trim_share,
            centre_multiple=plan.averaging.centre_multiple,
            check_pieces=plan.averaging.check_pieces,
        )

    @property
    def is_robust(self) -> bool:
        """Whether a part's contributions are more than summed."""
        return self.mean != "weighted_mean"

    def rows_of_a_section(self, rows: int) -> int:
        """Return how many rows a section of a table with so many rows has at most."""
        return rows if self.is_robust else self.section_rows

    def part_sizes(self, values: int) -> tuple[int, ...]:
        """Return how many values each part of a vector has."""
        return self.codec.part_sizes(values, self.part_bytes)

    def usual(self, anchor: ModuleState) -> Usual:
        """Return what contributions to a module usually are.

        A gradient that comes again and again becomes a momentum of 1 / (1 - mu) times its norm,
        so the usual norm is that of the momentum times (1 - mu).
        """
        tokens = Usual.of(anchor.progress, anchor.version).tokens
        if not self.clip_multiple:
            return Usual(tokens)
        parts = anchor.momentum.split(self.part_sizes(anchor.momentum.numel()))
        return Usual(tokens, tuple((1.0 - self.momentum) * exact_norm(part) for part in parts))

    def scales(self, norms: Sequence[float], usual_norm: float = 0.0) -> tuple[float, ...]:
        """Return what the contributions of a section to one part are multiplied by; mostly 1.

        The median is the lower one of the norms above 0: of two contributions the smaller is the
        measure. So that who contributes next to nothing does not silence the others, a norm up to
        `usual_norm` is always admitted.
        """
        above = [norm for norm in norms if norm > 0.0]
        if not self.clip_multiple or len(above) < 2:
            return (1.0,) * len(norms)
        most = max(self.clip_multiple * _lower_median(above), usual_norm)
        return tuple(1.0 if norm <= most else most / norm for norm in norms)

    def weights(self, table: Sequence[Contribution], usual: Usual = UNKNOWN) -> tuple[float, ...]:
        """Return the weight of each row of a canonical table; together they are 1.

        A path's share is its shard's share among the contributing paths (Eq. 2-3, normalised
        within the group), or the same for all paths. Replicas of a path split its share by
        tokens, of which each counts `GREATEST_OF_MEDIAN` times the median of the replicas at
        most, or `GREATEST_OF_USUAL` times the path's usual tokens if that is more: a lie takes
        four fifths from one honest replica. Raises ValueError when a contributing path has no
        sequences.
        """
        of_path: dict[int, list[int]] = {}
        for row in table:
            of_path.setdefault(row.path, []).append(row.tokens)
        most = {
            path: max(
                GREATEST_OF_MEDIAN * _lower_median(tokens),
                GREATEST_OF_USUAL * usual.tokens.get(path, 0),
            )
            for path, tokens in of_path.items()
        }
        counted = [min(row.tokens, most[row.path]) for row in table]
        tokens_of_path = {
            path: sum(min(row, most[path]) for row in tokens) for path, tokens in of_path.items()
        }
        sizes = dict.fromkeys(tokens_of_path, 1)
        if self.shard_sequences is not None:
            sizes = {path: self.shard_sequences.get(path, 0) for path in tokens_of_path}
        empty = [path for path, size in sizes.items() if size <= 0]
        if empty:
            raise ValueError(f"path {empty[0]} contributes but its shard has no sequences")
        total = sum(sizes.values())
        return tuple(
            (sizes[row.path] / total) * (tokens / tokens_of_path[row.path])
            for row, tokens in zip(table, counted, strict=True)
        )

    def clip(
        self,
        contributions: Sequence[torch.Tensor],
        usual_norm: float = 0.0,
        norms: Sequence[float] | None = None,
    ) -> None:
        """Scale down, in place, what is too great among a section's contributions to one part.

        `norms` are those of the contributions, if they are known.
        """
        if not self.clip_multiple or len(contributions) < 2:
            return
        if norms is None:
            norms = [exact_norm(part) for part in contributions]
        self.scale(contributions, norms, usual_norm)

    def scale(
        self, contributions: Sequence[torch.Tensor], norms: Sequence[float], usual_norm: float
    ) -> None:
        """Scale down, in place, contributions to a part, or pieces of them, by the parts' norms."""
        _scale(contributions, self.scales(norms, usual_norm))

    def combine_section(
        self,
        contributions: Sequence[torch.Tensor],
        weights: Sequence[float],
        paths: Sequence[int],
    ) -> torch.Tensor:
        """Return what one section's contributions to one part come to, in canonical order.

        With a robust mean that is the average of all, or the weighted mean where fewer than three
        contribute; otherwise it is the section's weighted sum.
        """
        if not self.is_robust or len(contributions) < robust_mean.LEAST_VOTERS:
            return self.sum_section(zip(contributions, weights, strict=True))

        def mean(values: Sequence[torch.Tensor], votes: Sequence[float]) -> torch.Tensor:
            if self.mean == "trimmed_mean":
                return robust_mean.trimmed_mean(values, votes, self.trim_share)
            return robust_mean.centered_clipping(values, votes, self.centre_multiple)

        return robust_mean.of_paths(contributions, weights, paths, mean)

    def combine(
        self, contributions: Iterable[torch.Tensor], weights: Sequence[float]
    ) -> torch.Tensor:
        """Return the weighted mean of contributions, or of one part of each, in canonical order.

        They are as their receivers see them, flat fp32 of one shape. The rows of each section are
        summed in order, then the sections. Raises ValueError when contributions and weights differ
        in number.
        """
        rows = zip(contributions, weights, strict=True)
        sums = (
            self.sum_section(itertools.islice(rows, len(section)))
            for section in sections(len(weights), self.section_rows)
        )
        total = self.add_sections(sums)
        next(rows, None)  # Raises if contributions are left.
        return total

    def sum_section(self, rows: Iterable[tuple[torch.Tensor, float]]) -> torch.Tensor:
        """Return the weighted sum of one section's contributions, in new memory.

        Weights are rounded to fp32 first; product and sum are rounded separately.
        """
        total: torch.Tensor | None = None
        for contribution, weight in rows:
            if total is None:
                total = torch.zeros_like(contribution)
            total.add_(contribution.mul(fp32(weight)))
        if total is None:
            raise ValueError("nothing to combine")
        return total

    def add_sections(self, sums: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the sum of the sections' sums, in order, in the memory of the first."""
        total: torch.Tensor | None = None
        for section_sum in sums:
            total = section_sum if total is None else total.add_(section_sum)
        if total is None:
            raise ValueError("nothing to combine")
        return total

    def average(
        self,
        gradients: Sequence[torch.Tensor],
        table: Sequence[Contribution],
        usual: Usual = UNKNOWN,
    ) -> torch.Tensor:
        """Return what every member of a group holds after the all-reduce of its gradients.

        `gradients` are flat fp32, in the order of the bounded table; each is taken twice. Each
        passes through the codec, and so does the average (design 4.3). Called by the simulator and
        by a peer that is alone in its group; the swarm's averager does the same in parts. A robust
        mean takes the memory of all gradients.
        """
        scales = iter(self._scales_of(gradients, usual))

        def received() -> Iterator[torch.Tensor]:
            for gradient in gradients:
                contribution = self.codec.round_trip(gradient)
                _scale(self._parts(contribution), next(scales, ()))
                yield contribution

        weights = self.weights(table, usual)
        if not self.is_robust:
            return self.codec.round_trip(self.combine(received(), weights))
        parts = zip(*map(self._parts, received()), strict=True)
        paths = [row.path for row in table]
        average = torch.cat([self.combine_section(part, weights, paths) for part in parts])
        return self.codec.round_trip(average)

    def _scales_of(
        self, gradients: Sequence[torch.Tensor], usual: Usual
    ) -> list[tuple[float, ...]]:
        """Return what the parts of each gradient are multiplied by; nothing if by 1 for certain."""
        scales: list[tuple[float, ...]] = []
        if not self.clip_multiple or len(gradients) < 2:
            return scales
        for section in sections(len(gradients), self.rows_of_a_section(len(gradients))):
            received = (self.codec.round_trip(gradients[row]) for row in section)
            norms = [[exact_norm(part) for part in self._parts(one)] for one in received]
            of_parts = zip(*norms, strict=True)
            usual_norms = usual.norms or itertools.repeat(0.0)
            scales += zip(*map(self.scales, of_parts, usual_norms), strict=True)
        return scales

    def _parts(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return flat.split(self.part_sizes(flat.numel()))


def outer_step(
    state: ModuleState,
    average: torch.Tensor,
    table: Sequence[Contribution],
    config: OuterConfig,
    round_index: int,
    *,
    paths: Collection[int] | None = None,
) -> ModuleState:
    """Return the state after one Nesterov step on the averaged outer gradient; inputs are kept.

    `average` is flat fp32 [size], `table` the canonical rows that went into it. With rescaling
    the average is multiplied by the root of the number of contributing paths (section 2.7);
    replicas of a path count once. The learning rate is that of the state's version. Given the
    module's `paths`, rows of other paths raise ValueError. Raises `IntegrityError` when a number
    is not finite or the size is wrong.
    """
    if average.shape != state.parameters.shape or average.dtype != torch.float32:
        raise IntegrityError(
            f"the average for {state.module} has {average.numel()} numbers of {average.dtype}, "
            f"not {state.layout.size} of fp32"
        )
    contributing = {row.path for row in table}
    if paths is not None and not contributing <= set(paths):
        raise ValueError(f"{state.module} has no paths {sorted(contributing - set(paths))}")
    gradient = average
    if config.sqrt_paths_rescaling:
        gradient = average.mul(fp32(math.sqrt(len(contributing))))
    momentum = state.momentum.mul(fp32(config.momentum)).add_(gradient)
    step = momentum.mul(fp32(config.momentum)).add_(gradient)
    rate = outer_learning_rate(config, state.version)
    parameters = state.parameters.sub(step.mul_(fp32(rate)))
    if not bool(torch.isfinite(parameters).all() and torch.isfinite(momentum).all()):
        raise IntegrityError(f"the outer step of {state.module} gave numbers that are not finite")
    return ModuleState(
        module=state.module,
        version=state.version + 1,
        parameters=parameters,
        momentum=momentum,
        progress=advanced_progress(state.progress, table, round_index),
        layout=state.layout,
    )


def coasted(state: ModuleState, config: OuterConfig) -> ModuleState:
    """Return what one more outer step without a gradient would make of a state's parameters.

    Whoever is offered a state scores this one too: parameters can be harmless and the momentum
    not. Not for training: version, momentum and progress stay, and nothing is checked.
    """
    rate = outer_learning_rate(config, state.version) * config.momentum**2
    return replace(state, parameters=state.parameters - rate * state.momentum)


def outer_learning_rate(config: OuterConfig, version: int) -> float:
    """Return the learning rate of the step that a module of this version takes (0 is the first).

    Linear warmup, then the peak, or a fall from the peak to the floor, which stays. Only sums,
    products and quotients of doubles, each rounded by itself: every machine gets the same bits.
    """
    step = version + config.first_step
    if step < config.warmup_steps:
        return config.learning_rate * ((step + 1) / config.warmup_steps)
    if not config.decay_steps:
        return config.learning_rate
    done = min(step - config.warmup_steps, config.decay_steps) / config.decay_steps
    left = 1.0 - done if config.decay == "linear" else _half_cosine(done)
    return config.learning_rate * (config.floor_ratio + (1.0 - config.floor_ratio) * left)


def _half_cosine(done: float) -> float:
    """Return (1 + cos(pi * done)) / 2 for `done` in [0, 1], exact at the ends and the middle.

    Cosines of different libraries differ in the last bit. This is the series of sin(x) up to x^19
    at x = pi / 2 * (1 - 2 * done), within 4e-16 of the true value.
    """
    x = (math.pi / 2) * (1.0 - 2.0 * done)
    if abs(x) == math.pi / 2:
        return 0.0 if done else 1.0
    square = x * x
    series = 1.0
    for order in range(18, 0, -2):
        series = 1.0 - square / (order * (order + 1)) * series
    return 0.5 * (1.0 + x * series)


def advanced_progress(
    progress: Mapping[int, PathProgress], table: Sequence[Contribution], round_index: int
) -> dict[int, PathProgress]:
    """Return a state's per-path counts with a committed table added."""
    advanced = dict(progress)
    for row in table:
        before = advanced.get(row.path, PathProgress(0, round_index))
        last_round = max(before.last_round, round_index)
        advanced[row.path] = PathProgress(before.tokens + row.tokens, last_round)
    return advanced


def _scale(tensors: Iterable[torch.Tensor], scales: Iterable[float]) -> None:
    """Multiply each tensor, in place, by its scale; 1 changes no bit."""
    for tensor, scale in zip(tensors, scales, strict=False):
        if scale != 1.0:
            tensor.mul_(fp32(scale))
