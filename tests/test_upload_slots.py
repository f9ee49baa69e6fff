"""Nobody holds a slot by taking little."""

from __future__ import annotations

import pytest
from dipaco.peer.exchange.upload_slots import (
    GRACE_S,
    LEAST_RATE_BYTES_S,
    WANTED_RATE_BYTES_S,
    Upload,
    UploadSlots,
)


class Case:
    """Three slots, two of a peer, on a clock that stands still unless told."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slots = UploadSlots(3, 2, lambda: self.now_s)
        self.stopped: list[str] = []

    def take(self, peer: str) -> Upload | None:
        return self.slots.take(peer, lambda: self.stopped.append(peer))

    def taken(self, peer: str) -> Upload:
        upload = self.take(peer)
        assert upload is not None
        return upload


@pytest.fixture
def case() -> Case:
    return Case()


def test_slots_are_bounded_in_all_and_for_each_peer(case: Case) -> None:
    first = case.taken("a")
    case.taken("a")
    assert case.take("a") is None
    case.taken("b")
    assert case.take("c") is None
    case.slots.give_back(first)
    case.slots.give_back(first)
    case.taken("c")
    assert case.take("d") is None
    assert case.stopped == []


def test_who_drips_loses_its_slot_to_who_asks(case: Case) -> None:
    """Half a chunk every 29 s: within the limit of each chunk, for as long as it likes."""
    drips = case.taken("drips")
    for _ in range(40):
        case.now_s += 29.0
        case.slots.sent(drips, 2**18)
    fast, other = case.taken("fast"), case.taken("other")
    case.slots.sent(fast, 2**24)
    case.slots.sent(other, 2**24)
    case.now_s += GRACE_S
    assert case.taken("d").peer == "d"
    assert case.stopped == ["drips"]
    assert case.take("e") is None, "the others take enough"


def test_the_slowest_goes_first_and_every_upload_has_some_time(case: Case) -> None:
    uploads = [case.taken(peer) for peer in "abc"]
    for upload, count in zip(uploads, (3000, 1000, 2000), strict=True):
        case.slots.sent(upload, count)
    case.now_s += GRACE_S
    assert case.take("d") is None
    case.now_s += 1.0
    assert case.take("d") is not None
    assert case.take("e") is not None
    assert case.stopped == ["b", "c"]


def test_many_of_one_peer_do_not_take_turns(case: Case) -> None:
    case.taken("a")
    case.taken("a")
    case.now_s += 10 * GRACE_S
    assert case.take("a") is None


def test_an_upload_below_the_floor_ends_although_nobody_asks(case: Case) -> None:
    upload = case.taken("a")
    case.now_s += GRACE_S + 10.0
    case.slots.sent(upload, 10 * LEAST_RATE_BYTES_S)
    case.now_s += 1.0
    with pytest.raises(TimeoutError, match="slowly"):
        case.slots.sent(upload, 1)


def test_a_steady_reader_keeps_its_slot_for_as_long_as_it_takes(case: Case) -> None:
    upload = case.taken("a")
    case.taken("b")
    case.taken("b")
    for _ in range(1000):
        case.now_s += 1.0
        for each in case.slots._uploads:
            case.slots.sent(each, WANTED_RATE_BYTES_S)
        assert case.take("c") is None
    assert upload in case.slots._uploads
