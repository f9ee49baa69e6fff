"""Weights, lengths and the outer step, against arithmetic done another way."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dipaco.base.errors import IntegrityError
from dipaco.modules.contributions import CHUNK_VALUES, CODECS, contribution_norm
from dipaco.modules.layout import ModuleLayout
from dipaco.modules.outer import (
    LEAST_OF_PARAMETERS,
    OuterGradient,
    OuterRule,
    Usual,
    advanced_progress,
    bounded_rows,
    canonical_rows,
    encode_in_place,
)
from dipaco.modules.state import ModuleState, PathProgress
from dipaco.protocol.config import ContributionsConfig, OuterConfig
from dipaco.protocol.outer_row import OuterRow
from support.runs.contribution_files import made_file
from support.runs.exact_numbers import square_roots

SIZE = 1000
LAYOUT = ModuleLayout(("w",), ((SIZE,),))
ROWS = canonical_rows([OuterRow(0, "a", 100), OuterRow(1, "b", 300)])
GOLDEN_NORM = "0x1.b9eb6d909be22p+12"
GOLDEN_DIGESTS = {
    "float32": "048fb7d367f9b3c4a77fb0db0d801bb36e9ccaa6fd8a016c233f31c3c4537f21",
    "int4": "f79f045b31dab5a2531d4cf0e606ea936a63c3b6e7c41b313a7ea62eb4524a57",
    "int2": "564b103d1939b7f383f8aa94e447db4fbc582805d4015ac7c9632a175563341d",
    "sign": "1d44273f11653dbb46e0916e3be6b4ec095fcb674e26215bddc22bcc27628c2f",
}


# Section 7.1; the golden digests are of steps with it.
PAPER = OuterConfig(learning_rate=0.7, momentum=0.9)


def rule_of(codec="float32", shard_sequences=None, outer=None, **contributions):
    config = ContributionsConfig(codec=codec, **contributions)
    return OuterRule(config, outer or PAPER, shard_sequences)


PLAIN = rule_of()


def files_of(rule, *tensors):
    return [rule.codec.encode(tensor) for tensor in tensors]


def drawn(seed, scale=1.0):
    return scale * torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def state_of(seed=0, **overrides):
    values = {
        "module": "L0.E0",
        "version": 3,
        "parameters": drawn(seed),
        "momentum": drawn(seed + 1, 0.1),
        "progress": {0: PathProgress(1000, 2)},
        "layout": LAYOUT,
    }
    return ModuleState(**{**values, **overrides})


rows = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 10**9)), min_size=1, max_size=8).map(
    lambda pairs: [OuterRow(path, f"peer{i}", n) for i, (path, n) in enumerate(pairs)]
)


@given(rows, st.randoms())
def test_canonical_order_does_not_depend_on_arrival(rows, random):
    shuffled = list(rows)
    random.shuffle(shuffled)
    assert canonical_rows(shuffled) == canonical_rows(rows)
    assert list(canonical_rows(rows)) == sorted(rows, key=lambda row: (row.path, row.peer))


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [OuterRow(0, "a", 0)],
        [OuterRow(0, "a", -5)],
        [OuterRow(-1, "a", 5)],
        [OuterRow(0, "a", 1.5)],
        [OuterRow("0", "a", 5)],
        [OuterRow(True, "a", 5)],
        [OuterRow(0, "a", True)],
        [OuterRow(0, "a", 5), OuterRow(1, "a", 5)],
        [OuterRow(0, "", 5), OuterRow(0, "", 5)],
    ],
)
def test_impossible_rows(rows):
    with pytest.raises(ValueError, match=r"contribut"):
        canonical_rows(rows)


def test_a_single_process_needs_no_peer_names():
    rows = canonical_rows([OuterRow(1, "", 5), OuterRow(0, "", 5)])
    assert [row.path for row in rows] == [0, 1]


@given(rows, st.lists(st.integers(1, 10**6), min_size=6, max_size=6), st.booleans())
def test_weights_follow_shards_then_tokens(rows, sizes, by_shard):
    canonical = canonical_rows(rows)
    shards = dict(enumerate(sizes)) if by_shard else None
    usual = Usual({row.path: 10**9 for row in canonical})
    weights = rule_of(shard_sequences=shards).weights(canonical, usual)
    paths = {row.path for row in canonical}
    total = sum(sizes[path] for path in paths)
    for row, weight in zip(canonical, weights, strict=True):
        replicas = sum(other.tokens for other in canonical if other.path == row.path)
        share = Fraction(sizes[row.path], total) if by_shard else Fraction(1, len(paths))
        assert weight == pytest.approx(float(share * row.tokens / replicas), rel=1e-14)
    assert math.fsum(weights) == pytest.approx(1, rel=1e-14)


def test_a_lie_takes_four_fifths_of_a_path_from_one_honest_replica():
    """Of two honest ones it takes two thirds; other paths lose nothing."""
    rule = rule_of(shard_sequences={0: 30, 1: 10})
    one = canonical_rows([OuterRow(0, "a", 1000), OuterRow(0, "z", 10**12)])
    assert rule.weights(one) == pytest.approx((0.2, 0.8))
    assert rule.weights((*one, OuterRow(1, "o", 10))) == pytest.approx((0.15, 0.6, 0.25))
    # Twice the usual tokens of the path are believed, if that is more.
    assert rule.weights(one, Usual({0: 3000})) == pytest.approx((1 / 7, 6 / 7))
    two = canonical_rows([*one, OuterRow(0, "b", 1000)])
    assert rule.weights(two) == pytest.approx((1 / 6, 1 / 6, 2 / 3))


def test_a_replica_that_has_just_come_takes_nothing_from_one_with_a_usual_round():
    rows = canonical_rows([OuterRow(0, "a", 200_000), OuterRow(0, "new", 1000)])
    rule = PLAIN
    assert rule.weights(rows) == pytest.approx((0.8, 0.2))
    counted = rule.weights(rows, Usual({0: 150_000}))
    assert counted == pytest.approx((200 / 201, 1 / 201))


def progress_of(usual, version):
    return {path: PathProgress(tokens * version, version - 1) for path, tokens in usual.items()}


@given(
    rows,
    st.dictionaries(st.integers(0, 5), st.integers(1, 10**6), max_size=4),
    st.integers(1, 100),
    st.sampled_from((1, 16)),
)
def test_no_row_counts_more_than_is_credible(rows, usual, version, leap):
    canonical = canonical_rows(rows)
    known = Usual.of(progress_of(usual, version), version)
    assert known.tokens == usual
    bounded = bounded_rows(canonical, known, leap)
    assert canonical_rows(bounded) == bounded
    tokens = sorted(row.tokens for row in canonical)
    is_alone = usual and len(tokens) == 1
    most = leap * (max(usual.values()) if is_alone else tokens[(len(tokens) - 1) // 2])
    for row, counted in zip(canonical, bounded, strict=True):
        assert (counted.path, counted.peer) == (row.path, row.peer)
        assert counted.tokens == min(row.tokens, most)
    # What a liar says beyond that changes nothing for anybody.
    more = [replace(row, tokens=row.tokens * 10**6) if row.tokens > most else row for row in rows]
    assert bounded_rows(canonical_rows(more), known, leap) == bounded


def test_one_lie_moves_a_schedule_by_sixteen_steps_at_most():
    progress = progress_of({0: 1000, 1: 500}, 200)
    usual = Usual.of(progress, 200)
    (row,) = bounded_rows([OuterRow(1, "liar", 10**12)], usual)
    assert row.tokens == 16_000
    assert advanced_progress(progress, [row], 200)[1].tokens == 100_000 + 16_000


# Of fp32 vectors: nothing, or at least the smallest such number.
@given(st.lists(st.just(0.0) | st.floats(1e-45, 1e30), min_size=1, max_size=33))
@example([5e24, 1e-45])
def test_what_is_longer_than_the_lower_median_is_shortened_to_it(norms):
    above = sorted(norm for norm in norms if norm > 0)
    scales = PLAIN.scales(norms)
    for norm, scale in zip(norms, scales, strict=True):
        assert 0 < scale <= 1
        if len(above) < 2:
            assert scale == 1
        else:
            most = above[(len(above) - 1) // 2]
            assert norm * scale == pytest.approx(min(norm, most))
    assert rule_of(shorten=False).scales(norms) == (1.0,) * len(norms)


def test_of_two_the_shorter_is_the_measure_and_one_alone_is_never_shortened():
    assert PLAIN.scales([1.0, 1000.0]) == (1.0, 0.001)
    assert PLAIN.scales([1000.0, 0.0]) == (1.0, 1.0)
    assert PLAIN.scales([1000.0]) == (1.0,)


def test_of_two_contributions_a_share_of_the_parameters_is_the_third_voice():
    """One of next to nothing would otherwise bring the other's work to nothing."""
    tiny, norm = 1e-38, 0.5 / LEAST_OF_PARAMETERS
    assert PLAIN.scales([1.0, tiny], norm) == (0.5, 1.0)
    assert PLAIN.scales([0.25, tiny], norm) == (1.0, 1.0)
    assert PLAIN.scales([1.0, 1000.0], norm) == (1.0, 0.001)
    assert PLAIN.scales([0.25, 1000.0], norm) == (1.0, 0.0005)
    assert PLAIN.scales([1.0, 1.0, tiny], norm) == (1.0, 1.0, 1.0)
    assert PLAIN.scales([1.0, tiny, 0.0], norm) == (0.5, 1.0, 1.0)


