"""Network namespaces as homes: routers with real NAT between peers and the rest of the world.

One namespace is the world. Every site hangs on it by a cable of its own, with public addresses: an
open peer right there, a closed one behind one router that masquerades, or behind two. Needs root,
iproute2 and nftables. Everything that was made is removed at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator

MASQUERADE = """
table ip home {
  chain out { type nat hook postrouting priority 100; oifname "wan" masquerade; }
  chain through {
    type filter hook forward priority 0; policy drop;
    ct state established,related accept
    iifname "lan" accept
  }
}
"""


def can_make_homes(*, with_nat: bool = True) -> bool:
    """Tell whether this machine has what it takes."""
    tools = ("ip", "nft") if with_nat else ("ip",)
    return os.geteuid() == 0 and all(map(shutil.which, tools))


class Homes:
    """The world and its sites; `routers` of each say how many lie between it and the world."""

    def __init__(self, routers: tuple[int, ...]) -> None:
        self._mark = f"dh{os.getpid() % 100_000}"
        self._made: list[str] = []
        self._routers = routers

    def build(self) -> None:
        """Make everything. Exits when that is not possible."""
        self.world = self._namespace("world")
        self.peers = [self._site(number, depth) for number, depth in enumerate(self._routers)]

    def address(self, site: int) -> str:
        """Return the public address of an open site."""
        return f"45.10.{site}.2"

    def prefix(self, site: int) -> list[str]:
        """Return what runs a command at a site."""
        return ["ip", "netns", "exec", self.peers[site]]

    def limit(self, site: int, mbps: float) -> None:
        """Let what leaves a site have so many Mbit/s at most."""
        bucket = ("rate", f"{int(1000 * mbps)}kbit", "burst", "16kb", "latency", "200ms")
        _run(*self.prefix(site), "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *bucket)

    def traffic(self, site: int) -> tuple[int, int]:
        """Return the bytes that a site has received and sent."""
        command = (*self.prefix(site), "ip", "-s", "-j", "link", "show", "eth0")
        counted = json.loads(_run(*command))[0]["stats64"]
        return int(counted["rx"]["bytes"]), int(counted["tx"]["bytes"])

    def _namespace(self, name: str) -> str:
        made = f"{self._mark}-{name}"
        _run("ip", "netns", "add", made)
        self._made.append(made)
        _run("ip", "-n", made, "link", "set", "lo", "up")
        _run("ip", "netns", "exec", made, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        return made

    def _cable(self, upper: str, upper_end: str, lower: str, lower_end: str, net: str) -> None:
        """Join two namespaces; the lower one sends everything to the upper one."""
        _run(
            "ip", "link", "add", upper_end, "netns", upper,
            "type", "veth", "peer", "name", lower_end, "netns", lower,
        )  # fmt: skip
        for name, end, host in ((upper, upper_end, 1), (lower, lower_end, 2)):
            _run("ip", "-n", name, "addr", "add", f"{net}.{host}/24", "dev", end)
            _run("ip", "-n", name, "link", "set", end, "up")
        _run("ip", "-n", lower, "route", "add", "default", "via", f"{net}.1")

    def _site(self, number: int, depth: int) -> str:
        above, end, net = self.world, f"site{number}", f"45.10.{number}"
        for level in range(depth):
            router = self._namespace(f"router{number}-{level}")
            self._cable(above, end, router, "wan", net)
            _run("ip", "netns", "exec", router, "nft", "-f", "-", text=MASQUERADE)
            above, end, net = router, "lan", f"192.168.{10 * level + 1}"
        peer = self._namespace(f"peer{number}")
        self._cable(above, end, peer, "eth0", net)
        return peer

    def remove(self) -> None:
        """Remove all namespaces, and with them the cables."""
        for name in reversed(self._made):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@contextlib.contextmanager
def homes(*routers: int) -> Iterator[Homes]:
    """Build the sites, and remove everything again."""
    made = Homes(routers)
    try:
        made.build()
        yield made
    finally:
        made.remove()


def _run(*command: str, text: str | None = None) -> str:
    done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
