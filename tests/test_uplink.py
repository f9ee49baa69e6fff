"""What a peer sends is limited: one clock for all its processes, reduces first, months counted."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dipaco.modules.codecs import CODECS
from dipaco.modules.outer import AveragingRule
from dipaco.peer.averaging.averager import ExactAverager
from dipaco.peer.averaging.bounded_p2p import _PacedWriter
from dipaco.peer.check.needs import too_slow
from dipaco.peer.owner.pauses import BY_COMMAND, Pauses, UploadBudget, ask_to_pause
from dipaco.peer.owner.uplink import (
    CONTENT_SHARE,
    LONGEST_WAIT_S,
    PIECE_S,
    PROBE_EVERY_S,
    PROBE_S,
    REDUCE_PAUSE_S,
    SPAN_S,
    SPANS,
    StreamMeter,
    Uplink,
)
from support.tiny_run import make_tiny_run


class FakeTime:
    """A clock that the test moves; sleeping moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(asyncio, "sleep", self._sleep)

    def __call__(self) -> float:
        return self.now_s

    async def _sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    return FakeTime(monkeypatch)


def test_bytes_take_the_time_that_the_limit_gives_them(clock: FakeTime) -> None:
    uplink = Uplink(8.0, clock)  # A million bytes a second.

    async def send() -> None:
        for _ in range(10):
            await uplink.reduce(300_000)
            await uplink.content(100_000)

    asyncio.run(send())
    # After each reduce, content waits a moment for the next one.
    assert clock.now_s - 100.0 == pytest.approx(4.0 + 10 * REDUCE_PAUSE_S, rel=0.2)
    assert uplink.sent_bytes == 4_000_000


def test_what_was_not_used_is_not_saved_up(clock: FakeTime) -> None:
    uplink = Uplink(8.0, clock)
    clock.now_s += 1000.0
    assert uplink.reserve(500_000, is_reduce=True) == pytest.approx(0.5)
    assert uplink.reserve(500_000, is_reduce=True) == pytest.approx(1.0)


def test_reduces_go_first(clock: FakeTime) -> None:
    uplink = Uplink(8.0, clock)
    uplink.reserve(2_000_000, is_reduce=True)
    asyncio.run(uplink.content(1000))
    assert clock.now_s - 100.0 >= 2.0 + REDUCE_PAUSE_S
    # A piece of content under way delays a reduce by no more than the piece.
    uplink.reserve(uplink.piece_bytes or 0, is_reduce=False)
    assert uplink.reserve(0, is_reduce=True) <= 1.1 * PIECE_S
    # A reduce without an end does not silence content for ever.
    uplink.reserve(10**9, is_reduce=True)
    began_s = clock.now_s
    assert uplink.is_busy()

    async def one_piece() -> None:
        await asyncio.wait_for(uplink.content(0), None)

    asyncio.run(one_piece())
    assert clock.now_s - began_s >= LONGEST_WAIT_S


def test_without_a_limit_nothing_waits(clock: FakeTime) -> None:
    uplink = Uplink(None, clock)
    asyncio.run(uplink.reduce(10**9))
    asyncio.run(uplink.content(10**9))
    assert clock.now_s == 100.0
    assert uplink.sent_bytes == 2 * 10**9
    assert uplink.piece_bytes is None
    assert uplink.stated_mbit_per_s is None
    assert Uplink(0.5).stated_mbit_per_s == 1


def test_all_processes_share_it() -> None:
    uplink = Uplink(8.0)
    child = multiprocessing.get_context("fork").Process(
        target=lambda: uplink.reserve(10**9, is_reduce=True)
    )
    child.start()
    child.join()
    assert uplink.sent_bytes == 10**9
    assert uplink.is_busy()
    assert uplink.reserve(0, is_reduce=False) > 900.0


def test_a_process_that_died_with_the_lock_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dipaco.peer.owner.uplink.LOCK_LIMIT_S", 0.01)
    uplink = Uplink(8.0)
    child = multiprocessing.get_context("fork").Process(target=uplink._lock.acquire)
    child.start()
    child.join()
    assert uplink.reserve(10**6, is_reduce=True) > 0.5
    assert uplink.reserve(10**6, is_reduce=True) > 1.0
    assert uplink.sent_bytes == 2 * 10**6


def test_a_message_is_paced_when_it_is_drained(clock: FakeTime) -> None:
    class Writer:
        written = b""
        transport = "its own"

        def write(self, data: bytes) -> None:
            self.written += data

        async def drain(self) -> None: ...

    inner: Any = Writer()
    writer = _PacedWriter(inner, Uplink(8.0, clock))
    writer.write(b"x" * 400_000)
    writer.write(b"y" * 100_000)
    asyncio.run(writer.drain())
    assert clock.now_s - 100.0 == pytest.approx(0.5)
    assert len(inner.written) == 500_000
    assert writer.transport == "its own"


