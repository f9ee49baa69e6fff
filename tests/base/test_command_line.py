"""The command line is a promise: options, defaults and what they take are frozen here, not words.

After a change that is meant, write the golden text anew and read its difference:

    PYTHONPATH=tests python tests/base/test_command_line.py > tests/golden/command_line.txt
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import MISSING
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from dipaco.base.command_line import Command
from dipaco.base.settings import Settings, arguments_of
from dipaco.inference import generate_command
from dipaco.peer import peer_command
from dipaco.peer.peer_settings import default_cache_folder
from support.programs.commands import SCRIPTS as COMMANDS
from support.programs.commands import commands, parsers
from support.programs.processes import ran

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "golden" / "command_line.txt"
CACHE_HOME = "/var/cache/volunteer"
ADDRESS = "/ip4/203.0.113.5/tcp/31337/p2p/12D3KooWLGUApiCpST4ZyZPakytsXQ19eY7ZRGCyyJWXKk4tqiZw"


def describe_all():
    """Return the command line of all commands as text: one line an option."""
    os.environ["XDG_CACHE_HOME"] = CACHE_HOME
    lines = []
    settings = {name: command.settings for name, command in commands()}
    for name, parser in parsers().items():
        found = arguments_of(settings[name]) if name in settings else ()
        arguments = {argument.name: argument for argument in found}
        lines += [name]
        for action in parser._actions:
            nature = _nature(action, arguments.get(action.dest))
            lines += [f"  {_usage(action)}  [{nature}]"]
        lines += [""]
    return "\n".join(lines)


def _usage(action):
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


def _nature(action, argument):
    if isinstance(action, argparse._HelpAction | argparse._VersionAction):
        return "ends"
    if isinstance(action, argparse._SubParsersAction):
        return "command"
    if action.nargs == 0:
        return "switch"
    kind, default = getattr(action.type, "__name__", "str"), argument and argument.default
    return f"{kind}, required" if default is MISSING else f"{kind}, default {default!r}"


def test_the_command_line_is_frozen(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", CACHE_HOME)
    assert describe_all() == GOLDEN.read_text(), f"if that is meant, see {__file__}"


def test_every_command_is_installed_and_frozen():
    installed = {
        entry.name: entry.value for entry in entry_points(group="console_scripts") if entry.value.startswith("dipaco.")
    }
    assert installed == {name: f"{module}:main" for name, module in COMMANDS.items()}


# -- what is answered at once: all of it in one process, because starting Python takes a second

ANSWER = """
import contextlib, importlib, io, json, os, sys
said = []
for module, words, columns in json.load(sys.stdin):
    os.environ["COLUMNS"] = str(columns)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = importlib.import_module(module).main(words)
        except SystemExit as end:
            code = end.code
    said.append((code, out.getvalue(), err.getvalue()))
