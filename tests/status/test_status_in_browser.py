"""The page of a swarm in a real browser: what a person sees, and what strangers cannot do in it."""

import io
import itertools
import json
from contextlib import contextmanager

import pytest

from dipaco.status.page import Answer, application
from support.programs.browser import PHONE, is_wider_than_screen, served, visited
from support.swarms.shown_swarm import FORKED, NAME, ROUND, WAITING, content_of, finished, in_trouble, then, well
from support.swarms.swarm_views import peer_name
from support.wire.proxy import behind_proxy

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
# The page looks again at once when it comes to the front.
LOOK = "document.dispatchEvent(new Event('visibilitychange'))"
# Over how many lines the words of something go.
LINES = (
    "one => { const all = document.createRange(); all.selectNodeContents(one); return all.getClientRects().length; }"
)


@contextmanager
def page_of(browser, content, words="", **options):
    """Serve the content and visit it; ready when the curves are there. `words` are its address."""
    from playwright.sync_api import expect

    with served(application(content)) as address, visited(browser, address + words, **options) as page:
        expect(page.locator(".chart")).to_have_count(4)
        yield page


def cell(page, box, subject):
    return page.locator(f'#{box} [data-subject="{subject}"]')


class Seen:
    """A picture of a whole page, as it looks when this is made."""

    def __init__(self, page):
        from PIL import Image

        # Nothing lies over the rest, and changes of colour are over.
        data = page.screenshot(full_page=True, animations="disabled")
        self._picture = Image.open(io.BytesIO(data)).convert("RGB")

    def colour(self, place, x=0.5, y=0.5):
        """Return the colour at a point of something, given in parts of its size."""
        box = place.bounding_box()
        at = (int(box["x"] + x * (box["width"] - 1)), int(box["y"] + y * (box["height"] - 1)))
        return self._picture.getpixel(at)


