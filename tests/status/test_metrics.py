"""What Prometheus is told: names and labels are a contract, and the examples use no others."""

import json
import re
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dipaco.base.metrics import text_of
from dipaco.peer.owner.uplink import Uplink
from dipaco.peer.peer_settings import PeerSettings
from dipaco.peer.presence.own_status import Activity, PeerStatus
from dipaco.peer.reporting.peer_metrics import PEER_METRICS, PeerMetrics
from dipaco.protocol.config import GridConfig
from dipaco.protocol.view import SwarmView
from dipaco.status.swarm_metrics import PATH_STATES, SWARM_METRICS, swarm_text
from support.runs.make_plan import make_plan
from support.swarms.fake_swarm import ME, FakeRun, FakeSwarm, FakeTime, peer_record

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "examples" / "monitoring"
NAMES = {metric.name for metric in (*PEER_METRICS, *SWARM_METRICS)}
ADDRESS = ("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWRA4F8vNLh1ueZWQYE3pafBEKj1FVw2XWGM1pwogTS83H",)


def samples(text):
    """Return (name, value of the label) to value, as Prometheus' own parser reads it."""
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def status(peers=3, **changes):
    path = {"state": "training", "last_round": 7, "tokens": 100}
    module = {"agree": True, "holders": ["A", "B"], "last_round": 7}
    peer = {"state": "training", "reachable": "direct", "tokens_per_s": 10.5}
    return {
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
    found = samples(swarm_text(status()))
    assert found["dipaco_swarm_round", ""] == 8
    assert found["dipaco_swarm_healthy", ""] == 0
    assert found["dipaco_swarm_problems", "forked"] == 2
    assert found["dipaco_swarm_problems", "stalled"] == 0
    assert found["dipaco_swarm_peers", "training"] == 3
    assert found["dipaco_swarm_peers_reachable", "direct"] == 3
    assert {name for key, name in found if key == "dipaco_swarm_paths"} == set(PATH_STATES)
    assert found["dipaco_swarm_path_behind_rounds", ""] == 9
    assert found["dipaco_swarm_module_behind_rounds", ""] == 6
    assert found["dipaco_swarm_modules_forked", ""] == 1
    assert found["dipaco_swarm_module_least_copies", ""] == 1
    assert found["dipaco_swarm_tokens_per_second", ""] == 31.5
    assert {name for name, _ in found} == {metric.name for metric in SWARM_METRICS}


def test_a_large_swarm_has_as_many_samples_as_a_small_one():
    assert len(samples(swarm_text(status(peers=5000)))) == len(samples(swarm_text(status())))
    empty = status(peers=0, paths=[], modules=[], validation={"perplexity": None})
    assert ("dipaco_swarm_validation_perplexity", "") not in samples(swarm_text(empty))


def metrics_after(*events):
    uplink = Uplink()
    uplink.received_bytes = 7
    metrics = PeerMetrics(uplink)
    plan = make_plan(grid=GridConfig(private_head=True))
    time = FakeTime(plan.start_s + 5.5 * plan.rounds.duration_s)
    swarm = FakeSwarm(SwarmView(0.0, peers={ME: peer_record(ME)}))
    claim = Activity("training", 3)
    status = PeerStatus(claim, waiting_for="others", reachable="direct", validation_loss=2.5)
    metrics.follow(FakeRun(plan, time.clock), swarm, status, lambda: 2)
    for kind, values in events:
        metrics.on_event(kind, values)
    return samples(text_of(metrics.collect()))


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
    assert {name for name, _ in found} == {metric.name for metric in PEER_METRICS}


def test_counters_are_there_before_anything_happens():
    found = metrics_after()
    for metric in PEER_METRICS:
        if metric.kind == "counter" and "bytes" not in metric.name:
            for label in ("L0", "L1", "private") if metric.label else ("",):
                assert found[metric.name, label] == 0


def test_a_peer_answers_where_it_is_told_and_says_so(tmp_path):
    metrics, said = PeerMetrics(Uplink(None)), list[str]()
    metrics.serve(PeerSettings(initial_peers=ADDRESS), said.append)
    assert said == []
    asked = PeerSettings(initial_peers=ADDRESS, metrics_port=0)
    metrics.serve(asked, said.append)
    metrics.serve(asked, said.append)
    assert len(said) == 1
    url = said[0].split()[-1]
    assert url.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert ("dipaco_tokens_total", "") in samples(answer.read())


# -- what stands in docs and examples


def names_in(expressions):
    return {name for text in expressions for name in re.findall(r"\bdipaco_\w+", text)}


def test_the_dashboard_shows_what_there_is_and_nothing_else():
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert names_in(t["expr"] for panel in panels for t in panel["targets"]) == NAMES
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    labels = {metric.label for metric in (*PEER_METRICS, *SWARM_METRICS)} | {"instance"}
    for panel in panels:
        for target in panel["targets"]:
            # A table of a range shows one of its series at a time.
            assert (panel["type"] == "table") == (target.get("format") == "table")
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels


def test_the_alerts_are_about_what_there_is():
    text = (MONITORING / "rules.yml").read_text()
    assert names_in(re.sub(r"dipaco:\w+", "", text).splitlines()) <= NAMES
    values = {value for metric in (*PEER_METRICS, *SWARM_METRICS) for value in metric.values}
    assert set(re.findall(r'="(\w+)"', text)) <= values


@pytest.mark.parametrize("metrics", [PEER_METRICS, SWARM_METRICS])
def test_every_metric_is_documented(metrics):
    text = (ROOT / "docs" / "monitoring.md").read_text()
    for metric in metrics:
        label = f"`{metric.label}`" if metric.label else ""
        assert f"| `{metric.name}` | {metric.kind} | {label} | {metric.help} |" in text
    documented = set(re.findall(r"^\| `(dipaco_\w+)` \|", text, re.M))
    assert documented == NAMES
