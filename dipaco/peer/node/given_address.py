"""The addresses that a peer joined through are kept, so that nobody is asked for them again."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from dipaco.base.errors import ConfigurationError, DipacoError
from dipaco.base.files import atomic_write
from dipaco.dht.addresses import EXAMPLE_PEER, check_given_peer


def keep_addresses(cache_folder: Path, given: Sequence[str]) -> None:
    """Keep what a peer was given, with the operator that it names; a full disk does not matter."""
    with contextlib.suppress(DipacoError, OSError):
        atomic_write(_file(cache_folder), "".join(f"{address}\n" for address in given).encode())


def kept_addresses(cache_folder: Path) -> tuple[str, ...]:
    """Return the addresses of the last time, of a peer or of the first of `--devices`.

    Raises ConfigurationError if there are none.
    """
    for folder in (cache_folder, cache_folder / "trainer-0"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            found = tuple(filter(_is_usable, _file(folder).read_text().split()))
            if found:
                return found
    raise ConfigurationError(
        "no address is given: ask for the address of a peer, and type dipaco-peer and the "
        f"address, for example dipaco-peer {EXAMPLE_PEER}"
    )


def _is_usable(address: str) -> bool:
    try:
        check_given_peer(address)
    except DipacoError:
        return False
    return True


def _file(cache_folder: Path) -> Path:
    return cache_folder / "address"
