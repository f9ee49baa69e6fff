"""Folders that cannot be locked or made: what is said names the place and the remedy."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from dipaco.base.errors import StorageError
from dipaco.peer.node.node import make_folder
from dipaco.protocol.identity import is_in_use, load_or_create_identity


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(tmp_path, number, monkeypatch):
    def refuse(descriptor, how):
        raise OSError(number, os.strerror(number))

    (tmp_path / "identity.key.lock").touch()
    monkeypatch.setattr(fcntl, "flock", refuse)
    said = r"is on a file system \(\w+\) that cannot lock files.*on a local disk with --cache-dir"
    with pytest.raises(StorageError, match=said):
        load_or_create_identity(tmp_path / "identity.key")
    assert not (tmp_path / "identity.key").exists()
    assert not is_in_use(tmp_path / "identity.key")


def test_a_folder_that_a_variable_names(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    with pytest.raises(StorageError, match=r"\(XDG_CACHE_HOME=/proc/nowhere\).*--cache-dir"):
        make_folder(Path("/proc/nowhere/dipaco"))
