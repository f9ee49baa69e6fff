"""Exact averagers in real processes with real p2pd on loopback."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dipaco.modules.codecs import CODECS
from dipaco.modules.outer import (
    SECTION_ROWS,
    AveragingRule,
    Contribution,
    canonical_table,
)
from support.host_process import (
    MATCHMAKING_S,
    SILENCE_S,
    HostProcess,
    digest,
    outer_gradient,
)

pytestmark = pytest.mark.swarm

# Thirteen parts: each of four peers reduces three or four.
SIZE = 400_000
# What a reducer of four parts decodes of its own and of two others' contributions, and one more:
# the third has heard of the group then. Whoever has not knows nobody whom it could name.
PARTS_OF_ALL = 13
# In a first attempt all come in the seconds before it closes; in a later one at any time. The limit
# only matters if somebody does not.
LIMIT_S = 60.0
CLOSE_S = MATCHMAKING_S + 2.0
HOST_SCRIPT = Path(__file__).parent / "support" / "averager_host.py"


class Host(HostProcess):
    """One peer's process, once it has said who it is."""

    def __init__(self, number: int, initial_peers: list[str], *flags: str) -> None:
        super().__init__(HOST_SCRIPT, number, initial_peers, [f"--size={SIZE}", *flags])
        hello = self.answer()
        self.addresses, self.peer_id = hello["addresses"], hello["peer_id"]
        self.children = hello["processes"]


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    started: list[Host] = []
    yield started
    for host in started:
        host.close()


def start(hosts: list[Host], count: int, *flags: str) -> None:
    for number in range(count):
        hosts.append(Host(number, hosts[0].addresses if hosts else [], *flags))


def average(hosts: list[Host], round_index: int, **command: Any) -> list[dict[str, Any]]:
    close_s = time.time() + (LIMIT_S if command.get("attempt") else CLOSE_S)
    tell(hosts, hosts, round=round_index, close_s=close_s, **command)
    return [host.answer() for host in hosts]


def tell(hosts: list[Host], candidates: list[Host], **command: Any) -> None:
    """Have hosts average with these candidates, who lead in this order."""
    for host in hosts:
        host.tell(candidates=[candidate.peer_id for candidate in candidates], **command)


def reference(
    hosts: list[Host], round_index: int, codec: str, section_rows: int = SECTION_ROWS
) -> str:
    """The digest that one process computes alone."""
    rows = {host.peer_id: host.number for host in hosts}
    table = canonical_table(
        Contribution(number % 2, peer, 1000 + number) for peer, number in rows.items()
    )
    ordered = [outer_gradient(rows[row.peer], round_index, SIZE) for row in table]
    rule = AveragingRule(CODECS[codec], section_rows=section_rows, part_bytes=2**16)
    return digest(rule.average(ordered, table))


@pytest.mark.parametrize("codec", ["float16", "blockwise8bit"])
def test_all_peers_hold_the_digest_of_the_reference(hosts: list[Host], codec: str) -> None:
    start(hosts, 3, f"--codec={codec}", "--check-pieces=4")
    for round_index, attempt in enumerate([0, 1]):
        answers = average(hosts, round_index, attempt=attempt)
        assert [answer.get("failed") for answer in answers] == [None] * 3
        assert {answer["digest"] for answer in answers} == {reference(hosts, round_index, codec)}
        assert all(answer["unchanged"] for answer in answers)
        assert len({json.dumps(answer["table"]) for answer in answers}) == 1
        # All have come, so nobody waits for the end.
        assert max(answer["seconds"] for answer in answers) < LIMIT_S
    for host in hosts:
        host.close()
        assert host.process.returncode == 0
        assert not [line for line in host.errors if "Traceback" in line], "".join(host.errors)


