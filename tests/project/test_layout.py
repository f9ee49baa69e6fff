"""Who may import whom (design 3, layout)."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# From the ground floor up: a room may import those before it, less what ABSENT says.
ROOMS = (
    "base",
    "modules",
    "routing",
    "training",
    "protocol",
    "dht",
    "peer",
    "status",
    "bootstrap",
    "inference",
    "simulator",
)
ABSENT = {
    # What is decided depends on no way to train, and what trains on nothing that is decided.
    "protocol": {"training"},
    "dht": {"training"},
    "inference": {"status", "bootstrap"},
    "bootstrap": {"status"},
    # The reference and the simulated network know no real one.
    "simulator": {"dht", "peer", "status", "bootstrap", "inference"},
}
# Of the peer, inference and status may use what fetches, not what trains.
READERS = ("inference", "status")
READERS_USE_OF_PEER = {"dipaco.peer.client", "dipaco.peer.credit"}
# Hivemind, and what only makes sense with it.
NETWORK = {"hivemind", "multiaddr", "multihash"}
NETWORK_FOLDERS = ("dht/", "peer/exchange/")


def _files(*folders: str) -> list[Path]:
    return [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


def _imports(file: Path) -> Iterator[str]:
    """Yield the absolute name of every module that a file imports, wherever in the file."""
    folder = file.relative_to(ROOT).parts[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = node.module or ""
            if node.level == 0:
                if name == "dipaco":
                    yield from (f"dipaco.{alias.name}" for alias in node.names)
                    continue
                # `from dipaco.peer import client` imports dipaco.peer.client.
                whole_folder = name.startswith("dipaco.") and name.count(".") == 1
                yield from (
                    (f"{name}.{alias.name}" for alias in node.names) if whole_folder else [name]
                )
            else:
                assert node.level == 1, f"{file}: a relative import out of its folder"
                yield f"dipaco.{folder}.{name}".rstrip(".")


def _below(room: str) -> set[str]:
    return set(ROOMS[: ROOMS.index(room)]) - ABSENT.get(room, set())


def _mistakes(file: Path) -> Iterator[str]:
    folder = file.relative_to(ROOT).parts[0]
    for name in _imports(file):
        parts = name.split(".")
        where = f"{file.relative_to(ROOT)} imports {name}"
        if parts[0] in NETWORK and not file.relative_to(ROOT).as_posix().startswith(
            NETWORK_FOLDERS
        ):
            yield f"{where}: the network is for {' and '.join(NETWORK_FOLDERS)} alone"
        if parts[0] in ROOMS:
            yield f"{where}: write dipaco.{name}"
        if parts[0] != "dipaco" or parts[1] == folder:
            continue
        if parts[1] not in _below(folder):
            yield f"{where}: imports run downward only"
        if folder in READERS and parts[1] == "peer" and name not in READERS_USE_OF_PEER:
            yield f"{where}: a reader stands on the exchange, not on the training peer"


@pytest.mark.parametrize("folder", ROOMS)
def test_imports_run_downward(folder: str) -> None:
    assert [line for file in _files(folder) for line in _mistakes(file)] == []


def test_the_check_finds_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    folder = tmp_path / "modules"
    folder.mkdir()
    file = folder / "wrong.py"
    file.write_text(
        "def late():\n    import hivemind\n    from dipaco.routing import plan\n"
        "    from dipaco import peer\n    import dht.view\n"
    )
    assert len(list(_mistakes(file))) == 4


def _module(file: Path) -> str:
    """Return the name by which a file is imported; benchmarks/ itself is no package."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "benchmarks":
        return ".".join(parts[1:]).removesuffix(".__init__")
    return ".".join(("dipaco", *parts)).removesuffix(".__init__")


def _imported(file: Path) -> Iterator[str]:
    """Yield what a file imports, and what it imports from there, which may be a module too.

    Anywhere in the file: what a function imports, and what only the type check reads.
    """
    package = _module(file).split(".")
    package = package if file.stem == "__init__" else package[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            begin = package[: len(package) + 1 - node.level] if node.level else []
            name = ".".join((*begin, *([node.module] if node.module else [])))
            yield from (name, *(f"{name}.{alias.name}" for alias in node.names))


def _circle(files: list[Path]) -> list[str]:
    """Return modules of which each imports the next and the last is the first, if there are."""
    names = {_module(file) for file in files}
    graph = {_module(file): names.intersection(_imported(file)) for file in files}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_import_goes_in_a_circle() -> None:
    assert _circle(_files(*ROOMS, "benchmarks")) == []


def test_the_check_finds_circles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    room = tmp_path / "peer" / "room"
    room.mkdir(parents=True)
    for folder in (room.parent, room):
        (folder / "__init__.py").touch()
    (room / "first.py").write_text(
        "import typing\nif typing.TYPE_CHECKING:\n    from . import last\n"
    )
    (room / "middle.py").write_text("from dipaco.peer.room.first import value\n")
    (room / "last.py").write_text("def late():\n    from .middle import value\n")
    circle = [f"dipaco.peer.room.{name}" for name in ("first", "last", "middle")]
    found = _circle(_files("peer"))
    assert (sorted(found[1:]), found[0]) == (sorted(circle), found[-1])
    (room / "last.py").unlink()
    assert _circle(_files("peer")) == []


def test_what_knows_no_network_loads_none() -> None:
    """Also by way of others: importing all of it leaves Hivemind unloaded."""
    names = [
        _module(file)
        for file in _files("base", "modules", "routing", "training", "protocol", "simulator")
        if file.stem != "__init__"
    ]
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print([name for name in ('hivemind', 'dipaco.dht', 'dipaco.peer') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=280, check=False
    )
    assert (done.stdout.split(), done.stderr) == (["[]"], "")


def test_every_room_is_typed_and_packaged() -> None:
    for room in ROOMS:
        assert (ROOT / room / "py.typed").is_file(), room
        assert (ROOT / "dipaco" / room).readlink() == Path("..", room)


def test_what_tests_share_is_in_support() -> None:
    found = []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                found += [(file.name, node.module or "")]
            elif isinstance(node, ast.Import):
                found += [(file.name, alias.name) for alias in node.names]
    assert [pair for pair in found if pair[1].startswith("test_")] == []
