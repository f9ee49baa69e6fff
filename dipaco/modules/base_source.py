"""The frozen base of a run, made of the public checkpoint that this machine may have already."""

from __future__ import annotations

from collections.abc import Callable

from dipaco.base.blobs import BlobStore
from dipaco.base.errors import DipacoError
from dipaco.base.files import sha256_of_file, storage_errors
from dipaco.protocol.plan import BaseSource, RunPlan

from .frozen_file import write_base
from .hub_cache import cached_snapshots


def seems_in_hub_cache(source: BaseSource) -> bool:
    """Return whether the hub's cache has all files of a checkpoint, by their names: no content is
    read."""
    return any(
        all((folder / file.name).is_file() for file in source.files)
        for folder in cached_snapshots(source.name)
    )


def take_base_from_hub_cache(plan: RunPlan, blobs: BlobStore, say: Callable[[str], None]) -> bool:
    """Make the base of a run with adapters, if its checkpoint is in the hub's cache, and put it
    into `blobs`; return whether it is there then.

    What comes of it is compared with the plan. A checkpoint that is another one is told of, and
    not used.
    """
    source, adapters, sha256 = plan.base_source, plan.model.adapters, plan.blobs.base
    if source is None or adapters is None:
        return False
    for folder in cached_snapshots(source.name):
        try:
            with storage_errors(folder):
                found = {f.name: sha256_of_file(folder / f.name) for f in source.files}
            if any(found[file.name] != file.sha256 for file in source.files):
                say(f"{folder} is another revision of {source.name} than this run has: not used")
                continue
            write_base(folder, adapters.base_format, blobs.partial_path(sha256))
            blobs.commit_partial(sha256)
        except DipacoError as error:
            say(f"{folder} is not used: {error}")
            continue
        say(f"the base model is made of {source.name} in the hub's cache")
        return True
    return False
