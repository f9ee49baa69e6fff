"""The machine is somebody's: hours, battery, pause and resume, niceness, names."""

from __future__ import annotations

import os
import re
import signal
import threading
from datetime import datetime
from pathlib import Path

import pytest
import torch

from dipaco.base.errors import ConfigurationError, NetworkError
from dipaco.modules.device import be_nice, limit_memory
from dipaco.peer import cli, control_cli
from dipaco.peer.owner import pauses
from dipaco.peer.owner.pauses import Hours, Pauses, activity_file, ask_to_pause, ask_to_resume
from dipaco.peer.settings import PeerSettings

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
def test_hours_may_span_midnight(
    text: str, inside: tuple[str, ...], outside: tuple[str, ...]
) -> None:
    hours = Hours.parse(text)

    def contains(time: str) -> bool:
        hour, minute = map(int, time.split(":"))
        return hours.contain(60 * hour + minute)

    assert [contains(time) for time in (*inside, *outside)] == [
        *(True for _ in inside),
        *(False for _ in outside),
    ]


@pytest.mark.parametrize("text", ["", "22", "7-7", "0-24", "25-7", "22:60-7", "x-y", "-1-3"])
def test_hours_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--hours 22-7"):
        Hours.parse(text)
    with pytest.raises(ConfigurationError, match=r"--hours"):
        PeerSettings(initial_peers=(ADDRESS,), hours=text)


def test_names_are_short_and_plain() -> None:
    assert PeerSettings(initial_peers=(ADDRESS,), name="kitchen laptop (2)").name
    for name in ("x" * 33, "[red]", "naïve", "a\nb"):
        with pytest.raises(ConfigurationError, match=r"--name"):
            PeerSettings(initial_peers=(ADDRESS,), name=name)


def supply(folder: Path, name: str, **values: str) -> None:
    (folder / name).mkdir(parents=True)
    for key, value in values.items():
        (folder / name / key).write_text(value + "\n")


def test_a_battery_that_is_emptied(tmp_path: Path) -> None:
    assert not pauses.is_on_battery(tmp_path / "none")
    supply(tmp_path / "mouse", "hid", type="Battery", scope="Device", status="Discharging")
    assert not pauses.is_on_battery(tmp_path / "mouse")
    supply(tmp_path / "laptop", "BAT0", type="Battery", status="Discharging")
    assert pauses.is_on_battery(tmp_path / "laptop")
    supply(tmp_path / "laptop", "AC", type="Mains", online="0")
    assert pauses.is_on_battery(tmp_path / "laptop")
    (tmp_path / "laptop" / "AC" / "online").write_text("1\n")
    assert not pauses.is_on_battery(tmp_path / "laptop")


def test_reasons_come_and_go(tmp_path: Path) -> None:
    clock = {"now": datetime(2026, 1, 1, 12, 0), "monotonic": 0.0}
    supply(tmp_path / "power", "BAT0", type="Battery", status="Discharging")
    watch = Pauses(
        tmp_path,
        Hours.parse("22-7"),
        on_battery=True,
        supplies=tmp_path / "power",
        now=lambda: clock["now"],  # type: ignore[arg-type, return-value]
        monotonic=lambda: clock["monotonic"],  # type: ignore[arg-type, return-value]
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


def test_a_full_disk_is_a_pause_until_there_is_room(tmp_path: Path) -> None:
    spare = iter((0, -1, 1, 2**30))
    now_s = iter(range(0, 1000, 10))
    watch = Pauses(tmp_path, spare_bytes=lambda folder: next(spare), monotonic=lambda: next(now_s))
    assert ["nearly full" in watch.reason() for _ in range(4)] == [False, True, True, False]


def test_signals_do_what_the_commands_do(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)]
    watch = Pauses(tmp_path)
    try:
        pauses.install_pause_signals(tmp_path)
        signal.raise_signal(signal.SIGUSR1)
        assert watch.change() == pauses.BY_COMMAND
        signal.raise_signal(signal.SIGUSR2)
        assert watch.change() == ""
    finally:
        for number, handler in zip((signal.SIGUSR1, signal.SIGUSR2), before, strict=True):
            signal.signal(number, handler)


def test_the_commands_without_a_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pause", "--cache-dir", str(tmp_path / "new")]) == 0
    assert "the next one starts paused" in capsys.readouterr().out
    assert pauses.pause_file(tmp_path / "new").exists()
    assert cli.main(["resume", "--cache-dir", str(tmp_path / "new")]) == 0
    assert "trains at once" in capsys.readouterr().out
    assert not pauses.pause_file(tmp_path / "new").exists()


def test_the_commands_wait_for_what_the_peer_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_cli, "is_in_use", lambda path: True)
    peer = Pauses(tmp_path)
    peer.tell("training", 3, "nobody trains it")
    assert activity_file(tmp_path).read_text() == "training path 3: nobody trains it\n"

    def follow() -> None:
        """Do as a session does."""
        while (reason := peer.change()) is None:
            threading.Event().wait(0.01)
        peer.tell("paused" if reason else "joining", None, reason)

    for command, said in (("pause", "paused: by dipaco-peer pause"), ("resume", "joining")):
        following = threading.Thread(target=follow)
        following.start()
        assert cli.main([command, "--cache-dir", str(tmp_path)]) == 0
        following.join()
        assert said in capsys.readouterr().out
    monkeypatch.setattr(control_cli, "LIMIT_S", 0.0)
    with pytest.raises(NetworkError, match=r"did not do so within"):
        control_cli.pause(control_cli.ControlSettings(cache_folder=tmp_path))
    peer.close()
    assert not activity_file(tmp_path).exists()


def test_niceness_is_of_the_thread_that_trains() -> None:
    held = os.getpriority(os.PRIO_PROCESS, 0)
    found: list[int] = []

    def train() -> None:
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


def test_gpu_memory_is_limited_on_gpus_only() -> None:
    limit_memory(torch.device("cpu"), None)
    with pytest.raises(ConfigurationError, match=re.escape("--vram-gb 8 is for a GPU")):
        limit_memory(torch.device("cpu"), 8.0)


@pytest.mark.parametrize(("word", "meant"), [("paus", "pause"), ("resum", "resume")])
def test_a_mistyped_command_is_no_bad_address(
    word: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([word]) == 3
    said = capsys.readouterr().err
    assert f"did you mean dipaco-peer {meant}?" in said
    assert said.count("\n") == 1
