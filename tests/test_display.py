"""What a volunteer sees: the panel of a peer, on 80 columns."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from dipaco.dht.view import SwarmView
from dipaco.modules.state import StateReference
from dipaco.peer.member.rounds import RoundSchedule
from dipaco.peer.publisher import Activity, PeerStatus
from dipaco.peer.reporting.display import LivePanel
from rich.console import Console
from support.certificates import certificate, digest_of, grid, peer
from support.make_plan import make_plan


def lines_of(status: PeerStatus, *certificates: Any, width: int = 80) -> list[str]:
    """Return the panel's lines in the middle of round 5."""
    held = StateReference("L0.E0", 12, digest_of("s"), 100, 5, 1)
    plan = make_plan(name="a-run-with-a-rather-long-name")
    node = SimpleNamespace(
        plan=plan,
        run_id="0123456789abcdef",
        me=peer(0),
        grid=grid(),
        clock=SimpleNamespace(now=lambda: plan.start_s + 5.7 * plan.rounds.duration_s),
        schedule=RoundSchedule(plan.rounds, grid(), plan.start_s),
        held=SimpleNamespace(get=lambda module: held),
        certifier=SimpleNamespace(all=lambda: certificates),
    )
    publisher = SimpleNamespace(view=SwarmView(0.0))
    console = Console(width=width, height=40, legacy_windows=False, color_system=None)
    with console.capture() as capture:
        console.print(LivePanel(node, publisher, status))  # type: ignore[arg-type]
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
        last_commit={"L0.E0": (4, 3), "L1.E1": (3, 1)},
    )
    signed = [certificate(1, (0, 1)), certificate(2, (0, 1, 2)), certificate(3, (0,))]
    lines = lines_of(status, *signed)
    assert all(len(line) <= 80 for line in lines)
    text = text_of(lines)
    for part in (
        "1 the least served of 256 paths, last trained in round 3",
        "trains, on NVIDIA GeForce RTX 4090 Laptop GPU",
        "for the shard of path 1, at most 300 s more",
        "20 tokens that others signed too, 10 alone, in rounds 1 to 3",
        "last: L0.E0 in round 4 with 2 others",
        "up 123 MB, down 0 bytes, nobody can call it",
        "round 4, 3 peers",
        "loss -, held-out -",
    ):
        assert part in text, text
    assert "…" not in text


@pytest.mark.parametrize(
    ("members", "said"), [(1, "with nobody else"), (2, "with 1 other"), (9, "with 8 others")]
)
def test_with_how_many_the_last_commit_was(members: int, said: str) -> None:
    status = PeerStatus(Activity("training", 0), last_commit={"P0": (7, members)})
    text = text_of(lines_of(status))
    assert f"nothing is committed yet; last: P0 in round 7 {said}" in text


def test_a_peer_without_a_path_says_what_it_does() -> None:
    text = text_of(lines_of(PeerStatus(Activity("paused", None, reason="by dipaco-peer pause"))))
    assert "- by dipaco-peer pause" in text
    assert "paused, on cpu" in text
    assert "module" not in text