def send_on_a_line(
    uplink: Uplink, clock: FakeTime, rate: float, messages: int, *, is_reduce: bool = True
) -> None:
    """Send messages of 100,000 bytes on a new stream, each of which waits for the line."""
    meter = StreamMeter(uplink, is_reduce=is_reduce)
    for _ in range(messages):
        began_s = clock.now_s
        clock.now_s += 1e5 / rate
        uplink.reserve(100_000, is_reduce=is_reduce)
        meter.wrote(100_000, began_s, clock.now_s)


def test_a_line_is_measured_by_what_was_sent_while_it_was_full(clock: FakeTime) -> None:
    uplink = Uplink(None, clock)
    # What buffers take at once says nothing, however much it is.
    StreamMeter(uplink, is_reduce=True).wrote(50_000_000, clock.now_s, clock.now_s + 0.06)
    assert uplink.measured_mbit_per_s is None
    clock.now_s += 60.0
    send_on_a_line(uplink, clock, 250_000, 12)
    assert uplink.measured_mbit_per_s == pytest.approx(2.0)
    assert uplink.stated_mbit_per_s == 2
    for rate in (125_000, 1_000_000, 30_000):
        clock.now_s += 60.0
        send_on_a_line(uplink, clock, rate, 45)
    assert uplink.measured_mbit_per_s == pytest.approx(8.0), "a slow reader does not lower it"
    # The limit if that is less.
    uplink.max_mbit_per_s = 5.0
    assert uplink.known_mbit_per_s == 5.0
    uplink.max_mbit_per_s = 20.0
    assert uplink.stated_mbit_per_s == 8
    clock.now_s += SPAN_S * (SPANS - 2)
    assert uplink.measured_mbit_per_s == pytest.approx(8.0)
    clock.now_s += 2 * SPAN_S
    assert uplink.measured_mbit_per_s is None, "lines change"


def test_a_busy_machine_and_pauses_do_not_lower_a_measure(clock: FakeTime) -> None:
    uplink = Uplink(None, clock)
    send_on_a_line(uplink, clock, 500_000, 25)
    meter = StreamMeter(uplink, is_reduce=True)
    for seconds in (0.2, 0.2, 1.7, 0.2, 3.0, 0.2, 0.2):
        clock.now_s += 0.1 + seconds
        meter.wrote(100_000, clock.now_s - seconds, clock.now_s)
    assert uplink.measured_mbit_per_s == pytest.approx(4.0)


def test_small_messages_of_which_few_wait_are_all_counted(clock: FakeTime) -> None:
    uplink, seen = Uplink(None, clock), []
    meter = StreamMeter(uplink, is_reduce=True)
    for number in range(90):
        # The transport takes two at once, and the third waits until all three have left.
        seconds = 0.15 if number % 3 == 2 else 0.0
        clock.now_s += seconds
        meter.wrote(30_000, clock.now_s - seconds, clock.now_s)
        seen.append(uplink.measured_mbit_per_s)
    assert seen[5] is None
    assert seen[-1] == pytest.approx(8 * 90_000 / 0.15 / 1e6)


def test_streams_that_share_a_line_are_added_up(clock: FakeTime) -> None:
    uplink = Uplink(None, clock)
    meters = [StreamMeter(uplink, is_reduce=number > 0) for number in range(4)]
    began = [clock.now_s] * 4
    for number in range(80):
        # In turn, each message waits for those of the three others.
        clock.now_s += 0.1
        at = number % 4
        meters[at].wrote(50_000, began[at], clock.now_s)
        began[at] = clock.now_s
    assert uplink.measured_mbit_per_s == pytest.approx(4.0, rel=0.02)


def test_answers_that_never_wait_count_beside_a_full_stream(clock: FakeTime) -> None:
    """Half of what a reduce sends are averages, which wait for what others send."""
    uplink = Uplink(None, clock)
    full, answers = (StreamMeter(uplink, is_reduce=True) for _ in range(2))
    for _ in range(20):
        began_s = clock.now_s
        answers.wrote(100_000, clock.now_s, clock.now_s)
        clock.now_s += 0.4
        full.wrote(100_000, began_s, clock.now_s)
    assert uplink.measured_mbit_per_s == pytest.approx(4.0)


def test_writes_that_wait_now_and_then_measure_nothing(clock: FakeTime) -> None:
    uplink = Uplink(None, clock)
    meter = StreamMeter(uplink, is_reduce=True)
    for _ in range(100):
        clock.now_s += 1.0
        meter.wrote(100_000, clock.now_s - 0.5, clock.now_s)
        meter.wrote(100_000, clock.now_s - 0.001, clock.now_s)
    assert uplink.measured_mbit_per_s is None
    assert uplink.stated_mbit_per_s is None


