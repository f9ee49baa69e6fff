"""Two network namespaces with a cable between them that can be cut. Needs root and iproute2."""

import contextlib
import os
import shutil
import subprocess


def can_split():
    """Tell whether this machine lets us make network namespaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"dipaco-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made.returncode == 0


class SplitNetwork:
    """Side 0 and side 1, one address each."""

    def __init__(self):
        mark = os.getpid() % 100_000
        self.names = (f"dipaco-a-{mark}", f"dipaco-b-{mark}")
        self._devices = (f"dpa{mark}", f"dpb{mark}")
        self.addresses = ("10.213.7.1", "10.213.7.2")

    def prefix(self, side):
        """Return what runs a command on one side."""
        return ["ip", "netns", "exec", self.names[side]]

    def cut(self):
        """Cut the cable."""
        _ip("-n", self.names[0], "link", "set", self._devices[0], "down")

    def mend(self):
        """Mend it again."""
        _ip("-n", self.names[0], "link", "set", self._devices[0], "up")

    def _lay(self):
        for name in self.names:
            _ip("netns", "add", name)
        a, b = self._devices
        _ip(
            "link", "add", a, "netns", self.names[0],
            "type", "veth", "peer", "name", b, "netns", self.names[1],
        )  # fmt: skip
        for name, device, address in zip(self.names, self._devices, self.addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", device, "up")

    def _remove(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@contextlib.contextmanager
def split_network():
    """Lay the cable, and remove everything again."""
    network = SplitNetwork()
    try:
        network._lay()
        yield network
    finally:
        network._remove()


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class ClosedHomes:
    """A hub, and homes that can call it and that nobody can call: they listen on loopback only."""

    def __init__(self, homes):
        self._mark = f"dpc{os.getpid() % 10_000}"
        self._homes = homes

    @property
    def hub_address(self):
        """Where the hub is called from everywhere."""
        return "10.214.0.1"

    def prefix(self, home):
        """Return what runs a command in a home; None: at the hub."""
        return ["ip", "netns", "exec", self._name(home)]

    def _name(self, home):
        return f"{self._mark}-hub" if home is None else f"{self._mark}-{home}"

    def _lay(self):
        for home in (None, *range(self._homes)):
            _ip("netns", "add", self._name(home))
            _ip("-n", self._name(home), "link", "set", "lo", "up")
        hub = self._name(None)
        _ip("-n", hub, "addr", "add", f"{self.hub_address}/32", "dev", "lo")
        for home in range(self._homes):
            up, down, net = f"up{home}", "wan", f"10.214.{home + 1}"
            _ip(
                "link", "add", up, "netns", hub,
                "type", "veth", "peer", "name", down, "netns", self._name(home),
            )  # fmt: skip
            for name, device, host in ((hub, up, 1), (self._name(home), down, 2)):
                _ip("-n", name, "addr", "add", f"{net}.{host}/24", "dev", device)
                _ip("-n", name, "link", "set", device, "up")
            _ip("-n", self._name(home), "route", "add", "default", "via", f"{net}.1")

    def _remove(self):
        for home in (None, *range(self._homes)):
            subprocess.run(["ip", "netns", "del", self._name(home)], capture_output=True, check=False)


@contextlib.contextmanager
def closed_homes(count):
    """Lay the cables, and remove everything again."""
    homes = ClosedHomes(count)
    try:
        homes._lay()
        yield homes
    finally:
        homes._remove()
