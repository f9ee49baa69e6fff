"""Weights, lengths and the outer step, against arithmetic done another way."""

import ast
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dipaco.base.errors import IntegrityError, MachineError
from dipaco.modules import trimmed_mean
from dipaco.modules.contributions import CHUNK_VALUES, CODECS, contribution_norm
from dipaco.modules.layout import ModuleLayout
from dipaco.modules.outer import (
    OuterGradient,
    OuterRule,
    advanced_progress,
    canonical_rows,
    encode_in_place,
    median_norm,
    moved_norm,
)
from dipaco.modules.state import MAX_COUNT, ModuleState, PathProgress, read_state, state_chunks
from dipaco.modules.trimmed_mean import fp32
from dipaco.protocol.chain.outer_row import OuterRow
from dipaco.protocol.config import ContributionsConfig, OuterConfig
from support.runs.contribution_files import made_file
from support.runs.exact_numbers import square_roots

SIZE = 1000
LAYOUT = ModuleLayout(("w",), ((SIZE,),))
ROWS = canonical_rows([OuterRow(0, "a", 100), OuterRow(1, "b", 300)])
THREE = canonical_rows([OuterRow(path, str(path), 100) for path in range(3)])
FOUR = canonical_rows([OuterRow(path, str(path), 100) for path in range(4)])
GOLDEN_TRIMMED_DIGEST = "9e3e1084c337e514e8cb4060609e13bd7facbea1d04c4f414f976af316adbd74"
GOLDEN_NORM = "0x1.b9eb6d909be22p+12"
GOLDEN_DIGESTS = {
    "float32": "04d5c47dfd05b80485d3a1c080a4f6f3bf047b47c38ce9a47359b6d28955154a",
    "int4": "51c233e1f1fe2ab5c7fc3e349017f9259863345307a03736c577fac06d6af69c",
    "int2": "c86282b56f8e5e3527822fb16102e2b616fb43f78b25065380f8a1e62f496ee3",
    "sign": "a72e6e326e93b6363a39055b0027cae661c6e04705e8ff35b1bb715c1204f6af",
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
        "progress": {0: PathProgress(1000, 2, 5, 1000)},
        "layout": LAYOUT,
        "usual_norm": 0.75,
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


def usually(tokens):
    """Return the progress of paths that grow so much in a step."""
    return {path: PathProgress(10 * usual, 9, 10, 10 * usual) for path, usual in tokens.items()}


@given(rows, st.lists(st.integers(1, 10**6), min_size=6, max_size=6), st.booleans())
def test_weights_follow_shards_then_tokens(rows, sizes, by_shard):
    """Of three replicas or more each counts the median at most."""
    canonical = canonical_rows(rows)
    shards = dict(enumerate(sizes)) if by_shard else None
    usual = usually({row.path: 10**9 for row in canonical})
    weights = rule_of(shard_sequences=shards).weights(canonical, usual)
    paths = {row.path for row in canonical}
    total = sum(sizes[path] for path in paths)
    for row, weight in zip(canonical, weights, strict=True):
        said = sorted(other.tokens for other in canonical if other.path == row.path)
        most = said[(len(said) - 1) // 2] if len(said) > 2 else said[-1]
        replicas = sum(min(tokens, most) for tokens in said)
        share = Fraction(sizes[row.path], total) if by_shard else Fraction(1, len(paths))
        assert weight == pytest.approx(float(share * min(row.tokens, most) / replicas), rel=1e-14)
    assert math.fsum(weights) == pytest.approx(1, rel=1e-14)


def test_a_lie_takes_two_thirds_of_a_path_from_one_honest_replica():
    """Of two honest ones it takes no more than each of them has; other paths lose nothing."""
    rule = rule_of(shard_sequences={0: 30, 1: 10})
    one = canonical_rows([OuterRow(0, "a", 1000), OuterRow(0, "z", 10**12)])
    assert rule.weights(one) == pytest.approx((1 / 3, 2 / 3))
    assert rule.weights((*one, OuterRow(1, "o", 10))) == pytest.approx((0.25, 0.5, 0.25))
    # Twice the usual tokens of the path are believed, if that is more.
    assert rule.weights(one, usually({0: 3000})) == pytest.approx((1 / 7, 6 / 7))
    two = canonical_rows([*one, OuterRow(0, "b", 1000)])
    assert rule.weights(two) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert rule.weights(two, usually({0: 3000})) == pytest.approx((1 / 3, 1 / 3, 1 / 3))


def test_a_replica_that_has_just_come_takes_nothing_from_one_with_a_usual_round():
    rows = canonical_rows([OuterRow(0, "a", 200_000), OuterRow(0, "new", 1000)])
    rule = PLAIN
    assert rule.weights(rows) == pytest.approx((2 / 3, 1 / 3))
    counted = rule.weights(rows, usually({0: 150_000}))
    assert counted == pytest.approx((200 / 201, 1 / 201))


@given(rows, st.dictionaries(st.integers(0, 5), st.integers(1, 10**6), max_size=4))
def test_a_path_grows_by_the_lower_median_of_its_rows_and_at_most_twice_what_is_usual(rows, usual):
    progress, rows = usually(usual), canonical_rows(rows)
    others = sorted(usual.values() or [row.tokens for row in rows])
    first = others[(len(others) - 1) // 2]
    grown = advanced_progress(progress, rows, 9)
    for path in {row.path for row in rows}:
        said = sorted(row.tokens for row in rows if row.path == path)
        counted = min(said[(len(said) - 1) // 2], 2 * max(usual.get(path, 0), first))
        steps = 11 if path in usual else 1
        before = 10 * usual.get(path, 0)
        assert grown[path] == PathProgress(before + counted, 9, steps, before + sum(said))
    assert all(grown[path] == progress[path] for path in usual if path not in {row.path for row in rows})


def test_what_one_of_a_path_says_moves_its_schedule_by_no_more_than_twice_the_usual():
    progress = usually({0: 1000, 1: 500, 2: 1000})
    lie = 10**12
    alone = advanced_progress(progress, [OuterRow(1, "liar", lie)], 10)
    assert alone[1].tokens == 5000 + 2 * 1000
    beside = advanced_progress(progress, canonical_rows([OuterRow(1, "a", 510), OuterRow(1, "liar", lie)]), 10)
    assert beside[1].tokens == 5000 + 510
    elsewhere = advanced_progress(progress, [OuterRow(7, "liar", lie)], 10)
    assert elsewhere[7].tokens == 2 * 1000
    first = advanced_progress({}, canonical_rows([OuterRow(0, "a", 100), OuterRow(1, "liar", lie)]), 0)
    assert first[1].tokens == 2 * 100


def test_lies_that_grow_each_round_move_the_schedule_of_their_path_with_the_square_of_its_rounds():
    """Just under what is believed, twenty rounds long, on a path on which nobody else trains."""
    progress = usually({0: 1000, 1: 1000})
    for number in range(20):
        rows = canonical_rows([OuterRow(0, "a", 1000), OuterRow(1, "liar", 10**12)])
        progress = advanced_progress(progress, rows, 10 + number)
    honest, lied = progress[0].tokens, progress[1].tokens
    assert honest == 30 * 1000
    assert lied < 9 * 10 * 1000
    # A path that is new is not measured by it.
    elsewhere = advanced_progress(progress, [OuterRow(7, "liar", 10**12)], 30)
    assert elsewhere[7].tokens == 2 * 1000


@pytest.mark.parametrize("lies", [1, 5])
def test_a_path_whose_rows_said_next_to_nothing_goes_on_as_others_do(lies):
    """A liar, or a peer that came just before a boundary. What a path has read, and so which texts come next, was
    held back for hundreds of rounds: its peers read the same batches again after each step."""
    progress = usually({0: 1000, 2: 1000})
    for number in range(lies):
        progress = advanced_progress(progress, [OuterRow(1, "liar", 1)], number)
    for number in range(10):
        progress = advanced_progress(progress, [OuterRow(1, "a", 1000)], lies + number)
    assert (progress[1].tokens, progress[1].read) == (10_000 + lies, 10_000 + lies)


def test_what_a_path_has_read_is_what_its_rows_say_and_begins_again_where_it_would_be_too_great():
    rows = canonical_rows([OuterRow(0, "a", 1000), OuterRow(0, "liar", 1)])
    progress = advanced_progress(usually({0: 1000}), rows, 10)
    assert (progress[0].tokens, progress[0].read) == (10_001, 11_001)
    for number in range(40):
        rows = canonical_rows([OuterRow(0, "a", 1000), OuterRow(0, "liar", 2**59)])
        before, progress = progress, advanced_progress(progress, rows, 11 + number)
        assert 0 <= progress[0].read < 2**62
        assert progress[0].read != before[0].read


def test_a_faster_peer_on_a_path_counts_in_full_as_soon_as_the_average_of_the_path_allows():
    progress = {0: PathProgress(3 * 1000, 2, 3, 3 * 1000)}
    for number in range(12):
        progress = advanced_progress(progress, [OuterRow(0, "fast", 4000)], 3 + number)
    assert progress[0].tokens >= 0.8 * (3 * 1000 + 12 * 4000)


# At least the smallest norm of an fp32 vector: none is empty.
norms = st.floats(1e-45, 1e30)


@given(st.lists(norms, min_size=1, max_size=33), norms)
@example([5e24, 1e-45], 1.0)
def test_the_usual_norm_has_a_voice_in_a_group_of_an_even_number(norms, usual):
    middle = len(norms) // 2
    voices = norms if len(norms) % 2 else [*norms, usual]
    assert median_norm(norms, usual) == sorted(voices)[middle]


@given(st.lists(norms, min_size=1, max_size=33), norms, norms)
def test_the_usual_norm_follows_the_lower_median_slowly_and_has_a_least_value(norms, usual, parameters):
    followed = sorted(norms)[(len(norms) - 1) // 2]
    moved = sorted([0.9375 * usual, followed, 1.0625 * usual])[1]
    assert moved_norm(norms, usual, parameters) == max(moved, parameters / 128)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("lie", [1e-38, 1e20])
def test_half_of_a_group_decides_nothing(count, lie):
    """What is taken stays between what is usual and what the others contribute."""
    for honest, usual in ((2.0, 1.0), (0.5, 1.0), (1.0, 1.0)):
        median = median_norm([honest, lie] * count, usual)
        assert min(honest, usual) <= median <= max(honest, usual)
        assert median_norm([*[honest, lie] * count, honest], usual) == honest


@pytest.mark.parametrize("lie", [1e-30, 1e12])
@pytest.mark.parametrize("usual", [10.0, 32.0, 100.0])
def test_half_that_lies_for_twenty_rounds_does_not_decide_how_long_steps_are(usual, lie):
    """Honest contributions are as long as ever; what is usual begins too short, right, or too long."""
    state, length, taken = state_of(usual_norm=usual), float(drawn(0).norm()), []
    for round_index in range(4, 24):
        honest = drawn(round_index), drawn(100 + round_index)
        files = files_of(PLAIN, *honest, *[lie * drawn(7)] * 2)
        before, state = state, PLAIN.step(state, files, FOUR, round_index)
        taken.append(float((state.momentum - before.momentum * fp32(0.9)).norm()))
    assert min(taken) > 0.15 * min(length, usual)
    assert max(taken) < 2 * max(length, usual)
    assert taken[-1] < 2 * length


def test_what_is_longer_than_the_median_is_shortened_to_it():
    tensors = [drawn(9), 3 * drawn(10), 0.1 * drawn(11)]
    length = float(tensors[0].norm())
    tensors[1] *= 3 * length / tensors[1].norm()
    shortened = [tensors[0], tensors[1] / 3, tensors[2]]
    stepped = PLAIN.step(state_of(), files_of(PLAIN, *tensors), THREE, 4)
    taken = rule_of(shorten=False).step(state_of(), files_of(PLAIN, *shortened), THREE, 4)
    assert torch.allclose(stepped.parameters, taken.parameters, atol=1e-5)
    assert stepped.usual_norm == 1.0625 * 0.75
    assert taken.usual_norm == state_of().usual_norm


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
    state = ModuleState("L0.E0", 0, parameters, momentum, {}, layout, 1.0)
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
    assert stepped.progress == {0: PathProgress(1100, 4, 6, 1100), 1: PathProgress(300, 4, 1, 300)}
    assert stepped.tokens == 1400
    with pytest.raises(ValueError, match=r"no paths \[1\]"):
        PLAIN.step(state, files, ROWS, 4, paths=(0,))


def test_rescaling_counts_paths_not_peers():
    replicas = canonical_rows(OuterRow(0, f"peer{i}", 10) for i in range(4))
    alone = canonical_rows([OuterRow(0, "a", 10)])
    same = drawn(9)
    first = PLAIN.step(state_of(), files_of(PLAIN, *[same] * 4), replicas, 4)
    assert torch.equal(first.parameters, PLAIN.step(state_of(), files_of(PLAIN, same), alone, 4).parameters)


def test_progress_never_goes_back():
    progress = {0: PathProgress(10, 9, 2, 10)}
    rows = [OuterRow(0, "a", 1), OuterRow(0, "b", 2)]
    assert advanced_progress(progress, rows, 5) == {0: PathProgress(11, 9, 3, 13)}
    assert progress == {0: PathProgress(10, 9, 2, 10)}


def test_no_count_is_greater_than_one_that_a_state_can_say():
    progress = {0: PathProgress(MAX_COUNT - 1, 9, 50, MAX_COUNT - 1)}
    progress = advanced_progress(progress, [OuterRow(0, "a", 20)], 10)
    assert progress == {0: PathProgress(MAX_COUNT, 10, 51, 18)}
    state = state_of(progress=progress)
    assert read_state(b"".join(state_chunks(state)), LAYOUT).digest == state.digest


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


def test_of_three_contributions_the_trimmed_mean_takes_the_middle_and_of_two_the_mean():
    rule = rule_of(outer=OuterConfig(learning_rate=1.0, momentum=0.0), combine="trimmed_mean", shorten=False)
    said = [torch.full((SIZE,), value) for value in (1.0, 2.0, 1000.0)]
    state = state_of(parameters=torch.zeros(SIZE), momentum=torch.zeros(SIZE))

    def moved(*tensors):
        rows = [OuterRow(path, str(path), 100) for path in range(len(tensors))]
        stepped = rule.step(state, files_of(rule, *tensors), rows, 4)
        return float(-stepped.parameters[0]) / math.sqrt(len(tensors))

    assert moved(*said) == pytest.approx(2.0)
    assert moved(*said[1:]) == pytest.approx(501.0)


def zeros_of_both_signs(variant):
    """Return a file with blocks whose scale is 0: their values are 0 with the signs of their codes."""
    data = bytearray(made_file("int4", SIZE, variant=variant))
    blocks = CODECS["int4"].blocks(SIZE)
    data[2 : 2 * blocks] = bytes(2 * blocks - 2)
    data[2 * blocks :] = (
        torch.randint(0, 256, (len(data) - 2 * blocks,), generator=torch.Generator().manual_seed(variant))
        .to(torch.uint8)
        .numpy()
        .tobytes()
    )
    return data


def test_no_zero_of_a_step_depends_on_how_wide_vectors_are(monkeypatch):
    """Three replicas of a private module, whose momentum is 0: there the sign of a zero would stay."""
    rule = rule_of("int4", outer=OuterConfig(), combine="trimmed_mean")
    rows, files = canonical_rows([OuterRow(7, peer, 10) for peer in "abc"]), [zeros_of_both_signs(n) for n in range(3)]
    digests = set()
    for sorted_values in (16384, 40, 8, 1):
        monkeypatch.setattr(trimmed_mean, "SORTED_VALUES", sorted_values)
        stepped = rule.step(state_of(module="P7", momentum=-drawn(3).abs()), files, rows, 4)
        assert not (torch.signbit(stepped.momentum) & (stepped.momentum == 0)).any()
        digests.add(stepped.digest)
    assert len(digests) == 1


def test_a_step_is_the_same_after_a_library_has_made_small_numbers_zero():
    state, files = state_of(momentum=torch.full((SIZE,), 1e-38)), files_of(PLAIN, drawn(5), drawn(6))
    digest = PLAIN.step(state, files, ROWS, 4).digest
    torch.set_flush_denormal(True)
    try:
        assert PLAIN.step(state, files, ROWS, 4).digest == digest
    finally:
        torch.set_flush_denormal(False)


def test_a_machine_with_another_arithmetic_takes_no_step(monkeypatch):
    monkeypatch.setattr(torch, "set_flush_denormal", lambda mode: False)
    monkeypatch.setattr(torch, "full", lambda *shape, **_: torch.zeros(1))
    with pytest.raises(MachineError, match="small numbers as zero"):
        PLAIN.step(state_of(), files_of(PLAIN, drawn(5)), ROWS[:1], 4)


@pytest.mark.parametrize("name", ["outer", "trimmed_mean", "contributions"])
def test_sums_of_floats_are_exact(name):
    """Python 3.12 adds floats otherwise than 3.11 does: `sum` is for integers, in one function."""
    tree = ast.parse(Path(trimmed_mean.__file__).with_name(f"{name}.py").read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    found = {
        function.name
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "sum"
    }
    assert found <= {"_sum_of_counts"}


def test_a_golden_step_of_shards_whose_sum_rounds():
    """By a trimmed mean of two replicas and another path, with sums that 3.11 and 3.12 round otherwise."""
    rows = canonical_rows([OuterRow(0, "a", 5), OuterRow(0, "b", 7), OuterRow(1, "c", 11), OuterRow(2, "d", 3)])
    rule = rule_of("int4", {0: 2**24 + 1, 1: 2**24 - 1, 2: 3}, combine="trimmed_mean")
    files = [made_file("int4", SIZE, variant=variant) for variant in (0, 5, 7, 9)]
    ramp = torch.arange(SIZE, dtype=torch.float32)
    stepped = rule.step(state_of(parameters=ramp / 7, momentum=ramp / 1e4), files, rows, 4)
    assert stepped.digest == GOLDEN_TRIMMED_DIGEST