def test_a_measure_is_for_all_processes(clock: FakeTime) -> None:
    uplink = Uplink(None, clock)

    def send() -> None:
        send_on_a_line(uplink, clock, 1_000_000, 45)

    child = multiprocessing.get_context("fork").Process(target=send)
    child.start()
    child.join()
    clock.now_s += 4.5
    assert uplink.measured_mbit_per_s == pytest.approx(8.0)
    assert uplink.piece_bytes == 250_000


def test_content_takes_a_share_of_a_measured_line(clock: FakeTime) -> None:
    uplink = Uplink(None, clock)
    # One reader was slow: that paces content, and no reduce.
    send_on_a_line(uplink, clock, 500_000, 25, is_reduce=False)
    assert uplink.stated_mbit_per_s is None
    clock.now_s += 10.0
    began_s = clock.now_s

    async def send() -> None:
        for _ in range(100):
            await uplink.content(50_000)

    asyncio.run(send())
    assert clock.now_s - began_s == pytest.approx(5_000_000 / (CONTENT_SHARE * 500_000))
    # Now and then it goes as fast as the line, and may find that this carries more.
    clock.now_s = began_s + PROBE_EVERY_S + 1.0
    probed_s = clock.now_s
    asyncio.run(uplink.content(10**6))
    assert clock.now_s == probed_s
    assert uplink.piece_bytes is None
    send_on_a_line(uplink, clock, 2_000_000, 80, is_reduce=False)
    assert uplink.measured_mbit_per_s == pytest.approx(16.0)
    clock.now_s += PROBE_S
    asyncio.run(uplink.content(1_500_000))
    assert clock.now_s - probed_s == pytest.approx(4.0 + PROBE_S + 1.0)
    # Its limit holds as well.
    limited = Uplink(2.0, clock)
    send_on_a_line(limited, clock, 500_000, 25, is_reduce=False)
    clock.now_s += 10.0
    began_s = clock.now_s
    asyncio.run(limited.content(500_000))
    assert clock.now_s - began_s == pytest.approx(2.0)


def test_content_keeps_away_while_a_group_closes(clock: FakeTime) -> None:
    uplink = Uplink(None, clock)
    uplink.expect_reduce(0.5)
    assert not uplink.is_busy(), "nothing is known of the line"
    send_on_a_line(uplink, clock, 500_000, 25, is_reduce=False)
    uplink.expect_reduce(10.0)
    assert not uplink.is_busy()
    clock.now_s += 9.5
    assert uplink.is_busy()
    clock.now_s += 1.0
    assert uplink.is_busy()
    clock.now_s += 1.0
    assert not uplink.is_busy()


def test_content_leaves_a_full_line_to_a_reduce_without_a_limit_too(clock: FakeTime) -> None:
    uplink = Uplink(None, clock)
    assert not uplink.is_busy()
    send_on_a_line(uplink, clock, 250_000, 12)
    began_s = clock.now_s
    asyncio.run(uplink.content(1000))
    assert clock.now_s - began_s >= 0.4 + REDUCE_PAUSE_S
    assert uplink.reserve(10**9, is_reduce=True) == 0.0, "no reduce waits without a limit"
    began_s = clock.now_s
    asyncio.run(uplink.content(1000))
    assert clock.now_s - began_s < LONGEST_WAIT_S


def test_content_waits_for_what_reduces_have_yet_to_send(clock: FakeTime) -> None:
    uplink = Uplink(None, clock)
    uplink.begin_reduce(1_000_000, 60.0)
    assert not uplink.is_busy(), "nothing is known of the line"
    uplink = Uplink(80.0, clock)
    uplink.begin_reduce(1_000_000, 60.0)
    asyncio.run(uplink.reduce(900_000))
    clock.now_s += 10.0
    assert uplink.is_busy(), "it waits for others, and has more to send"
    asyncio.run(uplink.reduce(150_000))
    clock.now_s += 10.0
    assert not uplink.is_busy()
    uplink.begin_reduce(1_000_000, 60.0)
    uplink.begin_reduce(0, 0.0)
    assert not uplink.is_busy(), "it was given up"
    child = multiprocessing.get_context("fork").Process(
        target=uplink.begin_reduce, args=(10**6, 60.0)
    )
    child.start()
    child.join()
    assert uplink.is_busy(), "a reduce of any process counts"
    clock.now_s += 61.0
    assert not uplink.is_busy(), "and one whose process has died, no longer than it had"


