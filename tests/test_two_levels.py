"""The exact all-reduce of large groups, in two levels: the bits of one level, or nothing."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import pytest
import torch
from dipaco.modules.outer import SECTION_ROWS
from dipaco.peer.averaging import allreduce
from dipaco.peer.averaging.allreduce import SUM_NUMBERS
from dipaco.peer.averaging.parts import AveragingFailed
from dipaco.peer.averaging.topology import Topology
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.allreduce_harness import (
    Group,
    MemoryNetwork,
    Message,
    Transit,
    failures,
    make_peer_id,
)
from support.reduce_traffic import reduce_traffic


@pytest.fixture(autouse=True)
def _enough_time_to_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is blamed must not depend on how busy the machine is."""
    monkeypatch.setattr(allreduce, "LINGER_SHARE", 30.0)


def topology_of(group: Group) -> Topology:
    """What the members of a group find."""
    agreed = group.agreed
    sizes = group.rule.part_sizes(len(group.flats[0]))
    order = [agreed.peers.index(row.peer) for row in agreed.table]
    return Topology.of(order, agreed.shares, sizes, group.section_rows)


def assert_equal_bits(group: Group, results: list[object]) -> None:
    expected = group.expected()
    for result in results:
        assert isinstance(result, torch.Tensor), repr(result)
        assert torch.equal(result, expected)


