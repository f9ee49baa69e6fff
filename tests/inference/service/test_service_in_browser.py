"""The page of the service in a real browser: a text is generated, watched, stopped and refused."""

import json
import re
from contextlib import contextmanager

import pytest
import torch

from dipaco.inference.generate import generate_tokens, prompt_tokens, stream_text
from dipaco.inference.sampling import Sampling
from dipaco.inference.service.app import Service
from dipaco.inference.service.engine import Engine, EngineLimits
from dipaco.inference.sources import DiskSource, assemble_path
from support.programs.browser import PHONE, is_wider_than_screen, served, visited
from support.programs.service import trained_run, wait_until
from support.runs.tiny_run import tiny_documents
from support.wire.proxy import behind_proxy

LIMITS = EngineLimits(memory_bytes=10**9, slots=3, queue=40, refresh_s=0)
PROMPT = tiny_documents(4, 1, 5)[2][:12]
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
PACE = re.compile(r" tokens? · \d+\.\d tokens/s")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return trained_run(tmp_path_factory.mktemp("service"))


@pytest.fixture(scope="module")
def engine(out):
    engine = Engine(DiskSource(out), torch.device("cpu"), LIMITS)
    engine.start()
    yield engine
    engine.close()


@contextmanager
def page_of(browser, engine, **options):
    """Serve the engine and visit its page; ready when the model is found."""
    from playwright.sync_api import expect

    about = {name: options.pop(name) for name in ("template", "api_key") if name in options}
    with served(Service(engine, **about).application()) as address, visited(browser, address, **options) as page:
        if "api_key" not in about:
            expect(page.locator("#about")).to_contain_text("4 paths")
        yield page


def set_up(page, **settings):
    """Fill in the settings."""
    page.locator("summary").click()
    for name, value in settings.items():
        page.fill(f"#{name}", value)
    page.locator("summary").click()


def test_a_text_is_generated(browser, engine, out):
    """It is that of `dipaco-generate`, with the path that gave it and how fast it came."""
    from playwright.sync_api import expect

    source = DiskSource(out)
    tokenizer = source.tokenizer()
    tokens = prompt_tokens(tokenizer, PROMPT)
    path = int(source.document_router(torch.device("cpu")).nearest_paths([tokens], 1)[0, 0])
    sampling = Sampling(max_tokens=30, temperature=0)
    made = generate_tokens(assemble_path(source, path), tokens, sampling)
    text = "".join(stream_text(tokenizer, made))
    with page_of(browser, engine) as page:
        set_up(page, max_tokens="30", temperature="0")
        page.fill("#prompt", PROMPT)
        page.get_by_role("button", name="Continue").click()
        expect(page.locator(".note.done")).to_have_count(1)
        turn = page.locator(".turn")
        assert turn.locator(".given").text_content() == PROMPT
        assert "".join(turn.locator(".path").all_text_contents()) == text
        expect(turn.locator(".chip")).to_have_text(f"path {path}")
        expect(page.locator(".note")).to_contain_text("as long as asked for")
        expect(page.locator(".note")).to_contain_text(PACE)
        expect(page.locator(".note")).to_contain_text("· 30 tokens ·")
        page.get_by_role("button", name="go on").click()
        expect(page.locator(".note.done")).to_have_count(2)
        expect(page.locator("#prompt")).to_have_value(PROMPT + text)


def test_a_text_is_watched_and_stopped(browser, engine):
    from playwright.sync_api import expect

    with page_of(browser, engine) as page:
        # The likeliest tokens soon go round and round, so the text does not end by itself.
        set_up(page, max_tokens="1000000", temperature="0")
        page.fill("#prompt", PROMPT)
        page.get_by_role("button", name="Continue").click()
        note = page.locator(".note")
        expect(note).to_contain_text(re.compile(r"path \d speaks · \d+ tokens? · \d+\.\d tokens/s"))
        page.get_by_role("button", name="Stop").click()
        expect(note).to_contain_text("stopped")
        expect(note).to_contain_text(PACE)
        expect(page.get_by_role("button", name="Continue")).to_be_visible()
        wait_until(lambda: engine.unfinished == 0)
        said = page.locator(".turn .path").first.text_content()
        assert said
        # The newest words are in sight, however long the text is.
        rest = page.evaluate("talk.scrollHeight - talk.scrollTop - talk.clientHeight")
        assert rest < 80
        # The next one is answered.
        set_up(page, max_tokens="5")
        page.locator("#go").click()
        expect(page.locator(".note.done")).to_have_count(2)


