"""Who reduces what in one level and in two: every part once, for every table."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch
from dipaco.modules.codecs import CODECS
from dipaco.modules.outer import SECTION_ROWS
from dipaco.peer.averaging.group import reduce_shares
from dipaco.peer.averaging.topology import Topology, deal
from dipaco.peer.check.needs import all_reduce_bytes
from hivemind.averaging.partition import TensorPartContainer
from hypothesis import assume, given, settings
from hypothesis import strategies as st

BANDWIDTHS = st.lists(st.sampled_from([0, 0, 10, 50, 100, 100, 1000]), min_size=2, max_size=150)


def topology_of(bandwidths: list[int], parts: int, rows: int, seed: int = 0) -> Topology:
    order = list(range(len(bandwidths)))
    random.Random(seed).shuffle(order)
    return Topology.of(order, reduce_shares(bandwidths), [100] * parts, rows)


@settings(max_examples=60, deadline=None)
@given(BANDWIDTHS.filter(any), st.integers(1, 60), st.integers(1, 40), st.integers(0, 9))
def test_every_contribution_reaches_one_reducer_and_every_sum_one_root(
    bandwidths: list[int], parts: int, rows: int, seed: int
) -> None:
    found = topology_of(bandwidths, parts, rows, seed)
    members = range(len(bandwidths))
    assert sorted(found.section_of) == list(members)
    assert max(map(len, found.sections)) <= rows
    for section in range(len(found.sections)):
        reduced = [part for m in members for part in found.parts_reduced_by(m, section)]
        assert sorted(reduced) == list(range(parts))
    assert all(bandwidths[m] > 0 for reducers in found.reducers for m in reducers)
    roots = {found.root(part) for part in range(parts)}
    sums = Counter(s for root in roots for m in members for s in found.sums_between(m, root))
    expected = {(part, section) for part in range(parts) for section in range(len(found.sections))}
    assert sums == Counter(expected)
    for root in roots:
        for member in members:
            assert list(found.sums_between(member, root)) == sorted(
                found.sums_between(member, root)
            )


@settings(max_examples=30, deadline=None)
@given(BANDWIDTHS.filter(any), st.integers(1, 20), st.integers(1, 40))
def test_what_members_send_adds_up(bandwidths: list[int], parts: int, rows: int) -> None:
    found = topology_of(bandwidths, parts, rows)
    codec, sizes, members = CODECS["float16"], [100] * parts, len(bandwidths)
    sent = sum(found.bytes_sent_by(member, sizes, codec) for member in range(members))
    expected = 0
    for part in range(parts):
        for section, others in enumerate(found.sections):
            # A reducer for another section has no contribution of its own to send to itself.
            reducer = found.reducers[section][part]
            expected += 2 * 2 * 100 * sum(member != reducer for member in others)
            expected += (4 + 2) * 100 * (reducer != found.root(part))
    assert sent == expected


def test_what_equal_members_send_is_what_plans_say() -> None:
    codec = CODECS["float16"]
    found = topology_of([100] * 8, 64, SECTION_ROWS)
    part = codec.part_values(2**19)
    planned = all_reduce_bytes(64 * part, 8, codec, 2**19)
    for member in range(8):
        assert found.bytes_sent_by(member, [part] * 64, codec) == pytest.approx(planned)


def test_a_reduce_takes_as_long_as_the_slowest_line() -> None:
    codec, sizes, lines = CODECS["float16"], [1000] * 60, [100, 4, 0, 100, 4]
    found = topology_of(lines, 60, SECTION_ROWS)
    sent = found.bytes_sent_by(1, sizes, codec)
    assert found.seconds_needed(lines, sizes, codec) == pytest.approx(8e-6 * sent / 4)
    assert found.seconds_needed([0, 0, 0, 0, 0], sizes, codec) == 0.0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=20).filter(any),
    st.integers(1, 3000),
    st.integers(1, 200),
)
def test_parts_are_dealt_as_hivemind_deals_them(
    shares: list[int], size: int, part_size: int
) -> None:
    # Hivemind computes the ends in floating point, which can fall below a whole number.
    total = sum(shares)
    ends = [end for end in itertools.accumulate(shares) if 0 < end < total]
    assume(all(size * end % total for end in ends))
    theirs = TensorPartContainer([torch.zeros(size)], shares, part_size_bytes=4 * part_size)
    sizes = [len(part) for part in torch.zeros(size).split(part_size)]
    counts = Counter(deal(sizes, shares))
    assert tuple(counts[place] for place in range(len(shares))) == theirs.num_parts_by_peer


def test_equal_members_reduce_for_their_own_section() -> None:
    found = topology_of([100] * 96, 64, SECTION_ROWS)
    for section, members in enumerate(found.sections):
        assert set(found.reducers[section]) == set(members)


@pytest.mark.parametrize(("members", "at_most"), [(16, 15), (64, 34), (256, 40), (1000, 116)])
def test_partners_do_not_grow_with_the_group(members: int, at_most: int) -> None:
    assert max(partners(topology_of([100] * members, 2 * members, SECTION_ROWS))) <= at_most


def partners(topology: Topology) -> list[int]:
    """How many others each member sends anything to or gets anything from."""
    linked: dict[int, set[int]] = {member: set() for member in topology.section_of}

    def link(one: int, other: int) -> None:
        if one != other:
            linked[one].add(other)
            linked[other].add(one)

    for members, reducers in zip(topology.sections, topology.reducers, strict=True):
        for part, reducer in enumerate(reducers):
            link(reducer, topology.root(part))
        for reducer in set(reducers):
            for member in members:
                link(member, reducer)
    return [len(others) for others in linked.values()]
