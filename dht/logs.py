"""Logging of the commands: our own one-line messages, and Hivemind's only when debugging."""

from __future__ import annotations

import logging
import os
import warnings


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