def test_a_chat_with_the_keyboard_alone(browser, engine):
    from playwright.sync_api import expect

    with page_of(browser, engine, template=TEMPLATE) as page:
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        expect(page.locator("#prompt")).to_be_focused()
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        page.keyboard.press("Enter")
        expect(page.locator(".note.done")).to_have_count(1)
        expect(page.locator(".turn.you")).to_have_text("one\ntwo")
        expect(page.locator("#prompt")).to_have_value("")
        page.keyboard.type("three")
        page.keyboard.press("Enter")
        expect(page.locator(".note.done")).to_have_count(2)
        for name in ("model", "clear", "go"):
            page.keyboard.press("Tab")
            expect(page.locator(f"#{name}")).to_be_focused()
        page.locator("#clear").press("Enter")
        expect(page.locator(".turn")).to_have_count(0)


def test_what_is_refused_is_said(browser, engine):
    from playwright.sync_api import expect

    with page_of(browser, engine, template=TEMPLATE, expected=("400",)) as page:
        set_up(page, stop="x" * 5000)
        page.fill("#prompt", PROMPT)
        page.keyboard.press("Enter")
        expect(page.locator(".note.bad")).to_contain_text("stop")
        # It can be sent again.
        expect(page.locator("#prompt")).to_have_value(PROMPT)


def test_a_service_that_wants_its_key(browser, engine):
    from playwright.sync_api import expect

    with page_of(browser, engine, api_key="secret", expected=("401",)) as page:
        expect(page.locator("#about")).to_contain_text("wants its key")
        page.locator("summary").click()
        page.fill("#key", "secret")
        page.keyboard.press("Tab")
        expect(page.locator("#about")).to_contain_text("4 paths")
        page.reload()
        expect(page.locator("#about")).to_contain_text("4 paths")


def test_hostile_texts_do_nothing(browser, engine):
    """Of the person, of a model and of those who named the run and its paths."""
    from playwright.sync_api import expect

    shown = [{"id": HOSTILE, "dipaco": {"chat": False}, "owned_by": HOSTILE, "max_model_len": 9}] * 3
    choice = {"index": 0, "text": HOSTILE, "finish_reason": None, "dipaco": {"path": 1}}
    event = {"system_fingerprint": HOSTILE, "choices": [choice]}
    lines = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
    with page_of(browser, engine) as page:
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": shown}))
        page.route("**/v1/completions", lambda route: route.fulfill(body=lines))
        page.reload()
        expect(page.locator("#about")).to_contain_text(HOSTILE)
        page.fill("#prompt", HOSTILE)
        page.locator("#go").click()
        expect(page.locator(".turn .given")).to_have_text(HOSTILE)
        expect(page.locator(".turn .path")).to_have_text(HOSTILE)
        expect(page.locator(".note.done")).to_contain_text(HOSTILE)
        expect(page.locator("img")).to_have_count(0)
        expect(page.locator("script")).to_have_count(1)


@pytest.mark.parametrize("is_dark", [False, True])
def test_on_a_phone(browser, engine, is_dark):
    from playwright.sync_api import expect

    with page_of(browser, engine, size=PHONE, is_dark=is_dark, has_touch=True) as page:
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(20, 22, 27)") == is_dark
        set_up(page, max_tokens="200")
        page.fill("#prompt", "x" * 300)
        page.locator("#go").tap()
        expect(page.locator(".note.done")).to_have_count(1)
        assert not is_wider_than_screen(page)
        page.locator("summary").tap()
        assert not is_wider_than_screen(page)
        expect(page.locator("#go")).to_be_in_viewport()


@pytest.mark.parametrize("slash", ["/", ""])
def test_under_a_sub_path_behind_a_proxy(browser, engine, slash):
    from playwright.sync_api import expect

    with (
        served(Service(engine).application()) as address,
        behind_proxy(address, "/our/model") as proxied,
        visited(browser, proxied + slash) as page,
    ):
        expect(page.locator("#about")).to_contain_text("4 paths")
        set_up(page, seed="1")
        page.fill("#prompt", PROMPT)
        page.locator("#go").click()
        expect(page.locator(".note.done")).to_contain_text(PACE)
