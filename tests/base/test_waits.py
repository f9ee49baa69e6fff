"""No thread waits for the wrong thing. All other tests run with these asserts."""

import os

import pytest

from dipaco.base.files import atomic_write
from dipaco.base.index import Index
from dipaco.base.waits import BriefLock, may_wait_for, never_waiting


def test_a_thread_for_which_others_wait_waits_for_no_disk(tmp_path):
    index = Index(tmp_path / "index.sqlite")
    with never_waiting():
        with pytest.raises(AssertionError, match="for which others wait, waits for the disk"):
            atomic_write(tmp_path / "file", b"text")
        with pytest.raises(AssertionError, match="for which others wait, waits for the disk"), index.transaction():
            pass
    assert os.listdir(tmp_path) == [], "nothing was begun"
    atomic_write(tmp_path / "file", b"text")


def test_nobody_waits_with_a_brief_lock_in_hand():
    lock = BriefLock()
    with lock, lock:
        pass
    may_wait_for("the exchange")
    with lock, pytest.raises(AssertionError, match="holds a brief lock and waits for the exchange"):
        may_wait_for("the exchange")
