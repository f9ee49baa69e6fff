"""How a command runs and ends: logging, Ctrl+C, and errors as one line and an exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TypeVar

from .errors import DipacoError, NetworkError, StorageError, printable
from .files import set_by
from .settings import Settings

# For the OpenMP that PyTorch brings: so many turns, some microseconds, then a thread that waits
# sleeps. Far fewer make a small model much slower on a quiet machine (benchmarks).
_SPIN_VARIABLE, _SPIN_COUNT = "GOMP_SPINCOUNT", "3000"
# In the stack wherever Python imports something.
_IMPORTING = "<frozen importlib._bootstrap>"
SettingsT = TypeVar("SettingsT", bound=Settings)


def run_with_settings(
    read: Callable[[], SettingsT], run: Callable[[SettingsT], int], *, debug: bool
) -> int:
    """Read the settings of a command and run it. Returns its exit code.

    With `debug`, tracebacks and debug messages are shown.
    """
    found: list[SettingsT] = []

    def read_settings() -> int:
        found.append(read())
        return 0

    with _interrupted_imports_end():
        exit_code = run_command(read_settings, debug)
        if not found:
            return exit_code
        (settings,) = found
        _quiet_threads()
        _limit_threads(getattr(settings, "threads", None))
        configure_logging(debug)
        return run_command(lambda: int(run(settings)), debug)


@contextlib.contextmanager
def _interrupted_imports_end() -> Iterator[None]:
    """Let Ctrl+C end the process at once where something is being imported, with exit code 130.

    Importing PyTorch and Hivemind takes seconds, and much of what runs in them catches everything:
    the exception is lost there, and the command goes on as if nobody had pressed a key.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        here = frame
        while here is not None:
            if here.f_code.co_filename == _IMPORTING:
                os._exit(128 + number)
            here = here.f_back
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        # A command may have installed its own, and goes by that until its process ends.
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask a command to end: Ctrl+C, SIGTERM, and SIGHUP when its terminal
    is closed, unless it was started to outlive that (`nohup`)."""
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    asked = (signal.SIGINT, signal.SIGTERM)
    return asked if outlives else (*asked, signal.SIGHUP)


def _quiet_threads() -> None:
    """Let PyTorch's threads sleep when they wait for each other, before PyTorch is imported.

    By themselves they turn in circles for milliseconds. Where another program has one of the cores
    they use up the time in which the thread could run that all wait for, and a step takes many
    times as long. Variables that are set already stay.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(_SPIN_VARIABLE, _SPIN_COUNT)


def _limit_threads(threads: int | None) -> None:
    """Let NumPy's products take no more threads than `--threads` says, before it is imported.

    PyTorch has a function for that. The library behind NumPy has this variable only.
    """
    if threads is not None:
        os.environ["OPENBLAS_NUM_THREADS"] = str(threads)


def configure_logging(debug: bool) -> None:
    """Set up logging before Hivemind is imported: our own one-line messages.

    Hivemind installs a handler of its own and prints tracebacks of failures that we handle; a
    user sees our one line, and all of it with `--debug`.
    """
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "DEBUG" if debug else "CRITICAL")
    os.environ.setdefault("HIVEMIND_MEMORY_SHARING_STRATEGY", "file_descriptor")
    os.environ.setdefault("GOLOG_LOG_LEVEL", "debug" if debug else "fatal")
    if not debug:
        warnings.filterwarnings("ignore", module=r"hivemind\.")
    handler = logging.StreamHandler()
    handler.setFormatter(_PrintableFormatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    ours = logging.getLogger("dipaco")
    ours.setLevel(logging.DEBUG if debug else logging.WARNING)
    ours.handlers = [handler]
    for noisy in ("asyncio", "hivemind"):
        logging.getLogger(noisy).setLevel(logging.DEBUG if debug else logging.CRITICAL)


def is_debugging() -> bool:
    """Return whether the command was started with `--debug`."""
    return logging.getLogger("dipaco").isEnabledFor(logging.DEBUG)


class _PrintableFormatter(logging.Formatter):
    """One line for a message; a traceback stays as it is."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


def run_command(main: Callable[[], int], debug: bool) -> int:
    """Run a command's body and turn its errors into one line and an exit code.

    `KeyboardInterrupt` gives 130. With `debug` the traceback is shown too.
    """
    try:
        return main()
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if debug:
            traceback.print_exc()
        exit_code, line = _explain(error)
        print(f"error: {printable(' '.join(line.split()))}", file=sys.stderr)
        return exit_code


def say(line: str) -> None:
    """Tell the person who started a command something that is not its result."""
    print(printable(line), file=sys.stderr, flush=True)


def _explain(error: Exception) -> tuple[int, str]:
    """Return the exit code and the one line of an error that ends a command."""
    if isinstance(error, DipacoError):
        return error.exit_code, str(error)
    if isinstance(error, ConnectionError):
        return NetworkError.exit_code, f"the network layer broke off ({error}); start again"
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        where = f"{error.filename}: " if error.filename else ""
        variable = set_by(Path(str(error.filename))) if error.filename else ""
        remedy = "free space, or give another folder"
        return StorageError.exit_code, f"{where}{reason}{variable}; {remedy}"
    return DipacoError.exit_code, (
        f"unexpected {type(error).__name__}: {error}; give --debug for the traceback and report it"
    )
