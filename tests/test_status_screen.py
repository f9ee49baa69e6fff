"""`dipaco-status --watch` on a terminal: problems in full or counted, tables in what is left."""

from __future__ import annotations

import re
from typing import Any

import pytest
from dipaco.dht.manifest import SignedManifest, load_or_create_operator_key, sign_manifest
from dipaco.dht.manifest import verify_manifest as verify
from dipaco.dht.status.screen import FittedStatus, render
from dipaco.dht.status.summary import status_of
from rich.console import Console
from support.swarm_views import Records, healthy_swarm, peer_name, plan_of

SIZES = ((80, 24), (80, 50), (200, 24), (200, 50))


@pytest.fixture(scope="module")
def sign(tmp_path_factory: pytest.TempPathFactory) -> Any:
    key = load_or_create_operator_key(tmp_path_factory.mktemp("operator") / "operator.pem")
    return lambda plan: verify(sign_manifest(plan, key))


def make_status(sign: Any, records: Records, **notes: Any) -> dict[str, Any]:
    manifest: SignedManifest = sign(records.plan)
    return status_of(records.view(), manifest, records.grid, **notes)


def healthy(peers: int, *sizes: int) -> Records:
    plan, grid = plan_of(*sizes)
    return healthy_swarm(plan, grid, peers=peers, round_index=30)


def spoiled(peers: int, *sizes: int) -> Records:
    """Return a swarm with problems of nearly every kind."""
    records = healthy(peers, *sizes)
    for index, module in enumerate(records.grid.modules()):
        holders = sorted(peer for held, peer in records.holdings if held == module)
        for peer in holders:
            if index % 3 == 0:
                records.hold(peer, module, 3)
            elif index % 3 == 1 and peer in holders[1:]:
                records.holdings.pop((module, peer))
        if index % 3 == 2:
            records.hold(holders[0], module, 29, chain="b")
    for name, record in list(records.peers.items())[::2]:
        records.peers[name] = record.model_copy(update={"reachable": "outgoing"})
    for path in list(records.progress)[::5]:
        records.progress[path] = records.progress[path].model_copy(update={"last_round": 0})
    return records


def shown(drawn: Any, width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, legacy_windows=False, color_system=None)
    with console.capture() as capture:
        console.print(drawn)
    return capture.get().rstrip("\n").split("\n")


def joined(lines: list[str]) -> str:
    return re.sub(r"\s+", " ", " ".join(lines))


def rows_of(lines: list[str], title: str) -> int:
    """Return how many rows of a table stand on the screen."""
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    titles = ("paths", "modules", "peers", "not shown")
    end = next((i for i in range(start + 2, len(lines)) if lines[i].startswith(titles)), len(lines))
    return end - start - 2


@pytest.mark.parametrize(("width", "height"), [*SIZES, (80, 12), (60, 8), (40, 4), (20, 3)])
@pytest.mark.parametrize(
    ("peers", "sizes"),
    [(3, (2, 2)), (9, (2, 2)), (40, (8, 8)), (500, (16, 16)), (3, (16, 16))],
)
def test_the_screen_is_never_overfull_and_no_problem_is_lost(
    sign: Any, peers: int, sizes: tuple[int, ...], width: int, height: int
) -> None:
    status = make_status(sign, spoiled(peers, *sizes))
    lines = shown(FittedStatus(status), width, height)
    assert len(lines) < height
    assert all(len(line) <= width for line in lines)
    text = joined(lines)
    texts = [joined([f"problem: {problem['text']}"]) for problem in status["problems"]]
    in_full = [one for one in texts if one in text]
    # The worst are those in full.
    assert in_full == texts[: len(in_full)]
    hidden = len(texts) - len(in_full)
    if hidden and height >= 8:
        assert f"and {hidden} more problems" in text or f"{hidden} problems:" in text
    if (width, height) in SIZES:
        assert in_full


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("is_healthy", [True, False])
def test_rows_that_are_not_shown_are_counted(
    sign: Any, width: int, height: int, is_healthy: bool
) -> None:
    make = healthy if is_healthy else spoiled
    status = make_status(sign, make(500, 16, 16))
    lines = shown(FittedStatus(status), width, height)
    counts = {"paths": 256, "modules": 32, "peers": 500}
    left_out = " ".join(line for line in lines if line.startswith("not shown: "))
    for title, count in counts.items():
        if f"{count} {title}" in left_out:
            continue
        hidden = re.search(rf"^{title} \((\d+) more not shown\)", "\n".join(lines), re.M)
        assert int(hidden[1]) if hidden else count - rows_of(lines, title) == 0
        assert rows_of(lines, title) + (int(hidden[1]) if hidden else 0) == count
    if is_healthy:
        assert "healthy" in lines
        # No line is wasted while rows are missing.
        assert len(lines) == height - 1


def test_problems_stand_above_the_tables(sign: Any) -> None:
    status = make_status(sign, spoiled(9, 2, 2))
    for drawn in (render(status), FittedStatus(status)):
        lines = [line.strip() for line in shown(drawn, 200, 80)]
        problems = [i for i, line in enumerate(lines) if line.startswith("problem: ")]
        assert len(problems) == len(status["problems"]) > 2
        assert max(problems) < min(i for i, line in enumerate(lines) if line.startswith("paths"))


def test_rows_in_trouble_are_shown_before_others(sign: Any) -> None:
    records = healthy(500, 16, 16)
    for path in (200, 255):
        entry = records.progress[path].model_copy(update={"last_round": 2})
        records.progress[path] = entry
    name = peer_name(400)
    records.peers[name] = records.peers[name].model_copy(update={"reachable": "outgoing"})
    lines = shown(FittedStatus(make_status(sign, records)), 120, 24)
    assert any(line.startswith("200 ") for line in lines)
    assert any(line.startswith("255 ") for line in lines)
    assert any(line.startswith(f"..{name[-8:]}") and "outgoing only" in line for line in lines)


def test_a_small_swarm_fits_whole(sign: Any) -> None:
    status = make_status(sign, healthy(6, 2, 2))
    text = "\n".join(shown(FittedStatus(status), 160, 50))
    assert "not shown" not in text
    assert all(word in text for word in ("healthy", "L1.E1", "held-out loss", "direct"))


@pytest.mark.parametrize(
    ("reachable", "said"),
    [("direct", "direct"), ("relayed", "relayed"), ("outgoing", "outgoing only")],
)
def test_how_peers_are_reached(sign: Any, reachable: str, said: str) -> None:
    records = healthy(6, 2, 2)
    name = peer_name(2)
    records.peers[name] = records.peers[name].model_copy(update={"reachable": reachable})
    row = next(
        line
        for line in shown(render(make_status(sign, records)), 160, 50)
        if f" ..{name[-8:]} " in line and "dipaco/test" in line
    )
    assert said in row


def test_a_swarm_as_read_by_scripts(sign: Any) -> None:
    status = make_status(sign, spoiled(9, 2, 2))
    assert not status["healthy"]
    for problem in status["problems"]:
        assert set(problem) == {"kind", "text", "what", "since_round", "remedy", "subjects"}
    disagreeing = {m["module"] for m in status["modules"] if not m["agree"]}
    assert disagreeing == {
        name for p in status["problems"] if p["kind"] == "forked" for name in p["subjects"]
    }
