"""AdamW states on this disk, for a return to their paths; losing one costs some warmup.

FOLDER/path-3.pt    of this path and of the one before a move; a peer's alone
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dipaco.base.files import atomic_file, remove_stale_temporaries, storage_errors

logger = logging.getLogger("dipaco.training.optimizer_states")

KEPT_OPTIMIZERS = 2
# It is as large as the states of a path's modules, and no work is in it: a peer that is killed goes
# on with one that is older than its anchors.
SAVE_EVERY_S = 1800.0
_FILE = re.compile(r"path-\d+\.pt")


def write_optimizer(folder: Path, path: int, state: Mapping[str, Any]) -> Callable[[], None]:
    """Write the optimizer state of `path`, tensor by tensor, so that it may change afterwards.

    The returned function waits for the disk, and makes it the one that is kept; only the latest few
    paths have one. Both raise `StorageError`.
    """
    remove_stale_temporaries(folder)
    file = folder / f"path-{path}.pt"
    with contextlib.ExitStack() as stack:
        torch.save(dict(state), stack.enter_context(atomic_file(file)))
        written = stack.pop_all()

    def keep() -> None:
        written.close()
        with storage_errors(folder):
            others = [found for found in folder.iterdir() if _FILE.fullmatch(found.name)]
            others = sorted((o for o in others if o != file), key=lambda o: o.stat().st_mtime)
            for old in others[: 1 - KEPT_OPTIMIZERS]:
                old.unlink(missing_ok=True)

    return keep


def load_optimizer(folder: Path, path: int) -> dict[str, Any] | None:
    """Return the kept state of `path`, or None; a damaged file is logged and removed."""
    file = folder / f"path-{path}.pt"
    if not file.is_file():
        return None
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever the damage makes it stumble over
        logger.warning("damaged optimizer state %s; starting afresh", file.name)
        logger.debug("it cannot be read: %s", error)
        file.unlink(missing_ok=True)
        return None
    return loaded if isinstance(loaded, dict) else None
