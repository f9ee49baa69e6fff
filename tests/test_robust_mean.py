"""Robust means: what a few can move, what the bits are, and that swarm and reference agree."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
from dataclasses import replace

import pytest
import torch
from dipaco.modules.codecs import CODECS, MeanName
from dipaco.modules.config import AveragingConfig, parse_config
from dipaco.modules.errors import ConfigurationError
from dipaco.modules.outer import AveragingRule, Contribution, canonical_table
from dipaco.modules.robust_mean import (
    MEASURED_VALUES,
    Mean,
    centered_clipping,
    exact_norm,
    of_paths,
    trim_count,
    trimmed_mean,
    weighted_mean,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from support.allreduce_harness import Group
from support.exact_numbers import square_roots

SIZE = 300
TRIMMED = functools.partial(trimmed_mean, share=0.2)
CENTERED = functools.partial(centered_clipping, multiple=2.0)
ROBUST = [TRIMMED, CENTERED]
GOLDEN_DIGESTS: dict[MeanName, str] = {
    "trimmed_mean": "6967b38f33473543d7ba80c21403c3c5bc00a25bee0f653e99b8811ed226790a",
    "centered_clipping": "07ed046827e3f33f91a339fef80fda9a2a8e5359de24103d5132614163e4466e",
}
ROBUST_NAMES = list(GOLDEN_DIGESTS)


def drawn(count: int, seed: int = 0, size: int = SIZE) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(size, generator=generator)
    return [common + 0.5 * torch.randn(size, generator=generator) for _ in range(count)]


def plain(values: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    whole = sum(weights)
    pairs = zip(values, weights, strict=True)
    return torch.stack([value.double() * (weight / whole) for value, weight in pairs]).sum(0)


weights_of = st.lists(st.floats(0.05, 20.0), min_size=3, max_size=12)


@pytest.mark.parametrize(
    ("voters", "share", "trimmed"),
    [(1, 0.2, 0), (2, 0.4, 0), (3, 0.01, 1), (4, 0.4, 1), (5, 0.2, 1), (6, 0.2, 2), (32, 0.2, 7)],
)
def test_how_many_are_left_out(voters: int, share: float, trimmed: int) -> None:
    assert trim_count(voters, share) == trimmed


@given(st.integers(1, 300), st.floats(0.001, 0.499))
def test_one_or_two_remain_at_least(voters: int, share: float) -> None:
    trimmed = trim_count(voters, share)
    assert voters - 2 * trimmed >= 1
    assert trimmed >= min(share * voters, (voters - 1) // 2) * 0.999


@settings(deadline=None, max_examples=50)
@given(weights_of, st.integers(0, 99), st.floats(-1e30, 1e30))
def test_trimming_keeps_every_coordinate_within_what_the_others_say(
    weights: list[float], seed: int, lie: float
) -> None:
    values = drawn(len(weights), seed)
    liars = trim_count(len(weights), 0.2)
    others = torch.stack(values[liars:])
    for place in range(liars):
        values[place] = torch.full((SIZE,), lie)
    average = TRIMMED(values, weights)
    assert bool((average >= others.amin(0)).all() and (average <= others.amax(0)).all())


@settings(deadline=None, max_examples=50)
@given(weights_of, st.integers(0, 99), st.floats(-1e30, 1e30))
def test_one_of_n_moves_a_clipped_mean_by_its_weight_in_usual_distances(
    weights: list[float], seed: int, lie: float
) -> None:
    """Whatever one says, the average stays within twice the others' distances of their values."""
    values = drawn(len(weights), seed)
    values[0] = torch.full((SIZE,), lie)
    average = CENTERED(values, weights)
    others = values[1:]
    widest = max(exact_norm(one - other) for one in others for other in others)
    # The median of the coordinates is within the others' box, of which this is a diagonal.
    box = torch.stack(others)
    diagonal = exact_norm(box.amax(0) - box.amin(0))
    assert min(exact_norm(average - other) for other in others) <= 3 * (diagonal + widest)


@settings(deadline=None, max_examples=30)
@given(weights_of, st.integers(0, 99))
def test_what_nobody_exceeds_is_a_weighted_mean(weights: list[float], seed: int) -> None:
    values = drawn(len(weights), seed)
    wide = functools.partial(centered_clipping, multiple=1e6)(values, weights)
    assert torch.equal(wide, weighted_mean(values, weights))
    torch.testing.assert_close(wide.double(), plain(values, weights), rtol=0, atol=1e-5)


@pytest.mark.parametrize("mean", ROBUST)
def test_of_two_the_weighted_mean_is_taken(mean: Mean) -> None:
    values = drawn(2)
    values[1].mul_(1e6)
    assert torch.equal(mean(values, [3.0, 1.0]), weighted_mean(values, [0.75, 0.25]))


@pytest.mark.parametrize("mean", ROBUST)
def test_equal_values_are_their_own_average(mean: Mean) -> None:
    value = drawn(1)[0]
    average = mean([value.clone() for _ in range(5)], [1.0, 2.0, 3.0, 4.0, 5.0])
    torch.testing.assert_close(average, value, rtol=1e-6, atol=0)


