"""What the members of a group send each other in a reduce, counted from its topology."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dipaco.modules.codecs import Codec
from dipaco.peer.averaging.allreduce import SUM_NUMBERS
from dipaco.peer.averaging.topology import Topology


@dataclass
class ReduceTraffic:
    """By member: messages with numbers and their bytes, and with whom it has anything to do."""

    messages: Counter[int] = field(default_factory=Counter)
    bytes: Counter[int] = field(default_factory=Counter)
    partners: dict[int, set[int]] = field(default_factory=dict)

    def send(self, source: int, target: int, messages: int, size: int) -> None:
        if source != target:
            self.messages[source] += messages
            self.bytes[source] += size
            self.partners.setdefault(source, set()).add(target)
            self.partners.setdefault(target, set()).add(source)


def reduce_traffic(topology: Topology, part_sizes: Sequence[int], codec: Codec) -> ReduceTraffic:
    found = ReduceTraffic()
    for part, size in enumerate(part_sizes):
        encoded, root = codec.encoded_bytes(size), topology.root(part)
        for members, reducers in zip(topology.sections, topology.reducers, strict=True):
            reducer = reducers[part]
            for member in members:
                found.send(member, reducer, 1, encoded)
                found.send(reducer, member, 1, encoded)
            found.send(reducer, root, -(-size // SUM_NUMBERS), 4 * size)
            found.send(root, reducer, 1, encoded)
    return found
