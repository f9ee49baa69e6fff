"""A DHT node on loopback and exchanges on it, for tests of what peers ask each other.

The fixture `nodes` (conftest.py) gives them; a test starts the exchanges that it needs.
"""

from dipaco.dht.guarded_dht import GuardedDHT
from dipaco.peer.exchange.exchange import Exchange
from dipaco.peer.exchange.streams.transport import HivemindTransport

RUN = "0123456789abcdef"
NOBODY = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


class Nodes:
    """A DHT node; exchanges on it are made by each test."""

    def __init__(self):
        self.server_dht = GuardedDHT(startup_timeout=60)
        self.server_dht.start()
        self.addresses = [str(address) for address in self.server_dht.get_visible_maddrs()]
        self.started = []

    def serving(self):
        exchange = Exchange(HivemindTransport(self.server_dht))
        exchange.start()
        self.started.append(exchange)
        return exchange

    def stop_exchanges(self):
        while self.started:
            self.started.pop().stop()
