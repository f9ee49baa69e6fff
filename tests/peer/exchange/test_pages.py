"""A peer that always says that it has more is not asked for ever."""

import pytest

from dipaco.peer.exchange import pages
from dipaco.peer.exchange.pages import REMEMBERED_PAGES, Pages
from support.wire.exchanges import MODULE, chain_of
from support.wire.peers import peer

PEER = peer(0)


@pytest.fixture(autouse=True)
def short_pages(monkeypatch):
    monkeypatch.setattr(pages, "ANSWERED_STEPS", 3)


def read(given):
    """Return how many pages are read of what a peer gives, one after the other."""
    asked, locator = Pages(), ("what we have",)
    for count, steps in enumerate(given, 1):
        if not asked.is_worth_more(PEER, MODULE, locator, steps):
            return count
        locator = (steps[-1].name, "older")
    return len(given)


def test_a_chain_is_read_to_its_end():
    chain = chain_of(11)
    assert read([chain[at : at + 3] for at in range(0, 11, 3)]) == 4


def test_pages_that_are_empty_or_half_or_again_the_same_are_the_last():
    chain, other = chain_of(9), chain_of(9, (1,))
    assert read([[]] * 9) == 1
    assert read([chain[:2]] * 9) == 1
    assert read([chain[:3]] * 9) == 2
    # Nor do two chains that take turns have no end.
    assert read([chain[3:6], other[:3], chain[3:6], other[:3]]) == 2


def test_a_fork_that_begins_earlier_is_read_all_the_same():
    asked, chain = Pages(), chain_of(9)
    assert asked.is_worth_more(PEER, MODULE, ("own",), chain[6:9])
    assert asked.is_worth_more(PEER, MODULE, ("own of later",), chain[:3])
    assert asked.is_worth_more(PEER, MODULE, (chain[2].name,), chain[3:6])


def test_what_is_remembered_is_bounded():
    asked, chain = Pages(), chain_of(3)
    for number in range(2 * REMEMBERED_PAGES):
        asked.is_worth_more(f"peer {number}", MODULE, (), chain)
    assert len(asked._last) == REMEMBERED_PAGES
