"""The page of a swarm and the JSON under it: what it answers, what it refuses, what it costs."""

import json
import threading
import time

import pytest
from starlette.testclient import TestClient

from dipaco.base.errors import ConfigurationError, NetworkError
from dipaco.base.http_server import listen
from dipaco.protocol.ledger import Credit, exported
from dipaco.status import status_command
from dipaco.status.history import History
from dipaco.status.page import PAGE, SwarmPage, application, interval_s, repeated, serve_swarm
from support.swarms.big_swarm import HOSTILE_NAME, big_records, fork, spoiled_records, status_at
from support.swarms.swarm_views import plan_of
from support.waiting import wait_until

ADDRESS = "/ip4/192.0.2.1/tcp/1/p2p/12D3KooWLGUApiCpST4ZyZPakytsXQ19eY7ZRGCyyJWXKk4tqiZw"
ABOUT = {"peers": 12, "sizes": (2, 2)}


@pytest.fixture(scope="module")
def statuses():
    """A small swarm in three rounds, the last of which is not well."""
    found = [status_at(big_records(r, **ABOUT)) for r in (4, 5)]
    records = big_records(20, **ABOUT)
    fork(records, "L0.E0")
    return [*found, status_at(records)]


def page_of(*outcomes, ledgers=()):
    """Return a page whose readings bring these, one after the other."""

    def given(outcomes):
        outcomes = iter(outcomes)

        def read(*_):
            found = next(outcomes)
            if isinstance(found, Exception):
                raise found
            return found

        return read

    return SwarmPage(given(outcomes), History(None), 15.0, given(ledgers))


@pytest.fixture(scope="module")
def client(statuses):
    page = page_of(*statuses)
    for _ in statuses:
        page.look()
    with TestClient(application(page)) as client:
        yield client


