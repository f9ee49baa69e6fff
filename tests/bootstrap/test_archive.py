"""Dated copies of all states: whole or not at all, and enough to export a run."""

from pathlib import Path

import pytest
import torch

from dipaco.base.errors import NetworkError
from dipaco.bootstrap.archive import LATEST, Archive
from dipaco.inference import export_command
from dipaco.inference.sources import DiskSource, assemble_path
from dipaco.modules.state import ModuleState
from dipaco.simulator import cli as simulator_cli
from support.runs.tiny_run import make_tiny_run

START_S = 1_700_000_000.0


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A simulated run."""
    folder = tmp_path_factory.mktemp("archive")
    make_tiny_run(folder / "run", private_embedding=True)
    arguments = [str(folder / "run"), "--rounds", "1", "--out", str(folder / "trained"), "--json"]
    assert simulator_cli.main(arguments) == 0
    return folder / "trained"


class Swarm:
    """States as a swarm would give them."""

    def __init__(self, folder):
        self.source = DiskSource(folder)
        self.run, self.plan, self.grid = self.source._run, self.source.plan, self.source.grid
        self.changed = {}

    def state(self, module):
        return self.changed.get(module) or self.source.state(module)

    def change(self, module):
        old = self.source.state(module)
        assert old is not None
        moved = old.parameters + 1
        self.changed[module] = ModuleState(module, old.version + 1, moved, old.momentum, old.progress, old.layout)

    def write(self, archive, after_s=0.0, state=None):
        chosen = state or self.state
        now_s = START_S + after_s
        return archive.write(self.run, self.plan, self.grid, chosen, now_s)


def test_an_archive_exports_a_run_when_everybody_is_gone(trained, tmp_path):
    swarm = Swarm(trained)
    copy = swarm.write(Archive(tmp_path / "kept", 3))
    assert copy.name == "2023-11-14T22-13-20Z"
    latest = str(tmp_path / "kept" / LATEST)
    assert export_command.main(["--state-dir", latest, "--all", "--out", str(tmp_path / "out")]) == 0
    kept, there = DiskSource(Path(latest)), DiskSource(trained)
    for path in range(4):
        found, expected = assemble_path(kept, path), assemble_path(there, path)
        assert all(torch.equal(a, b) for a, b in zip(found.parameters(), expected.parameters(), strict=True))


def test_what_did_not_change_is_linked(trained, tmp_path):
    swarm, archive = Swarm(trained), Archive(tmp_path, 3)
    first = swarm.write(archive)
    swarm.change("L0.E1")
    second = swarm.write(archive, 60)
    assert archive.dates() == [first, second]
    assert (tmp_path / LATEST).resolve() == second

    def files(copy):
        return {str(file.relative_to(copy)): file.stat().st_ino for file in copy.rglob("*.safetensors")}

    before, after = files(first), files(second)
    assert len(before) == len(after)
    new = {name for name, inode in after.items() if before.get(name) != inode}
    assert {name.split("/")[-2] for name in new} == {"L0.E1"}
    known = swarm.state("L0.E1")
    assert known is not None
    found = archive.stored("L0.E1", known.digest, swarm.grid)
    assert found is not None
    assert found.digest == known.digest


def test_only_the_last_copies_are_kept(trained, tmp_path):
    swarm, archive = Swarm(trained), Archive(tmp_path, 2)
    copies = [swarm.write(archive, 60 * number) for number in range(3)]
    assert archive.dates() == copies[1:]


def test_a_copy_that_cannot_be_whole_leaves_nothing(trained, tmp_path):
    swarm, archive = Swarm(trained), Archive(tmp_path, 3)
    good = swarm.write(archive)

    def missing(module):
        return None if module == "L1.E1" else swarm.state(module)

    with pytest.raises(NetworkError, match=r"no peer serves a state of L1.E1"):
        swarm.write(archive, 60, missing)

    def silent(module):
        raise NetworkError("nobody serves it")

    with pytest.raises(NetworkError):
        swarm.write(archive, 60, silent)
    assert {file.name for file in tmp_path.iterdir()} == {good.name, LATEST}
    # A process that ended within a copy leaves what the next one clears away.
    (tmp_path / ".2023-11-14T22-13-21Z.new").mkdir()
    later = swarm.write(archive, 120)
    assert {file.name for file in tmp_path.iterdir()} == {good.name, later.name, LATEST}
