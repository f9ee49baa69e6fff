"""Checks of reducers: honest ones are unchanged, liars are found, and false accusers too."""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from dipaco.modules.codecs import CODECS
from dipaco.modules.outer import AveragingRule
from dipaco.peer.averaging import allreduce, streams, verdicts
from dipaco.peer.averaging.checking import Accusation, Verdict
from dipaco.peer.averaging.codec import PIECE_VALUES, PartCodec
from dipaco.peer.averaging.commitment import (
    HASH_BYTES,
    ShownPiece,
    merkle_root,
    merkle_way,
    nodes_of,
    pieces_of,
    root_of,
)
from dipaco.peer.averaging.parts import AveragingFailed
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.allreduce_harness import (
    Group,
    MemoryNetwork,
    MemoryRunner,
    Message,
    Transit,
    make_peer_id,
    signature_of,
)
from support.exact_numbers import square_roots

LIAR = make_peer_id(1)
ALL_PIECES = 1024
NUMBERS = 17_011
GOLDEN_COMMITMENT = "416f43ab62429b6e801f7923a52daf341e2777f803e3e69bed14bc35fb5bd23b"


def name(number: int) -> str:
    return make_peer_id(number).to_base58()


def checked(size: int, **changes: object) -> Group:
    return Group.random(size, NUMBERS, **{"check_pieces": ALL_PIECES, **changes})


def assert_all_but_the_liar_name_it(results: list[object], *, is_proven: bool = True) -> None:
    for index, result in enumerate(results):
        if make_peer_id(index) != LIAR:
            assert isinstance(result, AveragingFailed), index
            assert result.culprits == (LIAR.to_base58(),)
            assert result.is_proven == is_proven


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bandwidths", [[100, 100], [100, 0, 100, 100], [0, 100, 0], [9, 100, 90]])
def test_honest_members_get_the_bits_that_they_get_without_checks(
    codec: str, bandwidths: list[int]
) -> None:
    group = checked(len(bandwidths), codec=codec, bandwidths=bandwidths)
    group.flats[0].mul_(100.0)  # It is clipped.
    network = MemoryNetwork()
    results = asyncio.run(group.run(network=network))
    expected = replace(group, check_pieces=0).expected()
    assert all(torch.equal(result, expected) for result in results)
    assert not any(runner.culprits for runner in network.runners.values())


def test_who_has_called_knows_the_end_and_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or those that were called would wait for that as long as they may."""
    for module in (allreduce, streams, verdicts):
        monkeypatch.setattr(module, "STAY_S", 3600.0)
    # Nobody waits for a silent member in this time.
    group = checked(4, silence_s=600.0, check_limit_s=600.0, timeout_s=40.0)
    assert all(torch.equal(result, group.expected()) for result in asyncio.run(group.run()))


@pytest.mark.parametrize("mean", ["trimmed_mean", "centered_clipping"])
def test_robust_means_are_checked_piece_by_piece(mean: str) -> None:
    group = checked(4, mean=mean, part_bytes=2**15)
    group.flats[2].mul_(-30.0)
    assert all(torch.equal(result, group.expected()) for result in asyncio.run(group.run()))


def lie_to_all(runner: MemoryRunner) -> None:
    """Have the liar average wrongly."""
    if runner.peer_id == LIAR:
        honest = runner._root._add_and_encode
        runner._root._add_and_encode = lambda sums: honest([sums[0].mul(1.5)])  # type: ignore[method-assign]


@pytest.mark.parametrize("codec", CODECS)
def test_a_reducer_that_gives_all_the_same_wrong_numbers_is_found(codec: str) -> None:
    group = checked(3, codec=codec, spoil=lie_to_all)
    assert_all_but_the_liar_name_it(asyncio.run(group.run()))


@pytest.mark.parametrize("bandwidths", [[100] * 4, [100, 100, 0, 0]])
def test_what_one_finds_all_know(monkeypatch: pytest.MonkeyPatch, bandwidths: list[int]) -> None:
    """The last member alone draws pieces of the liar; the one before it may hear of it only from
    others, as neither of the two can be called."""

    def draw(reducers: list[int], sizes: list[int], me: int, count: int) -> list[tuple[int, int]]:
        return [(reducers.index(1), 0)] if me == 3 else []

    monkeypatch.setattr(verdicts, "draw", draw)
    group = checked(4, bandwidths=bandwidths, spoil=lie_to_all)
    assert_all_but_the_liar_name_it(asyncio.run(group.run()))


def test_a_reducer_that_gives_each_other_numbers_and_signs_them_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody draws anything: the two signatures are the proof."""
    monkeypatch.setattr(verdicts, "draw", lambda *_: [])
    digests: dict[PeerID, list[bytes]] = defaultdict(list)

    async def lie(transit: Transit, message: Message) -> Message:
        if transit.kind != "average" or transit.source != LIAR:
            return message
        told = digests[transit.target]
        if message.tensor_part.dtype:  # A part; what comes last is the signature.
            numbers = bytearray(message.tensor_part.buffer)
            numbers[0] ^= transit.target.to_bytes()[-1] | 1
            message.tensor_part.buffer = bytes(numbers)
            told.append(hashlib.sha256(bytes(numbers)).digest())
        else:
            said = verdicts.SIGNED_PREFIX + b"group" + hashlib.sha256(b"".join(told)).digest()
            message.tensor_part.buffer = signature_of(LIAR.to_base58(), said)
        return message

    assert_all_but_the_liar_name_it(asyncio.run(checked(4).run(lie)))