def test_a_reduce_that_the_line_does_not_carry_is_told_while_it_runs(
    caplog: pytest.LogCaptureFixture, clock: FakeTime
) -> None:
    uplink = Uplink(None, clock)
    peer: Any = SimpleNamespace(peer_id="me")
    averager = ExactAverager(
        peer,
        prefix="L0",
        size=8,
        rule=AveragingRule(CODECS["float16"]),
        matchmaking_s=1.0,
        paths_of_module={"L0.E0": (0,)},
        uplink=uplink,
        start=False,
    )
    averager._owed_bytes.value = 10e6
    averager._foretell("L0.E0", 20.0)
    assert averager._upload_mbit() == 100, "not measured yet"
    send_on_a_line(uplink, clock, 250_000, 12)
    averager._foretell("L0.E0", 41.0)
    assert not caplog.messages
    averager._foretell("L0.E0", 20.0)
    averager._foretell("L0.E0", 20.0)
    [line] = caplog.messages
    assert line.startswith("L0.E0: this outer step sends 10 MB in 20 s, and this line carries 5 MB")
    assert "give --max-upload-mbps 1.8 to keep room" in line
    assert line.endswith("longer rounds or codec = blockwise8bit")
    assert averager._upload_mbit() == 2


def test_a_month_s_upload(tmp_path: Path) -> None:
    month = {"now": datetime(2026, 1, 30)}
    uplink = Uplink()

    def budget(limit_gb: float | None = 1.0) -> UploadBudget:
        return UploadBudget(tmp_path, uplink, gb_month=limit_gb, now=lambda: month["now"])

    first = budget()
    uplink.reserve(600_000_000, is_reduce=False)
    assert first.reason() == ""
    # It goes on where it was after a restart, and counts without a limit too.
    uplink.reserve(300_000_000, is_reduce=True)
    unlimited = budget(None)
    assert unlimited.reason() == ""
    first.count()
    second = budget()
    uplink.reserve(200_000_000, is_reduce=True)
    assert second.reason() == "1 GB were sent this month (--max-upload-gb-month)"
    assert not uplink.serves
    assert json.loads((tmp_path / "upload.json").read_text())["month"] == "2026-01"
    watch = Pauses(tmp_path, budget=second)
    assert watch.change() == "1 GB were sent this month (--max-upload-gb-month)"
    second._limits_gb["month"] = 2.0
    ask_to_pause(tmp_path)
    paused = Pauses(tmp_path, budget=second)
    assert paused.change() == BY_COMMAND
    assert uplink.serves, "what is left may be served in a pause"
    second._limits_gb["month"] = 1.0
    paused = Pauses(tmp_path, budget=second)
    assert paused.change() == BY_COMMAND
    assert not uplink.serves, "and no more than that"
    month["now"] = datetime(2026, 2, 1)
    assert second.reason() == ""
    assert uplink.serves
    (tmp_path / "upload.json").write_text("nonsense")
    assert budget().reason() == ""


def test_an_hour_s_upload(tmp_path: Path) -> None:
    # What an earlier version has written counts for the month.
    (tmp_path / "upload.json").write_text('{"month": "2026-01", "bytes": 500000000}')
    clock = {"now": datetime(2026, 1, 30, 14, 50)}
    uplink = Uplink()

    def budget() -> UploadBudget:
        return UploadBudget(tmp_path, uplink, gb_month=3.0, gb_hour=1.0, now=lambda: clock["now"])

    first = budget()
    uplink.reserve(900_000_000, is_reduce=False)
    assert first.reason() == ""
    # A restart in the same hour goes on where it was.
    second = budget()
    uplink.reserve(200_000_000, is_reduce=True)
    assert second.reason() == "1 GB were sent this hour (--max-upload-gb-hour)"
    assert not uplink.serves
    clock["now"] = datetime(2026, 1, 30, 15, 0)
    assert second.reason() == ""
    assert uplink.serves
    # The same hour of another day is another one, and the month goes on.
    clock["now"] = datetime(2026, 1, 31, 15, 0)
    uplink.reserve(900_000_000, is_reduce=True)
    assert second.reason() == ""
    clock["now"] = datetime(2026, 1, 31, 16, 0)
    uplink.reserve(600_000_000, is_reduce=True)
    assert second.reason() == "3 GB were sent this month (--max-upload-gb-month)"


def test_a_limit_that_no_round_fits_in_is_told_beforehand(tmp_path: Path) -> None:
    plan = make_tiny_run(tmp_path / "run", duration_s=60.0).plan()
    assert too_slow(plan, None) == []
    assert too_slow(plan, 1000.0) == []
    lines = too_slow(plan, 0.001)
    assert [line.partition(":")[0] for line in lines] == ["L0", "L1"]
    needed = float(lines[0].rpartition(" ")[2])
    assert too_slow(plan, 1.1 * needed)[:1] != lines[:1]
    assert "--max-upload-mbps 0.001 does not carry" in lines[0]
