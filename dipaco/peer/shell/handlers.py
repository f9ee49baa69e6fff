"""The tables by which the parts of a node carry out what its member wants done.

Every part of a node gives a table of the actions that it carries out. `shell` puts them together
and looks up each action, so an action that nobody carries out is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from dipaco.protocol.member.actions import Action
from dipaco.protocol.member.events import Event

Handlers: TypeAlias = Mapping[type[Action], Callable[[Any], Event | None]]
"""By action, what does it or begins to. What it returns happened at once; what comes later is
reported to the shell."""
