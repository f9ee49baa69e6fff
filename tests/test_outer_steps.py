"""An outer round from boundary to adoption: real files, chains and states, and no network."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from dipaco.dht.chain import Head, Row, Step, genesis_name
from dipaco.dht.identity import peer_id_of_public_key, raw_public_key
from dipaco.modules.compose import gather_module
from dipaco.modules.errors import IntegrityError, NetworkError
from dipaco.modules.outer import OuterRule
from dipaco.modules.state import ModuleState
from dipaco.peer.exchange.chain_store import ChainStore
from dipaco.peer.exchange.contribution_files import ContributionFiles
from dipaco.peer.member import actions as a
from dipaco.peer.member import events as e
from dipaco.peer.outer_steps import OuterSteps
from dipaco.peer.states import States, head_of
from dipaco.peer.trainer import PathTrainer
from dipaco.routing.batches import BatchStream
from dipaco.routing.run_folder import RunFolder
from support.fake_swarm import FakeEvents, FakeTime
from support.tiny_run import make_tiny_run

MODULE, OTHER = "L0.E0", "L1.E0"
WAIT_S = 60.0


class FakeExchange:
    """Gives the files that lie with other peers of the test."""

    def __init__(self, own: ContributionFiles) -> None:
        self._own = own
        self.others: list[ContributionFiles] = []

    def gather(
        self,
        rows: Sequence[Row],
        others: Mapping[str, tuple[str, ...]],
        *,
        check: Callable[[Row, Path], None],
        on_done: Callable[[Row, str, bool], None],
        timeout_s: float,
    ) -> None:
        for row in rows:
            found = [files.find(row.file) for files in (self._own, *self.others)]
            file = next((file for file in found if file is not None), None)
            if file is None:
                on_done(row, "nobody has it", False)
                continue
            try:
                check(row, file)
            except IntegrityError as error:
                on_done(row, str(error), True)
                continue
            self._own.add(row, file.read_bytes())
            on_done(row, "", False)


class Peer:
    """One peer that trains path 0, or a keeper that trains nothing."""

    def __init__(self, run: RunFolder, folder: Path, path: int | None) -> None:
        plan = self.plan = run.plan()
        grid = self.grid = run.grid(plan)
        key = Ed25519PrivateKey.generate()
        self.me = peer_id_of_public_key(raw_public_key(key))
        self.reported: queue.SimpleQueue[e.Event] = queue.SimpleQueue()
        self.events = FakeEvents()
        chains = ChainStore(plan.run_id, grid.modules(), folder / "chains")
        contributions = ContributionFiles(folder / "contributions")
        self.fetched: dict[str, ModuleState] = {}
        own = RunFolder(folder / "run")
        self.node: Any = SimpleNamespace(
            plan=plan,
            grid=grid,
            me=self.me,
            identity=SimpleNamespace(key=key),
            rule=OuterRule.of(plan, run.shard_index(plan)),
            chains=chains,
            contributions=contributions,
            held=States(grid, own.states, own.blobs, chains),
            exchange=FakeExchange(contributions),
            clock=FakeTime(plan.start_s + 100.0).clock,
            fetcher=SimpleNamespace(state=self._fetch),
            genesis_step=lambda module: genesis_name(plan.run_id, module),
        )
        base = run.base_parameters(plan)
        self.genesis = {m: run.genesis_state(plan, m, base) for m in grid.modules()}
        rows = torch.ones(2, plan.model.sequence_length, dtype=torch.int64)
        files: Any = SimpleNamespace(
            genesis_state=lambda module: self.genesis[module], path=path, validation=rows
        )
        self.trainer = None if path is None else PathTrainer(plan, grid, torch.device("cpu"))
        self.outer = OuterSteps(
            self.node,
            files,
            self.events,  # type: ignore[arg-type]
            self.reported.put,
            announce=lambda: None,
            trainer=self.trainer,
        )
        if self.trainer is not None:
            assert path is not None
            heads = []
            for module in grid.modules_of_path(path):
                found = self.do(a.FetchState(self.head0(module), ()))
                assert isinstance(found, e.StateFetched)
                heads.append(found.head)
            states = self.outer.hold(tuple(heads))
            tokens = run.train_tokens(plan, path)
            sequences = plan.inner.batch_sequences
            stream = BatchStream(tokens, seed=plan.seed, path=path, batch_sequences=sequences)
            self.trainer.start_path(path, states, stream)

    def _fetch(self, head: Head, holders: Sequence[str]) -> ModuleState:
        if head.digest not in self.fetched:
            raise NetworkError(f"none of {len(holders)} holders answers")
        return self.fetched[head.digest]

    def head0(self, module: str) -> Head:
        return Head(module, genesis_name(self.plan.run_id, module), 0, 0, -1, "", 0)

    def do(self, action: a.Action) -> e.Event:
        """Have an action carried out, and return what came of it."""
        is_done, event = self.outer.carry_out(action)
        assert is_done
        return event or self.reported.get(timeout=WAIT_S)

    def publish(self, round_index: int = 0, steps: int = 2, module: str = MODULE) -> Row:
        assert self.trainer is not None
        for _ in range(steps):
            self.trainer.inner_step()
        parent = self.node.held.get(module).step
        event = self.do(a.Publish(module, round_index, parent, 0.0))
        assert isinstance(event, e.Published), event
        return event.row

    def gather(self, *rows: Row) -> list[e.Event]:
        self.outer.carry_out(a.Gather(rows[0].module, rows))
        return [self.reported.get(timeout=WAIT_S) for _ in rows]

    def compute(self, base: str, *steps: Step) -> Head:
        event = self.do(a.Compute(steps[0].module, base, steps))
        assert isinstance(event, e.Computed), event
        return event.head

    def adopt(self, head: Head, *, save: bool = False) -> None:
        adopt = a.Adopt(head, head.round_index, 2, 2, True, save)
        assert self.outer.carry_out(adopt) == (True, None)

    def local(self, module: str = MODULE) -> torch.Tensor:
        assert self.trainer is not None
        return gather_module(self.trainer.model, self.grid, module)


@pytest.fixture(params=["float32", "int4", "sign"])
def swarm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Peer, Peer, Peer]]:
    """Return trainers of paths 0 and 1, which share a module, and a keeper."""
    run = make_tiny_run(tmp_path / "run", codec=request.param)
    peers = [
        Peer(run, tmp_path / name, path) for name, path in zip("abk", (0, 1, None), strict=True)
    ]
    for peer in peers:
        peer.node.exchange.others = [p.node.contributions for p in peers if p is not peer]
    yield peers[0], peers[1], peers[2]
    for peer in peers:
        peer.outer.stop()


def test_all_who_gather_the_files_compute_one_state(swarm: tuple[Peer, Peer, Peer]) -> None:
    one, other, keeper = swarm
    rows = (one.publish(), other.publish())
    assert rows[0].tokens == 2 * one.trainer.tokens_per_step  # type: ignore[union-attr]
    step = Step.of(rows)
    heads = []
    for peer in swarm:
        found = peer.gather(*rows)
        assert [event.kind for event in found] == ["gathered", "gathered"]
        heads.append(peer.compute(step.parent, step))
    assert len(set(heads)) == 1
    assert (heads[0].version, heads[0].weight, heads[0].round_index) == (1, 2, 0)
    files = [one.node.contributions.find(row.file).read_bytes() for row in step.rows]
    paths = one.grid.paths_of_module(MODULE)
    expected = one.node.rule.step(one.genesis[MODULE], files, step.table, 0, paths)
    assert heads[0].digest == expected.digest

    one.adopt(heads[0], save=True)
    assert torch.equal(one.local(), expected.parameters)
    assert one.node.held.get(MODULE) == heads[0]
    assert one.node.chains.served(MODULE) == (step.name, heads[0])
    (commit,) = one.events.of("commit")
    assert set(commit["group"]) == {one.me, other.me}
    assert commit["own_tokens"] == rows[0].tokens

    assert keeper.outer.carry_out(a.Keep(heads[0])) == (True, None)
    content = keeper.node.held.lookup(heads[0].digest)
    assert content is not None
    data = content if isinstance(content, bytes) else content.read_bytes()
    assert hashlib.sha256(data).hexdigest() == heads[0].digest
    # The next step stands on what is kept, in memory or on disk.
    second = Step.of([one.publish(1)])
    keeper.gather(*second.rows)
    assert keeper.compute(step.name, second).version == 2


def test_what_is_missing_or_bad_is_reported(swarm: tuple[Peer, Peer, Peer]) -> None:
    one, other, _ = swarm
    row = other.publish()
    other.node.exchange.others = one.node.exchange.others = []
    (found,) = one.gather(row)
    assert isinstance(found, e.GatherFailed)
    assert not found.is_refused
    failed = one.do(a.Compute(MODULE, row.parent, (Step.of([row]),)))
    assert isinstance(failed, e.ComputeFailed)

    bad = ContributionFiles(one.node.contributions.folder / "bad")
    bad.add(row, b"\xff" * row.bytes)
    one.node.exchange.others = [bad]
    (found,) = one.gather(row)
    assert isinstance(found, e.GatherFailed)
    assert found.is_refused
    one.node.exchange.others = [other.node.contributions]
    (found,) = one.gather(row)
    assert isinstance(found, e.Gathered)


def test_a_state_that_is_fetched_is_checked_and_goes_under_the_work(
    swarm: tuple[Peer, Peer, Peer],
) -> None:
    one, other, _ = swarm
    step = Step.of([other.publish()])
    head = other.compute(step.parent, step)
    missing = one.do(a.FetchState(head, (other.me,)))
    assert isinstance(missing, e.FetchFailed)
    one.fetched[head.digest] = other.node.held.waiting(MODULE, step.name)
    one.publish()
    fetched = one.do(a.FetchState(head, (other.me,)))
    assert fetched == e.StateFetched(head)
    scored = one.do(a.Check(MODULE, step.name))
    assert isinstance(scored, e.Checked)
    assert scored.loss_before is not None
    assert scored.loss_after is not None
    one.node.chains.add_verified([step])
    one.adopt(head)
    # What was trained before the boundary is not in it, and is lost.
    assert torch.equal(one.local(), one.node.held.find(MODULE, step.name).parameters)
    assert one.do(a.Publish(MODULE, 1, step.name, 0.0)).kind == "publish_failed"


def test_a_state_that_is_on_its_way_is_not_fetched_beside_itself(
    swarm: tuple[Peer, Peer, Peer],
) -> None:
    """The first of two downloads of one state would remove what the second is about to read."""
    one, other, _ = swarm
    step = Step.of([other.publish()])
    head = other.compute(step.parent, step)
    state, go, asked = other.node.held.waiting(MODULE, step.name), threading.Event(), []

    def slow(wanted: Head, holders: Sequence[str]) -> ModuleState:
        asked.append(wanted)
        assert go.wait(60)
        return state

    one.node.fetcher = SimpleNamespace(state=slow)
    for _ in range(3):
        one.outer.carry_out(a.FetchState(head, (other.me,)))
    go.set()
    assert one.reported.get(timeout=60) == e.StateFetched(head)
    assert asked == [head]


def test_numbers_that_are_none_are_not_published(swarm: tuple[Peer, Peer, Peer]) -> None:
    one, _, _ = swarm
    assert one.trainer is not None
    one.trainer.inner_step()
    with torch.no_grad():
        next(iter(one.trainer.model.parameters())).fill_(float("nan"))
    module = next(m for m in (MODULE, OTHER) if not bool(torch.isfinite(one.local(m)).all()))
    parent = one.node.held.get(module).step
    failed = one.do(a.Publish(module, 0, parent, 0.0))
    assert isinstance(failed, e.PublishFailed)
    assert not failed.is_finite


def test_a_restart_finds_what_was_saved(swarm: tuple[Peer, Peer, Peer], tmp_path: Path) -> None:
    one, _, _ = swarm
    step = Step.of([one.publish()])
    one.adopt(one.compute(step.parent, step))
    one.node.held.save_all()
    second = Step.of([one.publish(1)])
    one.adopt(one.compute(step.name, second))  # It is not on disk when the peer is killed.
    chains = ChainStore(one.plan.run_id, one.grid.modules(), tmp_path / "a" / "chains")
    own = RunFolder(tmp_path / "a" / "run")
    again = States(one.grid, own.states, own.blobs, chains)
    found = {head.module: head for head in again.load_from_disk()}
    assert found[MODULE].step == step.name
    assert chains.served(MODULE)[0] == step.name
    state = again.find(MODULE, step.name)
    assert state is not None
    assert head_of(state, step.name, 1, 0) == found[MODULE]
