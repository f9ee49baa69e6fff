"""The simulated DHT: views put together from what each key says are those of the records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import pytest
from dipaco.dht.coverage import bucket_count, home_bucket, scope_of
from dipaco.dht.records import PeerRecord, ProgressEntry, ProgressRecord
from dipaco.dht.view import SwarmView, view_of_records
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import StateReference
from dipaco.simulator.swarm import directory
from dipaco.simulator.swarm.directory import SimulatedDirectory
from dipaco.simulator.swarm.engine import Engine
from dipaco.simulator.swarm.network import Link, Network
from dipaco.simulator.swarm.publishing import make_standing, module_record
from dipaco.simulator.swarm.reading import Contents, joined_view
from dipaco.simulator.swarm.scenario import small_plan
from dipaco.simulator.swarm.world import START_S

PEERS = 40


class _Writers:
    """Peers that claim, move, hold states of any age and go, as long as it takes."""

    def __init__(self, seed: int) -> None:
        self.engine = Engine(seed, START_S)
        self.plan = small_plan((16, 16), duration_s=300.0)
        self.grid = Grid(self.plan.model, self.plan.grid, self.plan.rounds.level_offsets)
        self.network = Network(self.engine)
        self.directory = SimulatedDirectory(self.engine, self.network, self.plan, self.grid)
        self.random = Random(seed)
        for number in range(PEERS):
            self.network.links[f"p{number}"] = Link()

    def write(self) -> None:
        """Let a peer say something."""
        random, grid = self.random, self.grid
        peer = f"p{random.randrange(PEERS)}"
        path = random.choice((None, *range(0, 256, 8)))
        state = random.choice(("joining", "training", "leaving", "serving"))
        since_s = self.engine.now_s - random.choice((0.0, 1.0, 100.0, -14.0))
        since_s += 6.0 * (random.random() < 0.01)
        standing = make_standing(state, path, since_s, random.randrange(3), pinned=False)
        life_s = random.choice((5.0, 60.0))
        bucket = home_bucket(peer, path, bucket_count(grid.path_count))
        record = directory_record(peer, standing)
        self.directory.write(peer, f"peers/{bucket}", random.choice((record, None)), life_s)
        for module in grid.modules_of_path(path or 0):
            version = random.randrange(4)
            digest = f"{version}" * 64
            held = StateReference(module, version, digest, version * 10, version - 1, 1)
            said = module_record(peer, module, standing, random.choice((held, None)))
            self.directory.write(peer, f"modules/{module}", said, life_s)
        if path is None:
            return
        entry = ProgressEntry.model_construct(
            path=path,
            last_round=random.randrange(3),
            tokens=random.randrange(100),
            validation_nll=3.0,
            validation_tokens=random.randrange(2),
            train_loss=3.0,
            best_sha256="",
        )
        said = ProgressRecord.model_construct(peer_id=peer, entries=(entry,))
        self.directory.write(peer, f"progress/{bucket}", said, 1000.0)


def directory_record(peer: str, standing: dict[str, Any]) -> Any:
    """Return what a peer says of itself."""
    return PeerRecord.model_construct(peer_id=peer, **standing)


@pytest.mark.parametrize("seed", range(3))
def test_views_of_contents_are_those_of_the_records(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = 0

    def compared(
        now_s: float,
        plan: RunPlan,
        grid: Grid,
        scope: Any,
        peers: Sequence[Contents],
        modules: Mapping[str, Contents],
        progress: Sequence[Contents],
    ) -> SwarmView | None:
        nonlocal joined
        found = joined_view(now_s, plan, grid, scope, peers, modules, progress)
        if found is not None:
            joined += 1
            wanted = view_of_records(
                now_s=now_s,
                plan=plan,
                grid=grid,
                peers=[record for contents in peers for record in contents.records],
                modules={module: contents.records for module, contents in modules.items()},
                progress=[record for contents in progress for record in contents.records],
                scope=scope,
            )
            assert found == wanted
            for name in ("claims", "peers", "holdings", "progress"):
                assert [*getattr(found, name)] == [*getattr(wanted, name)], name
        return found

    monkeypatch.setattr(directory, "joined_view", compared)
    writers = _Writers(seed)
    engine, grid = writers.engine, writers.grid
    for _ in range(400):
        writers.write()
        engine.run(engine.now_s + engine.between(0.0, 0.5))
        modules = writers.random.sample(grid.modules(), 4)
        buckets = writers.random.sample(range(bucket_count(grid.path_count)), 2)
        writers.directory.read("p0", engine.now_s, scope_of(modules, buckets, grid))
    assert joined > 100


def test_a_reader_sees_the_version_before_one_that_is_not_visible_yet() -> None:
    writers = _Writers(0)
    store, engine = writers.directory, writers.engine
    store.write_s = (1.0, 1.0)
    scope = scope_of(("L0.E0",), (0,), writers.grid)

    def rounds_seen() -> list[int]:
        view = store.read("p1", engine.now_s, scope)
        return [claim.round for claim in view.claims.values()]

    for number in range(3):
        standing = make_standing("training", 0, START_S, number, pinned=False)
        store.write("p0", "modules/L0.E0", module_record("p0", "L0.E0", standing, None), 60.0)
        assert rounds_seen() == ([number - 1] if number else [])
        engine.run(engine.now_s + 1.0)
        assert rounds_seen() == [number]
    for number in (3, 4):
        standing = make_standing("training", 0, START_S, number, pinned=False)
        store.write("p0", "modules/L0.E0", module_record("p0", "L0.E0", standing, None), 60.0)
        engine.run(engine.now_s + 0.6)
    assert rounds_seen() == [3]
    engine.run(engine.now_s + 70.0)
    assert rounds_seen() == []
