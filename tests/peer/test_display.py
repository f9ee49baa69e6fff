"""What a volunteer sees: the panel of a peer, on 80 columns."""

import io
import itertools
import logging
import re
import threading
from pathlib import Path

from rich.console import Console

from dipaco.base import running
from dipaco.base.errors import NetworkError, StorageError
from dipaco.peer.owner.uplink import Uplink
from dipaco.peer.presence.own_status import Activity, PeerStatus
from dipaco.peer.reporting.peer_display import Display, Given, LivePanel
from dipaco.protocol.about import AboutRun
from dipaco.protocol.view import SwarmView
from support.runs.make_plan import make_plan
from support.swarms.fake_swarm import FakeRun, FakeSwarm, FakeTime
from support.swarms.swarm_views import record


def lines_of(status, *events, others=0, width=80, sent_bytes=0, in_model=0, about=AboutRun()):
    """Return the panel's lines in the middle of round 5, after some events."""
    plan = make_plan(name="a-run-with-a-rather-long-name", about=about)
    uplink = Uplink()
    uplink.sent_bytes = sent_bytes
    time = FakeTime(plan.start_s + 5.7 * plan.rounds.duration_s)
    run = FakeRun(plan, time.clock, me="me")
    peers = {name: record(name) for name in ("me", *"abcdef"[:others])}
    given = Given()
    given.count = lambda: in_model
    for kind, values in events:
        given.on_event(kind, values)
    swarm = FakeSwarm(SwarmView(0.0, peers=peers))
    panel = LivePanel(run, swarm, status, given, uplink, Path("/data/dipaco"))
    console = Console(width=width, height=40, legacy_windows=False, color_system=None)
    with console.capture() as capture:
        console.print(panel)
    return capture.get().rstrip("\n").split("\n")


def text_of(lines):
    return re.sub(r"\s+", " ", " ".join(line.strip("│ ") for line in lines))


def step(tokens):
    said = {"path": 1, "path_step": 7, "tokens_per_s": 9.0}
    return "inner", {"tokens": tokens, "loss": 5.4321, **said}


def test_the_panel_says_what_a_peer_does_and_what_its_owner_wants_to_know():
    claim = Activity("training", 1, reason="nobody trains it")
    status = PeerStatus(claim, device="NVIDIA GeForce RTX 4090 Laptop GPU", tokens_per_s=12345.6, reachable="outgoing")
    lines = lines_of(status, step(1500), step(1500), others=3, in_model=2000, sent_bytes=123_456_789)
    # Two columns are left for what a terminal shows of Ctrl+C.
    assert all(len(line) <= 78 for line in lines)
    text = text_of(lines)
    for part in (
        "trains path 1 (the run has 4), 12,346 tokens/s, on NVIDIA GeForce RTX 4090 Laptop GPU",
        "3 others are here; they cannot call this machine: it calls them",
        "3,000 tokens since",
        "; 2,000 of yours are in the model",
        "loss 5.432 round",
        "the peers combine their work in",
        "sent 123 MB, received 0 bytes",
        "to stop: Ctrl+C, nothing is lost; to pause: dipaco-peer pause --cache-dir /data/dipaco",
    ):
        assert part in text, text
    for word in ("boundary", "digest", "L0.E0", "nobody trains it", "…"):
        assert word not in text


def test_the_panel_says_what_the_run_is_for():
    for about in (AboutRun(), AboutRun(description="Laws of nine countries.", end="2026-12-31")):
        text = text_of(lines_of(PeerStatus(Activity("joining", 2)), about=about))
        assert about.text in text
        assert ("planned until" in text) == bool(about.end)


def test_the_loss_on_held_out_texts_is_told_once_it_is_known():
    status = PeerStatus(Activity("training", 1), validation_loss=5.25)
    assert "5.432; 5.250 on texts that it does not train on" in text_of(lines_of(status, step(9)))
    assert "loss - round" in text_of(lines_of(PeerStatus(Activity("joining", 1))))


def test_what_is_in_the_model_is_counted_from_the_chains_now_and_then():
    now_s = 0.0
    found = iter((1000, StorageError("the disk is away"), 3000))

    def count():
        nonlocal now_s
        now_s += 1.0
        tokens = next(found)
        if isinstance(tokens, Exception):
            raise tokens
        return tokens

    given = Given(lambda: now_s)
    given.count = count
    for waited_s, tokens in ((0, 1000), (50, 1000), (60, 1000), (50, 1000), (60, 3000)):
        now_s += waited_s
        assert str(given) == f"0 tokens since {given.came}; {tokens:,} of yours are in the model"


