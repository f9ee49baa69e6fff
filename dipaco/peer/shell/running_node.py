"""A node in one run, with what works beside its member."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from dipaco.peer.background import Background
from dipaco.peer.node.node import Node
from dipaco.peer.presence.own_status import PeerStatus
from dipaco.peer.presence.refresher import Refresher
from dipaco.peer.reporting.event_log import EventLog


@dataclass(frozen=True)
class RunningNode:
    """The parts that the shell of a node stands on. A peer makes new ones for every run."""

    node: Node
    status: PeerStatus
    """What others are told of this peer."""
    refresher: Refresher
    background: Background
    events: EventLog
    stopping: threading.Event
    """Set when the process shall end."""
