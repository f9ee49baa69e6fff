"""A swarm of 256 paths and 500 peers through its rounds, with what goes wrong in a real one."""

import math

from dipaco.protocol.admission import Gate
from dipaco.protocol.manifest import SignedManifest
from dipaco.status.summary import status_of

from .swarm_views import healthy_swarm, peer_name, plan_of

DEVICES = ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3060", "AMD Radeon 7900", "cpu x16")
VERSIONS = ("dipaco/1.4.0", "dipaco/1.4.0", "dipaco/1.4.0", "dipaco/1.3.2", "dipaco/1.2.0")
WAYS = (
    "direct", "direct", "direct", "direct", "direct", "outgoing", "outgoing",
)  # fmt: skip
HOSTILE_NAME = "<img src=x onerror=alert(1)>"


def big_records(round_index, *, peers=500, sizes=(16, 16), in_round=0.5, start_s=1000.0, duration_s=600.0):
    """Return the records of a large healthy swarm at a moment, of machines of many kinds."""
    plan, grid = plan_of(*sizes, duration_s=duration_s)
    plan = plan.model_copy(update={"name": "large", "start_s": start_s})
    records = healthy_swarm(plan, grid, peers=peers, round_index=round_index, in_round=in_round)
    for number, (name, record) in enumerate(list(records.peers.items())):
        spread = (number * 7919) % 997 / 997
        records.peers[name] = record.model_copy(
            update={
                "device": DEVICES[number % len(DEVICES)],
                "software": VERSIONS[number * 31 % len(VERSIONS)],
                "reachable": WAYS[number * 13 % len(WAYS)],
                "tokens_per_s": round(400 * 60**spread * (1 + 0.05 * math.sin(round_index + number))),
                "name": HOSTILE_NAME if number == 3 else f"volunteer {number}" * (number % 3 == 0),
                "bytes_up": 10**6 * round_index * (number + 1),
                "bytes_down": 10**6 * round_index * (number + 2),
                "addresses": (f"/ip4/203.0.{number // 250}.{number % 250}/tcp/31337",),
            }
        )
    for path, entry in list(records.progress.items()):
        loss = 2.6 + 4.5 * math.exp(-round_index / 25) + (path * 37 % 101) / 160
        records.progress[path] = entry.model_copy(
            update={"tokens": entry.tokens * 1000, "validation_nll": loss * 4096, "validation_tokens": 4096}
        )
    return records


def fork(records, module):
    """Let half of a module's trainers hold a chain of their own."""
    holders = sorted(peer for held, peer in records.holdings if held == module)
    newest = max(h.head.round_index for (held, _), h in records.holdings.items() if held == module)
    for peer in holders[::2]:
        records.hold(peer, module, newest, chain="other")


def isolate(records, peer):
    """Let a peer hold states of its own of all that it trains."""
    for held, owner in list(records.holdings):
        if owner == peer:
            newest = records.holdings[held, owner].head
            records.hold(peer, held, newest.round_index, chain=peer)


def neglect(records, path, since_round):
    """Let nobody train a path."""
    for name, claim in list(records.claims.items()):
        if claim.path == path:
            other = (path + 1) % records.grid.path_count
            records.claims[name] = claim.model_copy(update={"path": other})
            records.peers[name] = records.peers[name].model_copy(update={"path": other})
    entry = records.progress[path]
    records.progress[path] = entry.model_copy(update={"last_round": max(0, since_round)})


def spoiled_records(round_index=30, **about):
    """Return a large swarm with a fork, an isolated peer and paths that wait."""
    records = big_records(round_index, **about)
    fork(records, "L0.E3")
    isolate(records, peer_name(137))
    for path in (21, 85, 200):
        neglect(records, path, round_index - 9)
    return records


def spoil(records):
    """Let a swarm in its round 30 have problems of nearly every kind, and return it."""
    for index, module in enumerate(records.grid.modules()):
        holders = sorted(peer for held, peer in records.holdings if held == module)
        for peer in holders:
            if index % 3 == 0:
                records.hold(peer, module, 3)
            elif index % 3 == 1 and peer in holders[1:]:
                records.holdings.pop((module, peer))
        if index % 3 == 2:
            records.hold(holders[0], module, 29, chain="b")
    for name, record in list(records.peers.items())[::2]:
        records.peers[name] = record.model_copy(update={"reachable": "outgoing"})
    for path in list(records.progress)[::5]:
        records.progress[path] = records.progress[path].model_copy(update={"last_round": 0})
    return records


def status_at(records, successor=None):
    """Return the status of the records; `successor` is the plan of the run that continues theirs."""
    manifest = SignedManifest(records.plan, "0" * 16, b"")
    then = successor and SignedManifest(successor, "0" * 16, b"")
    gate = Gate(records.plan.run_id, bytes(32))
    return status_of(records.view(), manifest, records.grid, successor=then, gate=gate)
