"""The page of a swarm and the JSON under it: what it answers, what it refuses, what it costs."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient
from support.big_swarm import HOSTILE_NAME, big_records, fork, spoiled_records, status_at
from support.swarm_views import peer_name, plan_of

from dipaco.base.errors import ConfigurationError, NetworkError
from dipaco.base.http_server import listen
from dipaco.protocol.ledger import Credit, exported
from dipaco.status import cli
from dipaco.status.history import History
from dipaco.status.service import PAGE, Board, Credits, StatusService
from dipaco.status.serving import Sampler, interval_s, serve_swarm

ADDRESS = "/ip4/192.0.2.1/tcp/1/p2p/12D3KooWLGUApiCpST4ZyZPakytsXQ19eY7ZRGCyyJWXKk4tqiZw"
ABOUT: dict[str, Any] = {"peers": 12, "sizes": (2, 2)}


@pytest.fixture(scope="module")
def statuses() -> list[dict[str, Any]]:
    """A small swarm in three rounds, the last of which is not well."""
    found = [status_at(big_records(r, **ABOUT)) for r in (4, 5)]
    records = big_records(20, **ABOUT)
    fork(records, "L0.E0")
    return [*found, status_at(records)]


@pytest.fixture(scope="module")
def history(statuses: list[dict[str, Any]]) -> Iterator[History]:
    history = History(None, statuses[0]["run"]["id"])
    for status in statuses:
        history.write(status)
    yield history
    history.close()


@pytest.fixture(scope="module")
def client(history: History, statuses: list[dict[str, Any]]) -> Iterator[TestClient]:
    board = Board(15.0)
    board.put(statuses[-1])
    with TestClient(StatusService(history, board, Credits()).application()) as client:
        yield client


def test_the_newest_status_and_any_moment(
    client: TestClient, statuses: list[dict[str, Any]]
) -> None:
    newest = client.get("/api/status")
    assert newest.json() == {
        "live": True,
        "interval_s": 15.0,
        "error": None,
        "status": statuses[-1],
    }
    between = client.get("/api/status", params={"at": statuses[1]["time_s"] + 1}).json()
    assert (between["live"], between["status"]) == (False, statuses[1])
    again = client.get("/api/status", headers={"if-none-match": newest.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_figures_over_time(client: TestClient, statuses: list[dict[str, Any]]) -> None:
    found = client.get("/api/series").json()
    assert found["span"]["count"] == 3
    series = found["series"]
    assert series["round"] == [4, 5, 20]
    assert series["peers"] == [12, 12, 12]
    assert "forked" in series["kinds"][2].split()
    few = client.get("/api/series", params={"points": 1, "until": statuses[1]["time_s"]}).json()
    assert few["series"]["round"] == [5]


def test_one_peer_path_and_module(client: TestClient, statuses: list[dict[str, Any]]) -> None:
    peer = client.get(f"/api/peer/{peer_name(1)}").json()
    assert peer["now"] == statuses[-1]["peers"][1]
    assert peer["history"]["state"] == ["training"] * 3
    path = client.get("/api/path/2").json()
    assert path["history"]["last_round"] == [s["paths"][2]["last_round"] for s in statuses]
    module = client.get("/api/module/L0.E0", params={"at": statuses[0]["time_s"]}).json()
    assert module["now"]["agree"] is True
    assert len(module["history"]["version"]) == 1
    forked = client.get("/api/module/L0.E0").json()
    assert forked["now"]["agree"] is False
    assert forked["history"]["weight"][-1] == forked["now"]["weight"] > 0


@pytest.mark.parametrize(
    ("address", "code", "message"),
    [
        ("/nothing", 404, "there is nothing at /nothing; look at /api/status"),
        ("/api/path/99", 404, "no path 99 is known here"),
        (f"/api/peer/{'Q' * 50}", 404, f"no peer {'Q' * 50} is known here"),
        ("/api/peer/0OIl", 400, "'0OIl' is not a peer's id"),
        ("/api/module/L0", 400, "'L0' is not a module's name"),
        ("/api/path/-1", 400, "'-1' is not a path's number"),
        ("/api/status?at=noon", 400, "at='noon': give a Unix time or a count"),
        ("/api/status?at=nan", 400, "at='nan': give a Unix time or a count"),
        ("/api/series?points=100000", 400, "points=100000: give 1 to 1000"),
    ],
)
def test_what_cannot_be_is_one_line_of_json(
    client: TestClient, address: str, code: int, message: str
) -> None:
    answer = client.get(address)
    assert (answer.status_code, answer.json()) == (code, {"error": message})
    assert answer.text.count("\n") == 1


def test_nothing_can_be_sent(client: TestClient) -> None:
    answer = client.post("/api/status", content=b"x")
    assert (answer.status_code, answer.json()["error"]) == (
        405,
        "POST is not for /api/status; GET is",
    )


def test_the_page_is_whole_and_lets_nothing_in(client: TestClient) -> None:
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


def test_a_hostile_name_stays_a_string(client: TestClient) -> None:
    answer = client.get("/api/status")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert HOSTILE_NAME in [peer["name"] for peer in answer.json()["status"]["peers"]]
    # Nothing of a peer stands in the page itself.
    assert HOSTILE_NAME not in client.get("/").text


def test_what_a_ledger_says_is_shown(history: History, statuses: list[dict[str, Any]]) -> None:
    credit = Credit(peer_name(1), tokens=700, paths={1: 700}, rows=3)
    credits, board = Credits(), Board(15.0)
    board.put(statuses[-1])
    with TestClient(StatusService(history, board, credits).application()) as client:
        assert client.get("/api/ledger").status_code == 404
        assert client.get("/api/series").json()["ledger"] is False
        ledger = exported("ab" * 8, {credit.peer: credit}, None)
        credits.put(ledger)
        assert client.get("/api/ledger").json() == ledger
        assert client.get(f"/api/peer/{peer_name(1)}").json()["credit"] == ledger["peers"][0]
        assert client.get(f"/api/peer/{peer_name(2)}").json()["credit"] is None


def test_metrics_of_the_newest_status(client: TestClient, history: History) -> None:
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert "dipaco_swarm_round 20.0" in answer.text


def test_before_the_first_reading_there_is_nothing() -> None:
    service = StatusService(History(None, "ab" * 8), Board(15.0), Credits())
    with TestClient(service.application()) as client:
        assert client.get("/metrics").status_code == 503
        assert client.get("/api/status").json()["status"] is None
        assert client.get("/api/status", params={"at": 5}).status_code == 404
        assert client.get("/api/series").json()["series"]["round"] == []


def test_only_the_sampler_reads_the_swarm(statuses: list[dict[str, Any]]) -> None:
    """Pages never make a reading; one that fails is said, and the next one is shown again."""
    outcomes: list[dict[str, Any] | Exception] = [
        statuses[0],
        NetworkError("nobody answers"),
        KeyError("x"),
        statuses[1],
    ]
    reads = 0

    def read() -> dict[str, Any]:
        nonlocal reads
        found = outcomes[reads]
        reads += 1
        if isinstance(found, Exception):
            raise found
        return found

    history, board = History(None, statuses[0]["run"]["id"]), Board(5.0)
    sampler = Sampler(read, history, board, 5.0)
    with TestClient(StatusService(history, board, Credits()).application()) as client:
        assert client.get("/api/status").json()["status"] is None
        assert reads == 0
        said = []
        for _ in outcomes:
            sampler.sample()
            for _ in range(5):
                found = client.get("/api/status").json()
            client.get(f"/api/peer/{peer_name(1)}")
            said.append((found["error"], found["status"]["round"]))
    assert said == [
        (None, 4),
        ("nobody answers", 4),
        ("reading the swarm failed: KeyError", 4),
        (None, 5),
    ]
    assert reads == 4
    span = history.span()
    assert span is not None
    assert span.count == 2


def test_the_page_follows_a_run_into_its_successor(
    tmp_path: Path, statuses: list[dict[str, Any]]
) -> None:
    first, then = statuses[0], {**statuses[1], "run": {**statuses[1]["run"], "id": "b" * 64}}
    file = tmp_path / "first.sqlite"
    history, board = History(file, first["run"]["id"]), Board(5.0)
    reads = iter((first, then))
    sampler = Sampler(lambda: next(reads), history, board, 5.0)
    with TestClient(StatusService(history, board, Credits()).application()) as client:
        for status in (first, then):
            sampler.sample()
            assert client.get("/api/status").json()["status"]["run"] == status["run"]
            assert client.get("/api/series").json()["span"]["count"] == 1
    history.close()
    # Each has a file of its own.
    assert History(file, first["run"]["id"]).at(math.inf) == first
    assert (tmp_path / f"{'b' * 64}.history.sqlite").exists()


def test_the_sampler_ends_when_it_is_told_to(statuses: list[dict[str, Any]]) -> None:
    history, board = History(None, statuses[0]["run"]["id"]), Board(5.0)
    was_read = threading.Event()

    def read() -> dict[str, Any]:
        was_read.set()
        return statuses[0]

    with Sampler(read, history, board, 3600.0) as sampler:
        assert was_read.wait(60)
    sampler._thread.join(60)
    assert not sampler._thread.is_alive()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Ask the page that a command serves for its status, and end the command then."""
    found: dict[str, Any] = {}

    def serve(application: Starlette, listening: socket.socket, names: Any) -> None:
        found["port"] = listening.getsockname()[1]
        with TestClient(application) as client:
            deadline = time.monotonic() + 60
            while not client.get("/api/series").json()["series"]["round"]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            found["status"] = client.get("/api/status").json()["status"]
            found["page"] = client.get("/").text
        listening.close()

    monkeypatch.setattr("dipaco.status.serving.serve_until_told", serve)
    return found


