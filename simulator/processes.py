"""One simulation on several devices: `dipaco-simulate --devices 0,1` is a process for each.

They talk through gloo on the loopback interface: outer steps are computed on the CPU, whatever the
devices are. This process only starts them, waits, and ends the others when one fails.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed
from dipaco.modules.command_line import configure_logging, run_command
from dipaco.modules.errors import ConfigurationError, DipacoError

from .crew import Crew
from .settings import CommandSettings

# A process waits for others while they train. One that ends is noticed at once.
_WAIT_LIMIT = timedelta(days=7)
_END_LIMIT_S = 10.0
# What a process ends with, without a word, because another one has ended.
_LEFT_ALONE = 113

Work = Callable[[CommandSettings, Crew], int]


def devices_of(text: str) -> tuple[str, ...]:
    """Read --devices: "0,1" is cuda:0 and cuda:1, "cpu,cpu" two processes on the CPU.

    Raises ConfigurationError for what is no device, and for devices of two types, which do not
    compute the same bits.
    """
    names = tuple(
        f"cuda:{part}" if part.isdecimal() else part
        for part in (part.strip() for part in text.split(","))
    )
    for name in names:
        if not re.fullmatch(r"cpu|cuda:\d+", name):
            raise ConfigurationError(
                f"--devices '{text}': '{name}' is not a device; write --devices 0,1 or cpu,cpu"
            )
    if len({name.partition(":")[0] for name in names}) > 1:
        raise ConfigurationError(
            f"--devices '{text}' are of two types, which compute different bits; give one type"
        )
    return names


def run_on_devices(settings: CommandSettings, devices: Sequence[str], work: Work) -> int:
    """Run `work` in a process for each device; return the exit code of the first that failed.

    `work` is a function of a module, called with the settings of its process. Raises
    DipacoError if a process was killed.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="dipaco-simulate-") as folder:
        processes = [
            context.Process(
                target=_be_one,
                args=(
                    replace(settings, devices=None, device=device),
                    rank,
                    len(devices),
                    Path(folder) / "meeting",
                    work,
                ),
            )
            for rank, device in enumerate(devices)
        ]
        try:
            for process in processes:
                process.start()
            running = {process.sentinel: process for process in processes}
            while running and not any(process.exitcode for process in processes):
                for sentinel in wait(list(running)):
                    running.pop(int(sentinel)).join()  # type: ignore[arg-type]
        finally:
            codes = [process.exitcode for process in processes if process.pid is not None]
            for process in processes:
                if process.pid is not None:
                    process.terminate()
            for process in processes:
                if process.pid is not None:
                    process.join(_END_LIMIT_S)
                    process.kill()
                    process.join()
    failed = [code for code in codes if code and code != _LEFT_ALONE]
    if any(code < 0 for code in failed) or (not failed and any(codes)):
        raise DipacoError(
            f"a process of --devices {settings.devices} was killed or lost; go on with --resume, "
            "if there is an --out DIR"
        )
    return failed[0] if failed else 0


def _be_one(settings: CommandSettings, rank: int, count: int, meeting: Path, work: Work) -> None:
    """Be one of the processes."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    configure_logging(settings.debug)
    sys.exit(run_command(lambda: _work(settings, rank, count, meeting, work), settings.debug))


def _work(settings: CommandSettings, rank: int, count: int, meeting: Path, work: Work) -> int:
    try:
        return work(settings, Crew(GlooLine(rank, count, meeting)))
    except LineBrokenError:
        return _LEFT_ALONE


def _end_with(parent: int) -> None:
    """End when the first process has ended, even if it was killed."""
    wait([parent])
    os._exit(_LEFT_ALONE)


class LineBrokenError(Exception):
    """Another process of the simulation has ended."""


class GlooLine:
    """A `Line` over torch.distributed. `meeting` is a file that is not there yet."""

    def __init__(self, rank: int, count: int, meeting: Path) -> None:
        self.rank, self.count = rank, count
        # Not the address of the machine's name, which others could reach.
        loopback = [name for _, name in socket.if_nameindex() if re.fullmatch(r"lo\d*", name)]
        if loopback:
            os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=count,
            timeout=_WAIT_LIMIT,
        )

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor. Raises LineBrokenError if the other process has ended."""
        try:
            torch.distributed.send(tensor, to)
        except RuntimeError as error:
            raise LineBrokenError(str(error)) from error

    def receive(self, tensor: torch.Tensor, sender: int) -> None:
        """Receive a tensor. Raises LineBrokenError if the other process has ended."""
        try:
            torch.distributed.recv(tensor, sender)
        except RuntimeError as error:
            raise LineBrokenError(str(error)) from error
