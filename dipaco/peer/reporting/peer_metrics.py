"""What a peer or a bootstrap node tells Prometheus: `--metrics-port`.

Counters follow from the events, gauges are read when they are asked for. One server for the life of
the process, whichever run it is in. Names and labels are a contract (docs/monitoring.md).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

from prometheus_client import start_http_server
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector, CollectorRegistry

from dipaco.base.errors import ConfigurationError, DipacoError
from dipaco.base.metrics import Metric
from dipaco.peer.exchange.contact.hello import SOFTWARE
from dipaco.peer.owner.uplink import Uplink
from dipaco.peer.peer_settings import NodeSettings
from dipaco.peer.presence.joined_run import JoinedRun, SeenSwarm
from dipaco.peer.presence.own_status import PeerStatus
from dipaco.protocol.records import ClaimState, Reachability


def _gauge(name: str, help: str, label: str = "", values: Iterable[str] = ()) -> Metric:
    return Metric(f"dipaco_{name}", "gauge", help, label, tuple(values))


def _counter(name: str, help: str, label: str = "") -> Metric:
    return Metric(f"dipaco_{name}_total", "counter", help, label)


# A level is a level's name, or "private".
PEER_METRICS = (
    _gauge("info", "1; which version of the software it is", "software"),
    _counter("tokens", "tokens trained since the process began"),
    _counter("inner_steps", "inner steps since the process began"),
    _counter(
        "inner_seconds",
        "seconds in inner steps; the rate of this counter is their share of the time",
    ),
    _gauge("tokens_per_second", "speed of training at present"),
    _gauge("loss", "training loss of the last inner step, in nats"),
    _gauge("validation_loss", "held-out loss of the path, in nats"),
    _gauge("round", "the present round; with fixed steps that of this peer"),
    _gauge("path", "the path in training; -1 without one"),
    _gauge("state", "1 for the state that the peer is in", "state", get_args(ClaimState)),
    _gauge("reachable", "1 for the way in which others call it", "how", get_args(Reachability)),
    _gauge("waiting", "1 while the peer waits for something"),
    _counter("outer_steps", "outer steps taken", "level"),
    _counter("rounds_without_step", "outer rounds that brought no step", "level"),
    _counter("outer_step_seconds", "seconds from boundaries to steps", "level"),
    _gauge("outer_step_peers", "peers in the last step", "level"),
    _counter("adoptions", "states of others taken over", "level"),
    _counter("moves", "moves to another path"),
    _counter("sent_bytes", "bytes of contributions, states and blobs sent"),
    _counter("received_bytes", "bytes of contributions, states and blobs received"),
    _gauge("states_held", "module states that the peer can serve"),
    _gauge("peers_seen", "peers in its newest view, which is a part of the swarm"),
)


def level_of(module: str) -> str:
    """Return the level of a module, "private" for a path's own."""
    return module.partition(".")[0] if "." in module else "private"


