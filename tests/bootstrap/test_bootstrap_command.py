"""What the command line of `dipaco-bootstrap` takes for an address, and what for a path."""

from pathlib import Path

import pytest

from dipaco.bootstrap.bootstrap_command import COMMAND

ADDRESS = "/ip4/203.0.113.5/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
TWO = ["--initial-peers", ADDRESS, "--initial-peers", ADDRESS]


def parse(words):
    parsed = COMMAND.parse(words)
    return parsed._command.read(parsed, {})


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
