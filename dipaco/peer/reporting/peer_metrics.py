"""What a peer or a bootstrap node reports to Prometheus: `--metrics`.

Counters follow from the events; gauges are read when they are asked for. There is one server for
the life of the process, whichever run it is in. Other programs rely on names and labels. No label
has a value for each peer, path or module, so the space that they take does not grow with the swarm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dipaco.base.errors import ConfigurationError, DipacoError
from dipaco.base.host_and_port import host_and_port
from dipaco.peer.exchange.contact.hello import SOFTWARE
from dipaco.peer.node.node import Node
from dipaco.peer.owner.uplink import Uplink
from dipaco.peer.presence.own_status import PeerStatus
from dipaco.peer.presence.refresher import Refresher
from dipaco.protocol.records import ClaimState, Reachability


def _level_of(module: str) -> str:
    """Return the level of a module, "private" for a path's own."""
    return module.partition(".")[0] if "." in module else "private"


class PeerMetrics(Collector):
    """The metrics of this process, and the server that answers with them. Thread-safe."""

    def __init__(self, uplink: Uplink) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry(auto_describe=False)
        self._is_served = False
        self._run: Node | None = None
        self._swarm: Refresher | None = None
        self._status, self._uplink = PeerStatus(), uplink

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"dipaco_{name}", help, labels, registry=self.registry)

        def gauge(name: str, help: str, *labels: str) -> Gauge:
            return Gauge(f"dipaco_{name}", help, labels, registry=self.registry)

        version = gauge("info", "always 1; the label is the version of the software", "software")
        version.labels(SOFTWARE).set(1)
        self._tokens = counter("tokens", "tokens trained since the process began")
        self._inner_steps = counter("inner_steps", "inner steps since the process began")
        share = "seconds in inner steps; the rate of this counter is their share of the time"
        self._inner_seconds = counter("inner_seconds", share)
        self._loss = gauge("loss", "training loss of the last inner step, in nats")
        self._loss.set(math.nan)
        self._outer_steps = counter("outer_steps", "outer steps taken", "level")
        self._steps_missed = counter(
            "rounds_without_step", "outer rounds that brought no step", "level"
        )
        self._step_seconds = counter(
            "outer_step_seconds", "seconds from boundaries to steps", "level"
        )
        self._step_peers = gauge("outer_step_peers", "peers in the last step", "level")
        self._adoptions = counter("adoptions", "states of others taken over", "level")
        self._moves = counter("moves", "moves to another path")

        self.registry.register(self)

    def follow(self, run: Node, swarm: Refresher, status: PeerStatus) -> None:
        """Read gauges from this run's parts from now on."""
        self._run, self._swarm, self._status = run, swarm, status
        # From 0 on: of a series that begins with its first event, `increase` misses that one.
        for level in {_level_of(module) for module in run.grid.modules()}:
            self._outer_steps.labels(level)
            self._steps_missed.labels(level)
            self._step_seconds.labels(level)
            self._adoptions.labels(level)

    def serve(self, where: str | None, say: Callable[[str], None]) -> None:
        """Answer at `/metrics` until the process ends, if it is asked for (`--metrics`). Raises
        ConfigurationError.

        Called once the other processes are forked, so that they don't share the socket; again in a
        successor, which changes nothing.
        """
        if where is None or self._is_served:
            return
        host, port = host_and_port("--metrics", where)
        try:
            server, _ = start_http_server(port, host, registry=self.registry)
        except OSError as error:
            raise ConfigurationError(
                f"--metrics {where}: cannot listen at {host} ({error.strerror or error}); give "
                "another port, or 0 for any"
            ) from None
        self._is_served = True
        say(f"metrics for Prometheus at http://{host}:{server.server_port}/metrics")

    def on_event(self, kind: str, values: Mapping[str, Any]) -> None:
        """Count an event. A listener of `EventLog`."""
        if kind == "inner":
            self._tokens.inc(values["tokens"])
            self._inner_steps.inc()
            self._inner_seconds.inc(values["seconds"])
            self._loss.set(values["loss"])
        elif kind == "outer_step":
            level = _level_of(values["module"])
            self._outer_steps.labels(level).inc()
            self._step_seconds.labels(level).inc(values["seconds_after_boundary"])
            self._step_peers.labels(level).set(values["rows"])
        elif kind == "carry_on":
            self._steps_missed.labels(_level_of(values["module"])).inc()
        elif kind == "adopt":
            self._adoptions.labels(_level_of(values["module"])).inc()
        elif kind == "move":
            self._moves.inc()

    def collect(self) -> Iterator[Metric]:
        """Yield what is read when it is asked for. The registry calls this."""
        run, status, uplink = self._run, self._status, self._uplink

        def gauge(name: str, help: str, value: float) -> Metric:
            return GaugeMetricFamily(f"dipaco_{name}", help, value=value)

        def one_of(name: str, help: str, label: str, found: str, all: tuple[str, ...]) -> Metric:
            family = GaugeMetricFamily(f"dipaco_{name}", help, labels=[label])
            for one in all:
                family.add_metric([one], float(one == found))
            return family

        path, held = status.claim.path, () if run is None else run.held.all()
        yield gauge("tokens_per_second", "speed of training at present", status.tokens_per_s)
        yield gauge("validation_loss", "held-out loss of the path, in nats", status.validation_loss)
        yield gauge("round", "the present round; with fixed steps that of this peer", self._round())
        yield gauge("path", "the path in training; -1 without one", -1 if path is None else path)
        is_waiting = bool(status.waiting_for)
        yield gauge("waiting", "1 while the peer waits for something", is_waiting)
        yield gauge("states_held", "module states that the peer can serve", len(held))
        seen = "peers in its newest view, which is a part of the swarm"
        yield gauge("peers_seen", seen, self._peers_seen())
        state, how = status.claim.state, status.reachable
        said = "1 for the state that the peer is in"
        yield one_of("state", said, "state", state, get_args(ClaimState))
        said = "1 for the way in which others can call it"
        yield one_of("reachable", said, "how", how, get_args(Reachability))
        what = "bytes of contributions, states and blobs"
        for name, count in (("sent", uplink.sent_bytes), ("received", uplink.received_bytes)):
            yield CounterMetricFamily(f"dipaco_{name}_bytes", f"{what} {name}", value=count)

    def _round(self) -> int:
        run = self._run
        if run is None or run.schedule.fixed_steps:
            return self._status.round_index
        return max(0, run.schedule.round_at(run.clock.now()))

    def _peers_seen(self) -> int:
        try:
            return len(self._swarm.view.present) if self._swarm is not None else 0
        except DipacoError:
            return 0
