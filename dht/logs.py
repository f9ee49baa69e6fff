"""Logging of the commands: our own one-line messages, and Hivemind's only when debugging."""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from collections.abc import Callable

from dipaco.modules.errors import run_command


def configure_logging(debug: bool) -> None:
    """Set up logging before Hivemind is imported. Called first by every command that uses it.

    Hivemind installs a handler of its own and prints tracebacks of failures that we handle; a
    user sees our one line, and all of it with `--debug`.
    """
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "DEBUG" if debug else "CRITICAL")
    os.environ.setdefault("HIVEMIND_MEMORY_SHARING_STRATEGY", "file_descriptor")
    os.environ.setdefault("GOLOG_LOG_LEVEL", "debug" if debug else "fatal")
    if not debug:
        warnings.filterwarnings("ignore", module=r"hivemind\.")
    root = logging.getLogger("dipaco")
    root.setLevel(logging.DEBUG if debug else logging.WARNING)
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
        root.propagate = False
    for noisy in ("asyncio", "hivemind"):
        logging.getLogger(noisy).setLevel(logging.DEBUG if debug else logging.CRITICAL)


def run_logged(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Set up logging, run a command with its options, and return the exit code.

    Called by `main` of the commands that have `--debug`.
    """
    configure_logging(options.debug)
    return run_command(lambda: run(options), options.debug)
