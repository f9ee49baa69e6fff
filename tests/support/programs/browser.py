"""A real browser for tests of the pages: Chromium without a screen, and what went wrong in it.

    with chromium() as browser, visited(browser, address) as page:
        expect(page.locator("#verdict")).to_contain_text("all is well")

A visit fails at its end when the console has an error, a dialog opened, or the page asked another
place for anything.
"""

import os
import shutil
import threading
from contextlib import contextmanager

from dipaco.base.http_server import listen, server_of

NAMES = ("chromium", "chromium-browser", "google-chrome")
# Root has no sandbox of Chromium's, and the browser asks nothing of anybody by itself.
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
WAIT_MS = 60_000.0
DESK = (1200, 900)
PHONE = (390, 844)


class NoBrowserError(Exception):
    """There is no browser here; the message says what to install."""


@contextmanager
def chromium():
    """Give a browser. Raises NoBrowserError where there is none."""
    try:
        from playwright.sync_api import expect, sync_playwright
    except ImportError:
        raise NoBrowserError("playwright is not installed; run make setup") from None
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        raise NoBrowserError("no browser: install Debian's chromium, or give CHROMIUM=FILE")
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS, timeout=WAIT_MS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def visited(browser, address, *, size=DESK, is_dark=False, now_s=None, expected=(), **options):
    """Open a page in a context of its own; fails at the end when something went wrong in it.

    `now_s` is what its clock shows, if not the time, `expected` are words of errors that a test
    makes on purpose, and `options` are those of a context.
    """
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if is_dark else "light", **options
    )
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    wrong = []
    host = "/".join(address.split("/")[:3])
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("request", lambda asked: _note_foreign(asked.url, host, wrong))

    def refuse(dialog):
        wrong.append(f"a dialog opened: {dialog.message}")
        dialog.dismiss()

    page.on("dialog", refuse)
    if now_s is not None:
        page.clock.set_fixed_time(1000 * now_s)
    try:
        page.goto(address)
        yield page
    finally:
        context.close()
    unexpected = [line for line in wrong if not any(word in line for word in expected)]
    assert not unexpected, unexpected


def _note_foreign(url, host, wrong):
    if not url.startswith((host + "/", "data:")):
        wrong.append(f"asked another place: {url}")


def is_wider_than_screen(page):
    """Return whether a person would have to scroll sideways."""
    return bool(page.evaluate("document.documentElement.scrollWidth > window.innerWidth"))


@contextmanager
def served(application):
    """Serve an application over HTTP, as the commands do, and give its address."""
    listening = listen("127.0.0.1", 0)
    server = server_of(application)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join(WAIT_MS / 1000)
        listening.close()