def test_a_trimmed_mean_is_that_of_exact_arithmetic() -> None:
    values, weights = drawn(7), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    found = TRIMMED(values, weights)
    for coordinate in range(SIZE):
        said = (float(value[coordinate]) for value in values)
        rows = sorted(zip(said, weights, strict=True))
        kept = rows[2:-2]
        exact = sum(v * w for v, w in kept) / sum(w for _, w in kept)
        assert float(found[coordinate]) == pytest.approx(exact, rel=1e-5, abs=1e-6)


def test_distances_are_measured_block_by_block() -> None:
    values = drawn(5, size=2 * MEASURED_VALUES + 9)
    values[2][MEASURED_VALUES] = 1e9
    whole = CENTERED(values, [1.0] * 5)
    for begin in range(0, whole.numel(), MEASURED_VALUES):
        block = [value[begin : begin + MEASURED_VALUES] for value in values]
        assert torch.equal(whole[begin : begin + MEASURED_VALUES], CENTERED(block, [1.0] * 5))


def test_many_replicas_of_a_lying_path_have_one_vote() -> None:
    honest, lie = drawn(3), torch.full((SIZE,), 1e6)
    rows, paths = [*honest, lie, lie, lie, lie], [0, 1, 2, 3, 3, 3, 3]
    weights = [0.25, 0.25, 0.25, *[0.0625] * 4]
    average = of_paths(rows, weights, paths, TRIMMED)
    assert bool((average <= torch.stack(honest).amax(0)).all())


def test_a_lying_replica_among_three_is_outvoted() -> None:
    honest, lie = drawn(2), torch.full((SIZE,), 1e6)
    average = of_paths([honest[0], lie, honest[1]], [0.3, 0.4, 0.3], [5, 5, 5], TRIMMED)
    assert bool((average <= torch.stack(honest).amax(0)).all())


def rule_of(mean: MeanName, codec: str = "float16", **changes: object) -> AveragingRule:
    return AveragingRule(CODECS[codec], part_bytes=1024, mean=mean, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("mean", ROBUST_NAMES)
def test_arrival_does_not_matter_and_threads_neither(mean: MeanName) -> None:
    gradients = drawn(5, size=3000)
    rows = [(Contribution(n % 3, f"p{n}", 10 + n), flat) for n, flat in enumerate(gradients)]
    of_peer = {row.peer: gradient for row, gradient in rows}
    averages = set()
    threads = torch.get_num_threads()
    try:
        for number, shuffled in enumerate(itertools.permutations(rows)):
            torch.set_num_threads(1 + 2 * (number % 2))
            table = canonical_table(row for row, _ in shuffled)
            average = rule_of(mean).average([of_peer[row.peer] for row in table], table)
            averages.add(average.numpy().tobytes())
    finally:
        torch.set_num_threads(threads)
    assert len(averages) == 1


@pytest.mark.parametrize(("mean", "golden"), GOLDEN_DIGESTS.items())
def test_golden_averages(mean: MeanName, golden: str) -> None:
    """Pins the bits; a change that is meant raises the protocol version too."""
    roots = square_roots(12_000)
    gradients = [roots.roll(1_000 * number) * (1 + number % 3) for number in range(6)]
    table = canonical_table(Contribution(n // 2 if n < 4 else n, f"p{n}", 10 + n) for n in range(6))
    average = rule_of(mean, shard_sequences={0: 7, 1: 9, 4: 5, 5: 6}).average(gradients, table)
    assert hashlib.sha256(average.numpy().tobytes()).hexdigest() == golden


@pytest.mark.parametrize("mean", ROBUST_NAMES)
def test_with_two_members_the_bits_are_those_of_the_weighted_mean(mean: MeanName) -> None:
    gradients = drawn(2)
    table = canonical_table([Contribution(0, "a", 10), Contribution(0, "b", 30)])
    found = rule_of(mean).average(gradients, table)
    assert torch.equal(found, rule_of("weighted_mean").average(gradients, table))


@pytest.mark.parametrize("mean", ROBUST_NAMES)
@pytest.mark.parametrize(("size", "codec"), [(4, "float16"), (5, "blockwise8bit"), (7, "none")])
def test_a_swarm_gets_the_bits_of_the_reference(mean: MeanName, size: int, codec: str) -> None:
    """Also of a group that would be in two levels: all of a part are with one reducer then."""
    group = Group.random(size, 9_011, codec=codec, shard_sequences={0: 50, 1: 20, 2: 7}, mean=mean)
    group.section_rows = 2
    group.flats[1].mul_(5.0)
    expected = group.expected()
    assert all(torch.equal(result, expected) for result in asyncio.run(group.run()))
    other = replace(group, mean="weighted_mean").expected()
    assert not torch.equal(expected, other)


@pytest.mark.parametrize(
    ("key", "value"),
    [("trim_share", 0.5), ("trim_share", 0.0), ("centre_multiple", 0.5), ("combine", "median")],
)
def test_impossible_settings_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=key):
        parse_config(AveragingConfig, {key: value}, "run.toml")
