"""Files of contributions: kept for three rounds, over restarts, and never more than there is room
for."""

import dataclasses
import os
import time

import pytest

from dipaco.base import kept_files
from dipaco.base.errors import IntegrityError
from dipaco.base.kept_files import KeptFiles
from dipaco.peer.exchange.files import contribution_files
from dipaco.peer.exchange.files.contribution_files import ContributionFiles
from support.wire.exchanges import MODULE, file_of, row_of


def opened(folder, now=time.time, **limits):
    kept = KeptFiles(folder, now)
    for name, value in limits.items():
        setattr(kept, name, value)
    kept.tidy()
    return ContributionFiles(kept)


def put(files, row, data, folder):
    """Put a file as a mailbox takes it; None when there is no room for it."""
    if not files.promise(row):
        return None
    came = folder / "came"
    came.write_bytes(file_of(row, data))
    path = files.install(row, came, is_mail=True)
    files.release(row)
    return path


def test_a_row_that_names_another_s_file_removes_it_only_before_it_is_taken(tmp_path):
    """Attack: an insider's row names an honest peer's file with one byte more; both are fetched, and the file of
    the honest one was gone when the insider's was refused."""
    files = opened(tmp_path / "files")
    row = row_of(0, data=b"honest")
    other = dataclasses.replace(row, bytes=row.bytes + 1)
    path = files.kept.path(row.file)
    path.parent.mkdir(parents=True)
    path.write_bytes(file_of(row, b"honest"))
    files.install(row, path)
    with pytest.raises(IntegrityError):
        files.install(other, path)
    assert files.find(row.file) == path
    files.kept.remove(row.file)
    path.write_bytes(file_of(row, b"honest"))
    with pytest.raises(IntegrityError):
        files.install(other, path)
    assert not path.exists()


def test_files_are_found_by_hash_also_after_a_restart_and_go_after_three_rounds(tmp_path):
    files, arrived = opened(tmp_path / "files"), []
    files.listen(arrived.append)
    rows = [row_of(0, round_index, data=b"%d" % round_index) for round_index in range(5)]
    for row in rows[:4]:
        files.add(row, (row.mark, b"%d" % row.round_index))
    fetched = tmp_path / "fetched"
    fetched.write_bytes(file_of(rows[4], b"4"))
    files.install(rows[4], fetched)
    assert arrived == [row.file for row in rows]
    assert files.is_checked(rows[0].file)
    assert not files.is_checked(rows[4].file)
    left = tmp_path / "files" / ".put-left.tmp"
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    again = opened(tmp_path / "files")
    path = again.find(rows[4].file)
    assert path.read_bytes() == file_of(rows[4], b"4")
    assert not left.exists()
    again.kept.prune(MODULE, 5)
    assert [again.find(row.file) is not None for row in rows] == [False] * 3 + [True] * 2
    again.kept.remove(rows[4].file)
    again.kept.prune(MODULE, 100)
    assert not list(again.kept.folder.glob("??/*"))


def test_a_file_that_was_made_for_another_row_is_not_kept(tmp_path):
    """A peer that names another's file in its own row gains nothing and takes nothing away."""
    files = opened(tmp_path / "files")
    own = row_of(0, data=b"work")
    files.add(own, (file_of(own, b"work"),))
    copies = (
        row_of(1, file=own.file, bytes=own.bytes),
        row_of(0, 1, file=own.file, bytes=own.bytes),
        row_of(0, file=own.file, bytes=own.bytes + 1),
    )
    for copy in copies:
        fetched = tmp_path / "fetched"
        fetched.write_bytes(file_of(own, b"work"))
        with pytest.raises(IntegrityError):
            files.install(copy, fetched)
        assert not fetched.exists()
    path = files.find(own.file)
    assert path.read_bytes() == file_of(own, b"work")


def test_the_oldest_rounds_make_room(tmp_path):
    files = opened(tmp_path, max_bytes=3000)
    rows = [row_of(0, n, data=bytes([n]) * 968) for n in range(5)]
    for row in rows:
        files.add(row, (row.mark, bytes([row.round_index]) * 968))
    assert [files.find(row.file) is not None for row in rows] == [False, False, True, True, True]


