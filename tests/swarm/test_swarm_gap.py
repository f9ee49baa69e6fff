"""What only a dead peer had is not waited for (design 4.4, chain; promises 2 and 6).

The only trainer of a path dies when it has told the step of its last row, and before it has given
the row's file to anybody. The step is on the heaviest chain, and nobody can have it. A free peer
takes the path, and steps on the state before it.
"""

import sys
import time

import pytest

from support.runs.tiny_run import make_tiny_run
from support.swarms.swarm import LIMIT_S, Swarm

pytestmark = pytest.mark.slow

# The limit of a round: rounds end when everybody is done, and a dead peer's claim expires in it.
DURATION_S = 20.0
PATH, MODULE = 0, "L1.E0"
DYING_PEER = """
import os, signal, sys
from pathlib import Path
from dipaco.peer.peer_command import main
from dipaco.peer.exchange.exchange import Exchange
from dipaco.peer.exchange.served_run import ServedRun
tell, tell_one, lookup = Exchange.tell, Exchange._tell_one, ServedRun.lookup
before, withheld, to_tell = set(), set(), set()
def telling(exchange, peers, module, rows=(), steps=(), keep=False):
    new = [step for step in steps if module == {module!r} and step.name not in before]
    if new and Path({go!r}).exists() and not withheld:
        withheld.update(row.file for row in new[-1].rows)
        to_tell.update(peers)
    before.update(step.name for step in new)
    tell(exchange, peers, module, rows, steps, keep)
async def telling_one(exchange, peer, request):
    await tell_one(exchange, peer, request)
    if request.module == {module!r} and peer in to_tell:
        to_tell.discard(peer)
        if not to_tell:
            os.kill(os.getpid(), signal.SIGKILL)
Exchange.tell, Exchange._tell_one = telling, telling_one
ServedRun.lookup = lambda run, sha256: None if sha256 in withheld else lookup(run, sha256)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.timeout(900)
def test_a_step_whose_file_died_with_its_owner_stops_no_path(tmp_path):
    run = make_tiny_run(
        tmp_path / "run",
        modules_per_level=(1, 2),
        inner_steps=3,
        duration_s=DURATION_S,
        start_s=time.time(),
        rounds={"gather_s": 4.0, "grace_s": 1.0, "dwell_rounds": 1, "copies": 4, "validation_sequences": 4},
    )
    go = tmp_path / "go"
    program = (sys.executable, "-c", DYING_PEER.format(module=MODULE, go=str(go)))
    with Swarm(tmp_path, run) as swarm:
        entry = swarm.start_bootstrap().address()
        dying = swarm.start_peer(entry, "--path", str(PATH), name="dying", program=program)
        free = swarm.start_peer(entry, name="free")
        # It takes the other path, and keeps a copy of what the first one trains.
        [copied] = swarm.wait([free], "kept", lambda event: event["module"] == MODULE and event["version"])
        go.touch()
        dying.popen.wait(LIMIT_S)
        last = max(event["version"] for event in dying.of("outer_step") if event["module"] == MODULE)
        [begun] = swarm.wait(
            [free], "training", lambda event: event["path"] == PATH and event["time_s"] > copied["time_s"]
        )
        assert last - 1 <= begun["modules"][MODULE] <= last
        [step] = swarm.wait(
            [free], "outer_step", lambda event: event["module"] == MODULE and event["time_s"] > begun["time_s"]
        )
        assert step["version"] == begun["modules"][MODULE] + 1
        between = [e for e in free.of("round") if begun["time_s"] < e["time_s"] < step["time_s"]]
        assert len(between) <= 2, between
        # Nor did it give the path up in between.
        assert "in vain" not in free.output.read_text()
