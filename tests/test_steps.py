"""States that are made of the one before and the average that led there, instead of fetched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dipaco.dht.certificates import Certificate, CommitStatement
from dipaco.modules.blobs import BlobStore
from dipaco.modules.codecs import CODECS
from dipaco.modules.errors import IntegrityError, NetworkError
from dipaco.modules.grid import Grid
from dipaco.modules.outer import AveragingRule, Contribution, outer_step
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import ModuleState, state_chunks
from dipaco.peer.exchange import steps
from dipaco.peer.exchange.fetching import ContentFetcher
from dipaco.peer.exchange.held_states import HeldStates
from dipaco.peer.exchange.steps import (
    BUSY_WAIT_S,
    GREATEST_WAIT_S,
    MOST_ASKED,
    HeldSteps,
    StepReplay,
    kept_steps,
    pack,
    packed_bytes,
    step_name,
    unpack,
)
from dipaco.peer.exchange.transfer import SLOW_GRACE_S
from dipaco.routing.run_folder import RunFolder
from hypothesis import given
from hypothesis import strategies as st
from support.exchange_nodes import RUN, Nodes
from support.tiny_run import make_tiny_run

ME = "Pme"


@given(
    name=st.sampled_from(sorted(CODECS)),
    values=st.integers(1, 9000),
    scale=st.floats(1e-9, 1e4),
    seed=st.integers(0, 2**31),
)
def test_an_average_is_packed_without_loss(name: str, values: int, scale: float, seed: int) -> None:
    codec = CODECS[name]
    generator = torch.Generator().manual_seed(seed)
    average = codec.round_trip(torch.randn(values, generator=generator) * scale)
    packed = pack(average, codec)
    assert packed is not None
    assert len(packed) == packed_bytes(codec, values)
    again = unpack(packed, codec, values)
    assert torch.equal(again.view(torch.int32), average.view(torch.int32))


def test_what_is_no_average_of_a_codec_is_not_packed() -> None:
    assert pack(torch.tensor([1.0, 1e-8]), CODECS["float16"]) is None
    assert pack(torch.tensor([0.3, 0.1234567]), CODECS["blockwise8bit"]) is None


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("excess", [-1, 1])
def test_an_average_of_another_length_is_refused(name: str, excess: int) -> None:
    codec = CODECS[name]
    with pytest.raises(IntegrityError, match="100 numbers"):
        unpack(bytes(packed_bytes(codec, 100) + excess), codec, 100)


class World:
    """A run, the states that its peers Pa and Pb commit, and this peer, which misses steps."""

    def __init__(self, folder: Path, codec: str = "float16") -> None:
        run = make_tiny_run(folder / "run", codec=codec)
        self.plan: RunPlan = run.plan()
        self.grid: Grid = run.grid(self.plan)
        self.codec = CODECS[codec]
        genesis = run.genesis_state(self.plan, "L0.E0")
        self.states: list[ModuleState] = [genesis]
        self.certificates: list[Certificate] = []
        self.packed: list[bytes] = []
        self.blobs = run.blobs
        self.held = HeldStates(self.grid, run.states, run.blobs)
        self.held.hold(genesis)
        self.served: dict[str, dict[str, bytes]] = {"Pa": {}, "Pb": {}, "Pc": {}}
        self.asked: list[str] = []

    peer_id = ME

    def commit(self) -> ModuleState:
        """Pa and Pb take a step, and serve it."""
        parent, rule = self.states[-1], AveragingRule(self.codec)
        table = (Contribution(0, "Pa", 64), Contribution(0, "Pb", 32))
        generator = torch.Generator().manual_seed(parent.version)
        gradients = [torch.randn(parent.layout.size, generator=generator) for _ in table]
        average = rule.average(gradients, table)
        state = outer_step(parent, average, table, self.plan.outer, parent.version + 3)
        statement = CommitStatement(
            "run", state.module, state.version, parent.digest, state.digest,
            parent.version + 3, table,
        )  # fmt: skip
        self.certificates.insert(0, Certificate(statement, {"Pa": b"", "Pb": b""}))
        self.states.append(state)
        packed = pack(average, self.codec)
        assert packed is not None
        self.packed.append(packed)
        for peer in ("Pa", "Pb"):
            self.served[peer][step_name(state.digest)] = packed
        return state

    def chain(self, module: str, digest: str) -> tuple[Certificate, ...]:
        names = [certificate.statement.digest for certificate in self.certificates]
        return tuple(self.certificates[names.index(digest) :]) if digest in names else ()

    def sample(
        self, peer: str, sha256: str, offset: int, count: int, timeout_s: float
    ) -> bytes | None:
        self.asked.append(peer)
        if sha256 not in self.served[peer]:
            raise NetworkError("it does not hold it")
        data = self.served[peer][sha256][offset : offset + count]
        return data if len(data) == count else None

    def fetch(self, holders: Sequence[str] = ("Pa", "Pb", "Pc")) -> ModuleState | None:
        replay = StepReplay(self.plan, self.grid, self.held, self, self)
        return replay.state(self.states[-1].reference, holders)


@pytest.mark.parametrize(("codec", "missed"), [("float16", 2), ("blockwise8bit", 3), ("none", 1)])
def test_who_missed_steps_takes_them_and_has_the_same_bits(
    tmp_path: Path, codec: str, missed: int
) -> None:
    world = World(tmp_path, codec)
    for _ in range(missed):
        world.commit()
    found = world.fetch()
    assert found is not None
    assert found.digest == world.states[-1].digest
    assert found.reference == world.states[-1].reference
    assert set(world.asked) <= {"Pa", "Pb"}, "those who took the step have it"
    for state, packed in zip(world.states[1:], world.packed, strict=True):
        assert world.held.lookup(step_name(state.digest)) == packed, "it serves others now"


@pytest.mark.parametrize(("missed", "fetched"), [(1, 0), (2, 0), (3, 1)])
def test_a_peer_fetches_the_state_where_steps_do_not_lead_to_it(
    tmp_path: Path, missed: int, fetched: int
) -> None:
    world, fetches = World(tmp_path), []
    for _ in range(missed):
        state = world.commit()

    def fetch(sha256: str, *_: Any, **__: Any) -> Path:
        fetches.append(sha256)
        (tmp_path / "fetched").write_bytes(b"".join(bytes(c) for c in state_chunks(state)))
        return tmp_path / "fetched"

    certifier: Any = SimpleNamespace(fetch_chain=lambda *_: (), chain=world.chain)
    exchange: Any = SimpleNamespace(fetch=fetch)
    directory: Any = None
    fetcher = ContentFetcher(directory, exchange, world.blobs, BlobStore(tmp_path / "scratch"))
    fetcher.use_plan(world.plan, world.grid, lambda: world.plan.start_s + 1e6)
    fetcher.use_certifier(certifier)
    fetcher.use_replay(StepReplay(world.plan, world.grid, world.held, world, world))
    assert fetcher.state(state.reference, ("Pa",)).digest == state.digest
    assert len(fetches) == fetched
    for served in world.served.values():
        served.clear()
    world.held.hold(world.states[-2])
    assert fetcher.state(state.reference, ("Pa",)).digest == state.digest
    assert len(fetches) == fetched + 1, "nobody has the step"


def test_a_step_comes_over_real_streams(tmp_path: Path, nodes: Nodes) -> None:
    world = World(tmp_path)
    state = world.commit()
    server, client = nodes.exchange(nodes.server_dht), nodes.asking()
    served = HeldStates(world.grid, RunFolder(tmp_path / "theirs").states, world.blobs)
    server.set_source(served, RUN)
    replay = StepReplay(world.plan, world.grid, world.held, client, world)
    assert replay.state(state.reference, (server.peer_id,)) is None, "it holds none"
    served.steps.hold(state, world.packed[0])
    found = replay.state(state.reference, (server.peer_id,))
    assert found is not None
    assert found.digest == state.digest
    assert client.bytes_down == len(world.packed[0]) < state.byte_size / 3.5


def test_where_steps_are_no_fewer_bytes_nobody_is_asked(tmp_path: Path) -> None:
    world = World(tmp_path)
    for _ in range(kept_steps(len(world.commit().parameters) * 2, 1000) + 9):
        world.commit()
    assert world.fetch() is None
    assert world.asked == []


def test_from_another_fork_nobody_is_asked(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.held.hold(World(tmp_path / "other", "none").commit())
    world.commit()
    assert world.fetch() is None
    assert world.asked == []


def test_wrong_numbers_are_refused_and_another_is_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path)
    state = world.commit()
    name, right = step_name(state.digest), world.packed[0]
    bad = {"other": right[2:] + right[:2], "nan": b"\xff\x7e" * (len(right) // 2)}
    for number, wrong in enumerate(bad.values()):
        world.served["Pa"][name] = world.served["Pb"][name] = wrong
        world.served["Pc"][name] = right
        found = world.fetch()
        assert found is not None
        assert found.digest == state.digest
        assert (
            len([line for line in caplog.messages if "refused the step" in line]) == 2 + 2 * number
        )
    del world.served["Pc"][name]
    assert world.fetch() is None, "then the state is fetched"
    assert world.held.get("L0.E0") == world.states[0].reference


def test_a_crowd_that_has_no_step_is_not_asked_one_by_one(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.commit()
    crowd = tuple(f"Px{number}" for number in range(20))
    world.served |= {peer: {} for peer in crowd}
    assert world.fetch(crowd) is None
    assert len(world.asked) == MOST_ASKED


def test_holders_that_keep_it_waiting_are_given_up_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, now_s = World(tmp_path), 0.0
    world.commit()
    world.commit()
    monkeypatch.setattr(steps.time, "monotonic", lambda: now_s)

    def wait(peer: str, sha256: str, offset: int, count: int, timeout_s: float) -> None:
        nonlocal now_s
        now_s += timeout_s
        world.asked.append(peer)

    def pass_by(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(steps.time, "sleep", pass_by)
    world.sample = wait  # type: ignore[method-assign,assignment]
    assert world.fetch() is None
    assert GREATEST_WAIT_S <= now_s < GREATEST_WAIT_S + BUSY_WAIT_S + 3 * (SLOW_GRACE_S + 10.0)
    assert set(world.asked) == {"Pa", "Pb", "Pc"}


def test_who_gives_one_piece_and_then_is_busy_for_ever_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, now_s = World(tmp_path), 0.0
    world.commit()
    monkeypatch.setattr(steps.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(steps, "PIECE_BYTES", 64)
    monkeypatch.setattr(steps, "LEAST_RATE_BYTES_S", 1e-3)

    def pass_by(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(steps.time, "sleep", pass_by)
    answer = world.sample
    world.sample = (  # type: ignore[method-assign]
        lambda peer, sha256, offset, *others: (
            answer(peer, sha256, offset, *others) if not offset else None
        )
    )
    assert world.fetch(("Pa",)) is None
    assert GREATEST_WAIT_S <= now_s <= GREATEST_WAIT_S + BUSY_WAIT_S


def test_a_step_comes_in_pieces_from_holders_that_are_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reduces go first on a full line: what has come by then is not lost."""
    world = World(tmp_path)
    state = world.commit()
    count = len(world.packed[0])
    monkeypatch.setattr(steps, "PIECE_BYTES", count // 4)
    monkeypatch.setattr(steps, "BUSY_WAIT_S", 0.0)
    offsets, answer = [], world.sample
    # Both are busy, then one line breaks down once.
    answers: list[Any] = [None, None, 1, None, 1, NetworkError("broken off"), 1, None, 1, 1]

    def sample(peer: str, sha256: str, offset: int, wanted: int, timeout_s: float) -> bytes | None:
        said = answers.pop(0)
        if isinstance(said, Exception):
            raise said
        if said is None:
            return None
        offsets.append(offset)
        return answer(peer, sha256, offset, wanted, timeout_s)

    world.sample = sample  # type: ignore[method-assign]
    found = world.fetch(("Pa", "Pb"))
    assert found is not None
    assert found.digest == state.digest
    assert offsets == [number * (count // 4) for number in range(len(offsets))]
    assert answers == [1] * (5 - len(offsets))


def test_the_oldest_steps_make_room(tmp_path: Path) -> None:
    world = World(tmp_path)
    for _ in range(5):
        world.commit()
    kept = kept_steps(len(world.packed[0]), world.states[0].layout.size)
    assert kept == 2
    usual, small = HeldSteps(), HeldSteps(greatest_bytes=len(world.packed[0]))
    for state, packed in zip(world.states[1:], world.packed, strict=True):
        usual.hold(state, packed)
        small.hold(state, packed)
        small.hold(state, None)
    for held, count in ((usual, kept), (small, 1)):
        found = [held.lookup(step_name(state.digest)) for state in world.states[1:]]
        assert found == [None] * (5 - count) + world.packed[5 - count :]
