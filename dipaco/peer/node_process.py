"""The parts that a node's process keeps from its start to its end, through all its runs."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from dipaco.peer.owner.uplink import Uplink
from dipaco.peer.reporting.event_log import EventLog
from dipaco.peer.reporting.peer_display import Display
from dipaco.peer.reporting.peer_metrics import PeerMetrics

from .peer_settings import NodeSettings


@dataclass(frozen=True)
class NodeProcess:
    """How a node tells people what it does, and is told to end."""

    display: Display
    stopping: threading.Event
    """Set when the process shall end."""
    events: EventLog
    uplink: Uplink
    metrics: PeerMetrics


def begin_process(
    settings: NodeSettings, display: Display, stopping: threading.Event
) -> NodeProcess:
    """Open the log of events, which display and metrics listen to."""
    events = EventLog(settings.log_json)
    events.add_listener(display.on_event)
    uplink = Uplink(settings.max_upload_mbps)
    metrics = PeerMetrics(uplink)
    events.add_listener(metrics.on_event)
    return NodeProcess(display, stopping, events, uplink, metrics)
