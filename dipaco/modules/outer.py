"""The outer step: contributions are shortened, weighed and combined, then one Nesterov step.

DiPaCo's Algorithm 1 (Douillard et al., 2024) with Eq. 2 and 3. Everything here gives the same bits
on every machine: fp32 on the CPU, each operation rounded by itself (no fused multiply-add), sums
in the order of the rows. A peer and the simulator call the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from dipaco.base.errors import IntegrityError
from dipaco.protocol.chain.outer_row import OuterRow
from dipaco.protocol.config import ContributionsConfig, OuterConfig
from dipaco.protocol.grid import PRIVATE_LEVEL
from dipaco.protocol.plan import RunPlan, ShardIndex

from . import trimmed_mean
from .arithmetic import check_arithmetic
from .contributions import (
    CHUNK_VALUES,
    CODECS,
    Codec,
    Data,
    contribution_norm,
    exact_norm,
    pieces,
)
from .device import all_finite, own_pages
from .state import MAX_COUNT, ModuleState, PathProgress
from .trimmed_mean import fp32

# A path grows by at most so many times its usual step, and one of two replicas counts at most so
# many times that, or the other one. With 4 times the other one, a replica that trained nothing cost
# 2.2 nats and not 0.8 (docs/results/attacks.md); with once, machines of a tenth of the speed cost
# 0.18.
_MAX_OF_USUAL = 2
# By how much of itself a module's usual norm moves in a step at most, and what it is at least, as a
# share of the norm of the parameters.
_MAX_MOVE, _LEAST_USUAL_NORM = 1 / 16, 1 / 128
# Values that are combined at a time. Changes no bit.
_PIECE_VALUES = 64 * CHUNK_VALUES

T = TypeVar("T", int, float)


def canonical_rows(rows: Iterable[OuterRow]) -> tuple[OuterRow, ...]:
    """Return the rows in the order in which everybody sums them: by path, then by peer.

    Raises ValueError if there is no row, a path is no natural number, tokens are not positive, or a
    peer occurs twice. The simulator's peers may have no name, if each path
    has only one.
    """
    given = tuple(rows)
    if not given:
        raise ValueError("a group needs at least one contribution")
    for row in given:
        if type(row.path) is not int or row.path < 0:
            raise ValueError(f"the contribution of '{row.peer}' has the path {row.path!r}")
        if type(row.tokens) is not int or row.tokens <= 0:
            raise ValueError(f"the contribution of '{row.peer}' has {row.tokens!r} tokens")
    owners = [row.peer or row.path for row in given]
    if len(set(owners)) != len(owners):
        raise ValueError("a peer contributes twice to one group")
    return tuple(sorted(given, key=lambda row: (row.path, row.peer)))


def _lower_median(values: Sequence[T]) -> T:
    """Return the middle value, of two the lower: no single one of two can move it up."""
    return sorted(values)[(len(values) - 1) // 2]


def median_norm(norms: Sequence[float], usual_norm: float) -> float:
    """Return the median norm of the contributions of a step.

    In a group of an even number the module's usual norm has a voice too, which nobody in the group
    chooses. So half of a group decides nothing, with contributions of almost nothing or huge ones.
    """
    more = [] if len(norms) % 2 else [usual_norm]
    return _lower_median([*norms, *more])


def moved_norm(norms: Sequence[float], usual_norm: float, parameters_norm: float) -> float:
    """Return a module's usual norm after a step with contributions of these norms.

    It follows the lower median, so half of a group that contributes huge ones does not raise it. It
    moves slowly and has a least value, so half that contributes almost nothing has to do so for
    many rounds to lower it, and never lowers it to nothing.
    """
    least, most = (1 - _MAX_MOVE) * usual_norm, (1 + _MAX_MOVE) * usual_norm
    moved = min(max(_lower_median(norms), least), most)
    return max(moved, _LEAST_USUAL_NORM * parameters_norm)


@dataclass(frozen=True)
class OuterGradient:
    """Anchor minus local, both flat fp32 [size]: what inner training changed, negated.

    It is computed where it is asked for, a part at a time, as all who use it do.
    """

    anchor: torch.Tensor
    local: torch.Tensor

    def numel(self) -> int:
        """Return how many numbers it has."""
        return self.anchor.numel()

    def __getitem__(self, part: slice, /) -> torch.Tensor:
        """Return a part of it, in new memory."""
        return self.anchor[part] - self.local[part]


def encode_in_place(gradient: OuterGradient, codec: Codec) -> bytearray:
    """Return the file of an outer gradient, and overwrite `gradient.local` with what it says.

    A trainer goes on from `new anchor + (parameters - gradient.local)`: what the encoding loses
    stays in the parameters, and so in the next outer gradient. Nobody is told a part twice, and
    there is no other memory of it. `local` changes piece by piece, so nobody may read it meanwhile
    (`training.trainer.Snapshot.encode` sees to that).
    """
    values = gradient.numel()
    data = codec.encode(gradient)
    for begin, end in pieces(values):
        told = codec.decode(data, values, begin, end)
        torch.sub(gradient.anchor[begin:end], told, out=gradient.local[begin:end])
    return data


@dataclass(frozen=True)
class OuterRule:
    """How the state after a step is computed from the files that its rows name.

    One value for peers and the simulator, so that all of them compute the same bits.
    `shard_sequences` are the sequences of each path's shard; None weighs paths alike.
    """

    contributions: ContributionsConfig
    outer: OuterConfig
    shard_sequences: Mapping[int, int] | None = None
    piece_values: int = _PIECE_VALUES
    """Another number in tests alone; a multiple of `CHUNK_VALUES`."""

    @classmethod
    def of(cls, plan: RunPlan, index: ShardIndex | None) -> OuterRule:
        """Return the rule of a run. Without the index of its shards only codecs can be asked."""
        sizes = None
        if index is not None:
            sizes = {shard.path: shard.train_sequences for shard in index.paths}
        return cls(plan.contributions, plan.outer, sizes)

    @property
    def codec(self) -> Codec:
        """How contributions are written."""
        return CODECS[self.contributions.codec]

    def _outer_of(self, module: str) -> OuterConfig:
        """Return the outer optimizer of a module. One trainer's gradient is noisier than the
        average of several, so a private module has a rate and a momentum of its own."""
        outer = self.outer
        if not module.startswith(PRIVATE_LEVEL):
            return outer
        own = {"learning_rate": outer.private_learning_rate, "momentum": outer.private_momentum}
        return outer.model_copy(update=own)

    def weights(
        self, rows: Sequence[OuterRow], progress: Mapping[int, PathProgress] | None = None
    ) -> tuple[float, ...]:
        """Return the weight of each row of a step; together they are 1.

        A path's share is its shard's share among the contributing paths (Eq. 2-3, normalised
        within the group), or the same for all paths. Replicas of a path split its share by
        tokens, of which each counts as much as `_most_tokens` says. Raises ValueError when a
        contributing path has no sequences.
        """
        usual = {path: entry.usual for path, entry in (progress or {}).items()}
        of_path = _tokens_of_paths(rows)
        most = {path: _most_tokens(tokens, usual.get(path, 0)) for path, tokens in of_path.items()}
        counted = [min(row.tokens, most[row.path]) for row in rows]
        tokens_of_path = {
            path: _sum_of_counts(min(row, most[path]) for row in tokens)
            for path, tokens in of_path.items()
        }
        sizes = dict.fromkeys(tokens_of_path, 1)
        if self.shard_sequences is not None:
            sizes = {path: self.shard_sequences.get(path, 0) for path in tokens_of_path}
        empty = [path for path, size in sizes.items() if size <= 0]
        if empty:
            raise ValueError(f"path {empty[0]} contributes but its shard has no sequences")
        total = _sum_of_counts(sizes.values())
        return tuple(
            (sizes[row.path] / total) * (tokens / tokens_of_path[row.path])
            for row, tokens in zip(rows, counted, strict=True)
        )

    def step(
        self,
        state: ModuleState,
        files: Sequence[Data],
        rows: Sequence[OuterRow],
        round_index: int,
        paths: Collection[int] | None = None,
    ) -> ModuleState:
        """Return the state after one outer step; `state` is kept.

        `rows` are those of the step in canonical order, `files` the checked contributions of these.
        The average is multiplied by the root of the number of contributing paths (section 2.7);
        replicas of a path count once. Given the module's `paths`, rows of other paths raise
        ValueError. Raises `IntegrityError` when a number is not finite, and `MachineError` where
        this machine's arithmetic is not that of the others.
        """
        check_arithmetic()
        rows = canonical_rows(rows)
        contributing = {row.path for row in rows}
        if paths is not None and not contributing <= set(paths):
            raise ValueError(f"{state.module} has no paths {sorted(contributing - set(paths))}")
        scales, usual_norm = self._shortening(state, files)
        combine = self._combination(state, files, rows, scales)
        outer = self._outer_of(state.module)
        root = fp32(math.sqrt(len(contributing))) if outer.sqrt_paths_rescaling else None
        mu = fp32(outer.momentum)
        rate = fp32(outer.learning_rate)
        size = state.layout.size
        parameters, momentum = own_pages(size), own_pages(size)
        memory = torch.empty(min(size, self.piece_values))
        for begin, end in pieces(size, self.piece_values):
            gradient = combine(begin, end)
            if root is not None:
                gradient.mul_(root)
            kept = torch.mul(state.momentum[begin:end], mu, out=momentum[begin:end]).add_(gradient)
            change = torch.mul(kept, mu, out=memory[: end - begin]).add_(gradient).mul_(rate)
            new = torch.sub(state.parameters[begin:end], change, out=parameters[begin:end])
            if not (all_finite(new) and all_finite(kept)):
                raise IntegrityError(
                    f"an outer step of {state.module} gave numbers that are not finite"
                )
        return ModuleState(
            module=state.module,
            version=state.version + 1,
            parameters=parameters,
            momentum=momentum,
            progress=advanced_progress(state.progress, rows, round_index),
            layout=state.layout,
            usual_norm=usual_norm,
        )

    def _shortening(
        self, state: ModuleState, files: Sequence[Data]
    ) -> tuple[tuple[float, ...], float]:
        """Return what each contribution is multiplied by, and the usual norm after the step.

        What is longer than the median norm is shortened to it.
        """
        if not self.contributions.shorten:
            return (1.0,) * len(files), state.usual_norm
        values = state.layout.size
        norms = [contribution_norm(self.codec, data, values) for data in files]
        parameters_norm = exact_norm(lambda b, e: state.parameters[b:e], values)
        median = median_norm(norms, state.usual_norm)
        scales = tuple(1.0 if norm <= median else median / norm for norm in norms)
        return scales, moved_norm(norms, state.usual_norm, parameters_norm)

    def _combination(
        self,
        state: ModuleState,
        files: Sequence[Data],
        rows: Sequence[OuterRow],
        scales: Sequence[float],
    ) -> Callable[[int, int], torch.Tensor]:
        """Return what gives the combined contributions from one value to another; the caller may
        change what it is given, until it asks for the next."""
        codec, values = self.codec, state.layout.size
        weights = self.weights(rows, state.progress)
        trims = self._is_trimmed and len(files) >= trimmed_mean.LEAST_VOTERS
        paths, share = [row.path for row in rows], self.contributions.trim_share
        sums = torch.empty(min(values, self.piece_values))

        def combine(begin: int, end: int) -> torch.Tensor:
            pieces = (codec.decode(data, values, begin, end) for data in files)
            if trims:
                scaled = [p.mul_(fp32(s)) for p, s in zip(pieces, scales, strict=True)]
                # Adding 0 leaves no negative zero: its sign would depend on a vector instruction.
                return trimmed_mean.of_paths(scaled, weights, paths, share).add(0.0)
            total = sums[: end - begin].zero_()
            for piece, weight, scale in zip(pieces, weights, scales, strict=True):
                total.add_(piece.mul_(fp32(weight * scale)))
            return total

        return combine

    @property
    def _is_trimmed(self) -> bool:
        return self.contributions.combine == "trimmed_mean"


def advanced_progress(
    progress: Mapping[int, PathProgress], rows: Sequence[OuterRow], round_index: int
) -> dict[int, PathProgress]:
    """Return a state's per-path counts after a step with these rows.

    A path's count is its place in the schedule. It grows by the lower median of what the path's
    rows say: nobody can check how many tokens another peer has trained. It grows by at most twice
    what it has grown by on average, or twice what the module's paths have (the lower median of
    their averages, and behind a genesis of all rows), if that is more. So a path whose only rows
    are lies grows with the square of its steps at most, and one whose rows said next to nothing
    goes on as others do. Its place in the shard grows by what all rows say, and begins again at
    0 where it would be too great: a lie changes which texts come next.
    """
    advanced = dict(progress)
    averages = [entry.usual for entry in progress.values()]
    of_paths = _lower_median(averages or [row.tokens for row in rows])
    for path, tokens in _tokens_of_paths(rows).items():
        before = progress.get(path, PathProgress(0, round_index, 0, 0))
        usual = max(before.usual, of_paths)
        grown = min(_lower_median(tokens), max(1, _MAX_OF_USUAL * usual))
        last_round = max(before.last_round, round_index)
        # Nobody could read a state with greater counts.
        advanced[path] = PathProgress(
            tokens=min(before.tokens + grown, MAX_COUNT),
            last_round=last_round,
            steps=before.steps + 1,
            read=(before.read + _sum_of_counts(tokens)) % (MAX_COUNT + 1),
        )
    return advanced


def _most_tokens(tokens: Sequence[int], usual: int) -> int:
    """Return how many tokens a replica of a path counts at most, for all that it says.

    Of three or more that is the median, so a lie takes no more than an honest replica of that many
    tokens has. Of two nobody knows which one lies, and a fast one that counts no more than a slow
    one would be lost: it counts `_MAX_OF_USUAL` times the other, or times the path's usual tokens.
    """
    if len(tokens) > 2:
        return _lower_median(tokens)
    return _MAX_OF_USUAL * max(_lower_median(tokens), usual)


def _tokens_of_paths(rows: Sequence[OuterRow]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for row in rows:
        found.setdefault(row.path, []).append(row.tokens)
    return found


def _sum_of_counts(counts: Iterable[int]) -> int:
    """Return the sum of integers, which is exact. Sums of floats differ between Pythons: those of
    consensus code are `math.fsum`."""
    return sum(counts)
