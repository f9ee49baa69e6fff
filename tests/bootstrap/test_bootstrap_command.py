"""What the command line of `dipaco-bootstrap` takes for an address, and what for a path."""

from pathlib import Path

import pytest

from dipaco.bootstrap.bootstrap_command import COMMAND, main
from dipaco.peer.node.given_address import keep_line
from dipaco.protocol.invitations import read_invitation
from dipaco.protocol.manifest import load_or_create_operator_key, sign_manifest
from support.runs.make_plan import make_plan

ADDRESS = "/ip4/203.0.113.5/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
TWO = ["--initial-peers", ADDRESS, "--initial-peers", ADDRESS]


def parse(words):
    parsed = COMMAND.parse(words)
    return parsed._command.read(parsed)


@pytest.mark.parametrize(
    "words",
    [
        ["my-run", *TWO],
        [*TWO, "my-run"],
        [*TWO, "--port", "0", "my-run"],
        [*TWO, "--announce-maddrs", ADDRESS, "my-run"],
        ["--host-maddrs", ADDRESS, "my-run", *TWO],
    ],
)
def test_the_folder_may_follow_addresses(words):
    parsed = parse(["serve", *words])
    assert parsed.folder == Path("my-run")
    assert parsed.initial_peers == (ADDRESS, ADDRESS)
    assert set(parsed.announce_maddrs) | set(parsed.host_maddrs) <= {ADDRESS}


def test_a_folder_may_begin_with_a_slash():
    parsed = parse(["serve", "--initial-peers", ADDRESS, "/srv/my-run"])
    assert (parsed.folder, parsed.initial_peers) == (Path("/srv/my-run"), (ADDRESS,))


def test_a_run_toml_may_follow_addresses():
    words = ["prepare", "--out", "new", "--from", "old", "--initial-peers", ADDRESS, "NEW.toml"]
    parsed = parse(words)
    assert (parsed.run_toml, parsed.initial_peers) == (Path("NEW.toml"), (ADDRESS,))


@pytest.mark.parametrize(
    ("words", "missing"), [(["serve"], "DIR"), (["serve", "--initial-peers", ADDRESS], "DIR"), (["plan"], "RUN.toml")]
)
def test_what_is_missing_is_named(words, missing, capsys):
    with pytest.raises(SystemExit):
        parse(words)
    assert f"the following arguments are required: {missing}" in capsys.readouterr().err


def test_a_mistyped_flag_is_answered_with_one_of_this_command(capsys):
    with pytest.raises(SystemExit):
        parse(["serve", "my-run", "--anounce-maddrs", ADDRESS])
    assert capsys.readouterr().err == "error: there is no flag --anounce-maddrs; did you mean --announce-maddrs?\n"


def test_an_invitation_is_one_whole_line_to_send(tmp_path, capsys):
    key = load_or_create_operator_key(tmp_path / "operator.pem")
    (tmp_path / "manifest.json").write_bytes(sign_manifest(make_plan(), key))
    for address in ("", ADDRESS):
        line = f"dipaco-peer {address} --invitation TEXT" * bool(address)
        keep_line(tmp_path, line)
        assert main(["invite", str(tmp_path), "--peers", "2"]) == 0
        said = capsys.readouterr()
        typed, invitation = said.out.removesuffix("\n").split(" --invitation ")
        assert typed == f"dipaco-peer {address or 'ADDR'}"
        assert read_invitation(invitation).terms.places == 2
        # Until it has run once, it does not know the address of the bootstrap node.
        assert ("ADDR is the address" in said.err) == (not line)
