"""The pictures of the page of a swarm in docs/pages, made anew by `make pictures`.

They show the made-up swarm of `shown_swarm`, at a fixed moment, so that they change only when the
page does.
"""

import io
import sys
from pathlib import Path

from dipaco.status.page import application
from support.programs.browser import PHONE, NoBrowserError, chromium, served, visited

from .shown_swarm import NOW_S, content_of, finished, in_trouble, well

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "pages"
MAX_BYTES = 150_000


def take(browser, name, status, **options):
    """Write one picture and return its size in bytes."""
    from PIL import Image
    from playwright.sync_api import expect

    content = content_of(status, with_ledger=False)
    with (
        served(application(content)) as address,
        visited(browser, address, timezone_id="UTC", now_s=NOW_S, **options) as page,
    ):
        expect(page.locator(".chart svg")).to_have_count(4)
        data = page.screenshot(full_page=True, animations="disabled")
    file = FOLDER / f"{name}.png"
    # Without its transparency, and packed as small as it goes.
    Image.open(io.BytesIO(data)).convert("RGB").save(file, optimize=True)
    return file.stat().st_size


def main():
    """Make all pictures."""
    size = {"size": (1200, 760)}
    try:
        with chromium() as browser:
            sizes = {
                "healthy": take(browser, "healthy", well(), **size),
                "trouble": take(browser, "trouble", in_trouble(), **size),
                "dark": take(browser, "dark", in_trouble(), is_dark=True, **size),
                "finished": take(browser, "finished", finished(), **size),
                "phone": take(browser, "phone", well(), size=PHONE),
            }
    except NoBrowserError as missing:
        print(f"error: {missing}", file=sys.stderr)
        return 3
    for name, count in sizes.items():
        print(f"{FOLDER.name}/{name}.png: {count / 1000:.0f} kB")
    too_large = [name for name, count in sizes.items() if count > MAX_BYTES]
    if too_large:
        print(f"error: over {MAX_BYTES // 1000} kB: {', '.join(too_large)}", file=sys.stderr)
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main())
