"""The command line is a promise: options, defaults and what they take are frozen here, not words.

After a change that is meant, write the golden text anew and read its difference:

    PYTHONPATH=tests python tests/base/test_command_line.py > tests/golden/command_line.txt
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from support.commands import SCRIPTS as COMMANDS
from support.commands import parsers, program_of

from dipaco.peer import cli
from dipaco.peer.owner import control_cli

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "golden" / "command_line.txt"
CACHE_HOME = "/var/cache/volunteer"
ADDRESS = "/ip4/203.0.113.5/tcp/31337/p2p/12D3KooWLGUApiCpST4ZyZPakytsXQ19eY7ZRGCyyJWXKk4tqiZw"


def describe_all() -> str:
    """Return the command line of all commands as text: one line an option."""
    os.environ["XDG_CACHE_HOME"] = CACHE_HOME
    lines: list[str] = []
    for name, module in COMMANDS.items():
        parser = program_of(module).parser()
        lines += [name, *(f"  {line}" for line in describe(parser)), ""]
    for command in control_cli.COMMANDS.values():
        lines += [command.name, *(f"  {line}" for line in describe(command.parser())), ""]
    return "\n".join(lines)


def describe(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield a line for every argument of a parser, and those of its sub-commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield name
                yield from (f"  {line}" for line in describe(command))
            continue
        yield f"{_usage(action)}  [{_nature(action)}]"


def _usage(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings)
    if action.nargs == 0:
        return names
    metavar = action.metavar or action.dest
    if action.option_strings and not action.metavar:
        metavar = metavar.upper()
    if action.choices:
        metavar = "|".join(map(str, action.choices))
    many = "..." if action.nargs in ("+", "*") else ""
    return f"{names} {metavar}{many}".strip()


def _nature(action: argparse.Action) -> str:
    if isinstance(action, argparse._HelpAction | argparse._VersionAction):
        return "ends"
    if action.nargs == 0:
        return "switch"
    parts = [getattr(action.type, "__name__", "str")]
    parts.append("required" if action.required else f"default {action.default!r}")
    return ", ".join(parts)


def test_the_command_line_is_frozen() -> None:
    found = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    assert found.stdout == GOLDEN.read_text(), f"if that is meant, see {__file__}"


def test_every_command_is_installed_and_frozen() -> None:
    installed = {
        entry.name: entry.value
        for entry in entry_points(group="console_scripts")
        if entry.value.startswith("dipaco.")
    }
    assert installed == {name: f"{module}:main" for name, module in COMMANDS.items()}


@pytest.mark.parametrize(
    "command",
    [
        *([name] for name in COMMANDS),
        ["dipaco-bootstrap", "prepare"],
        ["dipaco-bootstrap", "plan"],
        ["dipaco-bootstrap", "serve"],
        ["dipaco-reroute", "fit"],
    ],
    ids=" ".join,
)
def test_help_reads_well(command: list[str]) -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / command[0]), *command[1:], "--help"],
        env={**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {' '.join(command)} ")
    lines = done.stdout.splitlines()
    # A help without white space at line ends, too long lines, or words cut at a hyphen.
    assert [line for line in lines if len(line) > 100 or line != line.rstrip()] == []


def test_a_terminal_that_lacks_a_character_gets_its_number() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "dipaco-peer"), "--show-config", "--name", "Zo\u00eb"],
        env={**os.environ, "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b'name = "Zo\\xeb"' in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_help_does_not_wait_for_large_imports(name: str) -> None:
    """Importing PyTorch and Hivemind takes seconds; help and mistakes should come at once."""
    program = (
        "import contextlib, importlib, sys\n"
        f"main = importlib.import_module({COMMANDS[name]!r}).main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(None):\n"
        "    main(['--help'])\n"
        "print(sorted({'torch', 'hivemind', 'datasets'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "exit_code", "message"),
    [
        ([], 3, "no address is given"),
        (["203.0.113.5:31337"], 4, "is not a multiaddress"),
        (["/ip4/203.0.113.5/tcp/31337"], 4, "paste the whole address"),
        (["--initial-peers", f"{ADDRESS}/operator/12"], 4, "no fingerprint"),
        ([ADDRESS, "--announce-maddrs", "/ip4/192.0.2.1"], 4, "--announce-maddrs"),
        ([ADDRESS, "--hours", "night"], 3, "--hours"),
    ],
)
def test_a_peer_refuses_what_cannot_be_before_it_imports_anything_large(
    words: list[str], exit_code: int, message: str
) -> None:
    program = (
        "import sys\n"
        "from dipaco.peer.cli import main\n"
        f"code = main({words!r})\n"
        "print(code, sorted({'torch', 'hivemind', 'datasets'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout == f"{exit_code} []\n"
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_address_needs_no_flag() -> None:
    other = ADDRESS.replace("31337", "31338")
    for words in ([ADDRESS], ["--check", ADDRESS], [ADDRESS, "--name", "x"]):
        assert cli.COMMAND.read(cli.COMMAND.parse(words)).initial_peers == (ADDRESS,)
    both = cli.COMMAND.parse([ADDRESS, "--initial-peers", other])
    assert cli.COMMAND.read(both).initial_peers == (ADDRESS, other)
    twice = cli.COMMAND.parse(["--initial-peers", ADDRESS, "--initial-peers", other])
    assert cli.COMMAND.read(twice).initial_peers == (ADDRESS, other)


def test_what_a_volunteer_needs_is_on_one_page() -> None:
    pages = []
    for flag in ("--help", "--help-all"):
        done = subprocess.run(
            [str(Path(sys.executable).parent / "dipaco-peer"), flag],
            env={**os.environ, "COLUMNS": "80", "XDG_CACHE_HOME": "/var/cache"},
            capture_output=True,
            text=True,
            timeout=200,
            check=True,
        )
        pages.append(done.stdout)
    assert len(pages[0].splitlines()) <= 28
    assert "--name" in pages[0]
    assert "--micro-batch-size" not in pages[0]
    assert "--micro-batch-size" in pages[1]


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_threads_that_wait_sleep_unless_the_user_wants_otherwise(
    given: dict[str, str], found: str
) -> None:
    """What is set once PyTorch is imported comes too late."""
    program = (
        "import os, sys\n"
        "from dipaco.base.command_line import Command, Settings\n"
        "def run(settings):\n"
        "    print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))\n"
        "    return 0\n"
        "sys.exit(Command('dipaco-test', Settings, run, 'Nothing.').main([]))\n"
    )
    ours = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {k: v for k, v in os.environ.items() if k not in ours} | given
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert done.stdout.split() == ["False", found]


def test_ctrl_c_ends_a_command_that_is_importing_something_which_catches_everything(
    tmp_path: Path,
) -> None:
    (tmp_path / "large.py").write_text(
        "import time\n"
        "print('importing', flush=True)\n"
        "try:\n    time.sleep(60)\nexcept BaseException:\n    print('went on', flush=True)\n"
    )
    script = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # These tests may run where it is ignored.
from dipaco.base.command_line import Command, Settings
def run(settings):
    import large
    return 0
raise SystemExit(Command("dipaco-test", Settings, run, "Test.").main())
"""
    command = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert command.stdout is not None
    assert command.stdout.readline() == "importing\n"
    command.send_signal(signal.SIGINT)
    assert command.communicate(timeout=120) == ("", "")
    assert command.returncode == 130


def test_every_option_says_what_it_is_for() -> None:
    found = [(name, action) for name, parser in parsers().items() for action in parser._actions]
    words = [
        (name, action.dest, (action.help or "").partition("[DIPACO_")[0]) for name, action in found
    ]
    assert [word for word in words if not word[2].strip() and word[1] != "version"] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_a_mistyped_option_is_one_line_after_the_usage(name: str) -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / name), "--no-such-option"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert [line for line in done.stderr.splitlines() if line.startswith(f"{name}: error: ")]
    assert "Traceback" not in done.stderr


SAY_FOR_EVER = """
import sys
from dipaco.base.command_line import run_command
def main():
    while True:
        print("a line", flush=True)
sys.exit(run_command(main, debug=False))
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_ends_a_command_without_a_word(unbuffered: str) -> None:
    """As with `| head -1`, also in containers, which often set PYTHONUNBUFFERED."""
    with subprocess.Popen(
        [sys.executable, "-c", SAY_FOR_EVER],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 1
        assert process.stderr.read() == b""


if __name__ == "__main__":
    sys.stdout.write(describe_all())
