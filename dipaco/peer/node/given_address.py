"""The addresses that a peer joined through are kept, so that nobody is asked for them again; other
commands of this machine use them too. So is the line by which others join through the peer."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from dipaco.base.errors import ConfigurationError, DipacoError
from dipaco.base.files import atomic_write, text_of
from dipaco.dht.addresses import EXAMPLE_PEER, check_given_peer, split_operator
from dipaco.peer.exchange.contact.known_peers import KnownPeers
from dipaco.peer.peer_settings import default_cache_folder


def keep_addresses(cache_folder: Path, given: Sequence[str]) -> None:
    """Keep what a peer was given, with the operator that it names; a full disk does not matter."""
    with contextlib.suppress(DipacoError, OSError):
        atomic_write(_file(cache_folder), "".join(f"{address}\n" for address in given).encode())


def kept_addresses(cache_folder: Path) -> tuple[str, ...]:
    """Return the addresses of the last time, of a peer or of the first of `--devices`.

    Raises ConfigurationError if there are none.
    """
    for folder in _folders(cache_folder):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            found = tuple(filter(_is_usable, _file(folder).read_text().split()))
            if found:
                return found
    raise ConfigurationError(
        "no address is given, and no peer has run here: ask for the address of any peer, and give "
        f"it, for example dipaco-peer {EXAMPLE_PEER}"
    )


def known_addresses(cache_folder: Path | None = None) -> tuple[str, ...]:
    """Return how a command that only reads comes into the swarm that the peer of this machine was
    in last: through the addresses of the last time, or through peers that were there with it.

    Raises ConfigurationError if no peer has run here.
    """
    cache_folder = cache_folder or default_cache_folder()
    given = kept_addresses(cache_folder)
    plain, _ = split_operator(given)
    known = [a for folder in _folders(cache_folder) for a in KnownPeers(folder).beside(plain)]
    return tuple(dict.fromkeys((*given, *known)))


def keep_line(cache_folder: Path, line: str) -> None:
    """Keep the line for `dipaco-peer status`, or forget it if it is empty; a full disk does not
    matter."""
    with contextlib.suppress(DipacoError, OSError):
        if line:
            atomic_write(_line_file(cache_folder), f"{line}\n".encode())
        else:
            _line_file(cache_folder).unlink(missing_ok=True)


def kept_line(cache_folder: Path) -> str:
    """Return the line that was kept, "" if there is none."""
    return text_of(_line_file(cache_folder)).strip()


def _line_file(cache_folder: Path) -> Path:
    return cache_folder / "for_a_friend"


def _folders(cache_folder: Path) -> tuple[Path, ...]:
    return cache_folder, cache_folder / "trainer-0"


def _is_usable(address: str) -> bool:
    try:
        check_given_peer(address)
    except DipacoError:
        return False
    return True


def _file(cache_folder: Path) -> Path:
    return cache_folder / "address"
