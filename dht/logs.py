"""For commands whose options are not typed."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from dipaco.modules.command_line import configure_logging, run_command


def run_logged(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Set up logging, run a command with its options, and return the exit code."""
    configure_logging(options.debug)
    return run_command(lambda: run(options), options.debug)
