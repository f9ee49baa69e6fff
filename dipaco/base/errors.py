"""Errors that a user can act on, each with the exit code of the command that meets it.

Every command turns a `DipacoError` into one line on standard error and exits with its code;
the traceback is shown only with `--debug`. The codes are documented in `docs/exit-codes.md`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DipacoError(Exception):
    """Something a user can fix. The message says what happened, the value seen, what to type."""

    exit_code = 1


class ConfigurationError(DipacoError):
    """A flag, a RUN.toml or a plan with an unknown or impossible value."""

    exit_code = 3


class UnreachableError(DipacoError):
    """No address that was given answers."""

    exit_code = 2


class AddressError(DipacoError):
    """An address or port that cannot be used: malformed, or already taken."""

    exit_code = 4


class RunSelectionError(DipacoError):
    """The DHT holds no run, several runs, or not the run that was asked for."""

    exit_code = 5


class ManifestError(DipacoError):
    """A manifest whose signature or hash is wrong, or which cannot be read."""

    exit_code = 6


class IntegrityError(DipacoError):
    """Bytes that do not have the hash they were asked for by, or a state of the wrong shape."""

    exit_code = 7


class ClockError(DipacoError):
    """This machine's clock is too far from those of the other peers."""

    exit_code = 8


class StorageError(DipacoError):
    """The disk is full, or a folder cannot be read or written."""

    exit_code = 9


class CorpusError(DipacoError):
    """A corpus that cannot be read or holds no usable text, or a shard that is empty."""

    exit_code = 10


class ProtocolVersionError(DipacoError):
    """The swarm speaks another version of the protocol."""

    exit_code = 11


class NetworkError(DipacoError):
    """The network layer died or a bounded wait for other peers ran out."""

    exit_code = 12


class AdmissionError(DipacoError):
    """A run by invitation, and no invitation, or one that does not count there."""

    exit_code = 13


class MachineError(DipacoError):
    """This machine computes otherwise than the others: its memory, processor or libraries."""

    exit_code = 14


def printable(text: str) -> str:
    """Return what others have written as one line that commands no terminal: "?" stands for
    control characters, and for those that change the direction of what follows."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that looks most like `name`, for "did you mean" messages."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None
