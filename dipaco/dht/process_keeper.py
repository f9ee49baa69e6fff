"""The keeper: a small process that forks a child, and forks it again when it is asked to.

It is forked at the start, when there is no model in memory yet. A child of the training process
itself would keep all that was in its memory at that moment, so each new start on a machine that is
short of memory would take as much again. The keeper has one thread, which waits in one place.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from dipaco.base.patience import looks

logger = logging.getLogger("dipaco.dht.process_keeper")

_PR_SET_PDEATHSIG = 1
# What the keeper may take to end one child and to fork another.
_FORK_LIMIT_S = 20.0
_END_LIMIT_S = 1.0
_PID_BYTES = 8


def die_with_parent() -> None:
    """Ask Linux to kill this process when the thread that started it ends. Elsewhere: nothing."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


class ProcessKeeper:
    """The keeper, seen from the process that has it. For one thread, which lives as long as it."""

    def __init__(self, work: Callable[[socket.socket], int]) -> None:
        """Fork it. Each child does `work` with its end of a connection, and exits with what that
        returns."""
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_FORK_LIMIT_S)
        self._pid = os.fork()
        if self._pid == 0:
            self._control.close()
            _end_with(partial(_keep, theirs, work))
        theirs.close()

    def start(self) -> tuple[int, socket.socket]:
        """End the child that there is, fork another, and return its id and a connection to it.

        Raises OSError when the keeper is gone or hangs.
        """
        ours, theirs = socket.socketpair()
        try:
            socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
            pid = self._control.recv(_PID_BYTES)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        if not pid:
            ours.close()
            raise BrokenPipeError("the keeper of the DHT process has ended")
        return int.from_bytes(pid, "big"), ours

    def close(self) -> None:
        """End the keeper and its child. Bounded."""
        self._control.close()
        for look_s in looks(_END_LIMIT_S):
            if self._has_ended():
                return
            time.sleep(look_s / 10)
        with contextlib.suppress(OSError):
            # Its child dies with it.
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)

    def _has_ended(self) -> bool:
        try:
            return os.waitpid(self._pid, os.WNOHANG)[0] == self._pid
        except ChildProcessError:
            return True


def _end_with(work: Callable[[], int]) -> NoReturn:
    """Do something in a process that was forked, and end it: nothing of its parent's goes on."""
    code = 1
    try:
        code = work()
    except BaseException:
        logger.debug("a forked process failed", exc_info=True)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    raise AssertionError


def _keep(control: socket.socket, work: Callable[[socket.socket], int]) -> int:
    """Run in the keeper: fork whenever that is asked for, until nobody can ask any more."""
    # A signal for the whole group means the peer, which still has to say goodbye.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    child = 0
    while True:
        asked, handles, _, _ = socket.recv_fds(control, 1, 1)
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if not asked:
            return 0
        child = os.fork()
        if child == 0:
            control.close()
            die_with_parent()
            connected = socket.socket(fileno=handles[0])
            _end_with(partial(work, connected))
        os.close(handles[0])
        control.send(child.to_bytes(_PID_BYTES, "big"))