def is_near(one, other, most=12):
    return all(abs(a - b) <= most for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("with_ledger", [True, False])
def test_a_swarm_that_is_well(browser, with_ledger):
    from playwright.sync_api import expect

    with page_of(browser, content_of(well(), with_ledger=with_ledger)) as page:
        expect(page.locator("#verdict")).to_contain_text("all is well")
        expect(page.locator("#name")).to_have_text(NAME)
        expect(page.locator("#what-for")).to_contain_text("from laws to folk tales. (licence of the model CC-BY-4.0)")
        expect(page.locator("#paths .cell:not(.name)")).to_have_count(16)
        expect(page.locator("#modules .cell")).to_have_count(8)
        expect(page.locator("#peers .cell")).to_have_count(40)
        expect(page.locator(".problem")).to_have_count(0)
        expect(page.locator(".chart svg")).to_have_count(4)
        expect(page.locator("#ledger")).to_be_visible(visible=with_ledger)


def test_the_grid_tells_which_path_waits(browser):
    from playwright.sync_api import expect

    with page_of(browser, content_of(in_trouble())) as page:
        expect(page.locator("#verdict")).to_contain_text("2 problems: 15 of 16 parts")
        waiting = page.locator("#paths .cell.waiting")
        expect(waiting).to_have_count(1)
        expect(waiting).to_have_attribute("data-subject", f"path {WAITING}")
        label = waiting.get_attribute("aria-label") or ""
        assert "nobody trains it" in label
        assert "Problem: waiting" in label
        expect(cell(page, "modules", FORKED).locator(".other")).to_have_count(1)
        page.get_by_role("button", name="Waited", exact=True).click()
        expect(cell(page, "paths", f"path {WAITING}")).to_have_text("11")
        # The problem leads to it, and pointing at the problem leaves only it in colour.
        chip = page.locator(".problem .chip", has_text=f"path {WAITING}")
        chip.hover()
        expect(page.locator("#paths .cell.lit")).to_have_count(1)
        chip.click()
        expect(page.locator("#detail")).to_contain_text("nobody trains it")


def test_the_legend_of_losses_has_their_digits(browser):
    from playwright.sync_api import expect

    status = well()
    for place, path in enumerate(status["paths"]):
        path["validation_loss"] = 2.614 + place / 100
    nothing = {**status, "paths": [{**path, "validation_loss": None} for path in status["paths"]]}
    for shown, said in ((status, "held-out loss: 2.61 to 2.76"), (nothing, "held-out loss: none yet")):
        with page_of(browser, content_of(shown)) as page:
            page.get_by_role("button", name="Loss", exact=True).click()
            expect(page.locator("#paths-legend")).to_contain_text(said)


def test_losses_on_own_texts_stand_apart_from_those_of_the_run(browser):
    from playwright.sync_api import expect

    status = well()
    status["peers"][0]["own_texts_loss"], status["peers"][3]["own_texts_loss"] = 3.2, 2.5
    with page_of(browser, content_of(status)) as page:
        expect(page.locator("#tiles")).to_contain_text("held-out loss on own texts · as 2 owners say")
        expect(page.locator("#tiles")).to_contain_text("2.5 to 3.2")
        page.evaluate(f"location.hash = 'peer/{status['peers'][0]['peer_id']}'")
        expect(page.locator("#detail")).to_contain_text("3.2, as its owner says")
    with page_of(browser, content_of(well())) as page:
        expect(page.locator("#tiles")).not_to_contain_text("own texts")


def test_details_that_are_open_follow_the_swarm(browser):
    """Also those that stand in the address before anything has been read."""
    from playwright.sync_api import expect

    content, first = content_of(well(ROUND - 1)), content_of(well(ROUND - 1)).newest
    content.newest = Answer.of({**json.loads(first.body), "status": None})
    with served(application(content)) as address, visited(browser, address + "#path/3") as page:
        expect(page.locator("#verdict")).to_contain_text("waiting for the first reading")
        expect(page.locator("#detail")).to_be_hidden()
        content.newest = first
        expect(page.locator("#detail")).to_contain_text(f"the present one is {ROUND - 1}")
        page.keyboard.press("Tab")
        expect(page.get_by_role("button", name="Close")).to_be_focused()
        content.newest = content_of(well(ROUND)).newest
        page.evaluate(LOOK)
        expect(page.locator("#detail")).to_contain_text(f"the present one is {ROUND}")
        expect(page.get_by_role("button", name="Close")).to_be_focused()


def test_a_new_round_moves_the_curves(browser):
    from playwright.sync_api import expect

    before, now = content_of(well(ROUND - 1)), content_of(well(ROUND))
    with page_of(browser, before) as page:
        expect(page.locator("#about")).to_contain_text(f"round {ROUND - 1}")
        curves = page.locator(".chart path:not(.area)")
        drawn = [curves.nth(place).get_attribute("d") for place in range(4)]
        loss = page.locator(".chart b").first.text_content()
        before.series, before.newest = now.series, now.newest
        # It looks by itself.
        expect(page.locator("#about")).to_contain_text(f"round {ROUND} ")
        expect(page.locator(".chart b").first).not_to_have_text(loss or "")
        expect(curves).to_have_count(4)
        for place in range(4):
            expect(curves.nth(place)).not_to_have_attribute("d", drawn[place] or "")


def test_hostile_names_do_nothing(browser):
    """All that strangers may say of themselves, in every place where it is shown."""
    from playwright.sync_api import expect

    status = in_trouble()
    status["run"]["name"] = HOSTILE
    for peer in status["peers"]:
        for said in ("name", "team", "device", "software", "waits_for"):
            peer[said] = HOSTILE
        peer["addresses"] = [HOSTILE]
    content = content_of(status)
    credits = [{"peer_id": peer_name(3), "name": HOSTILE, "tokens": 5}]
    content.ledger = Answer.of({"peers": credits, "teams": [{"team": HOSTILE, "tokens": 5}], "counted_at_s": 1.0})
    with page_of(browser, content) as page:
        expect(page.locator("#name")).to_have_text(HOSTILE)
        page.locator("#list summary").click()
        expect(page.locator("#list tbody tr")).to_have_count(40)
        expect(page.locator("#list tbody td").nth(6)).to_have_text(HOSTILE)
        expect(page.locator("#ledger")).to_contain_text(HOSTILE)
        for address in (f"peer/{peer_name(3)}", f"path/{WAITING}", f"module/{FORKED}"):
            page.evaluate("to => { location.hash = to; }", address)
            expect(page.locator("#detail")).to_be_visible()
        page.evaluate("to => { location.hash = to; }", f"peer/{peer_name(3)}")
        expect(page.locator("#detail h1")).to_contain_text(HOSTILE)
        expect(page.locator("#detail dd", has_text=HOSTILE)).to_have_count(5)
        expect(page.locator("img, script:not(head ~ body > script)")).to_have_count(0)


@pytest.mark.parametrize("words", ["#peer/%", "#path/99", "#module/%E0%A4%A", "#peer/", "#x/y"])
def test_an_address_that_leads_nowhere(browser, words):
    from playwright.sync_api import expect

    with page_of(browser, content_of(well()), words) as page:
        expect(page.locator(".chart svg")).to_have_count(4)
        expect(page.locator("#notice")).to_be_empty()
        cell(page, "paths", "path 3").click()
        expect(page.locator("#detail")).to_contain_text("path 3")


def test_the_keyboard_is_enough(browser):
    from playwright.sync_api import expect

    with page_of(browser, content_of(well())) as page:
        for name in ("Trainers", "Waited", "Loss", "Tokens"):
            page.keyboard.press("Tab")
            expect(page.get_by_role("button", name=name, exact=True)).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#modes [aria-pressed=true]")).to_have_text("Tokens")
        # The grid is one stop; the arrows move within it, from the names of the columns down.
        page.keyboard.press("Tab")
        expect(cell(page, "paths", "L1.E0")).to_be_focused()
        for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
            page.keyboard.press(key)
        expect(cell(page, "paths", "path 5")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#detail")).to_be_focused()
        expect(page.locator("#detail h1")).to_have_text("path 5")
        page.keyboard.press("Tab")
        expect(page.get_by_role("button", name="Close")).to_be_focused()
        page.keyboard.press("Escape")
        expect(page.locator("#detail")).to_be_hidden()
        expect(cell(page, "paths", "path 5")).to_be_focused()
        page.keyboard.press("Tab")
        expect(cell(page, "modules", "L0.E0")).to_be_focused()
        page.keyboard.press("End")
        page.keyboard.press("Tab")
        expect(page.locator("#peers .cell").first).to_be_focused()


@pytest.mark.parametrize("size", [PHONE, (320, 640)])
def test_on_a_phone(browser, size):
    """Nothing is wider than the screen, and no words run into each other."""
    from playwright.sync_api import expect

    with page_of(browser, content_of(in_trouble()), size=size, has_touch=True) as page:
        assert not is_wider_than_screen(page)
        for ends in page.locator(".ends").all():
            boxes = [box for one in ends.locator("span").all() if (box := one.bounding_box())]
            for left, right in itertools.pairwise(boxes):
                assert left["x"] + left["width"] + 4 <= right["x"]
                assert left["y"] == right["y"]
        for number in page.locator("#ledger td.n").all():
            assert number.evaluate(LINES) == 1, number.text_content()
        page.locator("#list summary").tap()
        assert not is_wider_than_screen(page)
        cell(page, "paths", f"path {WAITING}").tap()
        expect(page.locator("#detail")).to_contain_text("nobody trains it")
        assert not is_wider_than_screen(page)
        page.get_by_role("button", name="Close").tap()
        expect(page.locator("#detail")).to_be_hidden()


@pytest.mark.parametrize("is_dark", [False, True])
def test_the_legends_have_the_colours_of_what_they_explain(browser, is_dark):
    status = in_trouble()
    # A slow peer is pale: what a version's colour is, the fastest shows.
    for peer in status["peers"]:
        peer["tokens_per_s"] = 1000.0
    with page_of(browser, content_of(status), is_dark=is_dark) as page:
        seen = Seen(page)
        sheet = seen.colour(page.locator("#paths-sheet"), 0.5, 0.99)
        assert (sum(sheet) < 150) == is_dark
        keys = page.locator("#peer-legend span:has(i)").all()
        assert len(keys) == 4
        for key in keys[:3]:
            version = (key.text_content() or "").partition(" · ")[0]
            peers = [one["peer_id"] for one in status["peers"] if one["software"] == version]
            key_colour = seen.colour(key.locator("i"))
            assert is_near(key_colour, seen.colour(cell(page, "peers", peers[0]))), version
        assert len({seen.colour(key.locator("i")) for key in keys[:3]}) == 3
        # The ramp: its end is the path with the most trainers, and it begins in another colour.
        most = max(status["paths"], key=lambda path: len(path["peers"]))
        ramp = page.locator("#paths-legend .ramp")
        busiest = seen.colour(cell(page, "paths", f"path {most['path']}"), 0.2)
        assert is_near(seen.colour(ramp, 0.97), busiest, 24)
        assert not is_near(seen.colour(ramp, 0.03), busiest, 60)
        newest = cell(page, "modules", "L0.E0").locator(".share i")
        assert is_near(seen.colour(page.locator(".now-key")), seen.colour(newest))
        # What is striped can be told from the sheet that it stands on.
        stripes = page.locator("#paths-legend .stripes")
        striped = {seen.colour(stripes, x / 10, 0.5) for x in range(2, 9)}
        assert not all(is_near(one, sheet, 24) for one in striped)


@pytest.mark.parametrize("is_dark", [False, True])
def test_words_stand_out_in_each_cell(browser, is_dark):
    """Also in cells of middling colour, at least 3 : 1."""
    with page_of(browser, content_of(in_trouble()), is_dark=is_dark) as page:
        page.get_by_role("button", name="Loss", exact=True).click()
        seen = Seen(page)
        for place in page.locator("#paths .cell.scaled").all():
            ink = place.evaluate("one => getComputedStyle(one).color")
            rgb = tuple(int(part) for part in ink[4:-1].split(","))
            found = contrast(rgb, seen.colour(place, 0.1))
            assert found >= 3, place.get_attribute("aria-label")


def contrast(one, other):
    """Return the contrast of two colours, as WCAG defines it."""

    def light(colour):
        parts = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    dark, bright = sorted((light(one), light(other)))
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("slash", ["/", ""])
def test_under_a_sub_path_behind_a_proxy(browser, slash):
    from playwright.sync_api import expect

    with (
        served(application(content_of(well()))) as address,
        behind_proxy(address, "/our/swarm") as proxied,
        visited(browser, proxied + slash) as page,
    ):
        expect(page.locator("#verdict")).to_contain_text("all is well")
        expect(page.locator(".chart svg")).to_have_count(4)
        expect(page.locator("#ledger")).to_be_visible()


def test_a_finished_run_leads_to_its_successor(browser):
    from playwright.sync_api import expect

    status = finished()
    content = content_of(status)
    with page_of(browser, content) as page:
        expect(page.locator("#verdict")).to_contain_text(f"finished, continued as {NAME}-2")
        expect(page.locator(".problem")).to_have_count(0)
        new = content_of(then(status))
        content.series, content.newest = new.series, new.newest
        page.evaluate(LOOK)
        expect(page.locator("#name")).to_have_text(f"{NAME}-2")
        expect(page.locator("#about")).to_contain_text(f"continues {NAME}, which is finished")
        expect(page.locator("#verdict")).to_contain_text("all is well")
        # Another run in the same tab continues nothing.
        other = content_of(well())
        content.series, content.newest = other.series, other.newest
        page.reload()
        expect(page.locator("#name")).to_have_text(NAME)
        expect(page.locator("#about")).not_to_contain_text("continues")


def test_a_page_that_lost_its_service_says_so_and_goes_on(browser):
    from playwright.sync_api import expect

    content = content_of(well(ROUND - 1))
    with (
        served(application(content)) as address,
        visited(browser, address, expected=("ERR_INTERNET_DISCONNECTED",)) as page,
    ):
        expect(page.locator(".chart svg")).to_have_count(4)
        page.context.set_offline(True)
        page.evaluate(LOOK)
        expect(page.locator("#notice")).to_contain_text("offline")
        expect(page.locator("#paths .cell:not(.name)")).to_have_count(16)
        page.context.set_offline(False)
        content.newest = Answer.of({**json.loads(content.newest.body), "error": "nobody answers"})
        page.evaluate(LOOK)
        expect(page.locator("#notice")).to_contain_text("nobody answers")
        content.newest = content_of(well(ROUND)).newest
        page.evaluate(LOOK)
        expect(page.locator("#notice")).to_be_empty()
        expect(page.locator("#about")).to_contain_text(f"round {ROUND} ")