@pytest.mark.parametrize("version", [0, 3])
def test_tiny_contributions_never_bring_the_work_of_another_to_nothing(version):
    """From the genesis on, or later; a step of half the work is what its weight gives it."""
    state = state_of(version=version, momentum=drawn(1, 0.1 * (version > 0)))
    for round_index in range(version, version + 12):
        work = drawn(100 + round_index, 0.1)
        files = files_of(PLAIN, work, 1e-30 * work)
        stepped = PLAIN.step(state, files, ROWS, round_index)
        moved = (stepped.parameters - state.parameters).norm()
        assert moved > LEAST_OF_PARAMETERS / 16 * state.parameters.norm()
        state = stepped


def test_a_thousandfold_contribution_is_an_ordinary_one():
    rows = canonical_rows([OuterRow(path, str(path), 100) for path in range(5)])
    tensors = [drawn(path) for path in range(5)]
    ordinary = PLAIN.step(state_of(), files_of(PLAIN, *tensors), rows, 4)
    tensors[2] = tensors[2] * 1000
    files = files_of(PLAIN, *tensors)
    shortened = PLAIN.step(state_of(), files, rows, 4)
    taken = rule_of(shorten=False).step(state_of(), files, rows, 4)
    assert (shortened.parameters - ordinary.parameters).norm() < drawn(0).norm()
    assert (taken.parameters - ordinary.parameters).norm() > 100 * drawn(0).norm()


