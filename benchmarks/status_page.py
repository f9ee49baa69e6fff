"""Drive the page of `dipaco-status --serve` in Chromium, with 256 paths and 500 peers.

    python benchmarks/status_page.py --out build/status_page [--real]

The swarm is made of the product's records: healthy, then 60 peers are killed at once, later a
module forks, a peer is on its own and paths wait. What a person would look for is looked for, and
pictures are kept. `--real` also shows three real peers on loopback, one of which is killed, while
they run and again from their event logs. Measures the time of a reading, of a poll and of drawing,
the bytes of an answer, and what a week of history takes. Needs Chromium and the extra `browser`.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from dipaco.dht.http_server import listen, server_of
from dipaco.dht.status.history import History
from dipaco.dht.status.service import Board, StatusService
from parts.chromium import chromium
from support.big_swarm import HOSTILE_NAME, history_of_a_kill, spoiled_records, status_at
from support.swarm import Swarm
from support.swarm_views import peer_name
from support.tiny_run import make_tiny_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SIZES = {"desk": (1440, 900, "light"), "night": (1440, 900, "dark"), "phone": (390, 844, "light")}
WAIT_MS = 60_000
ROUNDS = 40
DURATION_S = 600.0
WEEK_S = 7 * 86_400.0
REAL_ROUND_S = 10.0
LIMIT_S = 240.0


@contextmanager
def serving(service: StatusService) -> Iterator[str]:
    """Serve until the caller is done, and yield the address."""
    listening = listen("127.0.0.1", 0)
    server = server_of(service.application())
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()


def await_true(page: Page, expression: str) -> None:
    """Wait until a page finds something true. Playwright's own way evaluates text in the page,
    which the page's policy forbids."""
    deadline = time.monotonic() + WAIT_MS / 1000
    while not page.evaluate(expression):
        if time.monotonic() > deadline:
            raise TimeoutError(f"for {WAIT_MS} ms this was not so: {expression}")
        page.wait_for_timeout(200)


def with_real_ids(status: dict[str, Any]) -> dict[str, Any]:
    """Return a status whose peer ids are as hard to compress as real ones."""
    text = json.dumps(status)
    alphabet = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
    for peer in [peer["peer_id"] for peer in status["peers"]]:
        digest = hashlib.sha512(peer.encode()).digest()
        text = text.replace(peer, "12D3KooW" + "".join(alphabet[b % 58] for b in digest[:44]))
    found: dict[str, Any] = json.loads(text)
    return found


def cpu_ms(work: Any, times: int = 10) -> float:
    """Return the CPU milliseconds of one call."""
    began = time.process_time()
    for _ in range(times):
        work()
    return round(1000 * (time.process_time() - began) / times, 2)