def test_who_gets_numbers_that_are_not_signed_names_their_reducer() -> None:
    async def damage(transit: Transit, message: Message) -> Message:
        is_part = transit.kind == "average" and transit.source == LIAR and transit.index == 0
        if is_part and transit.target == make_peer_id(0):
            message.tensor_part.buffer = message.tensor_part.buffer[::-1]
        return message

    results = asyncio.run(checked(3, codec="none").run(damage))
    assert isinstance(results[0], AveragingFailed)
    assert results[0].culprits == (LIAR.to_base58(),)


def refuse(message: Message) -> None:
    message.code = averaging_pb2.PROTOCOL_VIOLATION


def forge(message: Message) -> None:
    shown = ShownPiece.from_bytes(message.tensor_part.buffer)
    message.tensor_part.buffer = replace(shown, data=bytes(len(shown.data))).to_bytes()


def forge_norm(message: Message) -> None:
    shown = ShownPiece.from_bytes(message.tensor_part.buffer)
    message.tensor_part.buffer = replace(shown, norm=shown.norm * 2).to_bytes()


def talk_nonsense(message: Message) -> None:
    message.tensor_part.buffer = b"\xc1nonsense"


@pytest.mark.parametrize("spoil", [refuse, forge, forge_norm, talk_nonsense])
def test_a_reducer_that_does_not_show_what_it_got_is_named(
    spoil: Callable[[Message], None],
) -> None:
    async def tamper(transit: Transit, message: Message) -> Message:
        if transit.kind == "shown" and transit.source == LIAR:
            spoil(message)
        return message

    group = checked(3, spoil=lie_to_all)
    assert_all_but_the_liar_name_it(asyncio.run(group.run(tamper)), is_proven=False)


def test_who_has_no_time_left_for_its_checks_names_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where lines are slow. Reducers that had the time to show their pieces are named."""
    for result in asyncio.run(checked(3, check_limit_s=0.0).run()):
        assert isinstance(result, AveragingFailed)
        assert "ran out" in str(result)
        assert result.culprits == ()
    monkeypatch.setattr(verdicts, "LOOK_SILENCES", 0)
    for result in asyncio.run(checked(3).run()):
        assert isinstance(result, AveragingFailed)
        assert len(result.culprits) == 1


def test_who_is_accused_and_cannot_answer_just_then_is_no_liar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An accusation proves nothing to who could not look for itself."""
    honest = make_peer_id(2)
    parts: list[int] = []

    def draw(reducers: list[int], sizes: list[int], me: int, count: int) -> list[tuple[int, int]]:
        parts.append(reducers.index(2))
        return []

    async def accuse(transit: Transit, message: Message) -> Message:
        if transit.kind == "shown" and transit.source == honest:
            refuse(message)
        if transit.kind in ("verdict", "answer") and transit.source == LIAR and not transit.index:
            said = Verdict.from_bytes(message.tensor_part.buffer, range(4), [NUMBERS] * 99)
            invented = replace(said, accusation=Accusation(parts[0], 0, False))
            message.tensor_part.buffer = invented.to_bytes()
        return message

    monkeypatch.setattr(verdicts, "draw", draw)
    results = asyncio.run(checked(4).run(accuse))
    failed = [result for result in results if isinstance(result, AveragingFailed)]
    assert {result.culprits for result in failed} == {(honest.to_base58(),)}
    assert not any(result.is_proven for result in failed)


@pytest.mark.parametrize("is_refusal", [False, True])
def test_a_false_accusation_changes_nothing(is_refusal: bool) -> None:
    """A lie that others can find out is the accuser's; a refusal that only it saw, nobody's."""

    async def accuse(transit: Transit, message: Message) -> Message:
        if transit.kind in ("verdict", "answer") and transit.source == LIAR and not transit.index:
            said = Verdict.from_bytes(message.tensor_part.buffer, range(4), [NUMBERS] * 99)
            invented = replace(said, accusation=Accusation(0, 0, is_refusal))
            message.tensor_part.buffer = invented.to_bytes()
        return message

    network = MemoryNetwork()
    group = checked(4, check_pieces=1)
    results = asyncio.run(group.run(accuse, network))
    assert all(torch.equal(result, group.expected()) for result in results)
    expected = () if is_refusal else (LIAR.to_base58(),)
    others = [runner for peer, runner in network.runners.items() if peer != LIAR]
    assert [runner.culprits for runner in others] == [expected] * 3


