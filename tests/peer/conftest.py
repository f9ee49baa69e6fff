"""A peer's command that joins nothing."""

import pytest

from dipaco.peer import peer_command
from dipaco.peer.kept_flags import keep_flags
from dipaco.peer.node.given_address import keep_addresses


@pytest.fixture
def start(tmp_path, monkeypatch, capsys):
    """Start a peer with some words, which joins; returns its settings, or its exit code, and what it printed."""
    joined = []

    def join(settings):
        joined.append(settings)
        keep_addresses(settings.cache_folder, settings.initial_peers)
        keep_flags(settings.cache_folder, settings.typed)
        return 0

    monkeypatch.setattr("dipaco.peer.training_peer.run_peer", join)

    def start(*words):
        try:
            code = peer_command.main([*words, "--cache-dir", str(tmp_path / "cache")])
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return (joined.pop() if joined else code), said.out + said.err

    return start
