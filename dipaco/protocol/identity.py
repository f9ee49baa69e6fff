"""A peer is one Ed25519 key, libp2p's identity and the signer of all that the peer says.

A peer id contains its public key, so anybody can check a signature who knows the peer id alone.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from dipaco.base.errors import AddressError, StorageError
from dipaco.base.files import atomic_write, try_lock

logger = logging.getLogger("dipaco.protocol.identity")

# In a cache folder.
KEY_FILE = "identity.key"
# Leaving takes up to ten seconds.
_PREDECESSOR_LEAVES_S = 15.0
_LOOK_S = 0.1
PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64
# libp2p's protobuf of a key: its type, its length and the key. Of a private one the 32 bytes of
# the seed and the 32 of the public key.
_ED25519_PRIVATE = b"\x08\x01\x12\x40"
_ED25519_PUBLIC = b"\x08\x01\x12\x20"
# The id of a short key is the key itself, as a multihash of the kind "identity", 36 bytes long.
PEER_ID_PREFIX = b"\x00\x24" + _ED25519_PUBLIC
_PEER_ID_CHARACTERS = 52
# Under a key of small order one signature holds for every message: the points whose eightfold is
# zero, in all spellings, without the bit of the sign.
_SMALL_ORDER = frozenset(
    bytes.fromhex(point)
    for point in (
        "00" * 32,
        "01" + "00" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ec" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f",
        "ee" + "ff" * 30 + "7f",
    )
)


@dataclass(frozen=True)
class Identity:
    """A loaded identity. Its lock is held until the process ends or `release` is called."""

    peer_id: str
    path: Path
    key: Ed25519PrivateKey
    lock: int

    @property
    def public_key(self) -> bytes:
        """The 32 bytes that stand in the peer id."""
        return raw_public_key(self.key)

    def release(self) -> None:
        """Let another process use the identity. Call it once."""
        let_go(self.lock)


def load_or_create_identity(
    path: Path,
    say: Callable[[str], None] = logger.warning,
    patience_s: float = _PREDECESSOR_LEAVES_S,
) -> Identity:
    """Return the identity in `path`, made on first use and never overwritten (mode 400).

    Raises `AddressError` when another process uses it and does not leave within `patience_s`,
    `StorageError` when it cannot be read; `say` tells that it waits.
    """
    path = Path(path)
    # Two processes with one identity would take each other's connections.
    lock = take_lock(
        path.with_name(path.name + ".lock"),
        f"identity {path}",
        "--cache-dir",
        say,
        patience_s,
    )
    try:
        if not path.exists():
            _create(path)
        key = _read(path)
    except BaseException:
        os.close(lock)
        raise
    return Identity(peer_id_of_public_key(raw_public_key(key)), path, key, lock)


def kept_peer_id(path: Path) -> str:
    """Return the peer id of the identity in `path`, which another process may use. Raises
    `StorageError`."""
    return peer_id_of_public_key(raw_public_key(_read(path)))


def take_lock(
    path: Path,
    what: str,
    options: str,
    say: Callable[[str], None] = logger.warning,
    patience_s: float = _PREDECESSOR_LEAVES_S,
) -> int:
    """Lock `path` for this process until `let_go`, and return the lock.

    A process that was started again waits for its predecessor, which may still be leaving, and
    says so once. Raises `AddressError` when the other one stays, naming the `options` that help,
    and `StorageError`. `what` is what the lock protects.
    """
    lock = -1
    until: float | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        while not try_lock(lock, path.parent):
            if until is None:
                until = time.monotonic() + patience_s
                say(
                    f"waiting for the process {_owner(lock)}that uses {what} to leave "
                    f"(at most {patience_s:g} s)"
                )
            if time.monotonic() > until:
                raise AddressError(
                    f"{what} is used by another process; give this one its own {options}"
                )
            time.sleep(_LOOK_S)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        if lock >= 0:
            os.close(lock)
        raise StorageError(f"{what}: {error.strerror}") from None
    except BaseException:
        os.close(lock)
        raise
    return lock


def is_in_use(path: Path) -> bool:
    """Tell whether a process on this machine has the identity in `path`; nothing is made."""
    try:
        lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR)
    except OSError:
        return False
    try:
        return not try_lock(lock, path.parent)
    except (OSError, StorageError):
        return False
    finally:
        os.close(lock)


def _owner(lock: int) -> str:
    """Return the id of the process that took the lock last, after a space, if it is known."""
    written = os.pread(lock, 20, 0).decode(errors="replace").strip()
    return f"{written} " if written.isdigit() else ""


def let_go(lock: int) -> None:
    """Let another process take a lock. Call it once."""
    # Unlocked, not only closed: forked children hold the same lock.
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def _read(path: Path) -> Ed25519PrivateKey:
    """Return the key in `path`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(f"identity {path}: {error.strerror}") from None
    seed, public = data[4:36], data[36:]
    if data.startswith(_ED25519_PRIVATE) and len(seed) == 32:
        key = Ed25519PrivateKey.from_private_bytes(seed)
        if raw_public_key(key) == public:
            return key
    raise StorageError(
        f"{path} is not a libp2p Ed25519 key; move it away to have a new identity made"
    )


def _create(path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    seed = key.private_bytes(
        serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption()
    )
    atomic_write(path, _ED25519_PRIVATE + seed + raw_public_key(key), mode=0o400)


def raw_public_key(key: Ed25519PrivateKey) -> bytes:
    """Return the 32 bytes of a key's public half."""
    return key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)


def peer_id_of_public_key(public_key: bytes) -> str:
    """Return the peer id of an Ed25519 key of 32 bytes. Raises ValueError for another length."""
    if len(public_key) != PUBLIC_KEY_BYTES:
        raise ValueError(f"an Ed25519 public key has {PUBLIC_KEY_BYTES} bytes")
    return base58.b58encode(PEER_ID_PREFIX + public_key).decode()


def public_key_of_peer_id(peer_id: str) -> bytes:
    """Return the 32 bytes of the key that a peer id contains.

    Raises ValueError when it is not the id of an Ed25519 key, in the one spelling of that id.
    """
    if len(peer_id) != _PEER_ID_CHARACTERS:
        raise ValueError("not the peer id of an Ed25519 key")
    data = base58.b58decode(peer_id)
    public_key = data[len(PEER_ID_PREFIX) :]
    if not data.startswith(PEER_ID_PREFIX) or peer_id_of_public_key(public_key) != peer_id:
        raise ValueError("not the peer id of an Ed25519 key")
    return public_key


def is_signed(message: bytes, signature: bytes, public_key: bytes) -> bool:
    """Tell whether the owner of a public key of 32 bytes signed `message`. Never raises."""
    if is_of_small_order(public_key):
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def is_of_small_order(public_key: bytes) -> bool:
    """Tell whether a public key of 32 bytes belongs to nobody: everybody can sign for it."""
    return public_key[:-1] + bytes([public_key[-1] & 0x7F]) in _SMALL_ORDER if public_key else False