def norm_of(flat):
    codec = CODECS["float32"]
    return contribution_norm(codec, codec.encode(flat), flat.numel())


def test_a_golden_norm():
    """Sums of squares round; the order in which they are added is part of the protocol."""
    assert norm_of(square_roots(9_999)).hex() == GOLDEN_NORM


def test_a_path_without_sequences_has_no_weight():
    for sizes in ({0: 10, 1: 0}, {0: 10}):
        with pytest.raises(ValueError, match="path 1 contributes"):
            rule_of(shard_sequences=sizes).weights(ROWS)


def naive_step(rule, state, tensors, weights):
    """Compute a step with NumPy, each operation rounded by itself."""
    f, codec = np.float32, rule.codec
    decoded = [codec.decode(codec.encode(tensor), tensor.numel()) for tensor in tensors]
    lengths = [math.sqrt(math.fsum(float(v) ** 2 for v in tensor)) for tensor in decoded]
    median = sorted(lengths)[(len(lengths) - 1) // 2]
    average = np.zeros(state.layout.size, dtype=f)
    for tensor, weight, length in zip(decoded, weights, lengths, strict=True):
        scale = min(1.0, median / length)
        average = average + f(weight * scale) * tensor.numpy()
    gradient = average * f(math.sqrt(len(weights)))
    momentum = state.momentum.numpy() * f(0.9) + gradient
    parameters = state.parameters.numpy() - (momentum * f(0.9) + gradient) * f(0.7)
    return momentum.tobytes(), parameters.tobytes()


@pytest.mark.parametrize("codec", CODECS)
def test_the_step_rounds_every_operation(codec):
    rule = rule_of(codec, {0: 3, 1: 7, 2: 2})
    rows = [OuterRow(path, str(path), 100) for path in range(3)]
    tensors = [drawn(9, 0.01), drawn(10, 0.03), drawn(11, 0.02)]
    stepped = rule.step(state_of(), files_of(rule, *tensors), rows, 4)
    momentum, parameters = naive_step(rule, state_of(), tensors, [3 / 12, 7 / 12, 2 / 12])
    assert stepped.momentum.numpy().tobytes() == momentum
    assert stepped.parameters.numpy().tobytes() == parameters


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
def test_what_an_encoding_loses_comes_with_the_next(codec):
    trained, anchor, parameters = drawn(9, 0.01), torch.zeros(SIZE), torch.zeros(SIZE)
    for _ in range(60):
        parameters = parameters - trained
        local = parameters.clone()
        data = encode_in_place(OuterGradient(anchor, local), codec)
        stepped = anchor - codec.decode(data, SIZE)
        anchor, parameters = stepped, stepped + (parameters - local)
    assert torch.allclose(parameters, -60 * trained, atol=1e-4)
    assert (anchor + 60 * trained).norm() < 8 * trained.norm()


@pytest.mark.parametrize("combine", ["weighted_mean", "trimmed_mean"])
def test_neither_threads_nor_pieces_change_the_bits(combine):
    size = 75 * CHUNK_VALUES + 77  # enough for PyTorch to use several threads
    layout = ModuleLayout(("w",), ((size,),))
    generator = torch.Generator().manual_seed(0)
    parameters, momentum, *tensors = torch.randn(7, size, generator=generator)
    state = ModuleState("L0.E0", 0, parameters, momentum, {}, layout)
    rows = [OuterRow(number // 2, str(number), 10 + number) for number in range(5)]
    rule = rule_of("int4", combine=combine)
    files = files_of(rule, *tensors)
    threads, digests = torch.get_num_threads(), set()
    try:
        for count, chunks in ((1, 1), (2, 7), (3, 64), (2, 1000)):
            torch.set_num_threads(count)
            pieces = replace(rule, piece_values=chunks * CHUNK_VALUES)
            digests.add(pieces.step(state, files, rows, 0).digest)
    finally:
        torch.set_num_threads(threads)
    assert len(digests) == 1


@pytest.mark.parametrize("codec", CODECS)
def test_golden_steps(codec):
    """Pins the bits; a change that is meant raises the protocol version too."""
    ramp = torch.arange(SIZE, dtype=torch.float32)
    state = state_of(parameters=ramp / 7, momentum=ramp / 1e4)
    rule = rule_of(codec, {0: 3, 1: 7})
    files = [made_file(codec, SIZE), made_file(codec, SIZE, variant=5)]
    stepped = rule.step(state, files, ROWS, 4)
    assert stepped.digest == GOLDEN_DIGESTS[codec]


def test_a_step_keeps_its_inputs_and_counts():
    state, files = state_of(), files_of(PLAIN, drawn(9), drawn(10))
    digest, before = state.digest, list(files)
    stepped = PLAIN.step(state, files, ROWS, 4, paths=(0, 1))
    del state.__dict__["digest"]
    assert state.digest == digest
    assert files == before
    assert stepped.version == 4
    assert stepped.progress == {0: PathProgress(1100, 4), 1: PathProgress(300, 4)}
    assert stepped.tokens == 1400
    with pytest.raises(ValueError, match=r"no paths \[1\]"):
        PLAIN.step(state, files, ROWS, 4, paths=(0,))


def test_rescaling_counts_paths_not_peers():
    replicas = canonical_rows(OuterRow(0, f"peer{i}", 10) for i in range(4))
    alone = canonical_rows([OuterRow(0, "a", 40)])
    same = drawn(9)
    first = PLAIN.step(state_of(), files_of(PLAIN, *[same] * 4), replicas, 4)
    assert first.digest == PLAIN.step(state_of(), files_of(PLAIN, same), alone, 4).digest


def test_progress_never_goes_back():
    progress = {0: PathProgress(10, 9)}
    rows = [OuterRow(0, "a", 1), OuterRow(0, "b", 2)]
    assert advanced_progress(progress, rows, 5) == {0: PathProgress(13, 9)}
    assert progress == {0: PathProgress(10, 9)}


def test_a_step_is_never_to_what_is_not_finite():
    state, gradient = state_of(parameters=torch.full((SIZE,), -3e38)), torch.zeros(SIZE)
    gradient[17] = 3e38
    with pytest.raises(IntegrityError, match="not finite"):
        PLAIN.step(state, files_of(PLAIN, gradient), ROWS[:1], 4)


def test_a_step_wants_a_file_for_each_row():
    with pytest.raises(ValueError, match="zip"):
        PLAIN.step(state_of(), files_of(PLAIN, drawn(9)), ROWS, 4)


def test_one_path_with_plain_sgd_takes_the_local_parameters():
    anchor, local = drawn(0), drawn(1)
    rule = rule_of(outer=OuterConfig(learning_rate=1.0, momentum=0.0))
    state = state_of(parameters=anchor, momentum=torch.zeros(SIZE))
    files = files_of(rule, OuterGradient(anchor, local)[:])
    stepped = rule.step(state, files, [OuterRow(0, "a", 1)], 0)
    torch.testing.assert_close(stepped.parameters, local)


def test_private_modules_take_an_outer_step_of_their_own():
    outer = OuterConfig(private_learning_rate=0.25, private_momentum=0.1)
    alike = OuterConfig(learning_rate=0.25, momentum=0.1)
    rule, files = rule_of(outer=outer), files_of(PLAIN, drawn(5))
    row = [OuterRow(7, "a", 100)]
    for module, other in (("P7", rule_of(outer=alike)), ("L0.E0", rule_of(outer=outer))):
        state = state_of(module=module)
        shared = other.step(replace(state, module="L0.E0"), files, row, 4)
        assert rule.step(state, files, row, 4).digest == replace(shared, module=module).digest


def test_a_trimmed_mean_leaves_a_liar_out():
    rows = [OuterRow(path, str(path), 100) for path in range(5)]
    common = drawn(50)
    tensors = [common + drawn(path, 0.1) for path in range(5)]
    plain = rule_of(outer=OuterConfig(learning_rate=1.0, momentum=0.0))
    honest = plain.step(state_of(), files_of(plain, *tensors[1:]), rows[1:], 4).parameters
    tensors[0] = -8 * common
    robust = replace(plain, contributions=ContributionsConfig(codec="float32", combine="trimmed_mean"))
    files = files_of(plain, *tensors)
    root = math.sqrt(5 / 4)
    moved = (robust.step(state_of(), files, rows, 4).parameters - state_of().parameters) / root
    lied = (plain.step(state_of(), files, rows, 4).parameters - state_of().parameters) / root
    wanted = honest - state_of().parameters
    assert (moved - wanted).norm() < 0.5 * (lied - wanted).norm()
