"""Checkpoints that the hub's libraries have fetched to this machine earlier; nothing is fetched."""

from __future__ import annotations

import re
from pathlib import Path

# As the Hugging Face Hub names models: OWNER/NAME.
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


def is_hub_name(name: str) -> bool:
    """Return whether this could be a model's name at the hub."""
    return bool(_HUB_NAME.fullmatch(name)) and ".." not in name


def cached_snapshots(name: str) -> tuple[Path, ...]:
    """Return the folders of a model's revisions in the hub's cache, the newest first."""
    if not is_hub_name(name):
        return ()
    # Not before it is used: importing it takes a while.
    from huggingface_hub.constants import HF_HUB_CACHE

    snapshots = Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "snapshots"
    if not snapshots.is_dir():
        return ()
    found = [folder for folder in snapshots.iterdir() if (folder / "config.json").is_file()]
    return tuple(sorted(found, key=lambda folder: folder.stat().st_mtime, reverse=True))
