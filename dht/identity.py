"""Who a peer is: one RSA key, libp2p's identity and the signer of its records at once.

Hivemind's record-signing key is otherwise made anew in every process and has nothing to do with
the peer id. Here it is the identity's, so anybody can check that a record's owner marker and the
peer id in the record belong together.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import multihash
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from dipaco.modules.errors import AddressError, StorageError
from hivemind.p2p import P2P, PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey

logger = logging.getLogger("dipaco.dht.identity")

# Leaving takes up to ten seconds.
PREDECESSOR_LEAVES_S = 15.0
_LOOK_S = 0.1


@dataclass(frozen=True)
class Identity:
    """A loaded identity. Its lock is held until the process ends or `release` is called."""

    peer_id: str
    path: Path
    key: RSAPrivateKey
    lock: int

    def release(self) -> None:
        """Let another process use the identity. Call it once."""
        let_go(self.lock)


def load_or_create_identity(
    path: Path,
    say: Callable[[str], None] = logger.warning,
    patience_s: float = PREDECESSOR_LEAVES_S,
) -> Identity:
    """Return the identity in `path`, made on first use and never overwritten (mode 400).

    The key also becomes Hivemind's process-wide signing key, so call this before any fork.
    Raises `AddressError` when another process uses it and does not leave within `patience_s`,
    `StorageError` when it cannot be read.
    """
    path = Path(path)
    # Two processes with one identity would take each other's connections.
    lock = take_lock(
        path.with_name(path.name + ".lock"),
        f"identity {path}",
        "--cache-dir or --identity-path",
        say,
        patience_s,
    )
    try:
        private, peer_id = _read(path)
    except BaseException:
        os.close(lock)
        raise
    key = RSAPrivateKey.__new__(RSAPrivateKey)
    key._private_key = private
    RSAPrivateKey._process_wide_key = key
    return Identity(peer_id, path, key, lock)


def take_lock(
    path: Path,
    what: str,
    options: str,
    say: Callable[[str], None] = logger.warning,
    patience_s: float = PREDECESSOR_LEAVES_S,
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
        while not _try_lock(lock):
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


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _owner(lock: int) -> str:
    """Return the id of the process that took the lock last, with a space, if it is known."""
    written = os.pread(lock, 20, 0).decode(errors="replace").strip()
    return f"{written} " if written.isdigit() else ""


def let_go(lock: int) -> None:
    """Let another process take a lock. Call it once."""
    # Unlocked, not only closed: forked children hold the same lock.
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def _read(path: Path) -> tuple[rsa.RSAPrivateKey, str]:
    """Return the key in `path` and its peer id. Called with the lock held."""
    try:
        if not path.exists():
            # Renamed when complete: a crash must not leave half an identity.
            unfinished = path.with_name(path.name + ".new")
            unfinished.unlink(missing_ok=True)
            P2P.generate_identity(str(unfinished))
            os.replace(unfinished, path)
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(f"identity {path}: {error.strerror}") from None
    try:
        private = serialization.load_der_private_key(
            crypto_pb2.PrivateKey.FromString(data).data, password=None
        )
        if not isinstance(private, rsa.RSAPrivateKey):
            raise TypeError("not an RSA key")
        return private, str(PeerID.from_identity(data).to_base58())
    except Exception:
        raise StorageError(
            f"{path} is not a libp2p RSA key; move it away to have a new identity made"
        ) from None


def peer_id_of_public_key(openssh_key: bytes) -> str:
    """Return the peer id that belongs to an owner marker's key ("ssh-rsa AAAA...").

    Raises ValueError when it is no RSA key, or one that is not spelled as `to_bytes` spells it.
    libp2p's rule: the SHA-256 multihash of the key as protobuf.
    """
    key = RSAPublicKey.from_bytes(openssh_key)
    if key.to_bytes() != openssh_key:
        raise ValueError("the key is not in its canonical form")
    public = key._public_key
    encoded = crypto_pb2.PublicKey(
        key_type=crypto_pb2.RSA,
        data=public.public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        ),
    ).SerializeToString()
    digest = hashlib.sha256(encoded).digest()
    return str(PeerID(multihash.encode(digest, "sha2-256")).to_base58())
