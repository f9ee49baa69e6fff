"""What a volunteer sees: the panel of a peer, on 80 columns."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from dipaco.dht.chain import Head
from dipaco.dht.view import SwarmView
from dipaco.modules.grid import Grid
from dipaco.peer.member.rounds import RoundSchedule
from dipaco.peer.publisher import Activity, PeerStatus
from dipaco.peer.reporting.display import LivePanel
from rich.console import Console
from support.make_plan import make_plan


def lines_of(status: PeerStatus, *steps: dict[str, Any], width: int = 80) -> list[str]:
    """Return the panel's lines in the middle of round 5, after some steps."""
    plan = make_plan(name="a-run-with-a-rather-long-name")
    grid = Grid(plan.model, plan.grid)
    held = Head("L0.E0", "5" * 64, 12, 30, 5, "d" * 64, 1)
    node = SimpleNamespace(
        plan=plan,
        run_id="0123456789abcdef",
        grid=grid,
        clock=SimpleNamespace(now=lambda: plan.start_s + 5.7 * plan.rounds.duration_s),
        schedule=RoundSchedule(plan.rounds, grid, plan.start_s),
        held=SimpleNamespace(get=lambda module: held),
    )
    publisher = SimpleNamespace(view=SwarmView(0.0))
    panel = LivePanel(node, publisher, status)  # type: ignore[arg-type]
    for step in steps:
        panel.on_event("commit", step)
    console = Console(width=width, height=40, legacy_windows=False, color_system=None)
    with console.capture() as capture:
        console.print(panel)
    return capture.get().rstrip("\n").split("\n")


def text_of(lines: list[str]) -> str:
    return re.sub(r"\s+", " ", " ".join(line.strip("│ ") for line in lines))


def test_the_panel_says_what_a_peer_does_waits_for_and_was_worth() -> None:
    claim = Activity("training", 1, reason="the least served of 256 paths, last trained in round 3")
    status = PeerStatus(
        claim,
        device="NVIDIA GeForce RTX 4090 Laptop GPU",
        tokens_per_s=12345.6,
        waiting_for="the shard of path 1, at most 300 s more",
        reachable="outgoing",
        bytes_up=123_456_789,
    )
    lines = lines_of(
        status,
        {"module": "L1.E1", "round": 3, "rows": 1, "own_tokens": 10},
        {"module": "L0.E0", "round": 3, "rows": 2, "own_tokens": 10},
        {"module": "L0.E0", "round": 4, "rows": 3, "own_tokens": 20},
    )
    assert all(len(line) <= 80 for line in lines)
    text = text_of(lines)
    for part in (
        "1 the least served of 256 paths, last trained in round 3",
        "trains, on NVIDIA GeForce RTX 4090 Laptop GPU",
        "for the shard of path 1, at most 300 s more",
        "30 tokens in steps; last: L0.E0 in round 4, 3 peers",
        "up 123 MB, down 0 bytes, nobody can call it",
        "round 4, 3 peers",
        "loss -, held-out -",
    ):
        assert part in text, text
    assert "…" not in text


def test_a_peer_without_a_path_says_what_it_does() -> None:
    text = text_of(lines_of(PeerStatus(Activity("paused", None, reason="by dipaco-peer pause"))))
    assert "- by dipaco-peer pause" in text
    assert "paused, on cpu" in text
    assert "module" not in text
