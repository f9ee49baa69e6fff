"""The machine is somebody's: hours, battery, pause and resume, niceness, names."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
from datetime import datetime

import pytest
import torch

from dipaco.base.errors import ConfigurationError, NetworkError
from dipaco.modules.device import be_nice
from dipaco.peer import pause_command, peer_command
from dipaco.peer.owner import pauses
from dipaco.peer.owner.pause_reasons import (
    Aside,
    FullDisk,
    Hours,
    is_on_battery,
    on_battery,
    outside_of,
    programs_of,
    running_programs,
    while_running,
)
from dipaco.peer.owner.pauses import Pauses, activity_file, ask_to_pause, ask_to_resume
from dipaco.peer.owner.uplink import Uplink
from dipaco.peer.owner.upload_budget import UploadBudget
from dipaco.peer.peer_settings import PeerSettings
from dipaco.peer.shell.session import rest_s

ADDRESS = "/ip4/203.0.113.5/tcp/31337/p2p/12D3KooWPeer"


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("22-7", ("22:00", "23:59", "00:00", "06:59"), ("07:00", "12:00", "21:59")),
        ("9-17", ("09:00", "16:59"), ("08:59", "17:00", "23:00")),
        ("22:30-7:15", ("22:30", "07:14"), ("22:29", "07:15")),
        ("18-24", ("18:00", "23:59"), ("00:00", "17:59")),
        ("0-6", ("00:00", "05:59"), ("06:00", "23:59")),
    ],
)
def test_hours_may_span_midnight(text, inside, outside):
    hours = Hours.parse(text)

    def contains(time):
        hour, minute = map(int, time.split(":"))
        return hours.contain(60 * hour + minute)

    assert [contains(time) for time in (*inside, *outside)] == [*(True for _ in inside), *(False for _ in outside)]


@pytest.mark.parametrize("text", ["", "22", "7-7", "0-24", "25-7", "22:60-7", "x-y", "-1-3"])
def test_hours_that_are_none_are_refused(text):
    with pytest.raises(ConfigurationError, match=r"--hours 22-7"):
        Hours.parse(text)
    with pytest.raises(ConfigurationError, match=r"--hours"):
        PeerSettings(initial_peers=(ADDRESS,), hours=text)


def test_names_are_short_and_plain():
    assert PeerSettings(initial_peers=(ADDRESS,), name="kitchen laptop (2)").name
    for name in ("x" * 33, "[red]", "naïve", "a\nb"):
        with pytest.raises(ConfigurationError, match=r"--name"):
            PeerSettings(initial_peers=(ADDRESS,), name=name)


def supply(folder, name, **values):
    (folder / name).mkdir(parents=True)
    for key, value in values.items():
        (folder / name / key).write_text(value + "\n")


def test_a_battery_that_is_emptied(tmp_path):
    assert not is_on_battery(tmp_path / "none")
    supply(tmp_path / "mouse", "hid", type="Battery", scope="Device", status="Discharging")
    assert not is_on_battery(tmp_path / "mouse")
    supply(tmp_path / "laptop", "BAT0", type="Battery", status="Discharging")
    assert is_on_battery(tmp_path / "laptop")
    supply(tmp_path / "laptop", "AC", type="Mains", online="0")
    assert is_on_battery(tmp_path / "laptop")
    (tmp_path / "laptop" / "AC" / "online").write_text("1\n")
    assert not is_on_battery(tmp_path / "laptop")


def test_reasons_come_and_go(tmp_path):
    clock = {"now": datetime(2026, 1, 1, 12, 0), "monotonic": 0.0}
    supply(tmp_path / "power", "BAT0", type="Battery", status="Discharging")
    watch = Pauses(
        tmp_path,
        [outside_of(Hours.parse("22-7"), lambda: clock["now"]), on_battery(tmp_path / "power")],
        monotonic=lambda: clock["monotonic"],
    )
    assert watch.change() == "outside of --hours 22-7, until 22:00"
    assert watch.change() is None
    ask_to_pause(tmp_path)
    assert watch.change() == pauses.BY_COMMAND
    ask_to_resume(tmp_path)
    ask_to_resume(tmp_path)
    assert watch.change() == "outside of --hours 22-7, until 22:00"
    clock["now"] = datetime(2026, 1, 1, 23, 0)
    # The hour is looked at now and then only.
    assert watch.change() is None
    clock["monotonic"] = 10.0
    assert watch.change() == "on battery (--on-battery pause), until it is plugged in"
    (tmp_path / "power" / "BAT0" / "status").write_text("Charging\n")
    clock["monotonic"] = 20.0
    assert watch.change() == ""


def test_a_full_disk_is_a_pause_until_there_is_room(tmp_path):
    spare = iter((0, -1, 1, 2**30))
    told = []
    disk = FullDisk(tmp_path, told.append, lambda folder: next(spare))
    assert ["nearly full" in disk() for _ in range(4)] == [False, True, True, False]
    assert len(told) == 1


def process(proc, number, stat, cmdline=""):
    (proc / str(number)).mkdir(parents=True)
    (proc / str(number) / "stat").write_text(f"{number} {stat} 1 1\n")
    (proc / str(number) / "cmdline").write_text(cmdline)


def test_a_program_that_runs_is_a_reason(tmp_path):
    process(tmp_path, 7, "(kworker/0:1) I")
    process(tmp_path, 8, "(Web (Content)) S", "/usr/lib/firefox/firefox\0-contentproc\0")
    process(tmp_path, 9, "(a-very-long-nam) R", "/opt/a-very-long-name-of-a-program\0")
    process(tmp_path, 10, "(Game.exe) R", "Z:\\games\\Game.exe\0")
    process(tmp_path, 11, "(obs) Z")
    process(tmp_path, os.getpid(), "(python) R", "python\0dipaco-peer\0")
    process(tmp_path, 13, "(python) S", "python\0dipaco-peer\0")  # It was forked.
    (tmp_path / "12").mkdir()  # It ended meanwhile.
    (tmp_path / "self").mkdir()
    assert {"firefox", "web (content)", "a-very-long-name-of-a-program", "game.exe"} <= (running_programs(tmp_path))
    for name in ("Firefox", "game.exe", "a-very-long-name-of-a-program", "steam,firefox"):
        assert "(--pause-while)" in while_running(programs_of(name), tmp_path)()
    for name in ("obs", "fire", "python", "steam"):
        assert while_running(programs_of(name), tmp_path)() == ""


@pytest.mark.parametrize("text", ["", "steam,", ",", "/usr/bin/obs"])
def test_names_of_programs_that_are_none_are_refused(text):
    with pytest.raises(ConfigurationError, match=r"--pause-while steam,obs"):
        PeerSettings(initial_peers=(ADDRESS,), pause_while=text)


def test_a_program_of_this_machine():
    """With the real /proc: this test itself is not found, a sleeping child is."""
    child = subprocess.Popen([shutil.which("sleep") or "sleep", "60"])
    try:
        assert "sleep" in running_programs()
    finally:
        child.kill()
        child.wait()


def test_what_was_sent_is_a_reason_until_the_next_month(tmp_path):
    now = [datetime(2026, 1, 31, 22, 30)]
    uplink = Uplink()

    def budget():
        return UploadBudget(tmp_path, uplink, 3.0, lambda: now[0])

    kept = budget()
    assert kept.reason() == ""
    uplink.sent_bytes = 1_500_000_000
    assert kept.reason() == ""
    assert uplink.serves
    kept.close()
    # Another peer with the same folder, after a restart: it goes on counting, also what it serves
    # before it has joined.
    uplink = Uplink()
    uplink.sent_bytes = 900_000_000
    again = budget()
    uplink.sent_bytes = 1_600_000_000
    assert "3 GB were sent this month" in again.reason()
    assert not uplink.serves
    now[0] = datetime(2026, 2, 1, 0, 0)
    assert again.reason() == ""
    assert uplink.serves


@pytest.mark.parametrize("count", ["Infinity", "-Infinity", "NaN", "1e400", '"many"', "null", "[]"])
def test_a_count_of_what_was_sent_that_is_none_begins_anew(tmp_path, count):
    (tmp_path / "upload.json").write_text(f'["2026-01", {count}]')
    now = datetime(2026, 1, 31)
    assert UploadBudget(tmp_path, Uplink(), 3.0, lambda: now).reason() == ""


def test_the_thread_that_decides_waits_for_no_disk(tmp_path, monkeypatch):
    """Ten minutes of turns, in which bytes are sent and the activity changes."""
    synced, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(file), real(file)))
    clock, uplink = [0.0], Uplink()
    budget = UploadBudget(tmp_path, uplink, 100.0)
    pauses = Pauses(tmp_path, [budget.reason], monotonic=lambda: clock[0])
    for turn in range(4 * 600):
        clock[0] += 0.25
        uplink.sent_bytes += 100
        pauses.change()
        pauses.tell("training", turn // 600, "")
    assert synced == []
    assert activity_file(tmp_path).read_text() == "training path 3\n"


@pytest.fixture
def signals(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)]
    pauses.install_pause_signals(tmp_path)
    yield
    for number, handler in zip((signal.SIGUSR1, signal.SIGUSR2), before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
def test_signals_do_what_the_commands_do(tmp_path):
    watch = Pauses(tmp_path)
    signal.raise_signal(signal.SIGUSR1)
    assert watch.change() == pauses.BY_COMMAND
    signal.raise_signal(signal.SIGUSR2)
    assert watch.change() == ""


@pytest.mark.usefixtures("signals")
def test_a_signal_to_a_process_that_the_peer_has_forked_pauses_nobody(tmp_path):
    """A terminal, or `kill` with a group, sends it to all of them; the peer itself has its own."""
    child = multiprocessing.get_context("fork").Process(target=signal.raise_signal, args=(signal.SIGUSR1,))
    child.start()
    child.join(60.0)
    assert child.exitcode == 0
    assert Pauses(tmp_path).change() is None


def test_the_commands_without_a_peer(tmp_path, capsys):
    assert peer_command.main(["pause", "--cache-dir", str(tmp_path / "new")]) == 0
    assert "the next one starts paused" in capsys.readouterr().out
    assert pauses.pause_file(tmp_path / "new").exists()
    assert peer_command.main(["resume", "--cache-dir", str(tmp_path / "new")]) == 0
    assert "trains at once" in capsys.readouterr().out
    assert not pauses.pause_file(tmp_path / "new").exists()


def test_the_commands_wait_for_what_the_peer_says(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pause_command, "is_in_use", lambda path: True)
    peer = Pauses(tmp_path)
    peer.tell("training", 3, "nobody trains it")
    assert activity_file(tmp_path).read_text() == "training path 3: nobody trains it\n"

    def follow():
        """Do as a session does."""
        while (reason := peer.change()) is None:
            threading.Event().wait(0.01)
        peer.tell("paused" if reason else "joining", None, reason)

    for command, said in (("pause", "paused: by dipaco-peer pause"), ("resume", "joining")):
        following = threading.Thread(target=follow)
        following.start()
        assert peer_command.main([command, "--cache-dir", str(tmp_path)]) == 0
        following.join()
        assert said in capsys.readouterr().out
    monkeypatch.setattr(pause_command, "LIMIT_S", 0.0)
    with pytest.raises(NetworkError, match=r"did not do so within"):
        pause_command.pause(pause_command.ControlSettings(cache_folder=tmp_path))
    peer.close()
    assert not activity_file(tmp_path).exists()


def test_niceness_is_of_the_thread_that_trains():
    held = os.getpriority(os.PRIO_PROCESS, 0)
    found = []

    def train():
        found.append(be_nice(None, torch.device("cuda")))
        found.append(be_nice(None, torch.device("cpu")))
        found.append(be_nice(19, torch.device("cpu")))
        found.append(be_nice(3, torch.device("cpu")))
        found.append(os.getpriority(os.PRIO_PROCESS, 0))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert found == [held, max(held, 10), 19, 19, 19]
    assert os.getpriority(os.PRIO_PROCESS, 0) == held


@pytest.mark.parametrize(
    ("word", "meant"), [("paus", "dipaco-peer pause"), ("resum", "dipaco-peer resume"), ("stats", "dipaco-peer status")]
)
def test_a_mistyped_command_is_no_bad_address(word, meant, capsys):
    assert peer_command.main([word]) == 3
    said = capsys.readouterr().err
    assert f"did you mean {meant}?" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(("percent", "rest"), [(100, 0.0), (50, 2.0), (25, 6.0)])
def test_a_share_of_the_time_is_work(percent, rest):
    assert rest_s(2.0, percent) == pytest.approx(rest)


def test_a_look_that_takes_long_holds_nobody_up():
    """Reading what a process was called with waits while that process moves its memory."""
    may_look, found = threading.Semaphore(0), iter(("steam runs", "", ""))

    def slow():
        assert may_look.acquire(timeout=60)
        return next(found)

    reason = Aside(slow, first_limit_s=0.01)
    assert [reason() for _ in range(3)] == [""] * 3, "nothing is found yet"
    for said in ("steam runs", ""):
        may_look.release()
        for _ in range(6000):
            if reason() == said:
                break
            threading.Event().wait(0.01)
        assert reason() == said
    may_look.release()


def test_a_peer_that_starts_knows_what_runs():
    assert Aside(lambda: "steam runs", first_limit_s=60.0)() == "steam runs"
