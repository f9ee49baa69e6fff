"""The trimmed mean: what a few can move, and what the bits are."""

import functools
import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dipaco.base.errors import ConfigurationError
from dipaco.modules.trimmed_mean import of_paths, trim_count, trimmed_mean, weighted_mean
from dipaco.protocol.config import ContributionsConfig, parse_config
from support.runs.exact_numbers import square_roots

SIZE = 300
SHARE = 0.2
TRIMMED = functools.partial(trimmed_mean, share=SHARE)
GOLDEN_DIGEST = "8c2cf105c8ca5de512c8bd487888eb773c98f289fcdb072df53cfa3290d3223c"


def drawn(count, seed=0, size=SIZE):
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(size, generator=generator)
    return [common + 0.5 * torch.randn(size, generator=generator) for _ in range(count)]


weights_of = st.lists(st.floats(0.05, 20.0), min_size=3, max_size=12)


@pytest.mark.parametrize(
    ("voters", "share", "trimmed"),
    [(1, 0.2, 0), (2, 0.4, 0), (3, 0.01, 1), (4, 0.4, 1), (5, 0.2, 1), (6, 0.2, 2), (32, 0.2, 7)],
)
def test_how_many_are_left_out(voters, share, trimmed):
    assert trim_count(voters, share) == trimmed


@given(st.integers(1, 300), st.floats(0.001, 0.499))
def test_one_or_two_remain_at_least(voters, share):
    trimmed = trim_count(voters, share)
    assert voters - 2 * trimmed >= 1
    assert trimmed >= min(share * voters, (voters - 1) // 2) * 0.999


@settings(deadline=None, max_examples=50)
@given(weights_of, st.integers(0, 99), st.floats(-1e30, 1e30))
def test_trimming_keeps_every_coordinate_within_what_the_others_say(weights, seed, lie):
    values = drawn(len(weights), seed)
    liars = trim_count(len(weights), 0.2)
    others = torch.stack(values[liars:])
    for place in range(liars):
        values[place] = torch.full((SIZE,), lie)
    average = TRIMMED(values, weights)
    assert bool((average >= others.amin(0)).all() and (average <= others.amax(0)).all())


def test_of_two_the_weighted_mean_is_taken():
    values = drawn(2)
    values[1].mul_(1e6)
    assert torch.equal(TRIMMED(values, [3.0, 1.0]), weighted_mean(values, [0.75, 0.25]))


def test_equal_values_are_their_own_average():
    value = drawn(1)[0]
    average = TRIMMED([value.clone() for _ in range(5)], [1.0, 2.0, 3.0, 4.0, 5.0])
    torch.testing.assert_close(average, value, rtol=1e-6, atol=0)


def test_a_trimmed_mean_is_that_of_exact_arithmetic():
    values, weights = drawn(7), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    found = TRIMMED(values, weights)
    for coordinate in range(SIZE):
        said = (float(value[coordinate]) for value in values)
        rows = sorted(zip(said, weights, strict=True))
        kept = rows[2:-2]
        exact = sum(v * w for v, w in kept) / sum(w for _, w in kept)
        assert float(found[coordinate]) == pytest.approx(exact, rel=1e-5, abs=1e-6)


def test_many_replicas_of_a_lying_path_have_one_vote():
    honest, lie = drawn(3), torch.full((SIZE,), 1e6)
    rows, paths = [*honest, lie, lie, lie, lie], [0, 1, 2, 3, 3, 3, 3]
    weights = [0.25, 0.25, 0.25, *[0.0625] * 4]
    average = of_paths(rows, weights, paths, SHARE)
    assert bool((average <= torch.stack(honest).amax(0)).all())


def test_a_lying_replica_among_three_is_outvoted():
    honest, lie = drawn(2), torch.full((SIZE,), 1e6)
    average = of_paths([honest[0], lie, honest[1]], [0.3, 0.4, 0.3], [5, 5, 5], SHARE)
    assert bool((average <= torch.stack(honest).amax(0)).all())


def test_replicas_count_alike_whatever_they_say_of_their_tokens():
    """Others' values lie around a negated one where they are hardly apart: there tokens that nobody
    can check would decide."""
    rows = drawn(4)
    claims = ([0.25] * 4, [0.1, 0.1, 0.1, 0.7])
    first, second = (of_paths(rows, weights, [5] * 4, SHARE) for weights in claims)
    assert torch.equal(first, second)


def test_a_golden_mean():
    """Pins the bits; a change that is meant raises the protocol version too."""
    roots = square_roots(12_000)
    rows = [roots.roll(1_000 * number) * (1 + number % 3) for number in range(6)]
    average = of_paths(rows, [0.1, 0.2, 0.15, 0.25, 0.2, 0.1], [0, 0, 1, 1, 4, 5], SHARE)
    assert hashlib.sha256(average.numpy().tobytes()).hexdigest() == GOLDEN_DIGEST


@pytest.mark.parametrize(("key", "value"), [("trim_share", 0.5), ("trim_share", 0.0), ("combine", "median")])
def test_impossible_settings_are_refused(key, value):
    with pytest.raises(ConfigurationError, match=key):
        parse_config(ContributionsConfig, {key: value}, "run.toml")
