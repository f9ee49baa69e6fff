"""What `dipaco-bootstrap plan` says that a role moves is what peers move in the simulated swarm."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import pytest

from dipaco.bootstrap.plan.traffic import FILES, RECEIVED, SENT, Crowd, LevelLoad, swarm_traffic
from dipaco.simulator.swarm.engine import Engine
from dipaco.simulator.swarm.invariants import Invariants
from dipaco.simulator.swarm.machine import Machine
from dipaco.simulator.swarm.network import Link
from dipaco.simulator.swarm.scenario import small_plan
from dipaco.simulator.swarm.world import FILE_BYTES, START_S, World

VOLUNTEER, CLOSED_VOLUNTEER, BOOTSTRAP_NODE = "volunteer", "unreachable volunteer", "bootstrap node"
ROUND_S, SETTLING, COUNTED = 300.0, 4, 6
WITHIN = 0.2
# Modules of each level, peers that train, and how many of them cannot be called.
SWARMS = [((2, 2), 12, 3), ((2, 2), 24, 5), ((3, 3), 18, 4), ((4,), 8, 2), ((2,), 4, 4)]
SEEDS = (0, 1)


class _Counted(Machine):
    """Counts the files of others that it gave."""

    gave = 0

    def serve(self, caller, verb, content):
        answer, size = super().serve(caller, verb, content)
        if verb == "get" and answer is not None:
            self.gave += self.world.files[content].row.peer != self.peer
        return answer, size


@dataclass
class _Found:
    """What one kind of peers moved in a round, on average, and what they hold."""

    count: int
    sent: float
    received: float
    stored: float
    """In the DHT, which is in what is sent."""
    read: float
    copies: float
    """States of modules that one of them does not train."""
    gave: float


def _live(grid, peers, closed, seed):
    """Let a calm swarm live, with one bootstrap node, and return what each kind moved."""
    engine = Engine(seed, START_S - ROUND_S)
    world = World(small_plan(grid, duration_s=ROUND_S), engine)
    watch = Invariants(world)
    kinds = {VOLUNTEER: [], CLOSED_VOLUNTEER: [], BOOTSTRAP_NODE: []}
    fast = Link(latency_s=0.02, jitter_s=0.005, uplink_bytes_s=1.25e8, downlink_bytes_s=1.25e8)
    node = _Counted(world, "boot0", fast, trains=False)
    for path in range(world.grid.path_count):
        node.store.shards.add(path)
    node.start()
    kinds[BOOTSTRAP_NODE].append(node)
    for number in range(peers):
        link = Link(can_be_called=number >= closed)
        machine = _Counted(world, f"p{number:02}", link, step_s=engine.between(4.0, 12.0))
        kinds[VOLUNTEER if number >= closed else CLOSED_VOLUNTEER].append(machine)
        engine.after(engine.between(1.0, ROUND_S / 2), machine.start)
    engine.run(START_S + SETTLING * ROUND_S)
    before = {kind: _counts(machines) for kind, machines in kinds.items()}
    engine.run(START_S + (SETTLING + COUNTED) * ROUND_S)
    assert watch.violations == []
    found = {}
    for kind, machines in kinds.items():
        moved = _counts(machines)
        moved.subtract(before[kind])
        copies = sum(len(machine.store.held.keys() - machine.works) for machine in machines)
        each = {name: moved[name] / COUNTED / max(1, len(machines)) for name in moved}
        found[kind] = _Found(len(machines), copies=copies / max(1, len(machines)), **each)
    return found


def _counts(machines):
    counts = Counter({"sent": 0, "received": 0, "stored": 0, "read": 0, "gave": 0})
    for machine in machines:
        traffic = machine.link.traffic
        counts["sent"] += traffic.sent.total()
        counts["received"] += traffic.received.total()
        counts["stored"] += traffic.sent["views"]
        counts["read"] += traffic.received["views"]
        counts["gave"] += machine.gave
    return counts


def compared(grid, peers, closed, seed):
    """Return what was counted, for each byte that the plan says, by role and direction."""
    found = _live(grid, peers, closed, seed)
    plan = small_plan(grid, duration_s=ROUND_S)
    levels = [LevelLoad(count, 1 / count, FILE_BYTES) for count in grid]
    crowd = Crowd(peers, closed / peers, bootstrap_nodes=1)
    moved = swarm_traffic(levels, math.prod(grid), plan.rounds, crowd)
    roles = {VOLUNTEER: moved.trains, CLOSED_VOLUNTEER: moved.trains_closed, BOOTSTRAP_NODE: moved.serves}
    # The simulator does not say who answers and stores: all who can be called, alike.
    able = [found[VOLUNTEER], found[BOOTSTRAP_NODE]]
    answered = sum(one.count * one.read for one in found.values()) / sum(o.count for o in able)
    taken = sum(one.count * one.stored for one in found.values()) / sum(o.count for o in able)
    # Trainers are the mailboxes, if one of them can be called.
    leading = VOLUNTEER if found[VOLUNTEER].count else BOOTSTRAP_NODE
    ratios = {}
    for kind, one in found.items():
        if not one.count:
            continue
        said = roles[kind] + moved.keeps * one.copies
        sent, received = one.sent, one.received
        if kind == leading:
            said = said + moved.leads * (sum(grid) / one.count)
        if kind != CLOSED_VOLUNTEER:
            sent, received = sent + answered, received + taken
        ratios[f"{kind} sent"] = sent / said[SENT].sum()
        ratios[f"{kind} received"] = received / said[RECEIVED].sum()
    node = found[BOOTSTRAP_NODE]
    if node.copies:
        on_top = node.received + taken - moved.serves[RECEIVED].sum()
        ratios["a copy, received"] = on_top / node.copies / moved.keeps[RECEIVED].sum()
    if moved.leads[SENT, FILES]:
        gave = sum(one.count * one.gave for one in found.values()) * FILE_BYTES
        ratios["a turn, sent"] = gave / sum(grid) / moved.leads[SENT, FILES]
    return ratios


@pytest.mark.parametrize(("grid", "peers", "closed"), SWARMS)
def test_roles_move_what_the_plan_says(grid, peers, closed):
    seeds = [compared(grid, peers, closed, seed) for seed in SEEDS]
    for name in sorted({name for ratios in seeds for name in ratios}):
        of = [ratios[name] for ratios in seeds if name in ratios]
        assert sum(of) / len(of) == pytest.approx(1, abs=WITHIN), (name, of)