def test_invented_signatures_of_another_average_are_the_liars_own() -> None:
    async def invent(transit: Transit, message: Message) -> Message:
        if transit.kind in ("verdict", "answer") and transit.source == LIAR and not transit.index:
            said = Verdict.from_bytes(message.tensor_part.buffer, range(3), [NUMBERS] * 99)
            averages = {r: (bytes(HASH_BYTES), sign) for r, (_, sign) in said.averages.items()}
            message.tensor_part.buffer = replace(said, averages=averages).to_bytes()
        return message

    network = MemoryNetwork()
    group = checked(3)
    results = asyncio.run(group.run(invent, network))
    assert all(torch.equal(result, group.expected()) for result in results)
    assert network.runners[make_peer_id(0)].culprits == (LIAR.to_base58(),)


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x92\x90\xa1x", b"\x92\x91\x93\x09\xc4\x00\xc4\x00\xc0"]
)
def test_a_verdict_that_is_none_is_not_heard(data: bytes) -> None:
    async def spoil(transit: Transit, message: Message) -> Message:
        if transit.kind in ("verdict", "answer") and transit.source == LIAR:
            message.tensor_part.buffer = data
        return message

    group = checked(3)
    results = asyncio.run(group.run(spoil))
    assert all(torch.equal(result, group.expected()) for result in results)


def test_who_sends_what_it_did_not_commit_to_is_named() -> None:
    async def change(transit: Transit, message: Message) -> Message:
        if transit.kind == "part" and transit.source == LIAR and transit.index == 1:
            message.tensor_part.buffer = bytes(len(message.tensor_part.buffer))
        return message

    results = asyncio.run(checked(3).run(change))
    assert any(
        LIAR.to_base58() in result.culprits
        for result in results
        if isinstance(result, AveragingFailed)
    )
    assert not any(isinstance(result, torch.Tensor) for result in results)


def test_who_dies_after_the_reduce_does_not_undo_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "draw", lambda *_: [])
    network = MemoryNetwork()
    ready: set[PeerID] = set()
    all_ready = asyncio.Event()

    async def die(transit: Transit, message: Message) -> Message:
        """Once all others have their averages, and before its own verdict."""
        if transit.kind in ("verdict", "answer"):
            if transit.source == LIAR:
                await all_ready.wait()
                network.kill(LIAR)
            ready.add(transit.source)
            if len(ready) == 3:
                all_ready.set()
        return message

    group = checked(4)
    results = asyncio.run(group.run(die, network))
    for index in (0, 2, 3):
        assert torch.equal(results[index], group.expected())


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    victim=st.integers(0, 3),
    after=st.integers(0, 100),
    bandwidths=st.sampled_from([[100] * 4, [100, 0, 100, 0]]),
)
def test_a_death_at_any_message_leaves_the_exact_result_or_none(
    victim: int, after: int, bandwidths: list[int]
) -> None:
    network = MemoryNetwork()
    group = checked(4, bandwidths=bandwidths, check_pieces=2, silence_s=1.5)
    results = asyncio.run(group.run(network.kill_at(after, make_peer_id(victim)), network))
    for result in results:
        if isinstance(result, torch.Tensor):
            assert torch.equal(result, group.expected())


@given(st.integers(1, 70), st.data())
def test_a_way_leads_from_its_leaf_alone_to_the_root(count: int, data: st.DataObject) -> None:
    leaves = [hashlib.sha256(bytes([number])).digest() for number in range(count)]
    place, other = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, count - 1))
    root, way = merkle_root(leaves), merkle_way(leaves, place)
    assert root_of(leaves[place], place, count, way) == root
    if other != place:
        assert root_of(leaves[other], place, count, way) != root
    for wrong in (way[:-1] if way else None, (*way, bytes(HASH_BYTES))):
        if wrong is not None:
            with pytest.raises(ValueError, match="too"):
                root_of(leaves[place], place, count, wrong)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("elements", [1, PIECE_VALUES, 2 * PIECE_VALUES + 5])
def test_pieces_are_what_the_part_decodes_to(codec: str, elements: int) -> None:
    wire = PartCodec(CODECS[codec])
    encoded = wire.encode(torch.randn(elements, generator=torch.Generator().manual_seed(1)))
    whole = wire.decode(encoded, elements).split(PIECE_VALUES)
    assert len(whole) == pieces_of(elements)
    for number, piece in enumerate(whole):
        data = wire.cut(encoded.buffer, elements, number)
        assert torch.equal(wire.decode_piece(data, piece.numel()), piece)


def test_a_golden_commitment() -> None:
    """Pins the hashes; a change that is meant raises the protocol version too."""
    rule = AveragingRule(CODECS["float16"], part_bytes=2**14)
    nodes = nodes_of(PartCodec(rule.codec), rule, square_roots(30_000))
    assert len(nodes) == 4
    assert merkle_root(nodes).hex() == GOLDEN_COMMITMENT
