"""Who a peer is: one RSA key, libp2p's identity and the signer of its records at once.

Hivemind's record-signing key is otherwise made anew in every process and has nothing to do with
the peer id. Here it is the identity's, so anybody can check that a record's owner marker and the
peer id in the record belong together.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import multihash
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from dipaco.modules.errors import AddressError, StorageError
from hivemind.p2p import P2P, PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey


@dataclass(frozen=True)
class Identity:
    """A loaded identity. Its lock is held until the process ends or `release` is called."""

    peer_id: str
    path: Path
    key: RSAPrivateKey
    lock: int

    def release(self) -> None:
        """Let another process use the identity. Call it once."""
        # Unlocked, not only closed: forked children hold the same lock.
        fcntl.flock(self.lock, fcntl.LOCK_UN)
        os.close(self.lock)


def load_or_create_identity(path: Path) -> Identity:
    """Return the identity in `path`, made on first use and never overwritten (mode 400).

    The key also becomes Hivemind's process-wide signing key, so call this before any fork.
    Raises `AddressError` when another process uses it, `StorageError` when it cannot be read.
    """
    path = Path(path)
    lock = _lock(path)
    try:
        private, peer_id = _read(path)
    except BaseException:
        os.close(lock)
        raise
    key = RSAPrivateKey.__new__(RSAPrivateKey)
    key._private_key = private
    RSAPrivateKey._process_wide_key = key
    return Identity(peer_id, path, key, lock)


def _lock(path: Path) -> int:
    """Two processes with one identity would take each other's connections."""
    lock = -1
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise AddressError(
            f"identity {path} is used by another process; give this one its own "
            "--cache-dir or --identity-path"
        ) from None
    except OSError as error:
        if lock >= 0:
            os.close(lock)
        raise StorageError(f"identity {path}: {error.strerror}") from None
    return lock


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
