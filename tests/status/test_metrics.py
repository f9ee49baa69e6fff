"""What Prometheus is told: names and labels are a contract, and the examples use no others."""

import json
import re
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dipaco.base.errors import ConfigurationError
from dipaco.base.host_and_port import host_and_port
from dipaco.peer.owner.uplink import Uplink
from dipaco.peer.presence.own_status import Activity, PeerStatus
from dipaco.peer.reporting.peer_metrics import PeerMetrics
from dipaco.protocol.config import GridConfig
from dipaco.protocol.view import SwarmView
from dipaco.status.swarm_metrics import POSSIBLE, swarm_metrics
from support.runs.make_plan import make_plan
from support.swarms.fake_swarm import ME, FakeRun, FakeSwarm, FakeTime, peer_record

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "examples" / "monitoring"


def families(registry):
    return list(text_string_to_metric_families(generate_latest(registry).decode()))


def samples(registry):
    """Return (name, value of the label) to value, as Prometheus' own parser reads it."""
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in families(registry)
        for sample in family.samples
    }


def status(peers=3, **changes):
    path = {"state": "training", "last_round": 7, "tokens": 100}
    module = {"agree": True, "holders": ["A", "B"], "last_round": 7}
    peer = {"state": "training", "reachable": "direct", "tokens_per_s": 10.5}
    return {
        "time_s": 1.8e9,
        "round": 8,
        "round_duration_s": 60.0,
        "healthy": False,
        "problems": [{"kind": "forked"}, {"kind": "forked"}, {"kind": "copies"}],
        "peers": [peer] * peers,
        "paths": [path, {"state": "unserved", "last_round": None, "tokens": 0}],
        "modules": [module, {"agree": False, "holders": ["A"], "last_round": 2}],
        "validation": {"loss": 2.5, "perplexity": 12.5},
        **changes,
    }


def test_a_status_as_metrics():
    found = samples(swarm_metrics(status()))
    assert found["dipaco_swarm_round", ""] == 8
    assert found["dipaco_swarm_healthy", ""] == 0
    assert found["dipaco_swarm_problems", "forked"] == 2
    assert found["dipaco_swarm_problems", "stalled"] == 0
    assert found["dipaco_swarm_peers", "training"] == 3
    assert found["dipaco_swarm_peers_reachable", "direct"] == 3
    assert {name for key, name in found if key == "dipaco_swarm_paths"} == set(POSSIBLE["paths"])
    assert found["dipaco_swarm_path_behind_rounds", ""] == 9
    assert found["dipaco_swarm_module_behind_rounds", ""] == 6
    assert found["dipaco_swarm_modules_forked", ""] == 1
    assert found["dipaco_swarm_module_least_copies", ""] == 1
    assert found["dipaco_swarm_tokens_per_second", ""] == 31.5
    assert found["dipaco_swarm_read_timestamp_seconds", ""] == 1.8e9


def test_a_large_swarm_has_as_many_samples_as_a_small_one():
    assert len(samples(swarm_metrics(status(peers=5000)))) == len(samples(swarm_metrics(status())))
    empty = status(peers=0, paths=[], modules=[], validation={"perplexity": None})
    assert ("dipaco_swarm_validation_perplexity", "") not in samples(swarm_metrics(empty))


def metrics_after(*events):
    return samples(followed(*events).registry)


def followed(*events):
    uplink = Uplink()
    uplink.received_bytes = 7
    metrics = PeerMetrics(uplink)
    plan = make_plan(grid=GridConfig(private_head=True))
    time = FakeTime(plan.start_s + 5.5 * plan.rounds.duration_s)
    swarm = FakeSwarm(SwarmView(0.0, peers={ME: peer_record(ME)}))
    claim = Activity("training", 3)
    status = PeerStatus(claim, waiting_for="others", reachable="direct", validation_loss=2.5)
    run = FakeRun(plan, time.clock)
    run.held = SimpleNamespace(all=lambda: (1, 2))
    metrics.follow(run, swarm, status)
    for kind, values in events:
        metrics.on_event(kind, values)
    return metrics


