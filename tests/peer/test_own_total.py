"""`dipaco-peer status`: a volunteer asks what the peer does and what it has given."""

import pytest

from dipaco.peer import own_total, peer_command
from dipaco.peer.exchange.chain_store import ChainStore
from dipaco.peer.node.given_address import keep_line
from dipaco.peer.node.line_for_others import line_for_others
from dipaco.peer.owner.pauses import Pauses
from dipaco.protocol.chain.steps import Row, Step, genesis_name
from dipaco.protocol.identity import load_or_create_identity
from dipaco.protocol.manifest import verify_manifest
from dipaco.routing.run_folder import RunFolder
from support.runs.tiny_run import make_tiny_run


@pytest.fixture
def cache(tmp_path):
    """Return the cache folder of a peer that has trained 1,000 tokens, and its identity."""
    run = make_tiny_run(tmp_path / "made")
    plan = run.plan()
    folder = tmp_path / "cache"
    identity = load_or_create_identity(folder / "identity.key")
    files = RunFolder(run.path.rename(folder / plan.run_id), identity.peer_id)
    chains = ChainStore(plan.run_id, run.grid(plan).modules(), files.states.kept.index, identity.peer_id)
    parent = genesis_name(plan.run_id, "L0.E0")
    row = Row("L0.E0", 0, parent, "5" * 64, 0, identity.peer_id, 1000, "f" * 64, 1, bytes(64))
    step = Step.of([row])
    chains.serve("L0.E0", step.name, [step])
    yield folder, identity
    files.states.kept.index.close()


def said_by(capsys, folder):
    assert peer_command.main(["status", "--cache-dir", str(folder)]) == 0
    return capsys.readouterr().out


def test_the_owner_of_a_peer_sees_what_it_does_and_has_given(cache, capsys):
    folder, identity = cache
    Pauses(folder).tell("training", 3, "nobody trains it")
    keep_line(folder, "dipaco-peer /ip4/203.0.113.5/tcp/31337/p2p/12D3KooWPeer")
    lines = said_by(capsys, folder).splitlines()
    assert lines[0] == "training path 3: nobody trains it"
    assert lines[1].endswith(": 1,000 tokens of yours are in the model")
    assert lines[2] == "for a friend: dipaco-peer /ip4/203.0.113.5/tcp/31337/p2p/12D3KooWPeer"
    # Nobody joins through a peer that is gone.
    identity.release()
    said = said_by(capsys, folder)
    assert "no peer is running here" in said
    assert "1,000 tokens" in said
    assert "friend" not in said


def test_before_the_first_work_there_is_nothing_and_nothing_is_made(tmp_path, capsys):
    assert "nothing trained yet" in said_by(capsys, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_line_for_a_friend_has_an_address_that_most_can_call(tmp_path):
    manifest = verify_manifest(make_tiny_run(tmp_path / "made").manifest_path.read_bytes())
    near, far = (f"/ip4/{host}/tcp/1/p2p/12D3KooWPeer" for host in ("192.168.1.4", "8.8.8.8"))
    pinned = f"/operator/{manifest.operator_fingerprint}"
    assert line_for_others([near, far], manifest).startswith(f"dipaco-peer {far}{pinned}")
    assert line_for_others([near], manifest).startswith(f"dipaco-peer {near}{pinned}")
    keep_line(tmp_path, "")
    assert own_total.kept_line(tmp_path) == ""
