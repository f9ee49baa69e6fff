"""A status as metrics for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from prometheus_client.metrics_core import Metric as Family

from dipaco.base.metrics import Metric, text_of
from dipaco.protocol.records import ClaimState, Reachability

from .problems import ProblemKind

PATH_STATES = ("training", "joining", "unserved")


def _gauge(name: str, help: str, label: str = "", values: Iterable[str] = ()) -> Metric:
    return Metric(f"dipaco_swarm_{name}", "gauge", help, label, tuple(values))


SWARM_METRICS = (
    _gauge("round", "the round by the clock"),
    _gauge("round_duration_seconds", "seconds of a round"),
    _gauge("healthy", "1 without problems, otherwise 0"),
    _gauge("problems", "problems that dipaco-status lists", "kind", get_args(ProblemKind)),
    _gauge("peers", "peers by what they do", "state", get_args(ClaimState)),
    _gauge("peers_reachable", "peers by how others call them", "how", get_args(Reachability)),
    _gauge("paths", "paths by whether they are trained", "state", PATH_STATES),
    _gauge("path_behind_rounds", "rounds since the path that has waited longest was trained"),
    _gauge("modules_forked", "modules whose trainers hold states of several chains"),
    _gauge("module_least_copies", "holders of the newest state of the module that has the fewest"),
    _gauge(
        "module_behind_rounds", "rounds since the last step of the module that has waited longest"
    ),
    _gauge("tokens_per_second", "what all peers train, by their own records"),
    _gauge("tokens", "tokens trained on all paths, by their anchors"),
    _gauge("validation_perplexity", "perplexity on held-out text, over the paths that report it"),
)


def swarm_families(status: Mapping[str, Any]) -> Iterator[Family]:
    """Yield the metrics of a status, as `summary.status_of` returns it."""
    values = _swarm_values(status)
    for metric in SWARM_METRICS:
        value = values[metric.name.removeprefix("dipaco_swarm_")]
        if value is not None:
            yield metric.family(value)


def _swarm_values(status: Mapping[str, Any]) -> dict[str, float | Mapping[str, float] | None]:
    peers, paths, modules = status["peers"], status["paths"], status["modules"]
    now = status["round"]
    return {
        "round": now,
        "round_duration_seconds": status["round_duration_s"],
        "healthy": float(status["healthy"]),
        "problems": Counter(problem["kind"] for problem in status["problems"]),
        "peers": Counter(peer["state"] for peer in peers),
        "peers_reachable": Counter(peer["reachable"] for peer in peers),
        "paths": Counter(path["state"] for path in paths),
        "path_behind_rounds": _most_behind(paths, now),
        "modules_forked": sum(not module["agree"] for module in modules),
        "module_least_copies": min((len(module["holders"]) for module in modules), default=None),
        "module_behind_rounds": _most_behind(modules, now),
        "tokens_per_second": sum(peer["tokens_per_s"] for peer in peers),
        "tokens": sum(path["tokens"] for path in paths),
        "validation_perplexity": status["validation"]["perplexity"],
    }


def _most_behind(entries: Iterable[Mapping[str, Any]], now: int) -> float:
    """Return for how many rounds the one that has waited longest has; all, if it never was."""
    lasts = (-1 if entry["last_round"] is None else entry["last_round"] for entry in entries)
    return float(max((max(0, now - last) for last in lasts), default=0))


def swarm_text(status: Mapping[str, Any]) -> bytes:
    """Return a status as Prometheus reads it: the answer of the page's `/metrics`."""
    return text_of(swarm_families(status))
