"""A command goes on when nobody reads what it prints any more.

A terminal is closed, `| head` has read enough: a command that trains, serves or prepares does not
depend on its audience. Its files (`--log-json`, results) are another matter, and so is a full disk.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Any

# A terminal that is gone, a pipe or a socket that nobody reads.
_GONE = (errno.EIO, errno.EPIPE, errno.ECONNRESET)


class _Stream(io.FileIO):
    """A descriptor that leads nowhere from the first write on that finds its audience gone."""

    is_lost = False

    def write(self, data: Any) -> int:  # type: ignore[override]
        written = 0
        try:
            while written < len(data):
                written += super().write(data[written:]) or 0
        except OSError as error:
            if error.errno not in _GONE:
                raise
            self.is_lost = True
            _lead_nowhere(self.fileno())
        return len(data)


def _lead_nowhere(descriptor: int) -> None:
    """Let all that is written to a descriptor vanish, also what libraries and children write."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def outlast_audience() -> None:
    """Let standard output and standard error end silently when nobody is there to read them.

    Texts and names have characters that the terminal may lack: these are written as escapes.
    Streams that somebody has put in the place of Python's own are left as they are.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        if stream is None:  # It was closed at the start; the next file would take its number.
            _lead_nowhere(descriptor)
        else:
            with contextlib.suppress(OSError):
                stream.flush()
            descriptor = stream.fileno()
        lasting = io.TextIOWrapper(
            # Without a buffer nothing is left to be written when it ends.
            _Stream(descriptor, "w", closefd=False),  # type: ignore[type-var]
            encoding="utf-8" if stream is None else stream.encoding,
            errors="backslashreplace",
            line_buffering=True,
        )
        setattr(sys, name, lasting)


def is_unread() -> bool:
    """Return whether standard output has lost its reader, for what only prints."""
    stream = getattr(sys.stdout, "buffer", None)
    return isinstance(stream, _Stream) and stream.is_lost
