"""docs/volunteers.md shows what a peer prints, and a peer prints it."""

import re
import time
from pathlib import Path

from support.runs.tiny_run import make_tiny_run
from support.swarms.swarm import LIMIT_S, Swarm

PAGE = Path(__file__).resolve().parents[2] / "docs" / "volunteers.md"


def expected_lines():
    """Return the lines of the page: figures are any, and so are words in capitals."""
    text = PAGE.read_text(encoding="utf-8")
    block = text.partition("<!-- lines of a peer -->")[2].partition("<!-- end -->")[0]
    found = []
    for line in filter(None, map(str.strip, block.splitlines())):
        pattern = re.sub(r"\d[\d.,:]*", "FIGURE", re.sub(r"\bL\d\.E\d\b", "MODULE", line))
        pattern = re.sub(r"\bpeers?$", "PEERS", re.escape(pattern))
        pattern = pattern.replace("FIGURE", r"\d[\d.,:]*")
        found.append(re.compile(re.sub(r"\b[A-Z]{3,}\b", ".+", pattern)))
    return found


def test_a_peer_prints_what_the_page_shows(tmp_path):
    lines = expected_lines()
    assert len(lines) > 10
    run = make_tiny_run(tmp_path / "run", start_s=time.time(), inner_steps=0, duration_s=5.0)
    with Swarm(tmp_path, run) as swarm:
        peer = swarm.start_peer(swarm.start_bootstrap(), "--device", "cpu")
        for kind in ("reachable", "outer_step", "validation"):
            swarm.wait([peer], kind)
        peer.interrupt()
        assert peer.popen.wait(LIMIT_S) == 0
        said = peer.output.read_text().splitlines()
    missing = [line.pattern for line in lines if not any(map(line.fullmatch, said))]
    assert missing == [], "\n".join(said)
    assert re.fullmatch(r".* left: you trained [\d,]+ tokens; the same command continues", said[-1])
