"""Certificates on disk, a file for each module, so that a peer that was away knows them again."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgpack
from dipaco.dht.certificate_check import decode_certificate, encode_certificate
from dipaco.dht.certificates import Certificate
from dipaco.dht.records import RecordError
from dipaco.modules.files import atomic_write
from dipaco.modules.grid import Grid

logger = logging.getLogger("dipaco.peer.exchange.certificate_files")

MAX_FILE_BYTES = 2**20
_SUFFIX = ".certificates"
_HASH_BYTES = 32


class CertificateFiles:
    """`folder/<module>.certificates`: a SHA-256, then the certificates that it is of."""

    def __init__(self, folder: Path, run_id: str, grid: Grid) -> None:
        self._folder = Path(folder)
        self._run_id = run_id
        self._grid = grid

    def save(self, module: str, certificates: Iterable[Certificate]) -> None:
        """Write the certificates of a module, the newest of them if not all fit.

        Raises `StorageError`.
        """
        newest = sorted(certificates, key=_age)
        kept: list[bytes] = []
        left_bytes = MAX_FILE_BYTES - 64
        for certificate in newest:
            data = encode_certificate(certificate)
            left_bytes -= len(data) + 5
            if left_bytes < 0:
                break
            kept.append(data)
        content: bytes = msgpack.packb(kept, use_bin_type=True)
        atomic_write(self._folder / f"{module}{_SUFFIX}", _hash(content) + content)

    def load(self) -> Iterator[Certificate]:
        """Yield what an earlier life of this peer wrote; a damaged file is skipped with a warning.

        Signatures are not checked again: they were before they were written.
        """
        for module in self._grid.modules():
            path = self._folder / f"{module}{_SUFFIX}"
            try:
                yield from self._read(path)
            except FileNotFoundError:
                continue
            except (OSError, ValueError, RecordError) as error:
                logger.warning("certificates of %s are not used: %s (%s)", module, error, path)

    def _read(self, path: Path) -> list[Certificate]:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError("the file is too large")
        data = path.read_bytes()
        content = data[_HASH_BYTES:]
        if _hash(content) != data[:_HASH_BYTES]:
            raise ValueError("the file is damaged")
        return [decode_certificate(item, self._run_id) for item in msgpack.unpackb(content)]


def _age(certificate: Certificate) -> tuple[int, str]:
    return -certificate.statement.round_index, certificate.statement.digest


def _hash(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
