"""The exact all-reduce with the real runners in memory: equal bits or nothing."""

from __future__ import annotations

import asyncio
import logging

import pytest
import torch
from dipaco.modules.codecs import CODECS
from dipaco.modules.outer import Usual
from dipaco.peer.averaging.codec import PartCodec
from dipaco.peer.averaging.group import reduce_shares
from dipaco.peer.averaging.parts import AveragingFailed, as_failure
from hivemind.p2p import P2PContext
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


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_member_gets_the_bits_of_the_reference(codec: str, size: int) -> None:
    group = Group.random(size, 30_011, codec=codec, shard_sequences={0: 50, 1: 20, 2: 7})
    results = asyncio.run(group.run())
    for result in results:
        assert isinstance(result, torch.Tensor), result
        assert torch.equal(result, group.expected())


def test_members_that_cannot_reduce_get_the_same_bits() -> None:
    group = Group.random(4, 30_011, bandwidths=[0, 90, 0, 10])
    results = asyncio.run(group.run())
    assert all(torch.equal(result, group.expected()) for result in results)


def test_tiny_vector_has_one_reducer() -> None:
    group = Group.random(5, 3)
    assert all(torch.equal(result, group.expected()) for result in asyncio.run(group.run()))


def test_input_is_summed_as_others_see_it() -> None:
    group = Group.random(2, 1000, paths=[0, 0])
    group.flats[0].fill_(1.0 + 2**-12)
    group.flats[1].fill_(1.0 + 2**-12)
    assert all(torch.equal(result, torch.ones(1000)) for result in asyncio.run(group.run()))


def test_weights_that_senders_state_are_ignored() -> None:
    async def lie(transit: Transit, message: Message) -> Message:
        message.weight = 1e9
        return message

    group = Group.random(3, 10_000)
    assert all(torch.equal(result, group.expected()) for result in asyncio.run(group.run(lie)))


def test_order_of_arrival_does_not_matter() -> None:
    async def delay(transit: Transit, message: Message) -> Message:
        if transit.source == make_peer_id(transit.index % 4):
            await asyncio.sleep(0.01)
        return message

    group = Group.random(4, 20_000, codec="none")
    assert all(torch.equal(result, group.expected()) for result in asyncio.run(group.run(delay)))


def test_missing_sender_fails_everybody() -> None:
    group = Group.random(4, 20_000, silence_s=0.3, absent=frozenset({2}))
    results = asyncio.run(group.run())
    name = make_peer_id(2).to_base58()
    assert len(failures(results)) == 3
    assert all(name in str(failure) for failure in failures(results))
    assert all(set(failure.peers_seen) == set(group.agreed.peers) for failure in failures(results))


def assert_no_result(results: list[object], group: Group, may_have_it: int | None) -> None:
    """Nobody has a result, but a reducer whose own answers went wrong may have the exact one."""
    for index, result in enumerate(results):
        if index == may_have_it and isinstance(result, torch.Tensor):
            assert torch.equal(result, group.expected())
        else:
            assert isinstance(result, AveragingFailed)


@pytest.mark.parametrize("kind", ["part", "average"])
def test_silent_peer_fails_everybody(kind: str) -> None:
    silent = make_peer_id(1)

    async def stall(transit: Transit, message: Message) -> Message:
        if transit.source == silent and transit.kind == kind and transit.index == 1:
            await asyncio.sleep(60)
        return message

    group = Group.random(3, 20_000, silence_s=0.3)
    results = asyncio.run(group.run(stall))
    assert_no_result(results, group, may_have_it=1 if kind == "average" else None)
    assert any(silent.to_base58() in failure.culprits for failure in failures(results))


def test_a_reducer_that_knows_no_such_group_makes_it_one_that_has_not_formed() -> None:
    forgetful = make_peer_id(1)

    async def forget(transit: Transit, message: Message) -> Message:
        if transit.source == forgetful and transit.kind == "average":
            return Message(code=averaging_pb2.BAD_GROUP_ID)
        return message

    failed = failures(asyncio.run(Group.random(2, 8_000).run(forget)))
    (failure,) = [f for f in failed if f.culprits == (forgetful.to_base58(),)]
    told = as_failure(failure, failure.peers_seen, ())
    assert (told.peers_seen, told.culprits) == ((), failure.culprits)


