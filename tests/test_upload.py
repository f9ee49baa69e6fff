"""Uploads to mirrors: everything is there in the end, checked, and nothing is sent twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from dipaco.bootstrap import upload as upload_module
from dipaco.bootstrap.settings import PrepareSettings
from dipaco.bootstrap.upload import Uploader, blobs_of, check_target, upload
from dipaco.modules.blobs import BlobStore
from dipaco.modules.errors import ConfigurationError, NetworkError
from dipaco.peer.exchange import transfer
from dipaco.routing.run_folder import RunFolder
from fsspec.implementations.memory import MemoryFileSystem
from support.prepared_run import quiet_display
from support.tiny_run import make_tiny_run


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_tiny_run(tmp_path / "run")


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    system: MemoryFileSystem = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


def uploader(run: RunFolder, system: Any) -> Uploader:
    return Uploader(run, run.plan(), system, "/bucket/run", "s3://bucket/run")


def send(run: RunFolder, system: Any) -> int:
    return uploader(run, system).run(lambda done, total, note: None)


def test_a_peer_gets_everything_from_the_mirror(
    run: RunFolder, memory: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = blobs_of(run, run.plan())
    assert send(run, memory) == len(names)
    # The peers' own code, with the memory in the place of a service.
    monkeypatch.setattr(transfer, "check_mirror", lambda address: address)
    mirror = transfer.MirrorSource("memory://bucket/run")
    store = BlobStore(tmp_path / "peer")
    for sha256 in names:
        fetched = transfer.download(sha256, [mirror], store, max_bytes=2**24, timeout_s=60)
        assert asyncio.run(fetched).read_bytes() == run.blobs.read(sha256)


def test_what_is_there_is_not_sent_again(run: RunFolder, memory: MemoryFileSystem) -> None:
    names = blobs_of(run, run.plan())
    assert send(run, memory) == len(names)
    assert send(run, memory) == 0
    # Half a file, and one that somebody has removed.
    memory.store[f"/bucket/run/{names[0]}"].truncate(10)
    memory.rm_file(f"/bucket/run/{names[1]}")
    assert send(run, memory) == 2
    # Nothing is known about what is there: it is read, and what is right stays.
    (run.path / "work" / "uploads.json").unlink()
    memory.pipe_file(f"/bucket/run/{names[2]}", b"x" * len(run.blobs.read(names[2])))
    assert send(run, memory) == 1
    assert memory.cat_file(f"/bucket/run/{names[2]}") == run.blobs.read(names[2])


class Failing(MemoryFileSystem):
    """A service that breaks after some files, or damages all of them."""

    cachable = False
    left = 2
    damages = False

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        if self.left == 0:
            raise TimeoutError("the service does not answer")
        self.left -= 1
        super().put_file(lpath, rpath, **options)
        if self.damages:
            content = bytearray(self.cat_file(rpath))
            content[0] ^= 1
            self.pipe_file(rpath, bytes(content))


def test_an_upload_goes_on_where_it_was_interrupted(
    run: RunFolder, memory: MemoryFileSystem
) -> None:
    system = Failing()
    with pytest.raises(NetworkError, match="TimeoutError: the service .* the same command goes on"):
        send(run, system)
    assert send(run, memory) == len(blobs_of(run, run.plan())) - 2


def test_a_bucket_that_is_not_there_is_to_be_made(run: RunFolder) -> None:
    class Bucketless(MemoryFileSystem):
        cachable = False

        def makedirs(self, path: str, exist_ok: bool = False) -> None:
            raise FileNotFoundError("Bucket does not exist: bucket")

    with pytest.raises(NetworkError, match="not exist: bucket; make that bucket .* command again"):
        send(run, Bucketless())


def test_a_place_that_damages_files_is_named(run: RunFolder, memory: MemoryFileSystem) -> None:
    system = Failing()
    system.left, system.damages = 99, True
    with pytest.raises(NetworkError, match="comes back with other bytes, 3 times"):
        send(run, system)
    assert system.left == 96


def test_the_whole_command_path(
    run: RunFolder, memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_module, "check_target", lambda address: address)
    display = quiet_display()
    upload(run, run.plan(), "memory://bucket/run", display)
    assert {Path(name).name for name in memory.store} == set(blobs_of(run, run.plan()))
    printed: Any = display.console.file
    assert "names no mirrors" in printed.getvalue()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("file:///tmp/x", "is no mirror; the address begins with one of https://, s3://"),
        ("memory://x", "is no mirror"),
        ("s3://a::file:///x", "is not one plain address"),
        ("https://example.org/run", "https can only be read"),
    ],
)
def test_only_places_that_mirrors_may_be_are_written(address: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match="--upload") as caught:
        check_target(address)
    assert said in str(caught.value)


def test_an_upload_is_for_one_machine(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--together and --upload"):
        PrepareSettings(run_toml=tmp_path, out=tmp_path, together=True, upload="s3://bucket/run")