def test_a_peer_as_metrics():
    step = {"tokens": 64, "seconds": 0.5, "loss": 3.25}
    outer_step = {"module": "L0.E1", "seconds_after_boundary": 2.0, "rows": 2}
    found = metrics_after(
        ("inner", step),
        ("inner", step),
        ("outer_step", outer_step),
        ("outer_step", {**outer_step, "module": "P3", "rows": 1}),
        ("carry_on", {"module": "L0.E1"}),
        ("adopt", {"module": "L0.E0"}),
        ("move", {}),
        ("waiting", {"what": "nothing that is counted"}),
    )
    for name, label, value in (
        ("tokens_total", "", 128), ("inner_steps_total", "", 2), ("inner_seconds_total", "", 1.0),
        ("loss", "", 3.25), ("validation_loss", "", 2.5), ("round", "", 5), ("path", "", 3),
        ("state", "training", 1), ("state", "paused", 0), ("reachable", "direct", 1),
        ("reachable", "outgoing", 0), ("waiting", "", 1), ("outer_steps_total", "L0", 1),
        ("outer_steps_total", "private", 1), ("rounds_without_step_total", "L0", 1),
        ("outer_step_seconds_total", "L0", 2.0), ("outer_step_peers", "L0", 2),
        ("adoptions_total", "L0", 1), ("moves_total", "", 1), ("sent_bytes_total", "", 0),
        ("received_bytes_total", "", 7), ("states_held", "", 2), ("peers_seen", "", 1),
    ):  # fmt: skip
        assert found[f"dipaco_{name}", label] == value, (name, label)


def test_counters_are_there_before_anything_happens():
    found = metrics_after()
    for name in ("tokens", "inner_steps", "inner_seconds", "moves"):
        assert found[f"dipaco_{name}_total", ""] == 0
    for name in ("outer_steps", "rounds_without_step", "outer_step_seconds", "adoptions"):
        for level in ("L0", "L1", "private"):
            assert found[f"dipaco_{name}_total", level] == 0


def test_a_peer_answers_where_it_is_told_and_says_so():
    metrics, said = PeerMetrics(Uplink(None)), []
    metrics.serve(None, said.append)
    assert said == []
    metrics.serve("0", said.append)
    metrics.serve("0", said.append)
    assert len(said) == 1
    url = said[0].split()[-1]
    assert url.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert b"dipaco_tokens_total 0.0" in answer.read()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("9400", ("127.0.0.1", 9400)), ("0.0.0.0:0", ("0.0.0.0", 0)), ("[::]:80", ("::", 80)),
        ("me.example.org:80", ("me.example.org", 80)), ("", None), ("me", None), ("70000", None),
        (":80", None), ("::80", None), ("-1", None), ("1:2:3", None),
    ],
)  # fmt: skip
def test_where_a_server_listens(text, found):
    if found is not None:
        assert host_and_port("--metrics", text) == found
        return
    with pytest.raises(ConfigurationError, match="--metrics '.*' is no port; for example --metrics 8090"):
        host_and_port("--metrics", text)


# -- what stands in docs and examples


def described(registry):
    """Return what each metric says of itself, by its name: kind, label, help."""
    return {
        family.name + "_total" * (family.type == "counter"): (
            family.type,
            next(iter(family.samples[0].labels), ""),
            family.documentation,
        )
        for family in families(registry)
    }


STEP = {"module": "L0.E1", "seconds_after_boundary": 2.0, "rows": 2}
METRICS = {**described(swarm_metrics(status())), **described(followed(("outer_step", STEP)).registry)}


def names_in(expressions):
    return {name for text in expressions for name in re.findall(r"\bdipaco_\w+", text)}


def test_the_dashboard_shows_what_there_is_and_nothing_else():
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    shown = names_in(t["expr"] for panel in panels for t in panel["targets"])
    assert shown == METRICS.keys() - {"dipaco_swarm_read_timestamp_seconds"}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    labels = {label for _, label, _ in METRICS.values()} | {"instance"}
    for panel in panels:
        for target in panel["targets"]:
            # A table of a range shows one of its series at a time.
            assert (panel["type"] == "table") == (target.get("format") == "table")
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels


def test_the_alerts_are_about_what_there_is():
    text = (MONITORING / "rules.yml").read_text()
    assert names_in(re.sub(r"dipaco:\w+", "", text).splitlines()) <= METRICS.keys()
    values = {value for values in POSSIBLE.values() for value in values}
    assert set(re.findall(r'="(\w+)"', text)) <= values


def test_every_metric_says_what_it_is():
    assert [name for name, (_, _, help) in METRICS.items() if not help] == []
