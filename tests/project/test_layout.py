"""Which room may import which (design 3, layout), and what a room has."""

import ast
import sys
from pathlib import Path

import pytest

from support.programs.processes import ran

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dipaco"
ROOMS = sorted(file.parent.name for file in PACKAGE.glob("*/__init__.py"))
# The layout that was asked for.
AT_THE_ROOT = ("bootstrap", "dht", "modules", "peer", "routing")


def test_who_may_import_whom():
    """The contracts are in pyproject.toml; what is wrong stands in the output.

    In a process of its own: the linter configures logging and silences every logger that exists.
    """
    program = (
        "from importlinter.cli import lint_imports\nraise SystemExit(lint_imports('pyproject.toml', no_cache=True))"
    )
    done = ran(sys.executable, "-c", program, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def loaded_by(names, wanted):
    """Import modules in a fresh process, and return which of the wanted ones that loads."""
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print([name for name in {wanted!r} if name in sys.modules])"
    )
    done = ran(sys.executable, "-c", program)
    assert done.stderr == ""
    return done.stdout.strip()


def modules_of(*rooms):
    return [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for room in rooms
        for file in sorted((PACKAGE / room).rglob("*.py"))
        if file.stem != "__init__"
    ]


def test_what_knows_no_network_loads_none():
    """Also by way of others: importing all of it leaves Hivemind unloaded."""
    names = modules_of("base", "protocol", "modules", "routing", "training", "simulator")
    assert loaded_by(names, ("hivemind", "dipaco.dht", "dipaco.peer")) == "[]"


def test_what_is_decided_loads_no_tensors():
    names = [*modules_of("base", "protocol", "simulator/swarm"), "dipaco.bootstrap.invite"]
    assert loaded_by(names, ("torch", "numpy", "hivemind")) == "[]"


def test_the_root_has_a_link_to_each_room_that_the_layout_demands():
    assert set(AT_THE_ROOT) < set(ROOMS)
    if (ROOT / "PKG-INFO").is_file():
        pytest.skip("a source archive has no links to folders")
    for room in AT_THE_ROOT:
        assert (ROOT / room).readlink() == Path("dipaco", room)


def test_what_tests_share_is_in_support():
    found = []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                found += [(file.name, node.module or "")]
            elif isinstance(node, ast.Import):
                found += [(file.name, alias.name) for alias in node.names]
    assert [pair for pair in found if pair[1].startswith("test_")] == []
