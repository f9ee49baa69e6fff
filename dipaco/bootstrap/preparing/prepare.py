"""Preparing a run: from documents to a signed manifest.

A new run, one that continues another, one with a larger grid, and one with paths more are made by
the same stages with other inputs (`stages_of`). Each notes what it was made from, so a preparation
that was stopped (or killed) goes on with the stage where it was, and a changed RUN.toml repeats
only what depends on the change. Within a stage, pretraining and scoring by paths go on, which may
take hours. Volunteers never run this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from dipaco.base.errors import AddressError, StorageError
from dipaco.base.files import storage_errors, try_lock
from dipaco.protocol.plan import RunPlan

from .prepared_summary import Summary
from .signing import Signing
from .stages import Job
from .stages_of_run import check, stages_of


def prepare(job: Job) -> RunPlan:
    """Make the run folder `job.out` and return the plan that was signed.

    When everything is done already, nothing is made or signed again; another run there is refused,
    unless it is to be replaced. A run that continues another one is signed by the same operator,
    and has its tokenizer, and its trained modules to begin with.

    Raises AddressError if another process prepares there, ConfigurationError for what cannot be,
    CorpusError for an unusable corpus or an empty shard, StorageError for a full disk.
    """
    with _alone(job.work):
        stages, signing = stages_of(job), Signing(job)
        check(job, stages)
        if signing.signed is not None:
            # Mistakes that the blobs do not decide are refused before hours of work.
            signing.is_signed(signing.plan(signing.signed.blobs, stages.base_source))
        plan, is_new = signing.sign(signing.plan(stages.blobs(), stages.base_source))
        Summary(job, stages, plan).show(is_new=is_new)
    return plan


@contextlib.contextmanager
def _alone(work: Path) -> Iterator[None]:
    """Keep other preparations out of a folder: they would write into the same files."""
    with storage_errors(work):
        work.mkdir(parents=True, exist_ok=True)
        lock = (work / "lock").open("wb")
    with lock:
        try:
            is_alone = try_lock(lock.fileno(), work)
        except StorageError:
            is_alone = True  # The shared disks of some clusters have no locks.
        if not is_alone:
            raise AddressError(
                f"{work.parent} is being prepared by another process; wait until it has ended, or "
                f"give another folder with --out"
            )
        yield
