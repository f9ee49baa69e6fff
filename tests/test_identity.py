"""One key is libp2p's identity and the signer of records, and one process uses it at a time."""

from __future__ import annotations

import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from dipaco.dht.identity import (
    let_go,
    load_or_create_identity,
    peer_id_of_public_key,
    take_lock,
)
from dipaco.modules.errors import AddressError, StorageError
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import PeerID
from hivemind.utils.crypto import RSAPrivateKey


def test_the_key_is_made_once_and_is_libp2ps(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity.key"
    identity = load_or_create_identity(path)
    data = path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o400
    assert identity.peer_id == PeerID.from_identity(data).to_base58()
    identity.release()
    again = load_or_create_identity(path)
    assert (again.peer_id, path.read_bytes()) == (identity.peer_id, data)
    again.release()


def test_anybody_can_tell_the_peer_id_of_a_records_owner(tmp_path: Path) -> None:
    identity = load_or_create_identity(tmp_path / "identity.key")
    assert peer_id_of_public_key(identity.key.get_public_key().to_bytes()) == identity.peer_id
    marker = RSASignatureValidator().local_public_key
    assert marker == b"[owner:" + identity.key.get_public_key().to_bytes() + b"]"
    assert RSAPrivateKey.process_wide() is identity.key
    identity.release()


@pytest.mark.parametrize("key", [b"", b"ssh-rsa AAAA", b"ssh-ed25519 AAAA", b"\xff"])
def test_what_is_no_rsa_key_has_no_peer_id(key: bytes) -> None:
    with pytest.raises(ValueError, match=r".*"):
        peer_id_of_public_key(key)


def test_a_second_process_cannot_use_the_identity(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    identity = load_or_create_identity(path)
    with pytest.raises(AddressError, match="used by another process"):
        load_or_create_identity(path, patience_s=0.0)
    other = (
        "import sys; from pathlib import Path\n"
        "from dipaco.modules.errors import AddressError\n"
        "from dipaco.dht.identity import load_or_create_identity\n"
        "try: load_or_create_identity(Path(sys.argv[1]), patience_s=0.0)\n"
        "except AddressError: sys.exit(42)\n"
    )
    command = [sys.executable, "-c", other, str(path)]
    assert subprocess.run(command, check=False, timeout=60).returncode == 42
    identity.release()
    assert subprocess.run(command, check=False, timeout=60).returncode == 0


def test_a_file_that_is_no_key_is_named_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(b"something else")
    for _ in range(2):  # The lock must have been let go.
        with pytest.raises(StorageError, match="identity.key is not a libp2p RSA key"):
            load_or_create_identity(path)
    assert path.read_bytes() == b"something else"


def test_an_empty_key_file_left_by_a_crash_is_named(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    path.touch()
    with pytest.raises(StorageError, match="move it away"):
        load_or_create_identity(path)


def test_a_place_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="identity"):
        load_or_create_identity(tmp_path / "file" / "identity.key")


OWNER = """
import sys; from pathlib import Path
from dipaco.dht.identity import take_lock
take_lock(Path(sys.argv[1]), "it", "folder")
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_start_waits_for_its_predecessor_to_leave(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    said: list[str] = []
    waits = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        waits.set()

    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(path) + ".lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "locked\n"
        with ThreadPoolExecutor(1) as threads:
            starting = threads.submit(load_or_create_identity, path, say, 120.0)
            assert waits.wait(60)
            owner.communicate("", timeout=60)
            starting.result(120).release()
    assert said == [
        f"waiting for the process {owner.pid} that uses identity {path} to leave (at most 120 s)"
    ]


def test_a_predecessor_that_stays_is_named_with_the_remedy(tmp_path: Path) -> None:
    said: list[str] = []
    lock = take_lock(tmp_path / ".lock", "the folder", "--cache-dir", said.append)
    assert said == []
    with pytest.raises(AddressError, match="the folder is used by another process.*--cache-dir"):
        take_lock(tmp_path / ".lock", "the folder", "--cache-dir", said.append, 0.3)
    assert len(said) == 1
    let_go(lock)
    let_go(take_lock(tmp_path / ".lock", "the folder", "--cache-dir", said.append, 0.0))