def test_what_others_put_has_a_bound_for_each_and_for_all(tmp_path):
    files = opened(tmp_path / "files", max_bytes=16_000)
    one = [row_of(1, n, data=bytes([n]) * 368) for n in range(3)]
    assert put(files, one[0], bytes(368), tmp_path)
    assert not files.promise(row_of(1, 9, data=bytes(700)))
    # A file that is on its way has its place, and comes once.
    assert files.promise(one[1])
    assert not files.promise(one[1])
    assert not files.promise(one[2])
    files.release(one[1])
    assert put(files, one[1], bytes([1]) * 368, tmp_path)
    stored = [put(files, row_of(n, data=bytes([n]) * 968), bytes([n]) * 968, tmp_path) for n in range(2, 20)]
    assert sum(path is not None for path in stored) == 7
    # The own work has room all the same.
    own = row_of(0, data=bytes(5000))
    assert files.add(own, (own.mark, bytes(5000))).exists()


def test_of_one_peer_a_mailbox_keeps_so_many_files_however_small(tmp_path):
    files = opened(tmp_path / "files")
    rows = [row_of(1, n, data=b"%d" % n) for n in range(200)]
    stored = [put(files, row, b"%d" % row.round_index, tmp_path) for row in rows]
    assert sum(path is not None for path in stored) == kept_files.MAIL_FILES_OF_A_PEER
    assert put(files, row_of(2, data=b"another"), b"another", tmp_path)
    files.kept.prune(MODULE, 300)
    assert put(files, rows[-1], b"199", tmp_path)


def test_who_contributed_lately_has_room_before_others(tmp_path):
    """Anybody in an open run can have as many identities as it takes to fill a mailbox."""
    files = opened(tmp_path / "files", max_bytes=16_000)
    contents = [bytes([n]) * 900 for n in range(20)]
    rows = [row_of(n, data=content) for n, content in enumerate(contents)]
    honest = rows[0].peer, rows[1].peer
    stored = [put(files, row, c, tmp_path) for row, c in zip(rows[2:], contents[2:], strict=True)]
    assert stored[0] is not None
    assert stored[-1] is None
    assert put(files, rows[0], contents[0], tmp_path) is None
    files.kept.has_contributed = lambda peer: peer in honest
    assert put(files, rows[0], contents[0], tmp_path) is not None
    assert put(files, rows[1], contents[1], tmp_path) is not None
    # Those who came first stay, and who contributed takes nothing from another who did.
    assert files.find(rows[2].file) is not None
    files.kept.has_contributed = lambda peer: True
    assert not files.promise(rows[-1])


def test_a_mailbox_has_room_again_after_the_rounds_for_which_files_are_kept(tmp_path):
    """Also where nobody follows the module that a file is of, and after a restart."""
    now = [1e6]

    def started():
        return opened(tmp_path / "files", lambda: now[0], max_bytes=16_000, kept_s=30.0)

    files = started()
    contents = [bytes([n]) * 900 for n in range(30)]
    both = [(row_of(n, data=content), content) for n, content in enumerate(contents)]
    first = [row for row, content in both[:15] if put(files, row, content, tmp_path)]
    now[0] += 29.0
    files = started()
    assert put(files, *both[20], tmp_path) is None
    now[0] += 2.0
    assert put(files, *both[20], tmp_path) is not None
    assert files.find(first[-1].file) is not None


def test_a_mailbox_keeps_so_many_files_however_small(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_files, "MAIL_FILES", 5)
    files = opened(tmp_path / "files")
    rows = [row_of(n, data=b"%d" % n) for n in range(9)]
    stored = [put(files, row, b"%d" % n, tmp_path) for n, row in enumerate(rows)]
    assert sum(path is not None for path in stored) == 5


def test_what_others_put_leaves_the_disk_its_reserve(tmp_path, monkeypatch):
    files, row = opened(tmp_path / "files"), row_of(0, data=b"1234")
    monkeypatch.setattr(contribution_files, "spare_bytes", lambda folder: 35)
    assert put(files, row, b"1234", tmp_path) is None
    monkeypatch.setattr(contribution_files, "spare_bytes", lambda folder: 36)
    assert put(files, row, b"1234", tmp_path) is not None