def test_the_panel_of_a_peer_that_waits_or_rests():
    status = PeerStatus(Activity("joining", 2), waiting_for="the shard of path 2", reachable="direct")
    text = text_of(lines_of(status, others=1))
    for part in ("joining path 2", "for the shard of path 2", "1 other is here; they can call"):
        assert part in text, text
    reason = "by dipaco-peer pause, until dipaco-peer resume"
    text = text_of(lines_of(PeerStatus(Activity("paused", None, reason=reason))))
    for part in (f"paused: {reason}", "nobody else is here", "to continue: dipaco-peer resume"):
        assert part in text, text
    # What that command cannot end it is not offered for.
    text = text_of(lines_of(PeerStatus(Activity("paused", None, reason="outside of --hours 22-7, until 22:00"))))
    assert "dipaco-peer" not in text
    assert "to stop: Ctrl+C" in text


def test_lines_are_for_people():
    output = io.StringIO()
    display = Display(Console(file=output, width=200))
    taken = {"module": "L0.E0", "round": 3, "version": 4, "rows": 1, "expected": 1}
    display.on_event("outer_step", {**taken, "own_tokens": 9, "digest": "d" * 64})
    display.on_event("outer_step", {**taken, "module": "L0.E1", "rows": 2, "own_tokens": 9})
    display.on_event(*step(123_456))
    display.on_event("leaving", {})
    text = output.getvalue()
    assert "L0.E0 is now version 4, with the work of 1 peer\n" in text
    assert "L0.E1 is now version 4, with the work of 2 peers\n" in text
    assert "left: you trained 123,456 tokens; the same command continues" in text


class HandTimer(threading.Timer):
    """A timer that a test fires."""

    made = []

    def start(self):
        self.made.append(self)

    def fire(self):
        if not self.finished.is_set():
            self.function()


def test_what_an_owner_does_not_read_is_left_out():
    taken = {"round": 3, "version": 4, "rows": 1, "expected": 1, "own_tokens": 9}
    move = {"from_path": 1, "to_path": 2, "reason": "it waited longest"}
    said = []
    for debug in (False, True):
        output = io.StringIO()
        display = Display(Console(file=output, width=200), debug=debug, timer=HandTimer)
        display.on_event("outer_step", {**taken, "module": "P1"})
        display.on_event("move", move)
        display.on_event("waiting", {"what": "the state of L0.E0"})
        display.on_event("claimed", {"path": 2, "reason": move["reason"]})
        display.on_event("kept", {"module": "L1.E0", "version": 2})
        display.on_event(*step(1))
        said.append([line.split()[1] for line in output.getvalue().splitlines()])
    assert said == [["moving", "path"], ["round", "moving", "waiting", "claimed", "keeps", "path"]]


def test_a_wait_is_told_when_it_is_long():
    output = io.StringIO()
    display = Display(Console(file=output, width=200), timer=HandTimer)

    def told(*events):
        """Return what is said once the time is over, after some events."""
        HandTimer.made.clear()
        before = len(output.getvalue())
        for event in events:
            display.on_event(*event)
        for timer in HandTimer.made:
            timer.fire()
        lines = output.getvalue()[before:].splitlines()
        return [line.split(maxsplit=1)[1] for line in lines if "waiting" in line]

    def states(have):
        return "waiting", {"what": f"states: have {have} of 3"}

    assert told(states(0), states(1)) == ["waiting for states: have 1 of 3"]
    assert told(states(2)) == ["waiting for states: have 2 of 3"]
    assert told(states(0), step(1)) == []
    assert told(states(0), ("leaving", {})) == []


HOSTILE = "nice\x1b]0;owned\x07\x1b[2J\u202egnp.exe\r\nsecond"
PLAIN = "nice?]0;owned??[2J?gnp.exe  second"


def test_no_text_of_others_commands_a_terminal(capsys):
    """One place makes it printable, for the console, the log and the line of an error."""
    console = Console(file=io.StringIO(), force_terminal=True, width=200, highlight=False)
    Display(console).say(f"  indented {HOSTILE}")
    assert console.file.getvalue() == f"  indented {PLAIN}\n"

    def fail():
        raise NetworkError(HOSTILE)

    assert running.run_command(fail, debug=False) == NetworkError.exit_code
    logger = logging.getLogger("dipaco")
    before = logger.handlers, logger.level
    try:
        running.configure_logging(debug=False)
        logger.warning("a peer says %s", HOSTILE)
    finally:
        logger.handlers, logger.level = before[0], before[1]
    said = capsys.readouterr().err
    assert f"error: {PLAIN.replace('  ', ' ')}\n" in said
    assert f"a peer says {PLAIN}\n" in said


def test_lines_that_belong_together_are_printed_at_once():
    """Another thread prints meanwhile: it comes before both or behind both."""
    console = Console(file=io.StringIO(), width=80)
    display, is_over = Display(console), threading.Event()

    def print_others():
        while not is_over.is_set():
            display.say("other")

    others = threading.Thread(target=print_others)
    others.start()
    for _ in range(300):
        display.say("paste this:", "dipaco-peer ADDR")
    is_over.set()
    others.join()
    lines = console.file.getvalue().splitlines()
    assert [b for a, b in itertools.pairwise(lines) if a == "paste this:"] == ["dipaco-peer ADDR"] * 300