print(json.dumps((said, sorted({"torch", "hivemind", "datasets"} & set(sys.modules)))))
"""
ALL = [name for name, _ in commands()]
# What the frozen text says of options that print something and end.
ENDING = [
    f"{name} {option}"
    for name, *options in (block.splitlines() for block in GOLDEN.read_text().split("\n\n") if block)
    for line in options
    if line.endswith("[ends]")
    for option in re.findall(r"-[a-z-]+", line.removesuffix("[ends]"))
]
PAGES = ["dipaco-peer --help", "dipaco-peer --help-all"]
REFUSED = [
    ([], 3, "no address is given"),
    (["203.0.113.5:31337"], 4, "is not a multiaddress"),
    (["/ip4/203.0.113.5/tcp/31337"], 4, "paste the whole address"),
    (["--initial-peers", f"{ADDRESS}/operator/12"], 4, "no fingerprint"),
    ([ADDRESS, "--announce-maddrs", "/ip4/192.0.2.1"], 4, "--announce-maddrs"),
    ([ADDRESS, "--announce-maddrs", "/ip4/192.0.2.1/tcp/0"], 4, "announces port 0"),
    ([ADDRESS, "--hours", "night"], 3, "--hours"),
    ([ADDRESS, "--huors", "22-7"], 3, "there is no flag --huors; did you mean --hours?"),
    ([ADDRESS, "--max-disk-gb", "20GB"], 3, "invalid float value: '20GB'; see dipaco-peer --help-all"),
]


class Answers:
    """What commands say, and which large packages all of them imported."""

    def __init__(self):
        lines = [f"{name} {word}" for name in ALL for word in ("--help", "--no-such-option")]
        lines += [" ".join(["dipaco-peer", *words]) for words, _, _ in REFUSED]
        lines += ENDING
        asked = [(COMMANDS[line.split()[0]], line.split()[1:], 100) for line in lines]
        asked += [(COMMANDS["dipaco-peer"], page.split()[1:], 80) for page in PAGES]
        environment = {**os.environ, "XDG_CACHE_HOME": "/var/cache"}
        done = ran(sys.executable, "-c", ANSWER, input=json.dumps(asked), env=environment, check=True)
        said, self.imported = json.loads(done.stdout)
        self.of = dict(zip(lines, said, strict=False))
        self.pages = [out for _, out, _ in said[len(lines) :]]


@pytest.fixture(scope="module")
def answers():
    return Answers()


def test_help_and_mistakes_wait_for_no_large_import(answers):
    """Importing PyTorch and Hivemind takes seconds."""
    assert answers.imported == []


@pytest.mark.parametrize("name", ALL)
def test_help_reads_well(answers, name):
    code, out, err = answers.of[f"{name} --help"]
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: {name} ")
    # A help without white space at line ends, too long lines, or words cut at a hyphen.
    assert [line for line in out.splitlines() if len(line) > 100 or line != line.rstrip()] == []


def test_what_is_frozen_is_what_the_programs_answer(answers):
    assert "dipaco-peer --help-all" in ENDING
    refused = {line: answers.of[line] for line in ENDING if answers.of[line][0] != 0}
    assert refused == {}


@pytest.mark.parametrize("name", ALL)
def test_a_mistyped_option_is_one_line(answers, name):
    """With the code of every other setting that cannot be, so no service starts again with it."""
    code, out, err = answers.of[f"{name} --no-such-option"]
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert err.startswith("error: ")


@pytest.mark.parametrize(("words", "exit_code", "message"), REFUSED)
def test_a_peer_refuses_what_cannot_be(answers, words, exit_code, message):
    code, out, err = answers.of[" ".join(["dipaco-peer", *words])]
    assert (code, out, len(err.splitlines())) == (exit_code, "", 1)
    assert message in err


def test_what_a_volunteer_needs_is_on_one_page(answers):
    page, everything = answers.pages
    assert len(page.splitlines()) <= 25
    assert "--name" in page
    assert "--let-sleep" not in page
    assert "--let-sleep" in everything


# -- in this process


def test_an_address_needs_no_flag():
    other = ADDRESS.replace("31337", "31338")
    for words in ([ADDRESS], ["--check", ADDRESS], [ADDRESS, "--name", "x"]):
        assert peer_command.COMMAND.read(peer_command.COMMAND.parse(words)).initial_peers == (ADDRESS,)
    both = peer_command.COMMAND.parse([ADDRESS, "--initial-peers", other])
    assert peer_command.COMMAND.read(both).initial_peers == (ADDRESS, other)
    twice = peer_command.COMMAND.parse(["--initial-peers", ADDRESS, "--initial-peers", other])
    assert peer_command.COMMAND.read(twice).initial_peers == (ADDRESS, other)


@pytest.mark.parametrize(
    "words",
    [
        ["--initial-peers", ADDRESS, "def main"],
        ["def main", "--initial-peers", ADDRESS],
        ["--initial-peers", ADDRESS, "--path", "3", "def main"],
    ],
)
def test_a_text_behind_an_address_is_no_address(words):
    command = generate_command.COMMAND
    settings = command.read(command.parse(words))
    assert (settings.initial_peers, settings.prompt) == ((ADDRESS,), "def main")


@pytest.mark.parametrize("value", ['"/data"', "'/data'", "/data\r", " /data \n", '" /data"\r\n'])
def test_quotes_and_white_space_around_a_folder_are_no_part_of_it(value, monkeypatch):
    command = peer_command.COMMAND
    assert command.read(command.parse(["--cache-dir", value])).cache_folder == Path("/data")
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert default_cache_folder() == Path("/data/dipaco")


def test_a_user_without_a_name_and_a_home_has_defaults(monkeypatch):
    """As in a container that runs under a number."""

    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_folder() == Path("/.cache/dipaco")
    parsers()


def test_the_second_of_two_addresses_behind_one_flag_is_refused_with_what_to_type(capsys):
    command = generate_command.COMMAND
    with pytest.raises(SystemExit):
        command.parse(["--initial-peers", ADDRESS, ADDRESS, "def main"])
    assert "give it again for the next" in capsys.readouterr().err


def test_a_terminal_that_lacks_a_character_gets_its_number():
    script = """
