"""Mirrors of a run's blobs, as sources of a download: an https address, or a folder."""

from __future__ import annotations

import ipaddress
import socket
from typing import BinaryIO
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import fsspec

from dipaco.base.blocking import run_blocking
from dipaco.protocol.plan import check_mirror

from .transfer import ContentAbsent, ContentStream, OffsetBeyondEnd


def _refuse_private(address: str) -> None:
    """Raise OSError for an https mirror at an address that not everybody can call: a manifest must
    not send volunteers to what is in their own networks."""
    place = urlsplit(address)
    if place.scheme != "https" or _is_behind_proxy(place.hostname or ""):
        return
    for *_, found in socket.getaddrinfo(place.hostname, place.port or 443):
        if not ipaddress.ip_address(str(found[0]).partition("%")[0]).is_global:
            raise OSError(f"the mirror is at the private address {found[0]}")


def _is_behind_proxy(host: str) -> bool:
    """Tell whether a host is called through the proxy of this machine, which looks up its name.

    An address that is private by its number is private in every network.
    """
    if "https" not in getproxies() or proxy_bypass(host):
        return False
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return host != "localhost"


class MirrorSource:
    """One mirror as a source of `download`."""

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")
        self.name = f"mirror {self._address}"

    async def open(self, sha256: str, offset: int) -> tuple[ContentStream, int]:
        """Open the mirror's file; blocks a thread, not the loop."""
        return await run_blocking(self._open, sha256, offset)

    def _open(self, sha256: str, offset: int) -> tuple[ContentStream, int]:
        # Laid out as the folder of blobs of a run is.
        address = f"{check_mirror(self._address)}/{sha256[:2]}/{sha256}"
        _refuse_private(self._address)
        # The HTTP client reads the proxy of this machine only when it is told to.
        is_https = address.startswith("https:")
        options = {"client_kwargs": {"trust_env": True}} if is_https else {}
        system, path = fsspec.core.url_to_fs(address, **options)
        try:
            total_bytes = system.size(path)
            if total_bytes is None:
                raise OSError("the mirror does not say how large its files are")
            if offset > total_bytes:
                raise OffsetBeyondEnd
            file = system.open(path, "rb")
        except FileNotFoundError as error:
            # Every failure at https has this name; a mirror that cannot be reached is not one that
            # lacks the file.
            cause = error.__cause__
            if is_https and cause is not None and getattr(cause, "status", 0) not in (404, 410):
                raise OSError(f"{self.name} cannot be read: {cause}") from None
            raise ContentAbsent from None
        file.seek(offset)
        return _MirrorStream(file), int(total_bytes)


class _MirrorStream:
    """An open file of a mirror."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    async def read(self, count: int) -> bytes:
        """Return up to `count` bytes."""
        return await run_blocking(self._file.read, count)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
