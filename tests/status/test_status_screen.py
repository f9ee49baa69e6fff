"""`dipaco-status` on a terminal: with --watch problems stay on top and tables scroll."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from rich.console import Console
from support.swarm_views import Records, healthy_swarm, peer_name, plan_of
from textual.widgets import DataTable

from dipaco.base.errors import NetworkError
from dipaco.protocol.admission import Gate
from dipaco.protocol.manifest import SignedManifest, load_or_create_operator_key, sign_manifest
from dipaco.protocol.manifest import verify_manifest as verify
from dipaco.status.screen import render
from dipaco.status.summary import status_of
from dipaco.status.watch import StatusApp


@pytest.fixture(scope="module")
def sign(tmp_path_factory: pytest.TempPathFactory) -> Any:
    key = load_or_create_operator_key(tmp_path_factory.mktemp("operator") / "operator.pem")
    return lambda plan: verify(sign_manifest(plan, key))


def make_status(sign: Any, records: Records) -> dict[str, Any]:
    manifest: SignedManifest = sign(records.plan)
    return status_of(records.view(), manifest, records.grid, gate=Gate.of(manifest))


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


# -- --watch


async def drawn(app: StatusApp, pilot: Any) -> list[str]:
    """Return the lines of the terminal, as they are now."""
    await pilot.pause()
    strips = app.screen._compositor.render_strips()
    return ["".join(segment.text for segment in strip) for strip in strips]


async def has_looked(app: StatusApp) -> None:
    """Wait until what was read is shown, or that nothing could be."""
    assert app._reader is not None
    await asyncio.to_thread(app._reader.join, 60)


def watched(
    status: dict[str, Any],
    size: tuple[int, int],
    check: Callable[[StatusApp, Any], Awaitable[None]],
    read: Callable[[], dict[str, Any]] | None = None,
) -> None:
    """Run the app without a terminal, and `check` in it."""

    async def run() -> None:
        # It looks again when it is told to, never by the clock.
        app = StatusApp(status, read or (lambda: status), period_s=1e6)
        async with app.run_test(size=size) as pilot:
            await check(app, pilot)

    asyncio.run(run())


@pytest.mark.parametrize(("width", "height"), [(80, 40), (80, 24)])
def test_all_problems_of_64_paths_stand_on_top(sign: Any, width: int, height: int) -> None:
    status = make_status(sign, spoiled(64, 8, 8))
    assert len({p["kind"] for p in status["problems"]}) >= 4

    async def check(app: StatusApp, pilot: Any) -> None:
        for keys in ((), ("3", "end")):
            await pilot.press(*keys)
            lines = await drawn(app, pilot)
            text = joined([line.strip() for line in lines])
            assert len(lines) == height
            for problem in status["problems"]:
                assert joined([f"problem: {problem['text']}"]) in text
            assert f"{len(status['problems'])} problems" in text
            assert "paths (64)" in text

    watched(status, (width, height), check)


def test_problems_that_do_not_fit_scroll_and_are_counted(sign: Any) -> None:
    status = make_status(sign, spoiled(64, 8, 8))
    count = len(status["problems"])

    async def check(app: StatusApp, pilot: Any) -> None:
        lines = await drawn(app, pilot)
        text = joined([line.strip() for line in lines])
        assert f"{count} problems" in text
        assert joined([f"problem: {status['problems'][0]['text']}"]) in text
        pane = app.query_one("#problems")
        assert pane.max_scroll_y > 0
        pane.focus()
        await pilot.press("end")
        await pilot.pause()
        await pilot.wait_for_animation()
        assert pane.scroll_y == pane.max_scroll_y
        last = joined([line.strip() for line in await drawn(app, pilot)])
        assert status["problems"][-1]["text"][-20:] in last
        # The table keeps a row.
        assert app.query_one("#paths").size.height >= 2

    watched(status, (80, 16), check)


def test_tables_scroll_and_stay_where_they_were_when_read_again(sign: Any) -> None:
    before, after = make_status(sign, healthy(500, 16, 16)), make_status(sign, spoiled(500, 16, 16))

    async def check(app: StatusApp, pilot: Any) -> None:
        await pilot.press("3")
        table = app.query_one("#peers", DataTable)
        assert (table.row_count, table.has_focus) == (500, True)
        await pilot.press(*["pagedown"] * 3)
        row = table.cursor_row
        assert row > 30
        app.action_look()
        await has_looked(app)
        assert table.cursor_row == row
        assert "problem" in joined(await drawn(app, pilot))
        # What is in trouble comes first.
        modules = app.query_one("#modules", DataTable)
        assert modules.get_row_at(0)[0].style == "red"
        await pilot.press("q")

    watched(before, (100, 30), check, lambda: after)


def test_a_swarm_that_cannot_be_read_is_said_and_what_was_stays(sign: Any) -> None:
    def read() -> dict[str, Any]:
        raise NetworkError("nobody answers")

    async def check(app: StatusApp, pilot: Any) -> None:
        app.action_look()
        await has_looked(app)
        text = joined(await drawn(app, pilot))
        assert "cannot read the swarm, tries again: nobody answers" in text
        assert app.query_one("#paths", DataTable).row_count == 4

    watched(make_status(sign, healthy(6, 2, 2)), (100, 30), check, read)


def test_it_ends_while_the_swarm_is_read(sign: Any) -> None:
    reads, answer = threading.Event(), threading.Event()
    status = make_status(sign, healthy(6, 2, 2))

    def read() -> dict[str, Any]:
        reads.set()
        assert answer.wait(60)
        return status

    found: list[StatusApp] = []

    async def check(app: StatusApp, pilot: Any) -> None:
        found.append(app)
        await pilot.press("r")
        assert await asyncio.to_thread(reads.wait, 60)
        await pilot.press("q")

    watched(status, (80, 24), check, read)
    # It has ended, and the swarm has not been read yet.
    reader = found[0]._reader
    assert reader is not None
    assert reader.is_alive()
    answer.set()
    reader.join(60)
    assert not reader.is_alive()


# -- without --watch


def test_problems_stand_above_the_tables(sign: Any) -> None:
    status = make_status(sign, spoiled(9, 2, 2))
    lines = [line.strip() for line in shown(render(status), 200, 80)]
    problems = [i for i, line in enumerate(lines) if line.startswith("problem: ")]
    assert len(problems) == len(status["problems"]) > 2
    assert max(problems) < min(i for i, line in enumerate(lines) if line.startswith("paths"))


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