@pytest.mark.parametrize("members", [40, 70, 100])
def test_a_large_group_gets_the_bits_of_the_reference(members: int) -> None:
    group = Group.random(members, 20_000)
    assert len(topology_of(group).sections) == -(-members // SECTION_ROWS)
    assert_equal_bits(group, asyncio.run(group.run()))


@pytest.mark.parametrize("rows", [SECTION_ROWS, 40])
def test_members_send_what_is_counted(rows: int) -> None:
    """Real messages, against the count that `benchmarks/averaging/large_groups.py` shows."""
    group = Group.random(40, 12_000, section_rows=rows, part_bytes=1024)
    numbers = group.rule.part_sizes(len(group.flats[0]))
    counted = reduce_traffic(topology_of(group), numbers, group.rule.codec)
    messages: Counter[int] = Counter()
    sizes: Counter[int] = Counter()
    partners: dict[int, set[int]] = {}
    places = {peer: place for place, peer in enumerate(group.peer_ids)}

    async def count(transit: Transit, message: Message) -> Message:
        source, target = places[transit.source], places[transit.target]
        if message.tensor_part.buffer:
            messages[source] += 1
            sizes[source] += len(message.tensor_part.buffer)
            partners.setdefault(source, set()).add(target)
            partners.setdefault(target, set()).add(source)
        return message

    assert_equal_bits(group, asyncio.run(group.run(count)))
    assert messages == counted.messages
    assert sizes == counted.bytes
    assert partners == counted.partners
    assert max(map(len, partners.values())) < 24 or rows == 40


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    members=st.integers(2, 14),
    rows=st.integers(1, 6),
    elements=st.integers(1, 30_000),
    codec=st.sampled_from(["none", "float16"]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_any_table_gets_the_bits_of_the_reference(
    members: int, rows: int, elements: int, codec: str, seed: int, data: st.DataObject
) -> None:
    """Whatever the sections, who can be reached, and however few the parts."""
    widths = st.lists(st.sampled_from([0, 10, 100, 300]), min_size=members, max_size=members)
    group = Group.random(
        members,
        elements,
        seed,
        codec=codec,
        section_rows=rows,
        bandwidths=data.draw(widths.filter(any)),
        timeout_s=30.0,
    )
    assert_equal_bits(group, asyncio.run(group.run()))


def test_the_codec_with_blocks_gets_the_bits_of_the_reference() -> None:
    group = Group.random(7, 30_011, codec="blockwise8bit", section_rows=3)
    assert_equal_bits(group, asyncio.run(group.run()))


def test_sums_of_large_parts_are_sent_in_pieces() -> None:
    group = Group.random(4, 3 * SUM_NUMBERS + 7, section_rows=2, part_bytes=2**21)
    assert_equal_bits(group, asyncio.run(group.run()))


def test_order_of_arrival_does_not_matter() -> None:
    async def delay(transit: Transit, message: Message) -> Message:
        if transit.source == make_peer_id(transit.index % 6):
            await asyncio.sleep(0.01)
        return message

    group = Group.random(6, 20_000, codec="none", section_rows=2)
    assert_equal_bits(group, asyncio.run(group.run(delay)))


def test_who_waits_for_a_slow_section_hears_that_the_others_live() -> None:
    """One member sends nothing until beats went all the ways on which others wait for it."""
    group = nine()
    slow = make_peer_id(0)
    beats: set[str] = set()
    all_beat = asyncio.Event()

    async def hold_back(transit: Transit, message: Message) -> Message:
        if message.code == averaging_pb2.ACCEPTED and transit.index > 0:
            beats.add(transit.kind)
            if beats == {"average", "sum", "total"}:
                all_beat.set()
        if transit.source == slow and transit.kind == "part":
            await all_beat.wait()
        return message

    assert_equal_bits(group, asyncio.run(group.run(hold_back)))


def run_with_a_death(group: Group, victim: int, kind: str) -> list[object]:
    """Kill a member at its first message of a kind."""
    network = MemoryNetwork()

    async def kill(transit: Transit, message: Message) -> Message:
        if transit.source == make_peer_id(victim) and transit.kind == kind:
            network.kill(make_peer_id(victim))
        return message

    return list(asyncio.run(group.run(kill, network)))


def assert_blamed(group: Group, results: list[object], victim: int) -> None:
    """Nobody has a result, all say who it was, and nobody blames another one."""
    name = make_peer_id(victim).to_base58()
    survivors = [result for place, result in enumerate(results) if place != victim]
    for result in survivors:
        assert isinstance(result, AveragingFailed), repr(result)
        assert name in result.reason, result.reason
        assert set(result.culprits) <= {name}, result.reason
        assert set(result.peers_seen) == set(group.agreed.peers)
    assert any(name in failure.culprits for failure in failures(survivors))


def nine(**changes: object) -> Group:
    return Group.random(9, 60_000, section_rows=3, **changes)


def test_the_death_of_a_reducer_fails_everybody_and_is_blamed_on_it() -> None:
    group = nine()
    victim = topology_of(group).reducers[1][0]
    assert_blamed(group, run_with_a_death(group, victim, "sum"), victim)


def test_the_death_of_a_root_fails_everybody_and_is_blamed_on_it() -> None:
    group = nine()
    victim = topology_of(group).root(0)
    assert_blamed(group, run_with_a_death(group, victim, "part"), victim)


def test_a_member_that_does_not_come_is_blamed() -> None:
    group = nine(absent=frozenset({4}))
    assert_blamed(group, list(asyncio.run(group.run())), 4)


def test_a_frozen_member_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing more, and keeps all of its calls open."""
    monkeypatch.setattr(allreduce, "LINGER_SHARE", 1.0)  # It hears no farewell however long.
    group = nine(silence_s=2.0)
    frozen = topology_of(group).root(0)
    has_begun = False

    async def freeze(transit: Transit, message: Message) -> Message:
        nonlocal has_begun
        if transit.source == make_peer_id(frozen):
            has_begun |= transit.kind == "sum"
            if has_begun:
                await asyncio.sleep(60)
        return message

    results = list(asyncio.run(group.run(freeze)))
    assert len(failures(results)) == len(results)
    culprits = {name for failure in failures(results) for name in failure.culprits}
    assert make_peer_id(frozen).to_base58() in culprits


def _cut(message: Message) -> None:
    message.tensor_part.buffer = message.tensor_part.buffer[:-1]


def _nan(message: Message) -> None:
    count = len(message.tensor_part.buffer)
    message.tensor_part.buffer = b"\xff" * count


def _recode(message: Message) -> None:
    message.tensor_part.compression = 3


def _no_numbers(message: Message) -> None:
    message.ClearField("tensor_part")


@pytest.mark.parametrize("damage", [_cut, _nan, _recode, _no_numbers])
@pytest.mark.parametrize("kind", ["part", "sum", "total", "average"])
def test_damage_on_any_way_fails_everybody_and_names_its_sender(kind: str, damage: object) -> None:
    group = nine()
    damaged: list[PeerID] = []

    async def tamper(transit: Transit, message: Message) -> Message:
        has_numbers = len(message.tensor_part.buffer) > 0
        if transit.kind == kind and has_numbers and not damaged:
            damaged.append(transit.source)
            damage(message)
        return message

    results = list(asyncio.run(group.run(tamper)))
    names = {peer.to_base58() for peer in damaged}
    assert len(names) == 1
    # Who got the part in another way has the right bits; that can only be its sender.
    for result in results:
        if isinstance(result, torch.Tensor):
            assert torch.equal(result, group.expected())
    assert len(failures(results)) >= len(results) - 1
    # The sender knows of no damage, and blames who complains.
    others = [r for r, peer in zip(results, group.peer_ids, strict=True) if peer not in damaged]
    assert {name for failure in failures(others) for name in failure.culprits} == names


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    victim=st.integers(0, 7),
    after=st.integers(0, 180),
    bandwidths=st.sampled_from([[100] * 8, [100, 0, 100, 100, 0, 0, 100, 0], [300, 100] * 4]),
)
def test_a_death_at_any_message_leaves_the_exact_result_or_none(
    victim: int, after: int, bandwidths: list[int]
) -> None:
    """The central promise: whoever ends with a result has the same bits as everybody else."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    network = MemoryNetwork()
    group = Group.random(8, 20_000, section_rows=3, bandwidths=bandwidths, silence_s=1.0)
    results = asyncio.run(group.run(network.kill_at(after, make_peer_id(victim)), network))
    for place, result in enumerate(results):
        if isinstance(result, torch.Tensor):
            assert torch.equal(result, group.expected())
        elif place != victim:
            assert isinstance(result, AveragingFailed), repr(result)


def test_what_is_clipped_is_measured_by_its_section() -> None:
    group = Group.random(7, 20_000, section_rows=3, part_bytes=8192, paths=range(7))
    plain = group.expected()
    group.flats[4] *= 1000
    assert not torch.equal(group.expected(), plain)
    assert_equal_bits(group, asyncio.run(group.run()))
