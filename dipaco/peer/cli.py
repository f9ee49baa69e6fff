"""Where an installation from before the files had names of their own finds `dipaco-peer`."""

from __future__ import annotations

from .peer_command import main

__all__ = ["main"]
