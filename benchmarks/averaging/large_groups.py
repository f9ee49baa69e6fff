"""What a large averaging group costs: the reduce in one level and in two, and the meeting.

    python benchmarks/averaging/large_groups.py [--members 16,64,256,1000] [--json]

The reduce is counted from who sends what to whom, with equal bandwidths: for a member (the greatest
of all) the others that it exchanges anything with, the messages and bytes that it sends, and the
contributions to one part that a reducer holds at a time. The meeting runs on a virtual clock with
50 to 150 ms from peer to peer, all coming within 0.2 s; sizes are those of the real messages. Its
columns: seconds from the boundary until the last one has the list of members, messages for each
member, and what the leader sends; `list Mbit/s` is the uplink with which its lists leave in one
second. A certificate has this many bytes with all signatures. Nothing here depends on the machine.
"""

from __future__ import annotations

import hashlib
import random
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dipaco.dht.certificate_check import encode_certificate
from dipaco.dht.certificates import Certificate, CommitStatement
from dipaco.dht.identity import peer_id_of_public_key, raw_public_key
from dipaco.modules.codecs import CODECS
from dipaco.modules.outer import SECTION_ROWS, Contribution, canonical_table
from dipaco.modules.plan import PROTOCOL_VERSION
from dipaco.peer.averaging.call_codec import encode
from dipaco.peer.averaging.group import GatherRow
from dipaco.peer.averaging.topology import Topology
from dipaco.peer.member import reception
from dipaco.peer.member.calls import Group, Message
from dipaco.peer.member.meeting import Meeting
from parts.common import Report, build_parser
from support.meeting_net import Faults, MeetingNet
from support.reduce_traffic import reduce_traffic

CODEC = CODECS["float16"]
WINDOW_S = 2.0
LATENCY_S = (0.05, 0.15)
ANCHOR = hashlib.sha256(b"anchor").hexdigest()
MIB = 2**20


class CountingNet(MeetingNet):
    """Counts the bytes that each peer sends; each row is as long as a real one."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, Faults(latency_s=LATENCY_S))
        self.sent: dict[str, list[int]] = {}
        self.list_bytes = 0

    def _say(self, source: str, target: str, number: int, mine: bool, message: Message) -> None:
        size = len(encode(message))
        entry = self.sent.setdefault(source, [0, 0])
        entry[0] += 1
        entry[1] += size
        self.list_bytes += size if isinstance(message, Group) else 0
        super()._say(source, target, number, mine, message)


def peer_ids(count: int) -> list[str]:
    """Real peer ids, the same every time."""
    keys = (
        Ed25519PrivateKey.from_private_bytes(hashlib.sha256(str(number).encode()).digest())
        for number in range(count)
    )
    return [peer_id_of_public_key(raw_public_key(key)) for key in keys]


def reduce_figures(members: int, numbers: int, part_bytes: int, rows: int) -> dict[str, Any]:
    """Count one reduce."""
    sizes = CODEC.part_sizes(numbers, part_bytes)
    topology = Topology.of(range(members), [1] * members, sizes, rows)
    found = reduce_traffic(topology, sizes, CODEC)
    return {
        "partners": max(map(len, found.partners.values())),
        "messages": max(found.messages.values()),
        "mib": max(found.bytes.values()) / MIB,
        "mean_mib": sum(found.bytes.values()) / members / MIB,
        "contributions": max(map(len, topology.sections)),
    }


def meeting_figures(peers: list[str]) -> dict[str, Any]:
    """Run one meeting in which all come."""
    net, chance = CountingNet(0), random.Random(0)

    def make(peer: str) -> Any:
        row = GatherRow(PROTOCOL_VERSION, "L0.E3", 1234, ANCHOR, 100, peer, 12_345_678, 100)
        return lambda now_s: Meeting(
            peer,
            peers,
            row.to_bytes(),
            lambda caller, data: None,
            now_s=now_s,
            window_s=WINDOW_S,
            start_s=0.0,
            close_s=WINDOW_S,
            give_up_s=1.5 * WINDOW_S + 0.5,
        )

    for peer in peers:
        net.add(peer, chance.uniform(0.0, 0.2), make(peer))
    with mock.patch.object(reception, "GREATEST_GROUP", max(len(peers), reception.GREATEST_GROUP)):
        net.run()
    groups = [peer.group for peer in net.peers.values() if peer.group is not None]
    sizes = {len(group.peers) for group in groups}
    leader = max(net.sent.values())
    return {
        "together": len(groups) if len(sizes) == 1 else 0,
        "seconds": max(peer.ended_s for peer in net.peers.values()),
        "messages": sum(count for count, _ in net.sent.values()) / len(peers),
        "leader_messages": leader[0],
        "leader_mib": leader[1] / MIB,
        "list_mbit": net.list_bytes * 8e-6,
    }


def certificate_bytes(peers: list[str]) -> int:
    """Return the size of a certificate that all have signed."""
    table = canonical_table(
        Contribution(place % 256, peer, 12_345_678) for place, peer in enumerate(peers)
    )
    statement = CommitStatement("0" * 16, "L0.E3", 1000, ANCHOR, ANCHOR, 1234, table)
    return len(encode_certificate(Certificate(statement, dict.fromkeys(peers, bytes(64)))))


def main() -> int:
    parser = build_parser(__doc__)
    parser.add_argument("--members", default="16,64,256,1000", help="sizes (16,64,256,1000)")
    parser.add_argument("--numbers", type=int, default=50_000_000, help="averaged (50000000)")
    parser.add_argument("--part-bytes", type=int, default=2**19, help="greatest part (524288)")
    chosen = parser.parse_args()
    columns = ("", "partners", "messages", "MiB sent", "mean MiB", "contributions held")
    report = Report("large groups", columns)
    for members in map(int, chosen.members.split(",")):
        figures: dict[str, Any] = {}
        for name, rows in (("flat", members), ("two levels", SECTION_ROWS)):
            figures[name] = reduce_figures(members, chosen.numbers, chosen.part_bytes, rows)
            report.row(f"{members} members, {name}", *figures[name].values())
        peers = peer_ids(members)
        met = figures["meeting"] = meeting_figures(peers)
        figures["certificate_bytes"] = certificate_bytes(peers)
        report.notes.append(
            f"{members} meet ({met['together']} together): {met['seconds']:.2f} s, "
            f"{met['messages']:.1f} messages each, leader {met['leader_messages']} messages and "
            f"{met['leader_mib']:.1f} MiB, list Mbit/s {met['list_mbit']:.0f}; "
            f"certificate {figures['certificate_bytes']:,} bytes"
        )
        report.figures[str(members)] = figures
    report.print(chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
