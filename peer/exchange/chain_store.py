"""The chains that this peer can tell others, kept over restarts (skeleton)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dipaco.dht.chain import Head, Row, Step


@dataclass(frozen=True)
class Told:
    """What answers somebody who asks for a module."""

    steps: tuple[Step, ...] = ()
    rows: tuple[Row, ...] = ()
    has_more: bool = False
    held: Head | None = None


class ChainStore:
    """Chains, recent rows and served heads of a run's modules. Thread-safe.

    :param folder: where a log of every module is; None: in memory only, for readers
    """

    def __init__(self, run_id: str, modules: Iterable[str], folder: Path | None) -> None:
        raise NotImplementedError

    # -- what is learned

    def add_verified(self, steps: Iterable[Step]) -> None:
        """Take in steps whose rows were checked; those without a known parent are left out."""
        raise NotImplementedError

    def note_rows(self, rows: Iterable[Row]) -> None:
        """Take in checked rows of rounds that have no step yet. Bounded for each peer."""
        raise NotImplementedError

    def note_admissions(self, admissions: Mapping[str, bytes]) -> None:
        """Keep the admissions of peers whose rows are here: they travel with the rows."""
        raise NotImplementedError

    # -- what is served

    def serve(self, module: str, step: str, head: Head | None = None) -> None:
        """Answer with the chain to `step` from now on; `head` is the state that is held of it, or
        None for a mailbox, which has none. Written to disk. Raises KeyError for an unknown step."""
        raise NotImplementedError

    def served(self, module: str) -> tuple[str, Head | None]:
        """Return what `serve` said last, also in an earlier life; the genesis before that."""
        raise NotImplementedError

    def head_of(self, module: str, digest: str) -> Head | None:
        """Return which head a state on this disk is, by its digest, if it was ever served."""
        raise NotImplementedError

    def answer(self, module: str, locator: Sequence[str]) -> Told:
        """Return what fits in one answer to somebody whose chain has these names."""
        raise NotImplementedError

    def admissions_of(self, peers: Iterable[str]) -> dict[str, bytes]:
        """Return the admissions of those peers whose admission is known."""
        raise NotImplementedError

    # -- reading

    def chain(self, module: str) -> tuple[Step, ...]:
        """Return the steps of the served chain, oldest first."""
        raise NotImplementedError

    def steps_to(self, module: str, step: str) -> tuple[Step, ...]:
        """Return the steps from the genesis to `step`, oldest first. Raises KeyError."""
        raise NotImplementedError

    def locator(self, module: str, step: str | None = None) -> tuple[str, ...]:
        """Return some names of the chain to `step`, or of the heaviest known."""
        raise NotImplementedError

    def recent_rows(self, module: str) -> tuple[Row, ...]:
        """Return the rows of the last rounds."""
        raise NotImplementedError