def _nan(message: Message) -> None:
    part = torch.full((message.tensor_part.size[0],), float("nan"), dtype=torch.float16)
    message.tensor_part.buffer = part.numpy().tobytes()


def _truncate(message: Message) -> None:
    message.tensor_part.buffer = message.tensor_part.buffer[:-2]


def _reshape(message: Message) -> None:
    message.tensor_part.size[0] += 1


def _retype(message: Message) -> None:
    message.tensor_part.dtype = "float64"


def _recode(message: Message) -> None:
    message.tensor_part.compression = 0


def _empty(message: Message) -> None:
    message.ClearField("tensor_part")


@pytest.mark.parametrize("damage", [_nan, _truncate, _reshape, _retype, _recode, _empty])
@pytest.mark.parametrize("kind", ["part", "average"])
def test_bad_part_fails_everybody_and_names_its_sender(kind: str, damage: object) -> None:
    bad = make_peer_id(0)

    async def tamper(transit: Transit, message: Message) -> Message:
        if transit.kind == kind and transit.source == bad and transit.index == 1:
            damage(message)
        return message

    group = Group.random(3, 20_000)
    results = asyncio.run(group.run(tamper))
    assert_no_result(results, group, may_have_it=0 if kind == "average" else None)
    assert any(bad.to_base58() in failure.culprits for failure in failures(results))


def test_own_average_beyond_float16_is_clamped_like_the_reference() -> None:
    group = Group.random(3, 5_000)
    group.flats[1].mul_(1e9)
    assert all(torch.equal(result, group.expected()) for result in asyncio.run(group.run()))


