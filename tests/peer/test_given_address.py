"""What this machine knows of the swarm that its peer was in last, for commands that are given no address."""

import json

import pytest

from dipaco.base.errors import ConfigurationError
from dipaco.inference import sources
from dipaco.inference.options import SourceOptions
from dipaco.peer.node.given_address import keep_addresses, known_addresses
from dipaco.status.status_command import StatusSettings

GIVEN, MET, ELSEWHERE = (
    f"/ip4/203.0.113.{n}/tcp/31337/p2p/12D3KooWLGUApiCpST4ZyZPakytsXQ19eY7ZRGCyyJWXKk4tq{end}"
    for n, end in ((5, "iZw"), (6, "iZx"), (7, "iZy"))
)
OPERATOR = "/operator/0123456789abcdef"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return the cache folder of a peer that was in a swarm."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = tmp_path / "dipaco"
    cache.mkdir()
    keep_addresses(cache, [GIVEN + OPERATOR])
    known = {"0" * 16: [GIVEN, MET], "1" * 16: [ELSEWHERE]}
    (cache / "known_peers.json").write_text(json.dumps(known))
    return cache


def test_a_reader_comes_in_through_those_who_were_there_too(cache, monkeypatch, capsys):
    """The machine whose address was given may be gone; peers of other swarms are none of these."""
    assert known_addresses(cache) == (GIVEN + OPERATOR, MET)
    opened = []
    monkeypatch.setattr(sources, "open_source", lambda **values: opened.append(values["initial_peers"]))
    SourceOptions().open_source()
    assert GIVEN in capsys.readouterr().err
    SourceOptions(state_folder=cache).open_source()
    SourceOptions(initial_peers=(ELSEWHERE,)).open_source()
    assert opened == [(GIVEN + OPERATOR, MET), (), (ELSEWHERE,)]
    assert StatusSettings().initial_peers == ()


def test_the_first_of_several_trainers_knows_too(cache):
    (cache / "trainer-0").mkdir()
    for name in ("address", "known_peers.json"):
        (cache / name).rename(cache / "trainer-0" / name)
    assert known_addresses(cache) == (GIVEN + OPERATOR, MET)


@pytest.mark.parametrize("spoiled", [None, b"nonsense\n", b"\xff", b""])
def test_a_machine_without_a_peer_asks_for_an_address(tmp_path, spoiled):
    if spoiled is not None:
        (tmp_path / "address").write_bytes(spoiled)
    with pytest.raises(ConfigurationError, match="ask for the address of any peer"):
        known_addresses(tmp_path)