def test_death_in_the_middle_of_a_reduce_changes_nothing(hosts: list[Host]) -> None:
    start(hosts, 3)
    victim = Host(3, hosts[0].addresses, f"--die-after-parts={PARTS_OF_ALL}")
    close_s = time.time() + LIMIT_S
    tell([*hosts, victim], [victim, *hosts], round=0, attempt=1, close_s=close_s)
    victim.process.wait(LIMIT_S)
    died = time.monotonic()
    answers = [host.answer() for host in hosts]
    assert time.monotonic() - died < SILENCE_S
    for answer in answers:
        assert "failed" in answer, answer
        assert answer["unchanged"]
        assert victim.peer_id in answer["peers_seen"]
    for child in victim.children:
        with pytest.raises(ProcessLookupError):
            _wait_for_end(child)
    retried = average(hosts, 0, attempt=2)
    assert {answer.get("digest") for answer in retried} == {reference(hosts, 0, "float16")}


def test_two_levels_have_the_bits_of_the_reference_and_survive_a_death(hosts: list[Host]) -> None:
    """Sections of two members, so that five peers are in three of them."""
    start(hosts, 4, "--section-rows=2")
    victim = Host(4, hosts[0].addresses, "--section-rows=2", "--die-after-parts=4")
    close_s = time.time() + LIMIT_S
    tell([*hosts, victim], [*hosts, victim], round=0, attempt=1, close_s=close_s)
    victim.process.wait(LIMIT_S)
    for answer in [host.answer() for host in hosts]:
        assert victim.peer_id in answer["failed"], answer
        assert answer["unchanged"]
    hosts.append(Host(4, hosts[0].addresses, "--section-rows=2"))
    for members, attempt in ((hosts[:4], 2), (hosts, 3)):
        answers = average(members, 0, attempt=attempt)
        said = [(answer, host.errors[-5:]) for answer, host in zip(answers, members, strict=True)]
        assert [answer.get("failed") for answer in answers] == [None] * len(members), said
        expected = reference(members, 0, "float16", section_rows=2)
        assert {answer["digest"] for answer in answers} == {expected}
        assert expected != reference(members, 0, "float16")


def _wait_for_end(pid: int) -> None:
    for _ in range(10 * int(LIMIT_S)):
        os.kill(pid, 0)
        time.sleep(0.1)


def test_bad_rows_keep_a_peer_out_and_say_why(hosts: list[Host]) -> None:
    start(hosts, 2)
    bad = Host(2, hosts[0].addresses)
    hosts.append(bad)
    good = hosts[:2]
    close_s = time.time() + CLOSE_S
    tell(good, hosts, round=0, close_s=close_s)
    # It thinks that a peer can have trained more than the others do.
    tell([bad], hosts, round=0, close_s=close_s, tokens=20_000, greatest_tokens=30_000)
    answers = [host.answer() for host in good]
    assert {answer.get("digest") for answer in answers} == {reference(good, 0, "float16")}
    assert "failed" in bad.answer()
    lines = [line for host in good for line in host.errors if "not admitted" in line]
    assert lines
    assert all(bad.peer_id in line and "20000 tokens" in line for line in lines)


def test_alone_and_other_rounds_do_not_meet(hosts: list[Host]) -> None:
    start(hosts, 2)
    close_s = time.time() + 3.0
    tell(hosts[:1], hosts, round=1, close_s=close_s)
    tell(hosts[1:], hosts, round=2, close_s=close_s)
    for host in hosts:
        answer = host.answer()
        assert "no other peer" in answer["failed"]
        assert answer["peers_seen"] == []
        assert answer["seconds"] < LIMIT_S


def test_shutdown_ends_a_waiting_call(hosts: list[Host]) -> None:
    start(hosts, 1)
    tell(hosts, hosts, round=0, close_s=time.time() + 2 * LIMIT_S, shutdown_after_s=1.0)
    answer = hosts[0].answer()
    assert "stopped" in answer["failed"] or "given up" in answer["failed"]
    assert answer["seconds"] < LIMIT_S
    tell(hosts, hosts, round=0, close_s=time.time() + LIMIT_S)
    assert "stopped" in hosts[0].answer()["failed"]