def test_overflowing_sum_fails_everybody() -> None:
    group = Group.random(2, 5_000, codec="none", paths=[0, 0])
    group.flats[0].fill_(3.0e38)
    group.flats[1].fill_(3.0e38)
    group.flats[1][4_000] = float("inf")
    results = asyncio.run(group.run())
    assert not any(isinstance(result, torch.Tensor) for result in results)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    victim=st.integers(0, 3),
    after=st.integers(0, 80),
    codec=st.sampled_from(["none", "float16"]),
    bandwidths=st.sampled_from([[100] * 4, [100, 0, 100, 100], [300, 100, 10, 100]]),
)
def test_a_death_at_any_message_leaves_the_exact_result_or_none(
    victim: int, after: int, codec: str, bandwidths: list[int]
) -> None:
    """The central promise: whoever ends with a result has the same bits as everybody else."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    network = MemoryNetwork()
    group = Group.random(4, 12_000, codec=codec, bandwidths=bandwidths, silence_s=1.0)
    results = asyncio.run(group.run(network.kill_at(after, make_peer_id(victim)), network))
    for index, result in enumerate(results):
        if isinstance(result, torch.Tensor):
            assert torch.equal(result, group.expected())
        elif index != victim:
            assert isinstance(result, AveragingFailed), repr(result)


def test_strangers_and_second_streams_change_nothing() -> None:
    network = MemoryNetwork()
    answers = []

    async def intrude(transit: Transit, message: Message) -> Message:
        if transit.kind == "average" and transit.index == 1:
            for intruder in (make_peer_id(99), transit.target):
                context = P2PContext(
                    handle_name="test", local_id=transit.source, remote_id=intruder
                )
                stream = network.runners[transit.source].rpc_aggregate_part(_nothing(), context)
                answers.extend([answer.code async for answer in stream])
        return message

    group = Group.random(3, 20_000)
    results = asyncio.run(group.run(intrude, network))
    assert all(torch.equal(result, group.expected()) for result in results)
    assert set(answers) == {averaging_pb2.PROTOCOL_VIOLATION}


async def _nothing():
    return
    yield


def test_member_of_another_group_is_refused() -> None:
    async def rename(transit: Transit, message: Message) -> Message:
        if transit.kind == "part" and transit.source == make_peer_id(0) and message.group_id:
            message.group_id = b"other rows"
        return message

    results = asyncio.run(Group.random(3, 20_000).run(rename))
    assert len(failures(results)) == 3


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("elements", [1, 4095, 4096, 10_000])
def test_codec_round_trip_is_that_of_the_reference(codec: str, elements: int) -> None:
    part = torch.randn(elements, generator=torch.Generator().manual_seed(elements))
    seen = PartCodec(CODECS[codec]).round_trip(part)
    assert torch.equal(seen, CODECS[codec].round_trip(part))
    assert seen.data_ptr() != part.data_ptr()


SOME_CAN_BE_REACHED = st.lists(
    st.integers(0, 1000) | st.just(1_000_000), min_size=2, max_size=40
).filter(any)


@given(SOME_CAN_BE_REACHED)
def test_shares_make_the_slowest_reducer_as_fast_as_possible(bandwidths: list[int]) -> None:
    """Among the shares that nobody exceeds twice an equal one with."""
    shares = reduce_shares(bandwidths)
    total, others = sum(shares), len(bandwidths) - 2
    able = [width for width in bandwidths if width]

    def slowest(fractions: list[float]) -> float:
        loads = zip(fractions, bandwidths, strict=True)
        return max((1 + others * fraction) / width for fraction, width in loads if width)

    ours = slowest([share / total for share in shares])
    equal = [bool(width) / len(able) for width in bandwidths]
    proportional = [width / sum(able) for width in bandwidths]
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        mixed = [(1 - part) * e + part * p for e, p in zip(equal, proportional, strict=True)]
        if max(mixed) <= 2 / len(able):
            assert ours <= slowest(mixed) * (1 + 1e-4)


@given(SOME_CAN_BE_REACHED)
def test_nobody_reduces_more_than_twice_an_equal_share(bandwidths: list[int]) -> None:
    shares = reduce_shares(bandwidths)
    able = sum(1 for width in bandwidths if width)
    assert max(shares) / sum(shares) <= min(1.0, 2 / able) * (1 + 1e-4)
    assert all(share == 0 for share, width in zip(shares, bandwidths, strict=True) if width == 0)
    assert all(type(share) is int and share >= 0 for share in shares)
    # Whoever says more gets no less, and where a member stands does not matter.
    assert shares == tuple(dict(zip(bandwidths, shares, strict=True))[b] for b in bandwidths)
    ordered = sorted(zip(bandwidths, shares, strict=True))
    assert [share for _, share in ordered] == sorted(shares)


def test_a_stated_million_does_not_give_the_whole_vector() -> None:
    assert reduce_shares([1_000_000, 10, 10, 10]) == (524_288, 174_762, 174_762, 174_762)
    assert reduce_shares([1_000_000, 10, 0]) == (1_048_576, 0, 0)
    assert reduce_shares([1_000_000, 10]) == (1, 1)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("factor", [1000.0, 60_000.0])
def test_a_thousandfold_contribution_is_an_ordinary_one(codec: str, factor: float) -> None:
    group = Group.random(5, 20_000, codec=codec, paths=range(5), part_bytes=8192)
    honest = group.expected().norm()
    group.flats[1] *= factor
    results = asyncio.run(group.run())
    expected = group.expected()
    assert all(isinstance(one, torch.Tensor) and torch.equal(one, expected) for one in results)
    assert honest < expected.norm() < 6 * honest


@pytest.mark.parametrize("usual", [0.0, 0.1])
def test_a_member_that_contributes_next_to_nothing_does_not_silence_the_other(usual: float) -> None:
    group = Group.random(2, 20_000, paths=[0, 1], part_bytes=8192)
    group.flats[0] *= 1e-4
    group.usual = Usual(norms=(usual,) * len(group.rule.part_sizes(20_000)))
    results = asyncio.run(group.run())
    expected = group.expected()
    assert all(isinstance(one, torch.Tensor) and torch.equal(one, expected) for one in results)
    whole = float(group.flats[1].norm()) / 2
    assert float(expected.norm()) == pytest.approx(whole if usual else 1e-3 * whole, rel=0.1)
