"""The disk is full, at whichever write: what the peer holds it serves from memory, nothing half stays,
and what the disk did not take it takes once there is room."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1]
PROGRAM = """
import logging, subprocess, sys
from pathlib import Path
from dipaco.base.errors import StorageError
from support.runs.kept_states import Life, state_of
from support.wire.exchanges import MODULE, chain_of, file_of, row_of

logging.disable(logging.CRITICAL)
DATA = b"work" * 3000
steps = chain_of(8)
folder = Path(sys.argv[1])

def refused_in(life, step):
    refused = 0
    row = row_of(0, step.round_index, data=DATA)
    try:
        life.files.add(row, (file_of(row, DATA),))
    except StorageError as error:
        assert "disk full" in str(error) and "--cache-dir" in str(error), error
        refused += 1
    life.take(step)
    life.kept.prune(MODULE, step.round_index)
    assert life.states.lookup(state_of(step.round_index + 1).digest) is not None
    assert life.states.find(MODULE, step.name) is not None
    return refused + life.chains._modules[MODULE].safe != len(life.chains.chain(MODULE))

def mount(how):
    subprocess.run(["mount", "-t", "tmpfs", "-o", how, "tmpfs", str(folder)], check=True)

refused = begun = 0
for pages in range(8, 150, 7):
    mount(f"size={4 * pages}k")
    try:
        life = Life(folder, "me")
    except StorageError as error:
        assert "disk full" in str(error), error
        life = None
    if life is not None:
        begun += 1
        for number, step in enumerate(steps[:-1], 1):
            refused += refused_in(life, step)
            assert life.chains.chain(MODULE) == tuple(steps[:number])
    subprocess.run(["mount", "-o", "remount,size=16m", str(folder)], check=True)
    life = life or Life(folder, "me")
    for step in steps[len(life.chains.chain(MODULE)):]:
        refused_in(life, step)
    life.kept.index.close()
    again = Life(folder, "me")
    assert [head.version for head in again.states.all()] == [8], pages
    assert again.chains.chain(MODULE) == tuple(steps)
    assert not list(folder.rglob("*.tmp"))
    for file in folder.glob("store/??/*"):
        assert again.kept.find(file.name) is not None
    again.kept.index.close()
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
print(begun, refused)
"""


def test_at_whichever_write_the_disk_is_full(tmp_path):
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(SUPPORT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    begun, refused = map(int, done.stdout.split())
    assert begun > 10
    assert refused > 10
