"""The frozen base of a prepared run, made again where a copy of the run was brought without it."""

from __future__ import annotations

from pathlib import Path

from dipaco.base.errors import ConfigurationError
from dipaco.modules.frozen_file import write_base
from dipaco.routing.run_folder import RunFolder


def install_base(run: RunFolder, checkpoint: Path | None) -> None:
    """Make the base of the checkpoint in a folder, if the run lacks it; its hash is checked.

    Raises `ConfigurationError` when no checkpoint is given and one is needed.
    """
    plan = run.plan()
    sha256 = plan.blobs.base
    if run.blobs.has(sha256):
        return
    if checkpoint is None or plan.base_source is None or plan.model.adapters is None:
        raise ConfigurationError(
            f"{run.path} lacks its base; name its checkpoint with --base FOLDER"
        )
    made, base_format = run.blobs.partial_path(sha256), plan.model.adapters.base_format
    write_base(checkpoint, plan.base_source.rows, base_format, made)
    run.blobs.commit_partial(sha256)