from dipaco.base.command_line import Command
from dipaco.base.settings import Settings
def run(settings):
    print("Zo\\u00eb")
    return 0
raise SystemExit(Command("dipaco-test", Settings, run, "Test.").main([]))
"""
    told = ran(sys.executable, "-c", script, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (told.returncode, told.stdout) == (0, "Zo\\xeb\n")


@pytest.mark.parametrize(
    ("given", "found"), [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_threads_that_wait_sleep_unless_the_user_wants_otherwise(monkeypatch, given, found):
    """Set before a command runs: once PyTorch is imported it comes too late."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, given.get(name, ""))
        if name not in given:
            monkeypatch.delenv(name)
    seen = []

    def run(settings):
        seen.append(os.environ.get("GOMP_SPINCOUNT"))
        return 0

    assert Command("dipaco-test", Settings, run, "").main([]) == 0
    assert seen == [found]


def test_threads_hold_for_numpy_too():
    """`dipaco-serve` computes short texts with it, and its library has threads of its own."""
    script = """
import os, sys
from dipaco.base.command_line import Command
from dipaco.base.settings import ComputeSettings
def run(settings):
    import numpy as np
    np.ones((512, 512)) @ np.ones((512, 512))
    print(len(os.listdir("/proc/self/task")))
    return 0
raise SystemExit(Command("dipaco-test", ComputeSettings, run, "Test.").main(["--threads", "1"]))
"""
    environment = {key: value for key, value in os.environ.items() if "_NUM_THREADS" not in key}
    told = ran(sys.executable, "-c", script, env=environment)
    assert (told.returncode, told.stdout) == (0, "1\n")


def test_ctrl_c_ends_a_command_that_is_importing_something_which_catches_everything(tmp_path):
    (tmp_path / "large.py").write_text(
        "import time\n"
        "print('importing', flush=True)\n"
        "try:\n    time.sleep(60)\nexcept BaseException:\n    print('went on', flush=True)\n"
    )
    script = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # These tests may run where it is ignored.
from dipaco.base.command_line import Command
from dipaco.base.settings import Settings
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
    assert command.stdout.readline() == "importing\n"
    command.send_signal(signal.SIGINT)
    assert command.communicate(timeout=120) == ("", "")
    assert command.returncode == 130


def test_every_option_says_what_it_is_for():
    found = [(name, action) for name, parser in parsers().items() for action in parser._actions]
    silent = [(name, action.dest) for name, action in found if not (action.help or "").strip()]
    assert silent == [("dipaco-bootstrap", "command")]  # Each command has a line of its own.


def test_the_end_of_a_command_does_not_look_through_all_objects():
    """With PyTorch in memory that takes seconds on a busy machine, after the last line."""
    program = (
        "import atexit, gc\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 0))\n"
        "from dipaco.simulator import simulate_command\n"
        "simulate_command.main(['no-such-run'])"
    )
    done = ran(sys.executable, "-c", program)
    assert done.stdout.strip() == "True", done.stderr


if __name__ == "__main__":
    sys.stdout.write(describe_all())
