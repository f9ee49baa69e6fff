"""The pages of `dipaco-status` and `dipaco-serve` over a live swarm, in a real browser.

Two peers train two of three paths; one has a name that would run if it were taken for markup. What
a person sees of it is looked at while rounds pass.
"""

import re
import subprocess
import time
from contextlib import contextmanager

import pytest

from support.programs.browser import visited
from support.runs.tiny_run import make_tiny_run, tiny_documents
from support.swarms.swarm import BIN, ENVIRONMENT, LIMIT_S, Swarm

ROUND_S = 6.0
LIMIT_MS = 1000 * LIMIT_S
HOSTILE_NAME = "<img src=x onerror=alert(1)>"


@contextmanager
def serving(folder, program, *words):
    """Run a command that serves a page, and give the page's address."""
    said = folder / f"{program}.out"
    with said.open("wb") as output:
        process = subprocess.Popen(
            [str(BIN / program), *words],
            # The curves of the status page are kept there.
            env={**ENVIRONMENT, "XDG_STATE_HOME": str(folder / "state")},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (found := re.search(r"serving at (http\S+)", said.read_text())):
            assert process.poll() is None, said.read_text()
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.1)
        yield found[1]
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture
def swarm(browser, tmp_path):
    run = make_tiny_run(
        tmp_path / "run",
        modules_per_level=(1, 3),
        inner_steps=0,
        duration_s=ROUND_S,
        start_s=time.time(),
        name="live",
        rounds={"dwell_rounds": 50, "validation_sequences": 4},
    )
    with Swarm(tmp_path, run) as swarm:
        yield swarm


@pytest.mark.timeout(900)
def test_the_pages_of_a_live_swarm(browser, swarm):
    entry = swarm.start_bootstrap().address()
    peers = [
        swarm.start_peer(entry, "--path", "0", "--name", HOSTILE_NAME),
        swarm.start_peer(entry, "--path", "1", "--name", "second"),
    ]
    swarm.wait(peers, "outer_step", lambda event: event["round"] >= 1)
    status = ("--initial-peers", entry, "--serve", "0")
    service = ("--initial-peers", entry, "--port", "0", "--allow-genesis", "--threads", "1")
    with (
        serving(swarm.folder, "dipaco-status", *status) as page_of_status,
        serving(swarm.folder, "dipaco-serve", *service) as page_of_service,
    ):
        _see_the_swarm(browser, page_of_status, peers)
        _see_the_service(browser, page_of_service)


def _see_the_swarm(browser, address, peers):
    from playwright.sync_api import expect

    with visited(browser, address) as page:
        expect(page.locator("#name")).to_have_text("live", timeout=LIMIT_MS)
        tiles = page.locator("#tiles")
        expect(tiles).to_contain_text("2peers train · of 3", timeout=LIMIT_MS)
        waiting = page.locator("#paths .cell.waiting")
        expect(waiting).to_have_count(1)
        expect(waiting).to_have_attribute("data-subject", "path 2")
        # The list of a small swarm is open; a stranger's name is text in it.
        expect(page.locator("#list tbody")).to_contain_text(HOSTILE_NAME)
        expect(page.locator("img")).to_have_count(0)
        # A new round moves the curves, without a hand on the page.
        curve = page.locator(".chart", has_text="tokens trained").locator("path:not(.area)")
        expect(curve).to_have_count(1, timeout=LIMIT_MS)
        drawn = curve.get_attribute("d") or ""
        about = page.locator("#about").text_content() or ""
        expect(page.locator("#about")).not_to_have_text(about, timeout=LIMIT_MS)
        expect(curve).not_to_have_attribute("d", drawn, timeout=LIMIT_MS)
        # Of a peer that is killed, the page tells that its path waits.
        peers[1].kill()
        expect(page.locator("#paths .cell.waiting")).to_have_count(2, timeout=LIMIT_MS)


def _see_the_service(browser, address):
    from playwright.sync_api import expect

    # The page ends a stream when it has read all of it.
    with visited(browser, address, expected=("ERR_ABORTED",)) as page:
        box = page.locator("textarea").first
        box.fill(tiny_documents(3, 1, 5)[0][:12])
        box.press("Enter")
        expect(page.get_by_text(re.compile(r"^path-\d$")).first).to_be_visible(timeout=LIMIT_MS)
        expect(page.get_by_text(re.compile(r"\d t/s$"))).to_be_visible(timeout=LIMIT_MS)
