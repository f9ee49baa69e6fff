"""What the command line of `dipaco-bootstrap` takes for an address, and what for a path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dipaco.bootstrap.cli import COMMAND

ADDRESS = "/ip4/203.0.113.5/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def parse(words: list[str]) -> Any:
    parsed = COMMAND.parse(words)
    return parsed._command.read(parsed, {})


@pytest.mark.parametrize(
    "words",
    [
        ["my-run", "--initial-peers", ADDRESS, ADDRESS],
        ["--initial-peers", ADDRESS, ADDRESS, "my-run"],
        ["--initial-peers", ADDRESS, ADDRESS, "--port", "0", "my-run"],
        ["--initial-peers", ADDRESS, ADDRESS, "--announce-maddrs", ADDRESS, "my-run"],
        ["--host-maddrs", ADDRESS, "my-run", "--initial-peers", ADDRESS, ADDRESS],
    ],
)
def test_the_folder_may_follow_addresses(words: list[str]) -> None:
    parsed = parse(["serve", *words])
    assert parsed.folder == Path("my-run")
    assert parsed.initial_peers == (ADDRESS, ADDRESS)
    assert set(parsed.announce_maddrs) | set(parsed.host_maddrs) <= {ADDRESS}


def test_a_folder_may_begin_with_a_slash() -> None:
    parsed = parse(["serve", "--initial-peers", ADDRESS, "/srv/my-run"])
    assert (parsed.folder, parsed.initial_peers) == (Path("/srv/my-run"), (ADDRESS,))


def test_a_run_toml_may_follow_addresses() -> None:
    words = ["prepare", "--out", "new", "--from", "old", "--initial-peers", ADDRESS, "NEW.toml"]
    parsed = parse(words)
    assert (parsed.run_toml, parsed.initial_peers) == (Path("NEW.toml"), (ADDRESS,))


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["serve"], "DIR"),
        (["serve", "--initial-peers", ADDRESS], "DIR"),
        (["plan"], "RUN.toml"),
    ],
)
def test_what_is_missing_is_named(
    words: list[str], missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(words)
    assert f"the following arguments are required: {missing}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        # Help and mistakes do not wait for what takes seconds to import.
        (
            ["bootstrap.cli", *(f"inference.{name}" for name in (
                "evaluate_cli", "generate_cli", "export.cli", "service.cli",
            ))],
            ["torch", "hivemind", "datasets", "numpy", "pydantic"],
        ),
        # Preparing and planning are no business of the network, texts one of reading alone.
        (
            ["bootstrap.preparing.prepare", "bootstrap.plan.figures"],
            ["hivemind", "datasets", "distributed"],
        ),
    ],
)  # fmt: skip
def test_what_is_not_needed_is_not_loaded(modules: list[str], unwanted: list[str]) -> None:
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module('dipaco.' + name)\n"
        f"print([name for name in {unwanted!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout.split(), done.stderr) == (["[]"], "")
