"""A status as metrics for Prometheus.

Other programs rely on names and labels. No label has a value for each peer, path or module, so the
space that they take does not grow with the swarm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Gauge

from dipaco.protocol.records import ClaimState, Reachability

from .problems import ProblemKind

POSSIBLE = {
    "problems": get_args(ProblemKind),
    "peers": get_args(ClaimState),
    "peers_reachable": get_args(Reachability),
    "paths": ("training", "joining", "unserved"),
}


def swarm_metrics(status: Mapping[str, Any]) -> CollectorRegistry:
    """Return the metrics of a status, as `summary.status_of` returns it."""
    peers, paths, modules = status["peers"], status["paths"], status["modules"]
    now, problems = status["round"], status["problems"]
    least_copies = min((len(module["holders"]) for module in modules), default=None)
    forked = sum(not module["agree"] for module in modules)
    registry = CollectorRegistry(auto_describe=False)

    def gauge(name: str, value: float | None, help: str) -> None:
        if value is not None:
            Gauge(f"dipaco_swarm_{name}", help, registry=registry).set(value)

    def counts(
        name: str, entries: Sequence[Mapping[str, Any]], label: str, key: str, help: str
    ) -> None:
        made = Gauge(f"dipaco_swarm_{name}", help, [label], registry=registry)
        found = Counter(entry[key] for entry in entries)
        # Series without a value yet are there too, so no alert is about a series that is missing.
        for value in {*POSSIBLE[name], *found}:
            made.labels(value).set(found[value])

    gauge("read_timestamp_seconds", status["time_s"], "when the swarm was read, in Unix time")
    gauge("round", now, "the round by the clock")
    gauge("round_duration_seconds", status["round_duration_s"], "seconds of a round")
    gauge(
        "healthy",
        status["healthy"],
        "1 without problems, 0 with some and when the swarm could not be read",
    )
    counts("problems", problems, "kind", "kind", "problems that dipaco-status lists")
    counts("peers", peers, "state", "state", "peers by what they do")
    counts("peers_reachable", peers, "how", "reachable", "peers by how others call them")
    counts("paths", paths, "state", "state", "paths by whether they are trained")
    gauge(
        "path_behind_rounds",
        _most_behind(paths, now),
        "rounds since the path that has waited longest was trained",
    )
    gauge("modules_forked", forked, "modules whose trainers hold states of several chains")
    gauge(
        "module_least_copies",
        least_copies,
        "holders of the newest state of the module that has the fewest",
    )
    gauge(
        "module_behind_rounds",
        _most_behind(modules, now),
        "rounds since the last step of the module that has waited longest",
    )
    gauge(
        "tokens_per_second",
        sum(peer["tokens_per_s"] for peer in peers),
        "what all peers train, by their own records",
    )
    gauge(
        "tokens",
        sum(path["tokens"] for path in paths),
        "tokens trained on all paths, by their anchors",
    )
    gauge(
        "validation_perplexity",
        status["validation"]["perplexity"],
        "perplexity on held-out text, over the paths that report it",
    )
    return registry


def _most_behind(entries: Iterable[Mapping[str, Any]], now: int) -> float:
    """Return for how many rounds the longest-waiting one has waited; all rounds, if it never had a
    step."""
    lasts = (-1 if entry["last_round"] is None else entry["last_round"] for entry in entries)
    return float(max((max(0, now - last) for last in lasts), default=0))
