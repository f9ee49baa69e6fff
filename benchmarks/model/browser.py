"""Drive the page of dipaco-serve in Chromium, on a desk and on a phone, and keep what was seen.

    make browser      # or: python benchmarks/model/browser.py --out /tmp/seen

It needs Chromium (Debian's package chromium, or CHROMIUM=FILE) and the extra `browser`. A tiny run
is trained for it. Prints what was checked, and ends with 0 if all of it held.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from dipaco.dht.http_server import listen, server_of
from dipaco.inference.rerouter import Rerouter
from dipaco.inference.service.app import Service
from dipaco.inference.service.engine import Engine, EngineLimits
from dipaco.inference.sources import DiskSource
from parts.chromium import chromium
from support.service import trained_run
from support.tiny_run import tiny_documents

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SIZES = {"desk": (1100, 800), "phone": (390, 844)}
WAIT_MS = 60_000


class Wanderer(Rerouter):
    """Goes from path to path."""

    def next_path(self, tokens: Any, routed: int, current: int, window: int, allowed: Any) -> int:
        return (current + 1) % 4


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve a tiny run and yield the page's address."""
    source = DiskSource(trained_run(folder))
    rerouter = Wanderer(source.plan.model, blocks=1, windows=(4,), path_count=4)
    limits = EngineLimits(memory_bytes=10**9, slots=4, queue=40, refresh_s=0)
    engine = Engine(source, torch.device("cpu"), limits, rerouter)
    engine.start()
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    listening = listen("127.0.0.1", 0)
    server = server_of(Service(engine, template=template).application())
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        engine.close()
        listening.close()


def completed(address: str, body: dict[str, Any]) -> dict[str, Any]:
    """Ask the interface itself."""
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def drive(browser: Browser, address: str, size: str, out: Path) -> list[str]:
    """Use the page as a person would; return what was checked."""
    from playwright.sync_api import expect

    width, height = SIZES[size]
    dark = "dark" if size == "phone" else "light"
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=dark,  # type: ignore[arg-type]
        has_touch=size == "phone",
    )
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on(
        "request",
        lambda asked: None if asked.url.startswith((address, "data:")) else wrong.append(asked.url),
    )
    page.goto(address)
    expect(page.locator("#about")).to_contain_text("4 paths", timeout=WAIT_MS)
    page.screenshot(path=out / f"{size}-1-empty.png")
    checked = ["the model is found"]
    prompt = tiny_documents(4, 1, 5)[2][:20]
    page.click("#complete")
    page.click("summary")
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "30")
    page.fill("#prompt", prompt)
    page.click("#go")
    finish(page, 1)
    body = {"prompt": prompt, "max_tokens": 30, "temperature": 0, "context_shift": True}
    wanted = completed(address, body)
    turn = page.locator(".turn").first
    assert "".join(turn.locator(".path").all_text_contents()) == wanted["choices"][0]["text"]
    path = wanted["dipaco"]["prompts"][0]["path"]
    assert turn.locator(".chip").all_text_contents() == [f"path {path}"]
    checked += ["the streamed text is that of the interface", "the path that spoke is shown"]
    page.click("summary")
    page.screenshot(path=out / f"{size}-2-completed.png")
    page.click("summary")
    page.fill("#reroute", "6")
    page.click("#go")
    finish(page, 2)
    chips = page.locator(".turn").nth(1).locator(".chip").all_text_contents()
    assert len(chips) > 2, chips
    checked.append("rerouting shows each path")
    page.click("summary")
    page.screenshot(path=out / f"{size}-3-rerouted.png")
    page.click("summary")
    page.fill("#max_tokens", "1000000")
    page.fill("#reroute", "")
    page.click("#go")
    expect(page.locator(".turn").nth(2).locator(".path").first).not_to_be_empty(timeout=WAIT_MS)
    page.click("#go")
    expect(page.locator(".note").nth(2)).to_contain_text("stopped", timeout=WAIT_MS)
    checked.append("an answer can be stopped")
    page.fill("#temperature", "-1")
    page.evaluate("document.getElementById('form').noValidate = true")
    page.fill("#max_tokens", "12")
    page.click("#go")
    expect(page.locator(".note.bad")).to_contain_text("temperature", timeout=WAIT_MS)
    checked.append("a mistake is said")
    page.click("#chat")
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")
    expect(page.locator(".note.bad")).to_have_count(2, timeout=WAIT_MS)
    expect(page.locator("#prompt")).to_have_value(prompt)
    checked.append("what was refused can be sent again")
    end = "(n => n.scrollHeight - n.scrollTop - n.clientHeight)(document.getElementById('talk'))"
    assert page.evaluate(end) < 80, "the newest answer is out of sight"
    checked.append("the newest answer is in sight")
    page.fill("#temperature", "0.8")
    page.click("summary")
    page.click("#clear")
    page.press("#prompt", "Enter")
    finish(page, 1)
    assert page.locator(".turn.you").all_text_contents() == [prompt]
    page.screenshot(path=out / f"{size}-4-chat.png")
    checked.append("a chat is answered")
    overflow = page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
    assert not overflow, "the page is wider than the screen"
    # What was refused on purpose is the one thing that the console may complain of.
    wrong = [line for line in wrong if "400" not in line]
    assert not wrong, wrong
    context.close()
    return [f"{size}: {line}" for line in (*checked, "nothing was asked of any other place")]


def finish(page: Page, answers: int) -> None:
    """Wait until so many answers are complete."""
    from playwright.sync_api import expect

    expect(page.locator(".note.done")).to_have_count(answers, timeout=WAIT_MS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/browser"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    checked: list[str] = []
    with (
        chromium() as browser,
        tempfile.TemporaryDirectory() as name,
        serving(Path(name)) as address,
    ):
        for size in SIZES:
            checked += drive(browser, address, size, options.out)
    print(json.dumps({"checked": checked}) if options.json else "\n".join(checked))
    return 0


if __name__ == "__main__":
    sys.exit(main())
