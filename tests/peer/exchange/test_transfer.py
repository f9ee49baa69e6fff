"""Fetching by hash from holders that are gone, busy, slow, cut off, or lie."""

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import socket
import threading
import time
from dataclasses import dataclass, field

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dipaco.base.blobs import BlobStore
from dipaco.base.errors import IntegrityError, NetworkError, StorageError
from dipaco.peer.exchange.files import transfer
from dipaco.peer.exchange.files.download_slots import DownloadSlots
from dipaco.peer.exchange.files.mirrors import MirrorSource
from dipaco.peer.exchange.files.partial_file import PartialFile, prune_partial_files
from dipaco.peer.exchange.files.refused_sources import FOR_S, RefusedSources
from dipaco.peer.exchange.files.transfer import (
    BLOCK_BYTES,
    ContentAbsent,
    OffsetBeyondEnd,
    SourceBusy,
    download,
    spread,
)
from support.wire.hostile_mirrors import HOSTILE_MIRRORS

CONTENT = bytes(range(256)) * (5 * BLOCK_BYTES // 512) + b"an odd end"
SHA = hashlib.sha256(CONTENT).hexdigest()


@dataclass
class FakeHolder:
    """A source in memory that misbehaves as told."""

    name: str = "holder"
    content: bytes = CONTENT
    breaks_after: int | None = None
    """Bytes of each stream after which it ends."""
    busy_times: int = 0
    absent: bool = False
    claims_bytes: int | None = None
    hangs: bool = False
    drips: bool = False
    """Each stream sends one piece and then, for ever, nothing."""
    offsets: list[int] = field(default_factory=list)
    sent: int = 0

    async def open(self, sha256, offset):
        self.offsets.append(offset)
        if self.hangs:
            await asyncio.sleep(3600)
        if self.absent:
            raise ContentAbsent
        if self.busy_times:
            self.busy_times -= 1
            raise SourceBusy(0.01)
        if offset > len(self.content):
            raise OffsetBeyondEnd
        total = self.claims_bytes if self.claims_bytes is not None else len(self.content)
        return FakeStream(self, offset), total


class FakeStream:
    def __init__(self, holder, offset):
        self.holder, self.offset = holder, offset
        self.has_sent = False
        self.left = holder.breaks_after if holder.breaks_after is not None else 2**60

    async def read(self, count):
        await asyncio.sleep(3600 if self.holder.drips and self.has_sent else 0)
        self.has_sent = True
        piece = self.holder.content[self.offset : self.offset + min(count, self.left, 70_001)]
        self.offset += len(piece)
        self.left -= len(piece)
        self.holder.sent += len(piece)
        return piece

    def close(self):
        pass


@pytest.fixture
def blobs(tmp_path):
    store = BlobStore(tmp_path / "blobs")
    store.tidy()
    return store


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(transfer, "RETRY_PAUSE_S", 0.01)


def fetch(blobs, *holders, sha=SHA, slots=2, **options):
    options = {"max_bytes": 2**30, "timeout_s": 120.0, "refused": RefusedSources(), **options}
    free = DownloadSlots(slots, slots)
    return asyncio.run(download(sha, holders, blobs, slots=free, **options))


def test_content_arrives_and_is_counted(blobs):
    told = []
    file = fetch(blobs, FakeHolder(), on_progress=lambda done, total: told.append(total - done))
    assert file.read_bytes() == CONTENT
    assert told == [len(CONTENT) - BLOCK_BYTES * n for n in range(len(told))]
    assert 0 < told[-1] < BLOCK_BYTES
    assert not blobs.partial_path(SHA).exists()
    holder = FakeHolder()
    fetch(blobs, holder)
    assert holder.offsets == [], "what is here is not asked for again"


def test_a_cut_off_transfer_goes_on_where_it_ended(blobs):
    flaky, steady = FakeHolder("flaky", breaks_after=BLOCK_BYTES + 5), FakeHolder("steady")
    assert fetch(blobs, flaky, steady).read_bytes() == CONTENT
    assert steady.offsets == [BLOCK_BYTES + 5]
    assert flaky.sent + steady.sent == len(CONTENT)


def test_what_an_earlier_process_received_is_used(blobs):
    blobs.partial_path(SHA).write_bytes(CONTENT[:1234])
    holder = FakeHolder()
    assert fetch(blobs, holder).read_bytes() == CONTENT
    assert holder.offsets == [1234]


def test_what_arrived_is_kept_when_all_fail(blobs):
    with pytest.raises(NetworkError, match="broke off"):
        fetch(blobs, FakeHolder(breaks_after=1000))
    assert blobs.partial_path(SHA).read_bytes() == CONTENT[: blobs.partial_path(SHA).stat().st_size]
    assert blobs.partial_path(SHA).stat().st_size == 1000 * transfer.MAX_FAILURES


def test_a_liar_is_named_and_skipped(blobs, caplog):
    liar = FakeHolder("peer Liar", content=CONTENT[:-1] + b"!")
    assert fetch(blobs, liar, FakeHolder()).read_bytes() == CONTENT
    assert len(liar.offsets) == 1
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "peer Liar" in warnings[0]


def test_only_liars_is_an_integrity_error(blobs):
    with pytest.raises(IntegrityError, match=r"peer A.*peer B"):
        fetch(blobs, FakeHolder("peer A", b"x" * 9), FakeHolder("peer B", b"y" * 9), sha=SHA)
    assert not blobs.has(SHA)
    assert not blobs.partial_path(SHA).exists()


def test_a_liar_is_not_asked_for_the_same_again_for_some_minutes(blobs):
    now_s = [0.0]
    refused = RefusedSources(monotonic=lambda: now_s[0])
    liar = FakeHolder("peer Liar", content=b"something else")
    for _ in range(3):
        with pytest.raises(IntegrityError, match="peer Liar"):
            fetch(blobs, liar, refused=refused)
    assert len(liar.offsets) == 1
    other = b"other content"
    repaired = FakeHolder("peer Liar", content=other)
    sha = hashlib.sha256(other).hexdigest()
    assert fetch(blobs, repaired, sha=sha, refused=refused).read_bytes() == other
    now_s[0] += FOR_S
    assert fetch(blobs, FakeHolder("peer Liar"), refused=refused).read_bytes() == CONTENT


def test_a_mixed_file_is_started_over_and_nobody_wronged(blobs, caplog):
    liar = FakeHolder("peer Liar", content=b"?" * len(CONTENT), breaks_after=BLOCK_BYTES)
    honest = FakeHolder("peer Honest")
    assert fetch(blobs, liar, honest).read_bytes() == CONTENT
    assert honest.offsets == [BLOCK_BYTES, 0]
    assert not [r for r in caplog.records if "refused" in r.message]
    assert [r for r in caplog.records if "parts from peer Honest, peer Liar" in r.message]


@pytest.mark.parametrize(("left", "offsets"), [(b"garbage", [7, 0]), (CONTENT + b"and more", [len(CONTENT) + 8, 0])])
def test_a_damaged_partial_file_is_nobody_s_fault(blobs, left, offsets):
    blobs.partial_path(SHA).write_bytes(left)
    holder = FakeHolder()
    assert fetch(blobs, holder).read_bytes() == CONTENT
    assert holder.offsets == offsets


def test_content_of_the_greatest_size_is_fetched_and_one_byte_more_is_refused_before_it_is_sent(blobs, caplog):
    size, holder = len(CONTENT), FakeHolder("peer Big")
    with pytest.raises(IntegrityError, match=f"it announces {size} bytes, at most {size - 1}"):
        fetch(blobs, holder, max_bytes=size - 1)
    assert holder.sent == 0
    assert len([r for r in caplog.records if "peer Big" in r.message]) == 1
    assert fetch(blobs, FakeHolder(), max_bytes=size).read_bytes() == CONTENT


def test_a_busy_holder_is_asked_again(blobs):
    holder = FakeHolder(busy_times=3)
    assert fetch(blobs, holder).read_bytes() == CONTENT
    assert len(holder.offsets) == 4


def test_absent_holders_are_skipped(blobs):
    gone = FakeHolder("gone", absent=True)
    assert fetch(blobs, gone, FakeHolder()).read_bytes() == CONTENT
    with pytest.raises(NetworkError, match="gone: it does not hold it"):
        fetch(blobs, gone, sha="0" * 64)
    with pytest.raises(NetworkError, match="nobody is known to hold"):
        fetch(blobs, sha="0" * 64)


def test_waiting_is_bounded(blobs, monkeypatch):
    began = time.monotonic()
    with pytest.raises(NetworkError, match="in time"):
        fetch(blobs, FakeHolder(hangs=True), timeout_s=0.3)
    with pytest.raises(NetworkError, match="busy"):
        fetch(blobs, FakeHolder(busy_times=10**6), timeout_s=1.0)
    assert time.monotonic() - began < 60.0


def test_a_slow_holder_is_left_for_another(blobs, monkeypatch):
    monkeypatch.setattr(transfer, "OPEN_TIMEOUT_S", 0.5)
    assert fetch(blobs, FakeHolder(hangs=True), FakeHolder()).read_bytes() == CONTENT


class CountedTime:
    """A clock that goes on by a tenth of a second for every piece that arrives."""

    def __init__(self):
        self.now_s = 0.0

    def monotonic(self):
        return self.now_s


def test_a_fast_sender_does_not_pass_the_deadline(blobs, monkeypatch):
    clock = CountedTime()
    monkeypatch.setattr(transfer, "time", clock)
    holder = FakeHolder("peer Fast")

    class Stream(FakeStream):
        async def read(self, count):
            clock.now_s += 0.1
            return await super().read(count)

    async def send(sha256, offset):
        return Stream(holder, offset), len(CONTENT)

    holder.open = send
    with pytest.raises(NetworkError, match="in time.*still sending"):
        fetch(blobs, holder, timeout_s=1.0)
    assert holder.sent == BLOCK_BYTES, "the block that had begun"
    assert blobs.partial_path(SHA).stat().st_size == BLOCK_BYTES, "kept for the next attempt"


def test_a_holder_that_drips_is_left_when_others_can_be_asked(blobs, monkeypatch):
    monkeypatch.setattr(transfer, "BLOCK_TIMEOUT_S", 3600.0)
    monkeypatch.setattr(transfer, "LEAST_RATE_BYTES_S", 2**23)
    monkeypatch.setattr(transfer, "SLOW_GRACE_S", 0.2)
    drips, honest = FakeHolder("drips", drips=True), FakeHolder("honest")
    assert fetch(blobs, drips, honest).read_bytes() == CONTENT
    assert honest.sent > len(CONTENT) // 2


def test_hundreds_of_silent_holders_cost_no_more_than_a_few(blobs, monkeypatch):
    monkeypatch.setattr(transfer, "SLOW_GRACE_S", 0.1)
    dead = [FakeHolder(f"dead {number}", hangs=True) for number in range(300)]
    slots, honest = DownloadSlots(2, 2), FakeHolder("honest")
    liar = FakeHolder("always busy")

    async def is_busy(sha256, offset):
        raise SourceBusy(0.0)

    liar.open = is_busy
    dead = [liar, *dead]
    options = {"max_bytes": 2**30, "timeout_s": 30.0, "refused": RefusedSources(), "slots": slots}
    assert asyncio.run(download(SHA, [*dead, honest], blobs, **options)).read_bytes() == CONTENT
    blobs.remove(SHA)
    asked = sum(len(holder.offsets) for holder in dead)
    assert asyncio.run(download(SHA, [*dead, honest], blobs, **options)).read_bytes() == CONTENT
    assert sum(len(holder.offsets) for holder in dead) == asked, "they are known to be silent"


@pytest.mark.parametrize("is_new", [True, False])
def test_a_silent_holder_is_left_for_one_that_is_named_meanwhile(blobs, monkeypatch, is_new):
    """Of a file that its owner keeps from one peer, others come to have it a little later."""
    monkeypatch.setattr(transfer, "BLOCK_TIMEOUT_S", 3600.0)
    monkeypatch.setattr(transfer, "SLOW_GRACE_S", 0.2)
    drips, other = FakeHolder("drips", drips=True), FakeHolder("other", absent=True)
    given = [drips] if is_new else [other, drips]
    begun_s, named = time.monotonic(), [other]

    def more():
        if time.monotonic() < begun_s + 0.5 or not named:
            return []
        other.absent = False
        return [named.pop()]

    assert fetch(blobs, *given, more=more).read_bytes() == CONTENT
    assert other.sent > len(CONTENT) // 2


def test_a_slow_holder_is_good_enough_when_there_is_no_other(blobs, monkeypatch):
    monkeypatch.setattr(transfer, "SLOW_GRACE_S", 0.0)
    monkeypatch.setattr(transfer, "LEAST_RATE_BYTES_S", 2**60)
    slow = FakeHolder("slow")
    assert fetch(blobs, FakeHolder("gone", absent=True), slow).read_bytes() == CONTENT
    assert slow.offsets == [0], "it was never left"


def test_files_that_drip_do_not_keep_an_honest_one_waiting(blobs, monkeypatch):
    """Eight files of as many sources that drip fill the slots; an honest one comes then."""
    monkeypatch.setattr(transfer, "BLOCK_TIMEOUT_S", 3600.0)
    monkeypatch.setattr(transfer, "LEAST_RATE_BYTES_S", 2**23)
    monkeypatch.setattr(transfer, "SLOW_GRACE_S", 0.2)

    async def all_of_them():
        slots = DownloadSlots(8, 2)

        def fetched(holder, sha256):
            getting = download(
                sha256, [holder], blobs, max_bytes=2**30, timeout_s=3600.0, slots=slots, refused=RefusedSources()
            )
            return asyncio.create_task(getting)

        dripping = [fetched(FakeHolder(f"drips {number}", drips=True), f"{number:064x}") for number in range(8)]
        await asyncio.sleep(0.1)
        path = await asyncio.wait_for(fetched(FakeHolder("honest"), SHA), 60.0)
        for task in dripping:
            task.cancel()
        await asyncio.wait(dripping)
        return path

    assert asyncio.run(all_of_them()).read_bytes() == CONTENT


def test_a_holder_that_is_busy_for_ever_is_given_up(blobs, monkeypatch):
    monkeypatch.setattr(transfer, "BUSY_LIMIT_S", 0.5)
    with pytest.raises(NetworkError, match="busy") as raised:
        fetch(blobs, FakeHolder(busy_times=10**6), timeout_s=3600.0)
    assert "in time" not in str(raised.value)


def test_a_holder_that_sends_something_between_two_refusals_is_not_given_up(blobs, monkeypatch):
    monkeypatch.setattr(transfer, "BUSY_LIMIT_S", 0.0)

    class OftenBusy(FakeHolder):
        async def open(self, sha256, offset):
            self.busy_times = len(self.offsets) % 2
            return await super().open(sha256, offset)

    holder = OftenBusy(breaks_after=200_000)
    assert fetch(blobs, holder).read_bytes() == CONTENT
    assert len(holder.offsets) > 20


def test_who_waits_for_busy_holders_takes_no_slot(blobs, tmp_path):
    async def both():
        slots = DownloadSlots(1, 1)
        liar, told = FakeHolder(busy_times=10**6), asyncio.Event()

        async def stay_busy(sha256, offset):
            told.set()
            raise SourceBusy(3600.0)

        liar.open = stay_busy
        options = {"max_bytes": 2**30, "timeout_s": 3600.0, "slots": slots}
        options["refused"] = RefusedSources()
        other = BlobStore(tmp_path / "other")
        waiting = asyncio.create_task(download(SHA, [liar], other, **options))
        await asyncio.wait_for(told.wait(), 60.0)
        try:
            return await asyncio.wait_for(download(SHA, [FakeHolder()], blobs, **options), 60.0)
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    assert asyncio.run(both()).read_bytes() == CONTENT


def test_a_holder_that_often_breaks_but_sends_is_not_given_up(blobs):
    holder = FakeHolder(breaks_after=len(CONTENT) // 9)
    assert fetch(blobs, holder).read_bytes() == CONTENT
    assert len(holder.offsets) > 2 * transfer.MAX_FAILURES


def test_after_a_mixed_file_a_busy_liar_costs_nothing(blobs):
    liar = FakeHolder("peer Liar", content=b"?" * len(CONTENT), breaks_after=BLOCK_BYTES)
    honest = FakeHolder("peer Honest", breaks_after=BLOCK_BYTES * 2)

    async def turn_busy(sha256, offset):
        stream = await FakeHolder.open(liar, sha256, offset)
        liar.busy_times = 10**6
        return stream

    liar.open = turn_busy
    assert fetch(blobs, liar, honest).read_bytes() == CONTENT
    assert honest.offsets == [BLOCK_BYTES, 0, BLOCK_BYTES * 2]


class SlowHolder(FakeHolder):
    """Sends a piece every fiftieth of a second, which is slow in these tests."""

    async def open(self, sha256, offset):
        stream, total = await super().open(sha256, offset)

        async def read(count):
            await asyncio.sleep(0.02)
            return await FakeStream.read(stream, count)

        stream.read = read
        return stream, total


def test_after_a_mixed_file_a_liar_that_stalls_does_not_keep_a_slow_holder_from_sending_all(blobs, monkeypatch):
    monkeypatch.setattr(transfer, "BLOCK_TIMEOUT_S", 3600.0)
    monkeypatch.setattr(transfer, "LEAST_RATE_BYTES_S", 2**60)
    monkeypatch.setattr(transfer, "SLOW_GRACE_S", 0.2)
    liar = FakeHolder("peer Liar", content=b"?" * len(CONTENT), drips=True)
    assert fetch(blobs, liar, SlowHolder("peer Honest"), timeout_s=30.0).read_bytes() == CONTENT


def test_after_a_mixed_file_what_a_holder_sends_counts_also_when_it_takes_the_place_of_more(blobs):
    liar = FakeHolder("peer Liar", content=b"?" * len(CONTENT), breaks_after=2 * BLOCK_BYTES)
    honest = FakeHolder("peer Honest", breaks_after=BLOCK_BYTES)
    with contextlib.suppress(NetworkError):  # not if all of it comes from one holder by chance
        assert fetch(blobs, liar, honest, timeout_s=2.0).read_bytes() == CONTENT
        return
    assert len(honest.offsets) > 2 * transfer.MAX_FAILURES


def test_who_says_that_a_file_ends_before_its_beginning_does_not_undo_what_another_sent(blobs):
    liar = FakeHolder("peer Liar", content=b"?" * len(CONTENT), breaks_after=BLOCK_BYTES)
    honest = SlowHolder("peer Honest", breaks_after=2 * BLOCK_BYTES)

    async def turn_away(sha256, offset):
        if not liar.offsets:
            return await FakeHolder.open(liar, sha256, offset)
        raise OffsetBeyondEnd if honest.offsets == [BLOCK_BYTES, 0] else SourceBusy(0.01)

    liar.open = turn_away
    assert fetch(blobs, liar, honest).read_bytes() == CONTENT
    assert honest.offsets == [BLOCK_BYTES, 0, BLOCK_BYTES * 2]


def test_many_at_once_fetch_once(blobs):
    holder = FakeHolder()

    async def all_at_once():
        options = {"max_bytes": 2**30, "timeout_s": 120.0}
        options["refused"] = RefusedSources()
        slots = DownloadSlots(9, 9)
        return await asyncio.gather(*(download(SHA, [holder], blobs, slots=slots, **options) for _ in range(5)))

    assert set(asyncio.run(all_at_once())) == {blobs.path(SHA)}
    assert holder.sent == len(CONTENT)


def test_who_opens_the_file_when_another_has_just_ended_fetches_nothing(blobs, monkeypatch):
    try_open = PartialFile.try_open

    def open_late(partial):
        blobs.add_bytes(CONTENT)
        return try_open(partial)

    monkeypatch.setattr(PartialFile, "try_open", open_late)
    holder = FakeHolder()
    assert fetch(blobs, holder).read_bytes() == CONTENT
    assert holder.offsets == []
    assert not blobs.partial_path(SHA).exists()


def test_threads_share_the_partial_file(blobs):
    holders = [FakeHolder(str(i), breaks_after=BLOCK_BYTES * 2) for i in range(3)]
    paths = []
    threads = [threading.Thread(target=lambda h=h: paths.append(fetch(blobs, h))) for h in holders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [path.read_bytes() == CONTENT for path in paths] == [True] * 3
    assert sum(holder.sent for holder in holders) == len(CONTENT)


def test_a_full_disk_is_a_storage_error(blobs, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    blobs.partial_path(SHA).write_bytes(CONTENT[:99])
    with pytest.raises(StorageError, match="disk full"):
        fetch(blobs, FakeHolder(), FakeHolder())
    # It is not left full of what cannot be finished.
    assert not list(blobs.partial_paths())


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A folder that stands for whatever an https address names."""
    folder = tmp_path / "mirror"
    folder.mkdir()

    def find(address, **options):
        return fsspec.filesystem("file"), str(folder.joinpath(*address.split("/")[-2:]))

    monkeypatch.setattr(fsspec.core, "url_to_fs", find)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", ("93.184.215.14", 443))])
    return folder


@pytest.mark.parametrize("found", ["127.0.0.1", "192.168.1.1", "169.254.169.254", "::1", "fe80::1%2"])
def test_no_mirror_leads_into_a_volunteer_s_own_network(blobs, mirror, monkeypatch, found):
    (mirror / SHA[:2]).mkdir()
    (mirror / SHA[:2] / SHA).write_bytes(CONTENT)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", (found, 443))])
    with pytest.raises(NetworkError, match="private address"):
        fetch(blobs, MirrorSource("https://mirror.example.org/blobs/"))


def test_a_mirror_resumes_and_is_checked(blobs, mirror):
    source = MirrorSource("https://example.org/blobs/")
    for name in (SHA[:2], "22"):
        (mirror / name).mkdir(exist_ok=True)
    (mirror / SHA[:2] / SHA).write_bytes(CONTENT)
    blobs.partial_path(SHA).write_bytes(CONTENT[:99])
    assert fetch(blobs, source).read_bytes() == CONTENT
    with pytest.raises(NetworkError, match="does not hold it"):
        fetch(blobs, source, sha="1" * 64)
    (mirror / "22" / ("2" * 64)).write_bytes(b"other")
    with pytest.raises(IntegrityError, match="mirror https"):
        fetch(blobs, source, sha="2" * 64)


@pytest.mark.parametrize("address", HOSTILE_MIRRORS)
def test_a_mirror_that_is_no_plain_address_is_never_opened(blobs, monkeypatch, address):
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda address, **options: pytest.fail("it was opened"))
    with pytest.raises(NetworkError, match="is not a mirror"):
        fetch(blobs, MirrorSource(address))


def test_partial_files_have_one_owner(blobs):
    with PartialFile(blobs, SHA) as first, PartialFile(blobs, SHA) as second:
        assert first.try_open()
        assert not second.try_open()
        first.append(b"abc")
        first.close()
        assert second.try_open()
        assert second.size_bytes == 3
        second.clear()
    assert not blobs.partial_path(SHA).exists(), "an empty one is not left behind"


def test_unfinished_downloads_do_not_pile_up(blobs):
    """A peer that announces a thousand states and sends none whole does not fill a disk."""
    shas = [f"{n:064x}" for n in range(20)]
    for age, sha in enumerate(shas):
        with pytest.raises(NetworkError):
            fetch(blobs, FakeHolder(breaks_after=10), sha=sha)
        os.utime(blobs.partial_path(sha), (10**9 + age, 10**9 + age))
    with PartialFile(blobs, shas[0]) as in_use:
        assert in_use.try_open()
        prune_partial_files(blobs, 3)
        kept = [path.name for path in blobs.partial_paths()]
    assert kept == [shas[0], *shas[-3:]]


@given(st.sets(st.text("abcdef", min_size=1), max_size=8), st.text("xyz", max_size=4))
def test_spread_is_an_order_of_the_holders(holders, me):
    order = spread(SHA, holders | {me}, me)
    assert set(order) == holders - {me}
    assert order == spread(SHA, sorted(holders), me)


def test_a_mirror_is_asked_through_the_proxy_which_looks_its_name_up(blobs, mirror, monkeypatch):
    (mirror / SHA[:2]).mkdir(exist_ok=True)
    (mirror / SHA[:2] / SHA).write_bytes(CONTENT)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("the name was looked up"))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:3128")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    assert fetch(blobs, MirrorSource("https://example.org/blobs/")).read_bytes() == CONTENT
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", ("10.0.0.1", 443))])
    for address in ("https://10.0.0.1/blobs", "https://localhost/blobs"):
        with pytest.raises(NetworkError, match="private address"):
            fetch(blobs, MirrorSource(address), sha="1" * 64)


def test_a_mirror_that_cannot_be_reached_is_not_one_that_lacks_the_file(blobs):
    aiohttp = pytest.importorskip("aiohttp")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
        patch.delenv("NO_PROXY", raising=False)
        patch.delenv("no_proxy", raising=False)
        with pytest.raises(NetworkError, match=r"cannot be read: .*127\.0\.0\.1"):
            fetch(blobs, MirrorSource("https://mirror.example.org/blobs"))
    assert aiohttp
