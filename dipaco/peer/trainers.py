"""Several trainers of one machine with one command: `dipaco-peer --devices cuda:0 cuda:1`.

Each is a peer, a process with its own identity, so a device that fails stops no other, and the
protocol does not know of this. They share the folders of runs: what one has fetched the others need
not fetch, and it is on the disk once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from dipaco.base.errors import ConfigurationError
from dipaco.base.output import outlast_audience
from dipaco.base.running import (
    configure_logging,
    is_debugging,
    run_command,
    stop_signals,
)

from .peer_settings import PeerSettings

# The others begin when the first has joined, so that a mistake is reported once.
_JOIN_LIMIT_S = 120.0
_JOINED = "this peer is "
# For the last lines of a trainer that has ended.
_DRAIN_LIMIT_S = 5.0


def trainer_settings(settings: PeerSettings) -> tuple[PeerSettings, ...]:
    """Return the settings of each trainer. Limits of the machine are divided among them. Raises
    ConfigurationError for flags that are about one peer.
    """
    count = len(settings.devices)
    for flag, given in (
        ("--device", settings.device != "auto"),
        ("--host-maddrs", not all(maddr.endswith("/tcp/0") for maddr in settings.host_maddrs)),
        ("--announce-maddrs", settings.announce_maddrs),
        # Each would train on the same texts.
        ("--texts", settings.texts is not None),
    ):
        if given:
            raise ConfigurationError(
                f"{flag} is for one peer, and --devices starts {count}; start one dipaco-peer for "
                "each device, with its own --cache-dir"
            )
    threads = settings.threads or os.cpu_count() or 1
    return tuple(
        replace(
            settings,
            devices=(),
            device=device,
            threads=max(1, threads // count),
            cache_folder=settings.cache_folder / f"trainer-{number}",
            name=f"{settings.name[:29]} {number}" if settings.name else "",
            port=settings.port + number if settings.port else settings.port,
            metrics=_next_port(settings.metrics, number),
            log_json=_numbered(settings.log_json, number),
            address_file=_numbered(settings.address_file, number),
            max_disk_gb=_share(settings.max_disk_gb, count),
            max_upload_mbps=_share(settings.max_upload_mbps, count),
            max_upload_gb_month=_share(settings.max_upload_gb_month, count),
        )
        for number, device in enumerate(settings.devices)
    )


def _next_port(where: str | None, number: int) -> str | None:
    """Return where a trainer answers Prometheus: each of them one port further than the one
    before, or at any free one if the port is 0."""
    if where is None:
        return None
    host, colon, port = where.rpartition(":")
    return f"{host}{colon}{int(port) + number if int(port) else 0}"


def _numbered(file: Path | None, number: int) -> Path | None:
    return None if file is None else file.with_stem(f"{file.stem}-{number}")


def _share(limit: float | None, count: int) -> float | None:
    return None if limit is None else limit / count


def run_trainers(settings: PeerSettings) -> int:
    """Train on all devices until every trainer has ended.

    Returns the exit code of the first one, in the order of the devices, that did not end well.
    """
    each, folder = trainer_settings(settings), settings.cache_folder
    trainers = [_Trainer(number, one, folder, len(each)) for number, one in enumerate(each)]
    stopping = threading.Event()
    _pass_signals_on(trainers, stopping)
    first, *others = trainers
    first.start()
    if first.joins_in_time():
        for trainer in others:
            if not stopping.is_set():
                trainer.start()
    started = [trainer for trainer in trainers if trainer.process is not None]
    for trainer in started:
        trainer.wait()
    return next((code for trainer in started if (code := trainer.exit_code)), 0)


class _Trainer:
    """A trainer's process, and the thread that prints its output."""

    def __init__(
        self, number: int, settings: PeerSettings, runs_folder: Path, sharers: int
    ) -> None:
        self.settings, self._runs_folder, self._sharers = settings, runs_folder, sharers
        self.process: BaseProcess | None = None
        self._label = f"[{number} {settings.device}] "
        self._has_joined = threading.Event()
        self._printer: threading.Thread | None = None

    def start(self) -> None:
        # The process inherits nothing of this one, neither locks nor threads.
        context = multiprocessing.get_context("spawn")
        lines, output = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_train,
            args=(self.settings, self._runs_folder, self._sharers, output, is_debugging()),
        )
        self.process.start()
        output.close()
        self._printer = threading.Thread(target=self._print, args=(lines,), daemon=True)
        self._printer.start()

    def _print(self, lines: Connection) -> None:
        with os.fdopen(os.dup(lines.fileno()), encoding="utf-8", errors="replace") as text:
            for line in text:
                print(f"{self._label}{line}", end="", flush=True)
                if line.startswith(_JOINED):
                    self._has_joined.set()
        self._has_joined.set()

    def signal(self, number: int) -> None:
        """Pass a signal on, if it is running."""
        if self.process is not None and self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, number)

    def joins_in_time(self) -> bool:
        """Wait until it has joined, for a while; returns False if it has ended instead."""
        assert self.process is not None
        self._has_joined.wait(_JOIN_LIMIT_S)
        return not wait([self.process.sentinel], timeout=0)

    def wait(self) -> None:
        """Wait until it has ended and its output is printed."""
        assert self.process is not None
        assert self._printer is not None
        self.process.join()
        self._printer.join(_DRAIN_LIMIT_S)

    @property
    def exit_code(self) -> int:
        """The exit code of the process, as a shell would report it."""
        code = self.process.exitcode if self.process is not None else None
        return 0 if code is None else 128 - code if code < 0 else code


def _train(
    settings: PeerSettings, runs_folder: Path, sharers: int, output: Connection, debug: bool
) -> None:
    """Run one trainer, in a session of its own, so that only the first process sends it signals."""
    os.setsid()
    # As in a peer that was started by itself: Hivemind's processes are forked.
    multiprocessing.set_start_method("fork", force=True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    outlast_audience()
    from dipaco.dht.process_keeper import die_with_parent

    from .training_peer import run_peer

    die_with_parent()
    configure_logging(debug)
    sys.exit(run_command(lambda: run_peer(settings, runs_folder, sharers), debug))


def _pass_signals_on(trainers: Sequence[_Trainer], stopping: threading.Event) -> None:
    """Pass Ctrl+C, SIGTERM, and the signals that pause and resume, on to all trainers.

    `stopping` is set by the first two: what has not started by then does not.
    """
    process = os.getpid()

    def pass_on(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:
            return
        if number not in (signal.SIGUSR1, signal.SIGUSR2):
            stopping.set()
        for trainer in trainers:
            trainer.signal(number)

    for number in (*stop_signals(), signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, pass_on)
