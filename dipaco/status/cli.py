"""Where an installation from before the files had names of their own finds `dipaco-status`."""

from __future__ import annotations

from .status_command import main

__all__ = ["main"]