def test_the_newest_status(client, statuses):
    newest = client.get("/api/status")
    shown = {"interval_s": 15.0, "error": None, "has_ledger": False, "status": statuses[-1]}
    assert newest.json() == shown
    again = client.get("/api/status", headers={"if-none-match": newest.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_figures_over_time(client, statuses):
    series = client.get("/api/series").json()
    assert series["time_s"] == [status["time_s"] for status in statuses]
    assert len(set(map(len, series.values()))) == 1


def test_what_is_not_there_is_one_line_of_json(client):
    answer = client.get("/nothing")
    message = "there is nothing at /nothing; look at /api/status"
    assert (answer.status_code, answer.json()) == (404, {"error": message})
    assert answer.text.count("\n") == 1


def test_nothing_can_be_sent(client):
    answer = client.post("/api/status", content=b"x")
    assert (answer.status_code, answer.json()["error"]) == (405, "POST is refused at /api/status; use GET")


def test_the_page_is_whole_and_lets_nothing_in(client):
    answer = client.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    text = PAGE.read_text()
    # No other place, and no way for a name to become markup or code.
    for never in ("http://", "https://", "innerHTML", "outerHTML", "insertAdjacent", "eval("):
        assert never not in text.replace("http://www.w3.org/2000/svg", ""), never
    assert " style=" not in text
    assert " onclick=" not in text


def test_a_hostile_name_stays_a_string(client):
    answer = client.get("/api/status")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert HOSTILE_NAME in [peer["name"] for peer in answer.json()["status"]["peers"]]
    # Nothing of a peer stands in the page itself.
    assert HOSTILE_NAME not in client.get("/").text


def test_who_contributed_is_counted_again_when_a_step_came(statuses):
    """The ledger is that of the run that is shown; one that cannot be read changes nothing."""
    run, now = statuses[0]["run"]["id"], [0.0]

    def read_ledger():
        now[0] += 3.0
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    first, then = (exported(run, {"ann": Credit("ann", tokens=n)}, {}) for n in (700, 900))
    outcomes = iter((NetworkError("nobody answers"), first, KeyError("x"), then))
    readings = iter((statuses[0], statuses[0], statuses[1]))
    page = SwarmPage(lambda: next(readings), History(None), 15.0, read_ledger, monotonic=lambda: now[0])
    with TestClient(application(page)) as client:

        def counted():
            page.count()
            answer = client.get("/api/ledger").json()
            assert answer.pop("counted_at_s", 0.0) <= time.time()
            return answer

        page.count()  # Nothing is shown yet.
        page.look()
        page.count()
        assert client.get("/api/ledger").status_code == 404
        # It took three seconds: a tenth of the time goes into it, no more.
        page.count()
        now[0] += 30.0
        assert counted() == first
        # The same rows in the chains are not counted again.
        now[0] += 3600.0
        page.look()
        assert counted() == first
        page.look()
        assert counted() == first  # It could not be read.
        now[0] += 30.0
        assert counted() == then


def test_what_cannot_be_read_is_said_once_however_often_it_is_tried(statuses, caplog):
    def said():
        return [record.message for record in caplog.records]

    gone, other = NetworkError("nobody answers"), NetworkError("no addresses")
    page = page_of(statuses[0], gone, gone, other, statuses[1], gone, ledgers=[gone] * 3)
    page.look()
    for _ in range(3):
        page.count()
        page._count_at_s = 0.0
    assert said() == ["the ledger cannot be read; it is tried again: nobody answers"]
    for _ in range(5):
        page.look()
    assert [line.rpartition(": ")[2] for line in said()[1:]] == ["nobody answers", "no addresses", "nobody answers"]


def test_metrics_of_the_newest_status(client):
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert "dipaco_swarm_round 20.0" in answer.text


def test_before_the_first_reading_there_is_nothing():
    with TestClient(application(page_of())) as client:
        assert client.get("/metrics").status_code == 503
        assert client.get("/api/status").json()["status"] is None
        assert client.get("/api/series").json()["time_s"] == []


def test_visitors_never_make_a_reading(statuses):
    """One that fails is said, and the next one is shown again."""
    outcomes = [statuses[0], NetworkError("nobody answers"), KeyError("x"), statuses[1]]
    page, said = page_of(*outcomes), []
    with TestClient(application(page)) as client:
        assert client.get("/api/status").json()["status"] is None
        for _ in outcomes:
            page.look()
            for _ in range(5):
                found = client.get("/api/status").json()
            said.append((found["error"], found["status"]["round"]))
            # What was seen before is no proof of health now.
            healthy = f"dipaco_swarm_healthy {float(found['error'] is None and found['status']['healthy'])}"
            assert healthy in client.get("/metrics").text
        # What is old can be told from what is new.
        assert f"dipaco_swarm_read_timestamp_seconds {statuses[1]['time_s']}" in client.get("/metrics").text
        assert len(client.get("/api/series").json()["time_s"]) == 2
    assert said == [(None, 4), ("nobody answers", 4), ("reading the swarm failed: KeyError", 4), (None, 5)]


def test_the_page_follows_a_run_into_its_successor(statuses):
    first, then = statuses[0], {**statuses[1], "run": {**statuses[1]["run"], "id": "b" * 64}}
    page = page_of(first, then)
    with TestClient(application(page)) as client:
        for status in (first, then):
            page.look()
            assert client.get("/api/status").json()["status"]["run"] == status["run"]
            assert client.get("/api/series").json()["time_s"] == [status["time_s"]]


def test_a_full_disk_hides_no_status(statuses):
    history = History(None)
    history._rows.execute("DROP TABLE figures")
    page = SwarmPage(lambda: statuses[0], history, 5.0)
    page.look()
    newest = json.loads(page.newest.body)
    assert newest["status"] == statuses[0]
    assert "cannot be kept" in newest["error"]


def test_what_is_repeated_ends_when_it_is_told_to():
    was_done = threading.Event()
    with repeated(was_done.set, 3600.0) as thread:
        assert was_done.wait(60)
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture
def served(monkeypatch):
    """Ask the page that a command serves for its status, and end the command then."""
    found = {}

    def serve(application, listening, names):
        found["port"] = listening.getsockname()[1]
        with TestClient(application) as client:
            wait_until(lambda: client.get("/api/series").json()["time_s"])
            found["status"] = client.get("/api/status").json()["status"]
            found["page"] = client.get("/").text
        listening.close()

    monkeypatch.setattr("dipaco.status.page.serve_until_told", serve)
    return found


def test_a_running_swarm_is_served_and_kept(tmp_path, served, statuses):
    plan = big_records(4, **ABOUT).plan
    file = tmp_path / "new" / "kept.sqlite"
    listening = listen("127.0.0.1", 0, "--serve")
    ledger = exported(plan.run_id, {}, {})
    assert serve_swarm(lambda: statuses[0], lambda history: ledger, plan, listening, file=file) == 0
    assert served["status"] == statuses[0]
    assert History(file).series(plan.run_id)["time_s"] == [statuses[0]["time_s"]]


def test_how_often_a_swarm_is_read():
    periods = [interval_s(plan_of(2, 2, duration_s=d)[0]) for d in (16.0, 60.0, 3600.0)]
    assert periods == [5.0, 15.0, 60.0]


def test_answers_about_a_large_swarm_are_bounded():
    status = status_at(spoiled_records())
    assert (len(status["paths"]), len(status["peers"])) == (256, 500)
    page = page_of(status)
    page.look()
    assert len(page.newest.body) < 500_000
    assert len(page.newest.packed) < 120_000
    assert json.loads(page.newest.body)["status"] == status


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"serve": "8090", "watch": True}, "--serve has its own page"),
        ({"earlier": ("x",)}, "--earlier is for --ledger"),
        ({"ledger": True, "watch": True}, "--ledger reads all chains"),
        ({"serve": "70000"}, "--serve '70000' is no port; for example --serve 8090"),
    ],
)
def test_flags_that_do_not_go_together(words, message):
    with pytest.raises(ConfigurationError, match=message):
        status_command.StatusSettings(**{"initial_peers": (ADDRESS,), **words})


def test_without_the_server_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    settings = status_command.StatusSettings(initial_peers=(ADDRESS,), serve="0")
    with pytest.raises(ConfigurationError, match=r"install it with pip install 'dipaco\[status\]'"):
        settings.open_port()
