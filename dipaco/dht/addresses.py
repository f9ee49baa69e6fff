"""What addresses look like: of a peer, to listen on, and with an operator. Nothing is called."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Sequence

from multiaddr import Multiaddr

from dipaco.base.errors import AddressError
from dipaco.base.settings import Option

EXAMPLE_PEER = "/ip4/203.0.113.5/tcp/31337/p2p/12D3KooWPeerId"
_EXAMPLE_LISTEN = "/ip4/0.0.0.0/tcp/31337"
OPERATOR_MARK = "/operator/"


def check_peer_address(address: str) -> str:
    """Return `address` if it names a peer and where to find it. Raises `AddressError`."""
    _parse(address, EXAMPLE_PEER)
    if "/p2p/" not in address:
        raise AddressError(
            f"'{address}' does not end with /p2p/ and a peer id; paste the whole address, "
            f"for example {EXAMPLE_PEER}"
        )
    return address


def check_given_peer(address: str) -> None:
    """Raise `AddressError` unless this is what a volunteer pastes: the address of a peer, and
    perhaps the operator's fingerprint."""
    check_peer_address(split_operator([address])[0][0])


def _check_proxy_name(name: str) -> None:
    """Raise `AddressError` unless this is the name of a host, without scheme and port."""
    if not re.fullmatch(r"[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*", name):
        raise AddressError(
            f"--proxy-name '{name[:80]}' is no name of a host; for example --proxy-name "
            "status.example.org"
        )


PROXY_NAME = Option(
    "host names that a server in front of it passes on",
    "NAME",
    flag="--proxy-name",
    check=_check_proxy_name,
)
"""For the settings of what answers by HTTP."""


def split_operator(addresses: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    """Return addresses as libp2p takes them, and the fingerprint of the operator that they pin.

    A pasted address may end with `/operator/` and the fingerprint; one of several is enough.
    Raises `AddressError` when it is none, or when two pin different operators.
    """
    plain, pinned = [], []
    for address in addresses:
        before, mark, fingerprint = address.partition(OPERATOR_MARK)
        if mark and not re.fullmatch(r"[0-9a-f]{16}", fingerprint):
            raise AddressError(
                f"'{address}' ends with {mark}{fingerprint}, which is no fingerprint of an "
                "operator (16 digits 0-9 and a-f); paste the whole address"
            )
        plain.append(before)
        pinned += [fingerprint] if mark else []
    if len(set(pinned)) > 1:
        raise AddressError(
            f"these addresses name different operators: {', '.join(sorted(set(pinned)))}; give "
            "those of one run"
        )
    return tuple(plain), pinned[0] if pinned else None


def listening_everywhere(port: int) -> tuple[str, ...]:
    """Return the addresses that listen on all there are, of IPv4 and, where a machine has it, of
    IPv6."""
    everywhere = (f"/ip4/0.0.0.0/tcp/{port}", f"/ip6/::/tcp/{port}")
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return everywhere[:1]
    return everywhere


def is_loopback(address: str) -> bool:
    """Tell whether only this machine can call an address."""
    return re.match(r"/ip4/127\.|/ip6/::1/", address) is not None


def check_listen_address(address: str, flag: str) -> str:
    """Return `address` if one can listen there or announce it. Raises `AddressError`."""
    parsed = parse_listen(address)
    if "tcp" not in {protocol.name for protocol in parsed.protocols()}:
        raise AddressError(f"{flag} '{address}' names no port; for example {_EXAMPLE_LISTEN}")
    if flag == "--announce-maddrs" and port_of(parsed) == 0:
        raise AddressError(f"{flag} '{address}' announces port 0; give the port that is forwarded")
    return address


def parse_listen(address: str) -> Multiaddr:
    """Read an address to listen on. Raises `AddressError`."""
    return _parse(address, _EXAMPLE_LISTEN)


def _parse(address: str, example: str) -> Multiaddr:
    try:
        parsed = Multiaddr(address)
    except Exception as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        reason = re.sub(r"^Invalid MultiAddr '.*?': | \(string: .*\)$", "", said)
        raise AddressError(
            f"'{address}' is not a multiaddress ({reason}); for example {example}"
        ) from None
    if any(protocol.name == "udp" for protocol in parsed.protocols()):
        raise AddressError(
            f"'{address}' is of UDP, and connections are made over TCP alone; for example {example}"
        )
    return parsed


def port_of(address: Multiaddr) -> int | None:
    """Return the TCP port of an address; None if it has none."""
    try:
        return int(address.value_for_protocol("tcp"))
    except Exception:
        return None


def with_ports_of(places: Iterable[str], listening: Iterable[str]) -> tuple[str, ...]:
    """Return addresses to listen at, where any port did, with the port of the `places` where it
    came to be. It stays "any" where that is not plain."""
    ports: dict[str, set[int]] = {}
    for place in places:
        family, port = place.split("/")[1], port_of(Multiaddr(place))
        ports.setdefault(family, set()).update([port] if port else [])
    found = []
    for address in listening:
        of_family = ports.get(address.split("/")[1], set())
        is_plain = address.endswith("/tcp/0") and len(of_family) == 1
        found.append(f"{address[:-1]}{min(of_family)}" if is_plain else address)
    return tuple(found)
