"""llama.cpp's page behind the route, in a real browser: a chat is routed and answered, or refused."""

import re

import pytest
import torch

from dipaco.inference.sources import DiskSource
from support.programs.browser import served, visited
from support.programs.service import lively, service, trained_run
from support.runs.tiny_run import tiny_documents

PROMPT = tiny_documents(4, 1, 5)[2][:12]
HOSTILE = "<img src=x onerror=alert(1)>"
# The page ends a stream when it has read [DONE].
EXPECTED = ("ERR_ABORTED",)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return lively(trained_run(tmp_path_factory.mktemp("page")))


@pytest.fixture(scope="module")
def address(out):
    with service(out) as route, served(route.application()) as address:
        yield address


def ask(page, text):
    page.locator("textarea").first.fill(text)
    page.locator("textarea").first.press("Enter")


def test_a_chat_is_routed_and_answered(browser, address, out):
    """`visited` fails where the page asks another place for anything, or its console has an error."""
    from playwright.sync_api import expect

    source, texts = DiskSource(out), (PROMPT, HOSTILE)
    router = source.document_router(torch.device("cpu"))
    routed = router.nearest_paths([source.tokenizer().beginning(text) for text in texts], 1)
    for text, path in zip(texts, routed[:, 0], strict=True):
        with visited(browser, address, expected=EXPECTED) as page:
            ask(page, text)
            expect(page.get_by_text(f"path-{path}", exact=True)).to_be_visible()
            expect(page.get_by_text(re.compile(r"\d t/s$"))).to_be_visible()
            expect(page.get_by_text(text).first).to_be_visible()
            expect(page.locator("img[src=x]")).to_have_count(0)


def test_a_service_with_a_key_asks_for_it(browser, out):
    from playwright.sync_api import expect

    with (
        service(out, api_key="secret") as route,
        served(route.application()) as address,
        visited(
            browser, address, expected=(*EXPECTED, "401", "ApiError", "API key", "Unauthorized", "wants its key")
        ) as page,
    ):
        expect(page.get_by_role("button", name="Enter API Key")).to_be_visible()
