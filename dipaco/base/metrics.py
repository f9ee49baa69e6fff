"""What all metrics of the project are made with, for Prometheus.

Names and labels are a contract (docs/monitoring.md). No label has a value for each peer, path or
module: what they take to store does not grow with the swarm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector, CollectorRegistry

CONTENT_TYPE = CONTENT_TYPE_LATEST


@dataclass(frozen=True)
class Metric:
    """What one metric is called and what it says."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    """All values of the label, where they are known; each is there from the beginning."""

    def family(self, value: float | Mapping[str, float]) -> Family:
        """Return it with its value, or with one for each value of its label."""
        labels = [self.label] if self.label else []
        made: GaugeMetricFamily | CounterMetricFamily
        if self.kind == "counter":
            made = CounterMetricFamily(self.name.removesuffix("_total"), self.help, labels=labels)
        else:
            made = GaugeMetricFamily(self.name, self.help, labels=labels)
        if isinstance(value, Mapping):
            for name in dict.fromkeys((*self.values, *sorted(value))):
                made.add_metric([name], value.get(name, 0.0))
        else:
            made.add_metric([], value)
        return made


class _Families(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = tuple(families)

    def collect(self) -> Iterable[Family]:
        return self._families


def text_of(families: Iterable[Family]) -> bytes:
    """Return metrics as Prometheus reads them; `CONTENT_TYPE` goes with it."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry)