class PeerMetrics(Collector):
    """Collects the metrics of this process. Thread-safe."""

    def __init__(self, uplink: Uplink) -> None:
        self._uplink = uplink
        self._lock = threading.Lock()
        self._values: dict[str, dict[str, float]] = {}
        self._is_served = False
        self._run: JoinedRun | None = None
        self._swarm: SeenSwarm | None = None
        self._status = PeerStatus()
        self._count_states: Callable[[], int] = lambda: 0

    def follow(
        self,
        run: JoinedRun,
        swarm: SeenSwarm,
        status: PeerStatus,
        count_states: Callable[[], int],
    ) -> None:
        """Read gauges from this run's parts from now on."""
        with self._lock:
            self._run, self._swarm, self._status = run, swarm, status
            self._count_states = count_states
            # From 0 on: of a series that begins with its first event, `increase` misses that one.
            for level in {level_of(module) for module in run.grid.modules()}:
                for metric in PEER_METRICS:
                    if metric.kind == "counter" and metric.label:
                        name = metric.name.removeprefix("dipaco_").removesuffix("_total")
                        self._add(name, 0.0, level)

    def serve(self, settings: NodeSettings, say: Callable[[str], None]) -> None:
        """Answer at `/metrics` until the process ends, if it is asked for. Raises
        ConfigurationError.

        Called once the other processes are forked, so that they don't share the socket; again in a
        successor, which changes nothing.
        """
        host, port = settings.metrics_host, settings.metrics_port
        if port is None or self._is_served:
            return
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            server, _ = start_http_server(port, host, registry=registry)
        except OSError as error:
            raise ConfigurationError(
                f"--metrics-port {port}: cannot listen at {host} ({error.strerror or error}); "
                "give another port, or 0 for any"
            ) from None
        self._is_served = True
        say(f"metrics for Prometheus at http://{host}:{server.server_port}/metrics")

    # -- events

    def on_event(self, kind: str, values: Mapping[str, Any]) -> None:
        """Count an event. A listener of `EventLog`."""
        with self._lock:
            if kind == "inner":
                self._add("tokens", values["tokens"])
                self._add("inner_steps", 1)
                self._add("inner_seconds", values["seconds"])
                self._values["dipaco_loss"] = {"": values["loss"]}
            elif kind == "outer_step":
                level = level_of(values["module"])
                self._add("outer_steps", 1, level)
                self._add("outer_step_seconds", values["seconds_after_boundary"], level)
                self._values.setdefault("dipaco_outer_step_peers", {})[level] = values["rows"]
            elif kind == "carry_on":
                self._add("rounds_without_step", 1, level_of(values["module"]))
            elif kind == "adopt":
                self._add("adoptions", 1, level_of(values["module"]))
            elif kind == "move":
                self._add("moves", 1)

    def _add(self, name: str, count: float, label: str = "") -> None:
        sums = self._values.setdefault(f"dipaco_{name}_total", {})
        sums[label] = sums.get(label, 0.0) + count

    # -- what is asked for

    def collect(self) -> Iterable[Family]:
        """Return all metrics. On the threads of Prometheus' server."""
        with self._lock:
            counted = {name: dict(found) for name, found in self._values.items()}
            run, swarm, status = self._run, self._swarm, self._status
            count_states = self._count_states
        others = {
            "dipaco_sent_bytes_total": {"": float(self._uplink.sent_bytes)},
            "dipaco_received_bytes_total": {"": float(self._uplink.received_bytes)},
            "dipaco_states_held": {"": float(count_states())},
        }
        values = {**counted, **_gauges(run, swarm, status), **others}
        return [_family(metric, values.get(metric.name)) for metric in PEER_METRICS]


def _family(metric: Metric, values: Mapping[str, float] | None) -> Family:
    if metric.label:
        return metric.family(values or {})
    if metric.kind == "counter":
        return metric.family((values or {}).get("", 0.0))
    return metric.family((values or {}).get("", math.nan))


def _gauges(
    run: JoinedRun | None, swarm: SeenSwarm | None, status: PeerStatus
) -> dict[str, Mapping[str, float]]:
    """Return what is read when it is asked for."""
    claim = status.claim
    plain = {
        "tokens_per_second": status.tokens_per_s,
        "validation_loss": status.validation_loss,
        "round": float(status.round_index),
        "path": -1.0 if claim.path is None else float(claim.path),
        "waiting": float(bool(status.waiting_for)),
    }
    if run is not None and not run.schedule.fixed_steps:
        plain["round"] = max(0, run.schedule.round_at(run.clock.now()))
    if swarm is not None:
        try:
            plain["peers_seen"] = len(swarm.view.present)
        except DipacoError:
            plain["peers_seen"] = 0
    return {
        **{f"dipaco_{name}": {"": float(value)} for name, value in plain.items()},
        "dipaco_info": {SOFTWARE: 1.0},
        "dipaco_state": {claim.state: 1.0},
        "dipaco_reachable": {status.reachable: 1.0},
    }