def measure(folder: Path) -> dict[str, Any]:
    """Return what reading, polling and keeping cost with 256 paths and 500 peers."""
    records = spoiled_records(30, duration_s=DURATION_S)
    view = records.view()
    status = status_at(records)
    real = with_real_ids(status)
    body = json.dumps(real, separators=(",", ":")).encode()
    history = History(folder / "measured.sqlite", real["run"]["id"])
    board = Board(60.0)
    board.put(real)
    found: dict[str, Any] = {
        "view_and_status_cpu_ms": cpu_ms(lambda: status_at(records)),
        "answer_made_cpu_ms": cpu_ms(lambda: board.put(real)),
        "moment_written_cpu_ms": cpu_ms(lambda: history.write(real)),
        "moment_read_cpu_ms": cpu_ms(lambda: history.at(1e11)),
        "response_bytes": len(body),
        "response_gzip_bytes": len(gzip.compress(body, 5)),
        "page_gzip_bytes": len(gzip.compress(Path(PAGE).read_bytes(), 5)),
        "peers": len(view.peers),
    }
    service = StatusService(history, board)
    with serving(service) as address:
        request = urllib.request.Request(
            f"{address}/api/status", headers={"Accept-Encoding": "gzip"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
            tag = answer.headers["etag"]

        def poll() -> None:
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()

        def poll_unchanged() -> None:
            asked = urllib.request.Request(f"{address}/api/status", headers={"If-None-Match": tag})
            # A 304 is an error to urllib.
            with contextlib.suppress(urllib.error.HTTPError):
                urllib.request.urlopen(asked, timeout=60)

        # Client and server are one process: both are counted.
        found["poll_cpu_ms"] = cpu_ms(poll, 50)
        found["poll_unchanged_cpu_ms"] = cpu_ms(poll_unchanged, 50)
    history.close()
    return found


PAGE = Path(__file__).parent.parent / "dht" / "status" / "page.html"


def week(folder: Path) -> dict[str, Any]:
    """Return what a week of readings of a large swarm leaves on disk, one every minute."""
    file = folder / "week.sqlite"
    bases = [with_real_ids(status) for status in history_of_a_kill(ROUNDS, duration_s=DURATION_S)]
    history = History(file, bases[0]["run"]["id"])
    rounds = int(WEEK_S / DURATION_S)
    written, began = 0, time.process_time()
    for minute in range(rounds * 10):
        status = dict(bases[minute // 5 % len(bases)])
        status["time_s"] = 1e9 + 60.0 * minute
        # What changes from reading to reading.
        status["peers"] = [
            {**peer, "tokens_per_s": peer["tokens_per_s"] + (minute * 31 + n) % 97}
            for n, peer in enumerate(status["peers"])
        ]
        history.write(status)
        written += 1
    history.thin(1e9 + WEEK_S)
    span = history.span()
    assert span is not None
    found = {
        "moments_written": written,
        "moments_kept": span.count,
        "cpu_s": round(time.process_time() - began, 1),
        "file_mb": round(file.stat().st_size / 1e6, 2),
        "used_mb": round(history.bytes / 1e6, 2),
    }
    history.close()
    return found


def opened(browser: Browser, address: str, size: str, wrong: list[str]) -> Page:
    """Open the page and note whatever goes wrong in it."""
    width, height, scheme = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,  # type: ignore[arg-type]
    )
    page = context.new_page()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("dialog", lambda dialog: wrong.append(f"dialog: {dialog.message}"))
    page.on(
        "request",
        lambda asked: None if asked.url.startswith((address, "data:")) else wrong.append(asked.url),
    )
    page.goto(address)
    return page


def drive(browser: Browser, address: str, size: str, out: Path) -> tuple[list[str], dict[str, Any]]:
    """Look at the swarm as a person would; return what was seen, and how long drawing took."""
    from playwright.sync_api import expect

    wrong: list[str] = []
    page = opened(browser, address, size, wrong)
    expect(page.locator("#verdict")).to_contain_text("problems", timeout=WAIT_MS)
    expect(page.locator(".chart svg")).to_have_count(4, timeout=WAIT_MS)
    expect(page.locator("#paths .cell:not(.name)")).to_have_count(256)
    expect(page.locator("#peers .cell")).to_have_count(500)
    expect(page.locator("#modules .cell")).to_have_count(32)
    cropped = page.evaluate(
        "[...document.querySelectorAll('#paths .name')].filter(one => one.scrollWidth > "
        "one.clientWidth).map(one => one.textContent)"
    )
    assert not cropped, cropped
    checked = ["256 paths, 32 modules and 500 peers are drawn"]
    page.screenshot(path=out / f"{size}-1-open.png")
    page.screenshot(path=out / f"{size}-2-whole.png", full_page=True)
    kinds = page.locator("#problems .kind").all_text_contents()
    assert kinds[:3] == ["forked · 3", "isolated", "waiting · 3"], kinds
    for path in (21, 85, 200):
        expect(page.locator(f'#paths [data-subject="path {path}"]')).to_have_class(
            "cell waiting trouble warn-tone"
        )
    checked.append("paths that wait are marked")
    module = page.locator('#modules [data-subject="L0.E3"]')
    assert "trouble" in (module.get_attribute("class") or "")
    expect(module.locator(".share .other")).to_have_count(1)
    checked.append("a fork is marked, with both sides")
    lone = page.locator(f'#peers [data-subject="{peer_name(137)}"]')
    assert "trouble bad-tone" in (lone.get_attribute("class") or "")
    checked.append("a peer on its own is marked")
    nodes = page.evaluate("document.querySelectorAll('*').length")
    draw_ms = page.evaluate(
        "() => { const t = performance.now(); for (let i = 0; i < 10; i++) { draw(); "
        "document.body.offsetHeight; } return (performance.now() - t) / 10; }"
    )
    page.locator("#problems .chip", has_text="path 21").click()
    expect(page.locator("#detail")).to_contain_text("nobody trains it", timeout=WAIT_MS)
    page.screenshot(path=out / f"{size}-3-path.png")
    page.keyboard.press("Escape")
    expect(page.locator("#detail")).to_be_hidden()
    module.click()
    expect(page.locator("#detail")).to_contain_text("hold different states", timeout=WAIT_MS)
    page.screenshot(path=out / f"{size}-4-module.png")
    page.goto(f"{address}/#peer/{peer_name(137)}")
    expect(page.locator("#detail")).to_contain_text("What it has contributed", timeout=WAIT_MS)
    expect(page.locator("#detail .problem")).to_have_count(1)
    page.screenshot(path=out / f"{size}-5-peer.png")
    checked.append("a path, a module and a peer have their own pages")
    page.keyboard.press("Escape")
    page.locator("#list summary").click()
    page.fill("#filter", "onerror")
    expect(page.locator("#list tbody tr")).to_have_count(1)
    expect(page.locator("#list tbody")).to_contain_text(HOSTILE_NAME)
    assert page.locator("img").count() == 0
    checked.append("a hostile name is text")
    page.locator("#list summary").click()
    # Before the kill, and after it.
    before, after = killed_at(page)
    page.evaluate("time => go(time)", before)
    expect(page.locator("#peers .cell")).to_have_count(500, timeout=WAIT_MS)
    page.evaluate("time => go(time)", after)
    expect(page.locator("#peers .cell")).to_have_count(440, timeout=WAIT_MS)
    expect(page.locator("#problems")).to_contain_text("paths wait", timeout=WAIT_MS)
    page.evaluate("scrollTo(0, 0)")
    page.screenshot(path=out / f"{size}-6-replay-of-a-kill.png")
    page.click("#live")
    expect(page.locator("#peers .cell")).to_have_count(500, timeout=WAIT_MS)
    checked.append("a kill is replayed")
    page.locator("#paths button.cell").nth(40).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("#detail")).to_be_visible(timeout=WAIT_MS)
    page.keyboard.press("Escape")
    checked.append("the keyboard is enough")
    overflow = page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
    assert not overflow, "the page is wider than the screen"
    assert not wrong, wrong
    page.context.close()
    figures = {"draw_ms": round(draw_ms, 1), "nodes": nodes}
    return [f"{size}: {line}" for line in (*checked, "nothing else was asked")], figures


def killed_at(page: Page) -> tuple[float, float]:
    """Return the moments before and after which most peers went at once."""
    found: list[float] = page.evaluate(
        "() => { const n = series.training; let at = 1; "
        "for (let i = 1; i < n.length; i++) if (n[i] - n[i - 1] < n[at] - n[at - 1]) at = i; "
        "return [series.time_s[at - 1], series.time_s[Math.min(at + 6, n.length - 1)]]; }"
    )
    return found[0], found[1]


@contextmanager
def command(folder: Path, *words: str) -> Iterator[str]:
    """Run `dipaco-status --serve 0` with more words, and yield the page's address."""
    said = folder / "status.out"
    with said.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "dipaco.dht.status.cli", *words, "--serve", "0"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline = time.monotonic() + LIMIT_S
            while not (found := re.search(r"serving at (\S+)", said.read_text())):
                lost = process.poll() is not None or time.monotonic() > deadline
                assert not lost, said.read_text()
                time.sleep(0.1)
            yield found[1]
        finally:
            process.terminate()
            process.wait(30)


def drive_real(browser: Browser, folder: Path, out: Path) -> list[str]:
    """Look at three real peers, one of which is killed, and at them again from their logs."""
    from playwright.sync_api import expect

    run = make_tiny_run(
        folder / "run",
        modules_per_level=(1, 3),
        inner_steps=0,
        duration_s=REAL_ROUND_S,
        start_s=time.time(),
        name="real",
    )
    (folder / "logs").mkdir()
    wrong: list[str] = []
    with Swarm(folder / "logs", run) as swarm:
        node = swarm.start_bootstrap()
        peers = [swarm.start_peer(node, "--name", f"volunteer {n}") for n in range(3)]
        words = ("--initial-peers", node.address(), "--history", str(folder / "real.sqlite"))
        with command(folder, *words) as address:
            page = opened(browser, address, "desk", wrong)
            expect(page.locator("#peers .cell")).to_have_count(4, timeout=WAIT_MS)
            expect(page.locator("#tiles")).to_contain_text("of 3", timeout=WAIT_MS)
            swarm.wait(peers, "commit", lambda event: event["round"] >= 4)
            await_true(page, "Boolean(series) && series.tokens.at(-1) > 0")
            page.wait_for_timeout(1000)
            page.screenshot(path=out / "real-1-three-peers.png")
            last_s = peers[2].read()[-1]["time_s"]
            peers[2].kill()
            expect(page.locator("#peers .cell")).to_have_count(3, timeout=2 * WAIT_MS)
            page.screenshot(path=out / "real-2-one-is-killed.png")
            page.evaluate(f"go({last_s})")
            expect(page.locator("#peers .cell")).to_have_count(4, timeout=WAIT_MS)
            page.context.close()
    assert not wrong, wrong
    with command(folder, "--replay", str(folder / "logs")) as address:
        page = opened(browser, address, "desk", wrong)
        await_true(page, "series !== null && status !== null")
        page.evaluate(f"go({last_s})")
        expect(page.locator("#peers .cell")).to_have_count(4, timeout=WAIT_MS)
        page.screenshot(path=out / "real-3-from-logs.png")
        page.context.close()
    assert not wrong, wrong
    return ["real: three peers, a kill, what was before it, and all of it again from the logs"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/status_page"))
    parser.add_argument("--real", action="store_true", help="three real peers too")
    parser.add_argument("--only-real", action="store_true", help="nothing but these")
    parser.add_argument("--no-week", action="store_true", help="leave the week of history out")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {}
    checked: list[str] = []
    if options.only_real:
        with chromium() as browser, tempfile.TemporaryDirectory() as name:
            print(*drive_real(browser, Path(name), options.out), sep="\n")
        return 0
    with chromium() as browser, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures["costs"] = measure(folder)
        if not options.no_week:
            figures["week"] = week(folder)
        start_s = time.time() - ROUNDS * DURATION_S
        about: dict[str, Any] = {"start_s": start_s, "duration_s": DURATION_S}
        statuses = list(history_of_a_kill(ROUNDS, **about))
        history = History(folder / "large.sqlite", statuses[0]["run"]["id"])
        for status in statuses:
            history.write(status)
        board = Board(60.0)
        board.put(statuses[-1])
        with serving(StatusService(history, board)) as address:
            for size in SIZES:
                lines, drawn = drive(browser, address, size, options.out)
                checked += lines
                figures[size] = drawn
        history.close()
        if options.real:
            checked += drive_real(browser, folder, options.out)
    if options.json:
        print(json.dumps({"checked": checked, **figures}))
    else:
        print("\n".join(checked), json.dumps(figures, indent=1), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