def test_a_running_swarm_is_served_and_kept(
    tmp_path: Path, served: dict[str, Any], statuses: list[dict[str, Any]]
) -> None:
    plan = big_records(4, **ABOUT).plan
    file = tmp_path / "new" / "kept.sqlite"
    listening = listen("127.0.0.1", 0, "--serve")
    assert serve_swarm(lambda: statuses[0], plan, listening, file, None) == 0
    assert served["status"] == statuses[0]
    assert History(file, plan.run_id).at(statuses[0]["time_s"]) == statuses[0]


def test_how_often_a_swarm_is_read() -> None:
    periods = [interval_s(plan_of(2, 2, duration_s=d)[0]) for d in (16.0, 60.0, 3600.0)]
    assert periods == [5.0, 15.0, 60.0]


def test_answers_about_a_large_swarm_are_bounded() -> None:
    status = status_at(spoiled_records())
    assert (len(status["paths"]), len(status["peers"])) == (256, 500)
    board = Board(60.0)
    board.put(status)
    assert len(board.answer.body) < 500_000
    assert len(board.answer.packed) < 120_000
    assert json.loads(board.answer.body)["status"] == status


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"serve": 8090, "watch": True}, "--serve goes without --watch"),
        ({"history": "x.sqlite"}, "--history is for --serve"),
        ({"ledger": "x.json"}, "--ledger is for --serve"),
        ({"serve": 70000}, "--serve 70000 must be 0 to 65535"),
    ],
)
def test_flags_that_do_not_go_together(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        cli.StatusSettings(**{"initial_peers": (ADDRESS,), **words})


def test_without_the_server_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    settings = cli.StatusSettings(initial_peers=(ADDRESS,), serve=0)
    with pytest.raises(ConfigurationError, match=r"install it with pip install 'dipaco\[serve\]'"):
        settings.open_port()
