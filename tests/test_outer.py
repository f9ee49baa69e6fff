"""Weights, codecs, sums and the Nesterov step, against arithmetic done another way."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import get_args

import numpy as np
import pytest
import torch
from dipaco.modules.codecs import CODECS, CodecName
from dipaco.modules.config import AveragingConfig, OuterConfig
from dipaco.modules.errors import IntegrityError
from dipaco.modules.grid import ModuleLayout
from dipaco.modules.outer import (
    SECTION_ROWS,
    AveragingRule,
    Contribution,
    Usual,
    advanced_progress,
    bounded_table,
    canonical_table,
    exact_norm,
    outer_gradient,
    outer_step,
    sections,
)
from dipaco.modules.state import ModuleState, PathProgress
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.exact_numbers import square_roots

SIZE = 1000
LAYOUT = ModuleLayout(("w",), ((SIZE,),))
PLAIN = AveragingRule(CODECS["none"])
TABLE = canonical_table([Contribution(0, "a", 100), Contribution(1, "b", 300)])
GOLDEN_NORM = "0x1.616066dceebbfp+9"
GOLDEN_DIGEST = "15c5a5475da5ad5f91901935cb75076e49ef7a55d6ed176bc09faedd122d77d1"


def drawn(seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def state_of(seed: int = 0, **overrides: object) -> ModuleState:
    values: dict[str, object] = {
        "module": "L0.E0",
        "version": 3,
        "parameters": drawn(seed),
        "momentum": drawn(seed + 1, 0.1),
        "progress": {0: PathProgress(1000, 2)},
        "layout": LAYOUT,
    }
    return ModuleState(**{**values, **overrides})  # type: ignore[arg-type]


rows = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 10**9)), min_size=1, max_size=8).map(
    lambda pairs: [Contribution(path, f"peer{i}", n) for i, (path, n) in enumerate(pairs)]
)


@given(rows, st.randoms())
def test_canonical_order_does_not_depend_on_arrival(
    table: list[Contribution], random: object
) -> None:
    shuffled = list(table)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert canonical_table(shuffled) == canonical_table(table)
    assert list(canonical_table(table)) == sorted(table, key=lambda row: (row.path, row.peer))


@pytest.mark.parametrize(
    "table",
    [
        [],
        [Contribution(0, "a", 0)],
        [Contribution(0, "a", -5)],
        [Contribution(-1, "a", 5)],
        [Contribution(0, "a", 1.5)],  # type: ignore[arg-type]
        [Contribution("0", "a", 5)],  # type: ignore[arg-type]
        [Contribution(True, "a", 5)],
        [Contribution(0, "a", True)],
        [Contribution(0, "a", 5), Contribution(1, "a", 5)],
        [Contribution(0, "", 5), Contribution(0, "", 5)],
    ],
)
def test_impossible_tables(table: list[Contribution]) -> None:
    with pytest.raises(ValueError, match=r"contribut"):
        canonical_table(table)


def test_a_single_process_needs_no_peer_names() -> None:
    table = canonical_table([Contribution(1, "", 5), Contribution(0, "", 5)])
    assert [row.path for row in table] == [0, 1]


@given(rows, st.lists(st.integers(1, 10**6), min_size=6, max_size=6), st.booleans())
def test_weights_follow_shards_then_tokens(
    table: list[Contribution], sizes: list[int], by_shard: bool
) -> None:
    canonical = canonical_table(table)
    shards = dict(enumerate(sizes)) if by_shard else None
    usual = Usual({row.path: 10**9 for row in canonical})
    weights = AveragingRule(CODECS["none"], shards).weights(canonical, usual)
    paths = {row.path for row in canonical}
    total = sum(sizes[path] for path in paths)
    for row, weight in zip(canonical, weights, strict=True):
        replicas = sum(other.tokens for other in canonical if other.path == row.path)
        share = Fraction(sizes[row.path], total) if by_shard else Fraction(1, len(paths))
        assert weight == pytest.approx(float(share * row.tokens / replicas), rel=1e-14)
    assert math.fsum(weights) == pytest.approx(1, rel=1e-14)


def test_a_lie_takes_four_fifths_of_a_path_from_one_honest_replica() -> None:
    """Of two honest ones it takes two thirds; other paths lose nothing."""
    rule = AveragingRule(CODECS["none"], {0: 30, 1: 10})
    one = canonical_table([Contribution(0, "a", 1000), Contribution(0, "z", 10**12)])
    assert rule.weights(one) == pytest.approx((0.2, 0.8))
    assert rule.weights((*one, Contribution(1, "o", 10))) == pytest.approx((0.15, 0.6, 0.25))
    two = canonical_table([*one, Contribution(0, "b", 1000)])
    assert rule.weights(two) == pytest.approx((1 / 6, 1 / 6, 2 / 3))


def test_a_replica_that_has_just_come_takes_nothing_from_one_with_a_usual_round() -> None:
    table = canonical_table([Contribution(0, "a", 200_000), Contribution(0, "new", 1000)])
    rule = AveragingRule(CODECS["none"])
    assert rule.weights(table) == pytest.approx((0.8, 0.2))
    counted = rule.weights(table, Usual({0: 150_000}))
    assert counted == pytest.approx((200 / 201, 1 / 201))


def progress_of(usual: Mapping[int, int], version: int) -> dict[int, PathProgress]:
    return {path: PathProgress(tokens * version, version - 1) for path, tokens in usual.items()}


@given(
    rows,
    st.dictionaries(st.integers(0, 5), st.integers(1, 10**6), max_size=4),
    st.integers(1, 100),
)
def test_no_row_counts_more_than_is_credible(
    table: list[Contribution], usual: dict[int, int], version: int
) -> None:
    canonical = canonical_table(table)
    known = Usual.of(progress_of(usual, version), version)
    assert known.tokens == usual
    bounded = bounded_table(canonical, known)
    assert canonical_table(bounded) == bounded
    tokens = sorted(row.tokens for row in canonical)
    measured = [] if usual and len(tokens) == 1 else [tokens[(len(tokens) - 1) // 2]]
    most = 16 * max([*measured, *usual.values()])
    for row, counted in zip(canonical, bounded, strict=True):
        assert (counted.path, counted.peer) == (row.path, row.peer)
        assert counted.tokens == min(row.tokens, most)
    # What a liar says beyond that changes nothing for anybody.
    more = [replace(row, tokens=row.tokens * 10**6) if row.tokens > most else row for row in table]
    assert bounded_table(canonical_table(more), known) == bounded


def test_one_lie_moves_a_schedule_by_sixteen_steps_at_most() -> None:
    progress = progress_of({0: 1000, 1: 500}, 200)
    usual = Usual.of(progress, 200)
    (row,) = bounded_table([Contribution(1, "liar", 10**12)], usual)
    assert row.tokens == 16_000
    assert advanced_progress(progress, [row], 200)[1].tokens == 100_000 + 16_000


# Of fp32 vectors: nothing, or at least the smallest such number.
@given(
    st.lists(st.just(0.0) | st.floats(1e-45, 1e30), min_size=1, max_size=33), st.floats(0.0, 1e3)
)
@example([5e24, 1e-45], 0.0)
def test_what_exceeds_ten_times_the_lower_median_is_scaled_down_to_it(
    norms: list[float], usual_norm: float
) -> None:
    above = sorted(norm for norm in norms if norm > 0)
    scales = PLAIN.scales(norms, usual_norm)
    most = max(10 * above[(len(above) - 1) // 2], usual_norm) if above else 0.0
    for norm, scale in zip(norms, scales, strict=True):
        assert 0 < scale <= 1
        if len(above) < 2 or norm <= most:
            assert scale == 1
        else:
            assert norm * scale == pytest.approx(most)
    assert replace(PLAIN, clip_multiple=0.0).scales(norms) == (1.0,) * len(norms)


def test_of_two_the_smaller_rules_but_silences_nobody_that_is_usual() -> None:
    assert PLAIN.scales([1.0, 1000.0]) == (1.0, 0.01)
    assert PLAIN.scales([1e-9, 1.0]) == (1.0, pytest.approx(1e-8))
    assert PLAIN.scales([1e-9, 1.0], usual_norm=1.5) == (1.0, 1.0)
    assert PLAIN.scales([0.0, 1.0]) == (1.0, 1.0)
    assert PLAIN.scales([1000.0]) == (1.0,)


@given(st.integers(1, 5000), st.integers(0, 1000), st.floats(1e-30, 1e30))
def test_norms_are_those_of_exact_arithmetic(size: int, seed: int, scale: float) -> None:
    flat = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale
    exact = math.sqrt(sum(Fraction(value) ** 2 for value in flat.tolist()))
    assert exact_norm(flat) == pytest.approx(exact, rel=1e-14)
    assert exact_norm(torch.zeros(size)) == 0


def test_a_golden_norm() -> None:
    """Sums of squares round; the order in which they are added is part of the protocol."""
    assert exact_norm(square_roots(999)).hex() == GOLDEN_NORM


@pytest.mark.parametrize("codec", get_args(CodecName))
def test_what_is_not_clipped_has_the_bits_of_a_plain_mean(codec: CodecName) -> None:
    table = canonical_table([Contribution(path, str(path), 100) for path in range(5)])
    tensors = [drawn(path) for path in range(5)]
    rule = AveragingRule(CODECS[codec], part_bytes=1024)
    unlimited = replace(rule, clip_multiple=0.0)
    assert torch.equal(rule.average(tensors, table), unlimited.average(tensors, table))
    tensors[2] = tensors[2] * 1000
    clipped, plain = rule.average(tensors, table), unlimited.average(tensors, table)
    assert clipped.norm() < 12 * drawn(0).norm() / 5 < 150 * drawn(0).norm() / 5 < plain.norm()


def test_usual_norms_are_what_repeated_gradients_would_make_of_the_momentum() -> None:
    rule = AveragingRule(CODECS["float16"], part_bytes=1024, momentum=0.9)
    state, table = state_of(momentum=torch.zeros(SIZE)), TABLE[:1]
    assert rule.usual(state) == Usual({0: 333}, (0.0, 0.0))
    gradient = drawn(5)
    for _ in range(200):
        state = outer_step(state, gradient, table, OuterConfig(momentum=0.9), 1)
    norms = rule.usual(state).norms
    parts = gradient.split(rule.part_sizes(SIZE))
    assert norms == pytest.approx([float(part.norm()) for part in parts], rel=1e-4)


@given(st.sampled_from(get_args(CodecName)), st.integers(1, 10**7), st.integers(1024, 2**21))
def test_parts_are_equal_and_whole_blocks(name: CodecName, values: int, part_bytes: int) -> None:
    codec = CODECS[name]
    sizes = codec.part_sizes(values, part_bytes)
    assert sum(sizes) == values
    assert max(sizes) <= codec.part_values(part_bytes)
    assert len(sizes) == -(-values // codec.part_values(part_bytes))
    assert all(size % codec.block_values == 0 for size in sizes[:-1])
    assert max(sizes) - min(sizes) < 2 * codec.block_values


def test_a_path_without_sequences_has_no_weight() -> None:
    with pytest.raises(ValueError, match="path 1 contributes"):
        AveragingRule(CODECS["none"], {0: 10, 1: 0}).weights(TABLE)
    with pytest.raises(ValueError, match="path 1 contributes"):
        AveragingRule(CODECS["none"], {0: 10}).weights(TABLE)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=5), st.integers(0, 1000))
def test_combining_rounds_every_operation(weights: list[float], seed: int) -> None:
    parts = [drawn(seed + i) for i in range(len(weights))]
    expected = np.zeros(SIZE, dtype=np.float32)
    for part, weight in zip(parts, weights, strict=True):
        product = (np.float32(weight) * part.numpy()).astype(np.float32)
        expected = (expected + product).astype(np.float32)
    total = PLAIN.combine(parts, weights)
    assert total.numpy().tobytes() == expected.tobytes()


@given(st.integers(1, 2000), st.integers(1, 64))
def test_sections_hold_all_rows_in_order_and_are_as_few_and_as_equal_as_can_be(
    rows: int, greatest: int
) -> None:
    found = sections(rows, greatest)
    sizes = [len(section) for section in found]
    assert [row for section in found for row in section] == list(range(rows))
    assert len(found) == math.ceil(rows / greatest)
    assert max(sizes) <= greatest
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("rows", [SECTION_ROWS, SECTION_ROWS + 1, 70, 100])
def test_a_large_table_is_summed_in_sections(rows: int) -> None:
    parts = [drawn(seed, 10.0 ** (seed % 5)) for seed in range(rows)]
    weights = [1 / (2 + seed) for seed in range(rows)]
    total: np.ndarray | None = None
    for section in sections(rows):
        subtotal = np.zeros(SIZE, dtype=np.float32)
        for row in section:
            subtotal = subtotal + np.float32(weights[row]) * parts[row].numpy()
        total = subtotal if total is None else total + subtotal
    assert total is not None
    assert total.dtype == np.float32
    summed = PLAIN.combine(iter(parts), weights)
    assert summed.numpy().tobytes() == total.tobytes()
    flat = AveragingRule(PLAIN.codec, section_rows=rows).combine(parts, weights)
    assert torch.equal(flat, summed) == (rows <= SECTION_ROWS)


def test_a_sum_in_pieces_is_the_sum() -> None:
    # The swarm's reducers each sum a part; the simulator sums all at once.
    parts, weights = [drawn(i) for i in range(3)], [0.2, 0.5, 0.3]
    whole = PLAIN.combine(parts, weights)
    for size in (1, 7, 64, 333):
        pieces = [
            PLAIN.combine(list(piece), weights)
            for piece in zip(*(part.split(size) for part in parts), strict=True)
        ]
        assert torch.equal(torch.cat(pieces), whole)


def test_combining_wants_one_weight_each() -> None:
    with pytest.raises(ValueError, match="zip"):
        PLAIN.combine([drawn(0)], [0.5, 0.5])
    with pytest.raises(ValueError, match="zip"):
        PLAIN.combine([drawn(0), drawn(1)], [0.5])
    with pytest.raises(ValueError, match="nothing"):
        PLAIN.combine([], [])


SPECIAL = torch.tensor([0.0, -0.0, 1e-8, -1e-8, 65504.0, 65520.0, 1e9, -1e9, 1 / 3, 6e-5])


@pytest.mark.parametrize("name", ["none", "float16", "blockwise8bit"])
def test_codecs_equal_those_of_the_wire(name: str) -> None:
    from hivemind.compression import BlockwiseQuantization, Float16Compression, NoCompression
    from hivemind.compression.base import CompressionInfo

    wire = {
        "none": NoCompression,
        "float16": Float16Compression,
        "blockwise8bit": BlockwiseQuantization,
    }[name]()
    for tensor in (SPECIAL, drawn(1), drawn(2, 1e-6), torch.randn(10_000), torch.zeros(5)):
        before = tensor.clone()
        received = wire.extract(wire.compress(tensor, CompressionInfo.from_tensor(tensor)))
        ours = CODECS[name].round_trip(tensor)
        assert ours.numpy().tobytes() == received.numpy().tobytes()
        assert torch.equal(tensor, before)
        assert ours.data_ptr() != tensor.data_ptr()


def test_the_table_has_the_codecs_that_a_plan_may_name() -> None:
    assert list(CODECS) == list(get_args(CodecName))
    with pytest.raises(ValidationError, match="'none', 'float16' or 'blockwise8bit'"):
        AveragingConfig.model_validate({"codec": "float8"})


def test_average_passes_the_codec_twice() -> None:
    tensors = [drawn(0), drawn(1)]
    table = (Contribution(0, "QmA", 100), Contribution(0, "QmB", 300))
    half = [tensor.half().float() for tensor in tensors]
    expected = (half[0] * 0.25 + half[1] * 0.75).half().float()
    assert torch.equal(AveragingRule(CODECS["float16"]).average(tensors, table), expected)
    alone = AveragingRule(CODECS["none"]).average(tensors[:1], table[:1])
    assert torch.equal(alone, tensors[0])


@pytest.mark.parametrize("rescaling", [True, False])
def test_outer_step_is_nesterov(rescaling: bool) -> None:
    state, average = state_of(), drawn(9, 0.01)
    config = OuterConfig(learning_rate=0.7, momentum=0.9, sqrt_paths_rescaling=rescaling)
    parameter = torch.nn.Parameter(state.parameters.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    optimizer.state[parameter]["momentum_buffer"] = state.momentum.clone()
    parameter.grad = average * (math.sqrt(2) if rescaling else 1)
    optimizer.step()
    stepped = outer_step(state, average, TABLE, config, 4)
    torch.testing.assert_close(stepped.parameters, parameter.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        stepped.momentum, optimizer.state[parameter]["momentum_buffer"], rtol=1e-6, atol=1e-7
    )


def test_outer_step_rounds_every_operation() -> None:
    state, average = state_of(), drawn(9, 0.01)
    f = np.float32
    gradient = average.numpy() * f(math.sqrt(2))
    momentum = state.momentum.numpy() * f(0.9) + gradient
    step = momentum * f(0.9) + gradient
    parameters = state.parameters.numpy() - step * f(0.7)
    stepped = outer_step(state, average, TABLE, OuterConfig(), 4)
    assert stepped.momentum.numpy().tobytes() == momentum.tobytes()
    assert stepped.parameters.numpy().tobytes() == parameters.tobytes()


def test_threads_do_not_change_the_bits() -> None:
    size = 300_000  # enough for PyTorch to use several threads
    layout = ModuleLayout(("w",), ((size,),))
    generator = torch.Generator().manual_seed(0)
    parameters, momentum, average = torch.randn(3, size, generator=generator)
    state = ModuleState("L0.E0", 0, parameters, momentum, {}, layout)
    threads, digests = torch.get_num_threads(), set()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            summed = AveragingRule(CODECS["float16"]).average([average, momentum], TABLE[:2])
            digests.add(outer_step(state, summed, TABLE, OuterConfig(), 0).digest)
    finally:
        torch.set_num_threads(threads)
    assert len(digests) == 1


def test_golden_outer_step() -> None:
    # Plain numbers, so that the digest does not depend on a generator.
    ramp = torch.arange(SIZE, dtype=torch.float32)
    state = state_of(parameters=ramp / 7, momentum=ramp / 1e4)
    tensors = [ramp / 333 - 1, 2 - ramp / 777]
    average = AveragingRule(CODECS["float16"], {0: 3, 1: 7}).average(tensors, TABLE)
    assert outer_step(state, average, TABLE, OuterConfig(), 4).digest == GOLDEN_DIGEST


def test_outer_step_keeps_its_inputs_and_counts() -> None:
    state, average = state_of(), drawn(9)
    digest, before = state.digest, average.clone()
    stepped = outer_step(state, average, TABLE, OuterConfig(), 4, paths=(0, 1))
    del state.__dict__["digest"]
    assert state.digest == digest
    assert torch.equal(average, before)
    assert stepped.version == 4
    assert stepped.progress == {0: PathProgress(1100, 4), 1: PathProgress(300, 4)}
    assert stepped.tokens == 1400
    with pytest.raises(ValueError, match=r"no paths \[1\]"):
        outer_step(state, average, TABLE, OuterConfig(), 4, paths=(0,))


def test_rescaling_counts_paths_not_peers() -> None:
    average = drawn(9)
    replicas = canonical_table(Contribution(0, f"peer{i}", 10) for i in range(4))
    alone = canonical_table([Contribution(0, "a", 40)])
    first = outer_step(state_of(), average, replicas, OuterConfig(), 4)
    assert first.digest == outer_step(state_of(), average, alone, OuterConfig(), 4).digest


def test_progress_never_goes_back() -> None:
    progress = {0: PathProgress(10, 9)}
    table = [Contribution(0, "a", 1), Contribution(0, "b", 2)]
    assert advanced_progress(progress, table, 5) == {0: PathProgress(13, 9)}
    assert progress == {0: PathProgress(10, 9)}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_nothing_that_is_not_finite_is_committed(value: float) -> None:
    state, average = state_of(parameters=torch.full((SIZE,), -3e38)), torch.zeros(SIZE)
    average[17] = value
    with pytest.raises(IntegrityError, match="not finite"):
        outer_step(state, average, TABLE, OuterConfig(), 4)


def test_averages_of_another_kind_are_refused() -> None:
    for wrong in (torch.zeros(SIZE - 1), torch.zeros(1), torch.zeros(SIZE, dtype=torch.float16)):
        with pytest.raises(IntegrityError, match="the average for"):
            outer_step(state_of(), wrong, TABLE, OuterConfig(), 4)


def test_one_path_with_plain_sgd_takes_the_local_parameters() -> None:
    anchor, local = drawn(0), drawn(1)
    config = OuterConfig(learning_rate=1.0, momentum=0.0)
    state = state_of(parameters=anchor, momentum=torch.zeros(SIZE))
    table = canonical_table([Contribution(0, "a", 1)])
    stepped = outer_step(state, outer_gradient(anchor, local), table, config, 0)
    torch.testing.assert_close(stepped.parameters, local)


def test_order_of_summing_matters_to_bits_so_it_is_fixed() -> None:
    parts = [drawn(i, 10.0**i) for i in range(3)]
    sums = {
        PLAIN.combine([parts[i] for i in order], [1 / 3] * 3).numpy().tobytes()
        for order in itertools.permutations(range(3))
    }
    assert len(sums) > 1


# The schedule


def test_the_step_takes_the_rate_of_its_version() -> None:
    average = drawn(5)
    config = OuterConfig(warmup_steps=8)
    stepped = outer_step(state_of(), average, TABLE, config, 4)
    constant = OuterConfig(learning_rate=0.7 * 4 / 8)
    assert stepped.digest == outer_step(state_of(), average, TABLE, constant, 4).digest
    after = outer_step(state_of(version=7), average, TABLE, config, 4)
    assert after.digest == outer_step(state_of(version=7), average, TABLE, OuterConfig(), 4).digest
