"""Blobs are what their hash says, and a file is either whole or not there."""

import errno
import hashlib
import os
import threading
import time
from pathlib import Path

import pytest

from dipaco.base.blobs import BlobStore, is_sha256
from dipaco.base.errors import IntegrityError, StorageError
from dipaco.base.files import atomic_file, atomic_write, remove_stale_temporaries, sha256_of_file, storage_errors

CONTENT = b"some content " * 1000
SHA = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def store(tmp_path):
    return BlobStore(tmp_path / "blobs")


def files_in(folder):
    return sorted(file for file in folder.rglob("*") if file.is_file())


def test_bytes_come_back(store):
    assert not store.has(SHA)
    assert not store.verify(SHA)
    assert store.add_bytes(CONTENT) == SHA == store.add_bytes(CONTENT)
    assert store.has(SHA)
    assert store.verify(SHA)
    assert store.read(SHA) == CONTENT
    assert store.require(SHA) == store.path(SHA)
    assert files_in(store.folder) == [store.path(SHA)]
    assert BlobStore(store.folder).read(SHA) == CONTENT


@pytest.mark.parametrize("move", [True, False])
def test_files_are_copied_or_moved(store, tmp_path, move):
    for attempt in range(2):
        source = tmp_path / f"source{attempt}"
        source.write_bytes(CONTENT)
        assert store.add_file(source, move=move) == SHA
        assert source.exists() is not move
    assert store.read(SHA) == CONTENT
    assert store.add_file(store.path(SHA), move=True) == SHA
    assert store.has(SHA)


def test_absent_and_damaged_blobs(store):
    with pytest.raises(IntegrityError, match="is not in"):
        store.read(SHA)
    store.add_bytes(CONTENT)
    store.path(SHA).write_bytes(CONTENT[:-1] + b"!")
    assert not store.verify(SHA)
    with pytest.raises(IntegrityError, match="damaged"):
        store.read(SHA)
    store.remove(SHA)
    assert not store.has(SHA)
    store.remove(SHA)


@pytest.mark.parametrize("name", ["", "../../passwd", SHA.upper(), SHA[:-1], SHA + "0", "z" * 64])
def test_names_that_are_no_hash(store, name):
    assert not is_sha256(name)
    for method in (store.path, store.has, store.read, store.partial_path, store.commit_partial):
        with pytest.raises(ValueError, match="not a SHA-256"):
            method(name)


def test_a_download_is_continued_and_committed(store):
    with pytest.raises(IntegrityError, match="no download"):
        store.commit_partial(SHA)
    partial = store.partial_path(SHA)
    store.tidy()
    partial.write_bytes(CONTENT[:100])
    again = BlobStore(store.folder).partial_path(SHA)
    assert again.stat().st_size == 100
    assert not store.has(SHA)
    with again.open("ab") as handle:
        handle.write(CONTENT[100:])
    assert store.commit_partial(SHA) == store.path(SHA)
    assert store.read(SHA) == CONTENT
    assert not partial.exists()


def test_a_wrong_download_is_removed(store):
    store.tidy()
    store.partial_path(SHA).write_bytes(b"forged")
    with pytest.raises(IntegrityError, match="arrived with the hash"):
        store.commit_partial(SHA)
    assert files_in(store.folder) == []


def test_a_secret_is_nobody_elses_from_its_first_byte_on(tmp_path):
    seen = []

    def chunks():
        (temporary,) = tmp_path.iterdir()
        seen.append(temporary.stat().st_mode & 0o777)
        yield b"secret"

    atomic_write(tmp_path / "key", chunks(), mode=0o600)
    assert [*seen, (tmp_path / "key").stat().st_mode & 0o777] == [0o600, 0o600]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    target = tmp_path / "deep" / "file"
    atomic_write(target, b"old")

    def chunks():
        yield b"new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        atomic_write(target, chunks())
    assert target.read_bytes() == b"old"
    assert files_in(tmp_path) == [target]
    atomic_write(target, [b"n", memoryview(b"ew")])
    assert target.read_bytes() == b"new"


def test_a_full_disk_says_where_and_what_to_type(tmp_path, monkeypatch, store):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"disk full.*blobs.*--cache-dir"):
        store.add_bytes(CONTENT)
    assert files_in(store.folder) == []
    source = tmp_path / "source"
    source.write_bytes(CONTENT)
    with pytest.raises(StorageError, match="disk full"):
        store.add_file(source, move=True)
    assert source.exists()


def test_a_real_full_disk():
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with (
        pytest.raises(StorageError, match="disk full"),
        storage_errors(Path("/dev")),
        open("/dev/full", "wb", buffering=0) as handle,
    ):
        handle.write(b"x")


def test_other_failures_name_the_file(tmp_path):
    with pytest.raises(StorageError, match="missing"), storage_errors(tmp_path):
        (tmp_path / "missing").read_bytes()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot use"):
        BlobStore(tmp_path / "file").add_bytes(CONTENT)
    with pytest.raises(StorageError, match="no permission"), storage_errors(tmp_path):
        raise PermissionError(errno.EACCES, "denied", str(tmp_path))
    with pytest.raises(StorageError, match="is read-only"), storage_errors(tmp_path):
        raise OSError(errno.EROFS, "Read-only file system", str(tmp_path))


def test_only_stale_temporaries_are_removed(tmp_path):
    folder = tmp_path / "blobs" / SHA[:2]
    folder.mkdir(parents=True)
    old, young, other = folder / ".a.1-x.tmp", folder / ".b.2-y.tmp", folder / "c.tmp"
    for file in (old, young, other):
        file.write_bytes(b"x")
    yesterday = time.time() - 86400
    os.utime(old, (yesterday, yesterday))
    os.utime(other, (yesterday, yesterday))
    BlobStore(tmp_path / "blobs").tidy()
    assert files_in(folder) == [young, other]
    remove_stale_temporaries(tmp_path / "absent")


def test_many_threads_may_store_the_same_blob(store):
    threads = [threading.Thread(target=store.add_bytes, args=(CONTENT,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.read(SHA) == CONTENT
    assert files_in(store.folder) == [store.path(SHA)]


def test_hash_of_a_large_file(tmp_path):
    with atomic_file(tmp_path / "large") as handle:
        handle.write(b"\1" * (2**20 + 17))
    expected = hashlib.sha256(b"\1" * (2**20 + 17)).hexdigest()
    assert sha256_of_file(tmp_path / "large") == expected
