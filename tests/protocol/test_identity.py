"""One key is libp2p's identity and the signer of records, and one process uses it at a time."""

import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hivemind.p2p import PeerID
from hypothesis import given
from hypothesis import strategies as st

from dipaco.base.errors import AddressError, StorageError
from dipaco.protocol.identity import (
    is_signed,
    let_go,
    load_or_create_identity,
    peer_id_of_public_key,
    public_key_of_peer_id,
    take_lock,
)
from support.programs.processes import ran

BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
# From the specification of peer ids by libp2p, where the keys stand as protobuf in hexadecimal.
LIBP2P_PRIVATE = bytes.fromhex(
    "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d1ed1e8fae2c4a144b8be8f"
    "d4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
)
LIBP2P_PUBLIC = bytes.fromhex("080112201ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")


def test_the_key_is_made_once_and_is_libp2ps(tmp_path):
    path = tmp_path / "deep" / "identity.key"
    identity = load_or_create_identity(path)
    data = path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o400
    assert identity.peer_id.startswith("12D3KooW")
    identity.release()
    again = load_or_create_identity(path)
    assert (again.peer_id, path.read_bytes()) == (identity.peer_id, data)
    again.release()


def test_keys_and_ids_are_those_of_libp2ps_specification(tmp_path):
    path = tmp_path / "identity.key"
    path.write_bytes(LIBP2P_PRIVATE)
    identity = load_or_create_identity(path)
    assert identity.public_key == LIBP2P_PUBLIC[4:]
    assert PeerID.from_base58(identity.peer_id).to_bytes() == b"\x00\x24" + LIBP2P_PUBLIC
    identity.release()


def test_p2pd_takes_the_identity_and_hivemind_makes_no_key_of_its_own(tmp_path):
    program = (
        "import sys; from pathlib import Path\n"
        "from hivemind.utils.crypto import RSAPrivateKey\n"
        "from support.wire.dht_pair import start_node\n"
        "node = start_node(Path(sys.argv[1]))\n"
        "assert str(node.dht.peer_id) == node.peer_id, (node.dht.peer_id, node.peer_id)\n"
        "assert RSAPrivateKey._process_wide_key is None\n"
        "node.close()\n"
    )
    done = ran(sys.executable, "-c", program, tmp_path, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr


@given(st.binary(min_size=32, max_size=32))
def test_a_peer_id_contains_its_key(public_key):
    peer_id = peer_id_of_public_key(public_key)
    assert public_key_of_peer_id(peer_id) == public_key
    assert PeerID.from_base58(peer_id).to_base58() == peer_id


@pytest.mark.parametrize("key", [b"", b"x" * 31, b"x" * 33])
def test_what_is_no_key_has_no_peer_id(key):
    with pytest.raises(ValueError, match="32 bytes"):
        peer_id_of_public_key(key)


@given(st.text(max_size=60) | st.text(BASE58, min_size=52, max_size=52))
def test_no_other_text_is_a_peer_id(text):
    with pytest.raises(ValueError, match=r".*"):
        public_key_of_peer_id(text)


def test_a_signature_is_of_one_message_and_one_key(tmp_path):
    identity = load_or_create_identity(tmp_path / "identity.key")
    signature = identity.key.sign(b"message")
    assert is_signed(b"message", signature, identity.public_key)
    assert not is_signed(b"another", signature, identity.public_key)
    assert not is_signed(b"message", signature, LIBP2P_PUBLIC[4:])
    for nonsense in (b"", b"x" * 64, signature + b"x", signature[:-1]):
        assert not is_signed(b"message", nonsense, identity.public_key)
    for nonsense in (b"", b"x" * 31, b"\xff" * 32):
        assert not is_signed(b"message", signature, nonsense)
    identity.release()


def test_a_second_process_cannot_use_the_identity(tmp_path):
    path = tmp_path / "identity.key"
    identity = load_or_create_identity(path)
    with pytest.raises(AddressError, match="used by another process"):
        load_or_create_identity(path, patience_s=0.0)
    other = (
        "import sys; from pathlib import Path\n"
        "from dipaco.base.errors import AddressError\n"
        "from dipaco.protocol.identity import load_or_create_identity\n"
        "try: load_or_create_identity(Path(sys.argv[1]), patience_s=0.0)\n"
        "except AddressError: sys.exit(42)\n"
    )
    command = [sys.executable, "-c", other, str(path)]
    assert subprocess.run(command, check=False, timeout=200).returncode == 42
    identity.release()
    assert subprocess.run(command, check=False, timeout=200).returncode == 0


def test_a_file_that_is_no_key_is_named_and_kept(tmp_path):
    path = tmp_path / "identity.key"
    # The last one's halves do not belong together: p2pd would sign what nobody can check.
    for data in (b"something else", LIBP2P_PRIVATE[:-1], LIBP2P_PRIVATE[:-1] + b"x"):
        path.write_bytes(data)
        for _ in range(2):  # The lock must have been let go.
            with pytest.raises(StorageError, match="identity.key is not a libp2p Ed25519 key"):
                load_or_create_identity(path)
        assert path.read_bytes() == data


def test_an_empty_key_file_left_by_a_crash_is_named(tmp_path):
    path = tmp_path / "identity.key"
    path.touch()
    with pytest.raises(StorageError, match="move it away"):
        load_or_create_identity(path)


def test_a_place_that_cannot_be_written_is_a_storage_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="identity"):
        load_or_create_identity(tmp_path / "file" / "identity.key")


OWNER = """
import sys; from pathlib import Path
from dipaco.protocol.identity import take_lock
take_lock(Path(sys.argv[1]), "it", "folder")
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_start_waits_for_its_predecessor_to_leave(tmp_path):
    path = tmp_path / "identity.key"
    said = []
    waits = threading.Event()

    def say(line):
        said.append(line)
        waits.set()

    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(path) + ".lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout.readline() == "locked\n"
        with ThreadPoolExecutor(1) as threads:
            starting = threads.submit(load_or_create_identity, path, say, 120.0)
            assert waits.wait(60)
            owner.communicate("", timeout=60)
            starting.result(120).release()
    assert said == [f"waiting for the process {owner.pid} that uses identity {path} to leave (at most 120 s)"]


def test_a_predecessor_that_stays_is_named_with_the_remedy(tmp_path):
    said = []
    lock = take_lock(tmp_path / ".lock", "the folder", "--cache-dir", said.append)
    assert said == []
    with pytest.raises(AddressError, match="the folder is used by another process.*--cache-dir"):
        take_lock(tmp_path / ".lock", "the folder", "--cache-dir", said.append, 0.3)
    assert len(said) == 1
    let_go(lock)
    let_go(take_lock(tmp_path / ".lock", "the folder", "--cache-dir", said.append, 0.0))
