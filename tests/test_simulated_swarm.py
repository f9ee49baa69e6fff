"""The swarm simulator: it is deterministic, it sees what is wrong, and members hold in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from dipaco.dht.certificate_check import encode_certificate
from dipaco.dht.certificates import Certificate, CertificateBook
from dipaco.dht.record_keys import record_subkey
from dipaco.dht.records import PeerRecord, ProgressEntry, ProgressRecord, Record
from dipaco.modules.outer import Contribution
from dipaco.modules.state import StateReference
from dipaco.peer.member.actions import (
    Action,
    Adopt,
    Average,
    Commit,
    FetchState,
    Offer,
    Purpose,
    TakeStep,
    Wait,
)
from dipaco.peer.member.events import Event, FetchFailed, StateFetched
from dipaco.simulator.swarm import averaging
from dipaco.simulator.swarm.carrying import SHARD_BYTES
from dipaco.simulator.swarm.directory import record_bytes
from dipaco.simulator.swarm.engine import Engine
from dipaco.simulator.swarm.fetching import Fetching
from dipaco.simulator.swarm.history import _History, real_member, run_history
from dipaco.simulator.swarm.invariants import Invariants
from dipaco.simulator.swarm.machine import Machine
from dipaco.simulator.swarm.network import STATES, Link, Network
from dipaco.simulator.swarm.publishing import make_standing, module_record, peer_record
from dipaco.simulator.swarm.scenario import PROFILES, draw_scenario, small_plan
from dipaco.simulator.swarm.signing import GREATEST_TOLD, certificate_bytes
from dipaco.simulator.swarm.trace import Trace
from dipaco.simulator.swarm.work import Content, ModuleWork, add, counts_of, steps_in
from dipaco.simulator.swarm.world import Decider, World
from hivemind.utils import MSGPackSerializer
from parts.earlier_protocol import earlier_member, earlier_protocol
from support.certificates import certificate

# Seeds of each profile that every run of the tests lives through; the benchmark lives through many.
SEEDS = range(8, 13)


@pytest.mark.parametrize("profile", PROFILES)
def test_members_hold_in_histories_with_faults(profile: str) -> None:
    # Three times as many liars as members take their time.
    for seed in SEEDS[:2] if profile == "invited" else SEEDS:
        result = run_history(seed, profile, members=2 + seed % 4, rounds=6)
        assert result.violations == [], result.command


def test_what_the_uninvited_do_to_an_open_run_they_cannot_do_to_one_by_invitation() -> None:
    # As many liars as here break an open run in many histories: this is one.
    beset = run_history(1, "invited", members=2, rounds=6, is_open=True)
    assert {violation.invariant for violation in beset.violations} == {"copies"}
    assert run_history(1, "invited", members=2, rounds=6).violations == []


def test_a_leader_that_closes_late_and_says_too_much_is_waited_for_and_then_left_out() -> None:
    """Rounds are counted, and limits are a peer's own. The leader is an insider."""
    result = run_history(111588, "mixed", trace=Trace(keep=True))
    assert result.violations == [], result.command
    refused = [line for line in result.trace.lines if "group refused: peer p9: " in line]
    assert any("p1 hears  average_failed" in line and "culprits=(p9)" in line for line in refused)
    meetings = [line for line in result.trace.lines if "p1 wants  average " in line]
    assert any("excluded=(p9)" in line for line in meetings)


def test_a_line_that_needs_more_than_half_of_the_window_commits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two attempts of half a window were both too short: each stepped alone, and forked."""
    window_s = draw_scenario(3, "calm", members=3, paths=1, rounds=6).duration_s * 0.45
    # Of three members with equal shares each sends two thirds of the parameters, twice.
    uplink = 2 * (2 / 3) * (World.state_bytes / 4) / (0.7 * window_s)
    monkeypatch.setattr(_History, "_link", lambda history: Link(uplink=uplink))
    result = run_history(3, "calm", members=3, paths=1, rounds=6)
    assert result.violations == []
    assert (result.figures.commits, result.figures.forks) == (11, 0)
    monkeypatch.setattr(averaging, "takes_long", lambda *needed: False)
    assert run_history(3, "calm", members=3, paths=1, rounds=6).figures.forks > 0


def test_the_earlier_rules_lose_work_in_a_history_in_which_members_lose_none() -> None:
    with earlier_protocol():
        result = run_history(0, "split", members=4, rounds=8, make_member=earlier_member)
    assert {violation.invariant for violation in result.violations} == {"work"}
    assert run_history(0, "split", members=4, rounds=8).violations == []


def test_a_seed_is_the_same_history_on_any_machine() -> None:
    program = (
        "from dipaco.simulator.swarm.history import run_history\n"
        "from dipaco.simulator.swarm.trace import Trace\n"
        "profiles = 'mixed', 'hostile'\n"
        "results = [run_history(29, p, rounds=4, trace=Trace(keep=True)) for p in profiles]\n"
        "print([(r.events, r.trace.digest()) for r in results])"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": number},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in ("1", "2")
    ]
    first, second = (process.communicate(timeout=250)[0] for process in running)
    assert first == second
    assert first.count("(") == 2


class _Spoiled:
    """A member some of whose answers are changed: what the invariants have to notice."""

    def __init__(self, member: Decider, change: Callable[[Action], Action | None]) -> None:
        self._member, self._change = member, change

    def handle(self, event: Event, now_s: float) -> list[Action]:
        changed = [self._change(action) for action in self._member.handle(event, now_s)]
        return [action for action in changed if action is not None]


def _violated_by(
    change: Callable[[Action], Action | None], profile: str, seeds: int = 12, **sizes: int
) -> set[str]:
    def make(machine: Machine, book: CertificateBook, held: tuple[StateReference, ...]) -> Decider:
        return _Spoiled(real_member(machine, book, held), change)

    found = set()
    for seed in range(seeds):
        result = run_history(seed, profile, make_member=make, **sizes)
        found |= {violation.invariant for violation in result.violations}
    return found


def test_lost_work_is_noticed() -> None:
    def forget(action: Action) -> Action:
        return replace(action, on_top=()) if isinstance(action, Adopt) else action

    assert "work" in _violated_by(forget, "split", seeds=4, members=4, paths=1, rounds=8)


def test_work_that_is_merged_twice_is_noticed() -> None:
    world = World(small_plan((1,), duration_s=60.0), Engine(0, 1000.0), real_member, Trace())
    world.watch = watch = Invariants(world, coverage=False)
    machine = Machine(world, "a", Link(), step_s=1.0)
    machine.link.is_up, machine.path, machine.steps = True, 0, 5
    steps: Content = {("a", 0): 1, ("a", 5): -1}
    anchor = replace(world.stock.genesis["L0.E0"], content=dict(steps))
    machine.works = {"L0.E0": ModuleWork(anchor, 5)}
    watch.started(machine)
    watch.begin_rest()
    assert "not its work" in watch.violations[0].what
    watch.violations.clear()
    machine.steps = 0
    watch.started(machine)
    machine.steps = 5
    watch.begin_rest()
    assert watch.violations == []
    machine.works["L0.E0"].shift = dict(steps)
    watch.begin_rest()
    assert "counts 2 times" in watch.violations[0].what


@pytest.mark.parametrize("liars", [0, 1])
def test_work_before_a_fork_older_than_all_parts_is_lost_to_liars_alone(liars: int) -> None:
    world = World(small_plan((1,), duration_s=60.0), Engine(0, 1000.0), real_member, Trace())
    world.watch = watch = Invariants(world, coverage=False)
    watch.liars = liars
    machine, other = (Machine(world, name, Link(), step_s=1.0) for name in "ab")
    machine.link.is_up, machine.path = True, 0
    genesis, steps = world.stock.genesis["L0.E0"], {("a", 0): 1, ("a", 5): -1}
    machine.works = {"L0.E0": ModuleWork(genesis, 5)}
    watch.started(machine)
    machine.steps = 5
    old = world.stock.step(genesis, [Contribution(0, "a", 80)], {"a": steps}, 0)
    new = world.stock.step(genesis, [Contribution(0, "b", 90)], {"b": {}}, 1)
    machine.works["L0.E0"].anchor = old
    watch.adopted(machine, Adopt("L0.E0", new.reference, (), False, 1.0, save=False), old)
    machine.works["L0.E0"].adopt(new, ())
    watch.begin_rest()
    assert ["is lost" in found.what for found in watch.violations] == ([] if liars else [True])
    assert other.steps == 0


def test_a_fork_that_stays_is_noticed() -> None:
    def stay(action: Action) -> Action | None:
        return None if isinstance(action, Adopt) else action

    assert "agreement" in _violated_by(stay, "split", seeds=4, members=4, paths=1, rounds=8)


def test_a_module_without_commits_is_noticed() -> None:
    def never(action: Action) -> Action | None:
        return None if isinstance(action, Average | Commit) else action

    assert "liveness" in _violated_by(never, "calm", seeds=1, members=3, rounds=8)


def test_missing_copies_are_noticed() -> None:
    def keep_all(action: Action) -> Action | None:
        return None if isinstance(action, Offer) else action

    assert "copies" in _violated_by(keep_all, "calm", seeds=1, members=4, paths=4, rounds=8)


def test_who_averages_again_with_a_reducer_that_it_found_out_is_noticed() -> None:
    def forgive(action: Action) -> Action:
        return replace(action, excluded=()) if isinstance(action, Average) else action

    def make(machine: Machine, book: CertificateBook, held: tuple[StateReference, ...]) -> Decider:
        return _Spoiled(real_member(machine, book, held), forgive)

    found = run_history(14, "falsified", members=4, paths=1, rounds=4, make_member=make)
    assert [violation.invariant for violation in found.violations] == ["checks"]
    honest = run_history(14, "falsified", members=4, paths=1, rounds=4)
    assert honest.violations == []
    assert honest.figures.found_out > 0


@pytest.mark.parametrize(("trains", "broken"), [(True, ["cost"]), (False, [])])
def test_a_bootstrap_node_alone_may_serve_a_shard_to_each_who_begins(
    trains: bool, broken: list[str]
) -> None:
    plan = small_plan((1,), duration_s=60.0)
    world = World(plan, Engine(0, 1000.0), real_member, Trace(), state_bytes=SHARD_BYTES)
    world.watch = watch = Invariants(world, coverage=False, stops=False)
    node = Machine(world, "b", Link(), step_s=1.0, trains=trains)
    node.link.is_up = True
    for _ in range(50):
        watch.started(node)
    node.link.traffic.move(STATES, 50 * SHARD_BYTES)
    world.engine.run(1061.0)
    assert [violation.invariant for violation in watch.violations] == broken
    node.link.traffic.move(STATES, 50 * SHARD_BYTES)
    world.engine.run(1121.0)
    assert [violation.invariant for violation in watch.violations] == [*broken, "cost"]


def test_a_turn_without_an_answer_is_noticed() -> None:
    def say_nothing(action: Action) -> Action | None:
        return None if isinstance(action, Wait | TakeStep) else action

    assert _violated_by(say_nothing, "calm", seeds=1) == {"contract"}


def test_contents_are_sums() -> None:
    content: Content = {}
    add(content, {("a", 0): 1, ("a", 5): -1})
    add(content, {("a", 5): 1, ("a", 9): -1})
    assert content == {("a", 0): 1, ("a", 9): -1}
    assert (steps_in(content), counts_of(content, "a")) == (9, [(0, 9, 1)])
    add(content, {("a", 3): 1, ("a", 4): -1})
    assert counts_of(content, "a") == [(0, 3, 1), (3, 4, 2), (4, 9, 1)]
    add(content, {("a", 0): 1, ("a", 9): -1}, -1)
    assert (counts_of(content, "a"), counts_of(content, "b")) == ([(3, 4, 1)], [])


class _Host:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def serve(self, caller: str, what: str, content: object, reply: Callable[..., None]) -> None:
        self.heard.append(caller)
        reply(what)


def _network(**links: Link) -> tuple[Engine, Network, dict[str, _Host]]:
    engine = Engine(0, 0.0)
    network = Network(engine)
    hosts = {name: _Host() for name in links}
    for name, link in links.items():
        network.join(name, link, hosts[name])
    return engine, network, hosts


def _ask(engine: Engine, network: Network, caller: str, callee: str) -> tuple[object, float]:
    answers: list[tuple[object, float]] = []
    network.call(
        caller, callee, "hello", None, lambda a: answers.append((a, engine.now_s)), limit_s=5.0
    )
    begin_s = engine.now_s
    engine.run(begin_s + 20.0)
    ((answer, end_s),) = answers
    return answer, end_s - begin_s


def test_calls_reach_who_can_be_called() -> None:
    closed = Link(can_be_called=False)
    engine, network, hosts = _network(a=Link(), b=Link(), c=closed)
    assert _ask(engine, network, "a", "b")[0] == "hello"
    refused, soon_s = _ask(engine, network, "a", "c")
    assert (refused, hosts["c"].heard) == (None, [])
    assert soon_s < 1.0
    assert _ask(engine, network, "c", "a")[0] == "hello"
    assert _ask(engine, network, "a", "c")[0] == "hello"
    network.cut({"a": 1})
    assert _ask(engine, network, "a", "b") == (None, 5.0)
    network.heal()
    assert _ask(engine, network, "a", "b")[0] == "hello"


def test_who_sleeps_answers_when_it_wakes_and_the_dead_never() -> None:
    engine, network, _ = _network(a=Link(), b=Link())
    network.links["b"].awake_s = engine.now_s + 3.0
    answer, waited_s = _ask(engine, network, "a", "b")
    assert answer == "hello"
    assert 3.0 <= waited_s < 4.0
    network.links["b"].awake_s = engine.now_s + 9.0
    assert _ask(engine, network, "a", "b") == (None, 5.0)
    network.links["b"].is_up = False
    assert _ask(engine, network, "a", "b")[1] < 1.0
    network.links["b"].hangs = True
    assert _ask(engine, network, "a", "b") == (None, 5.0)


def test_a_state_that_is_on_its_way_is_not_sent_for_twice() -> None:
    world = World(small_plan((1,), duration_s=60.0), Engine(0, 1000.0), real_member, Trace())
    world.watch = Invariants(world, coverage=False)
    holder, machine = (Machine(world, name, Link(), step_s=1.0) for name in "ab")
    genesis = world.stock.genesis["L0.E0"]
    state = world.stock.step(genesis, [Contribution(0, "a", 80)], {"a": {}}, 0)
    holder.link.is_up = machine.link.is_up = True
    holder.serve_state(state)
    fetching, heard = Fetching(machine), list[Event]()
    machine.deliver = heard.append  # type: ignore[method-assign]
    wanted: tuple[tuple[tuple[str, ...], Purpose], ...] = (
        ((), "keep"),
        (("a",), "begin"),
        (("a",), "adopt"),
    )
    for holders, purpose in wanted:
        fetching.state(FetchState(state.reference, holders, purpose))
    world.engine.run(1060.0)
    assert [(type(event), event.purpose) for event in heard] == [  # type: ignore[union-attr]
        (FetchFailed, "keep"),
        (StateFetched, "begin"),
        (StateFetched, "adopt"),
    ]
    assert holder.link.traffic.bytes_by[STATES] < 1.1 * world.state_bytes


def test_transfers_share_an_uplink() -> None:
    _, network, _ = _network(a=Link(uplink=1e6), b=Link(), c=Link())
    first_s, second_s = (network.arrival_s("a", peer, 2e6) for peer in ("b", "c"))
    assert 2.0 < first_s < 2.2
    assert 4.0 < second_s < 4.2


def _peer_record(state: str) -> PeerRecord:
    return PeerRecord.model_construct(peer_id="a", state=state, path=None, since_s=0.0, round=0)


def test_records_are_late_and_each_side_of_a_split_has_its_own() -> None:
    engine = Engine(0, 1000.0)
    plan = small_plan((2, 2), duration_s=60.0)
    world = World(plan, engine, real_member, Trace())
    for name in ("a", "b"):
        world.network.join(name, Link(), _Host())
    directory = world.directory
    directory.write_s = (2.0, 2.0)

    def seen(reader: str) -> str | None:
        record = directory.read(reader, engine.now_s).peers.get("a")
        return record.state if record else None

    directory.write("a", "peers/0", _peer_record("joining"), 60.0)
    assert seen("b") is None
    engine.run(1003.0)
    assert seen("b") == "joining"
    world.network.cut({"b": 1})
    directory.write("a", "peers/0", _peer_record("training"), 60.0)
    engine.run(1006.0)
    assert (seen("a"), seen("b")) == ("training", "joining")
    world.network.heal()
    assert seen("b") == "training"
    engine.run(1070.0)
    assert seen("b") is None


def test_what_is_given_is_not_drawn() -> None:
    drawn = draw_scenario(3, "churn", members=5, paths=6, rounds=9)
    assert (drawn.members, drawn.rounds, drawn.faults) == (5, 9, ("churn",))
    with pytest.raises(ValueError, match="profile must be one of calm"):
        draw_scenario(0, "rain")


def test_certificates_are_as_long_as_real_ones() -> None:
    for members in (2, 16, 100):
        made = certificate(1000, range(members))
        rows = tuple(replace(row, path=1000, tokens=5_000_000) for row in made.statement.table)
        real = Certificate(replace(made.statement, table=rows), made.signatures)
        assert certificate_bytes(real) == pytest.approx(len(encode_certificate(real)), rel=0.1)


def test_a_large_group_gathers_its_signatures() -> None:
    books: dict[str, CertificateBook] = {}

    def make(machine: Machine, book: CertificateBook, held: tuple[StateReference, ...]) -> Decider:
        books[machine.peer] = book
        return real_member(machine, book, held)

    result = run_history(1, "calm", members=GREATEST_TOLD + 2, paths=1, rounds=1, make_member=make)
    assert result.violations == []
    known = [certificate for book in books.values() for certificate in book.all()]
    large = [found for found in known if len(found.statement.table) > GREATEST_TOLD]
    assert large
    assert sum(len(found.signers) == len(found.statement.table) for found in large) > 0.9 * len(
        large
    )


def _published_bytes(kind: str, item: str, record: Record) -> int:
    """Return how long a record is under its key, with its subkey and signature."""
    subkey = record_subkey(kind, "0" * 16, item, b"k" * 32)
    value = MSGPackSerializer.dumps(record.model_dump()) + b"s" * 64
    return len(MSGPackSerializer.dumps(subkey)) + len(value)


def test_records_are_as_long_as_real_ones() -> None:
    world = World(small_plan((64, 64), duration_s=300.0), Engine(0, 0.0), real_member, Trace())
    peer = "12D3KooW" + "A" * 44
    standing = make_standing("training", 4000, 1.7e9, 900, pinned=False)
    address = "/ip4/203.0.113.25/tcp/31337/p2p/" + peer
    said = peer_record(world, peer, standing, 12345.6).model_copy(
        update={
            "software": "dipaco 0.1.0",
            "device": "NVIDIA GeForce RTX 4090",
            "addresses": (address, address),
            "bytes_up": 10**10,
            "bytes_down": 10**10,
        }
    )
    held = StateReference("L1.E63", 900, "f" * 64, 10**9, 899, 10**8)
    entry = ProgressEntry(
        path=4000,
        last_round=900,
        tokens=10**9,
        validation_nll=1e6,
        validation_tokens=10**6,
        train_loss=2.5,
        best_sha256="f" * 64,
        best_nll=1e6,
        best_tokens=10**6,
        best_round=899,
    )
    records: list[tuple[str, str, Record]] = [
        ("peers", "63", said),
        ("modules", "L1.E63", module_record(peer, "L1.E63", standing, held)),
        ("modules", "L1.E63", module_record(peer, "L1.E63", standing, None)),
        ("progress", "63", ProgressRecord(peer_id=peer, entries=(entry,))),
        ("progress", "63", ProgressRecord(peer_id=peer, entries=(entry,) * 5)),
    ]
    for kind, item, record in records:
        real = _published_bytes(kind, item, record)
        assert record_bytes(record) == pytest.approx(real, rel=0.1), (kind, real)
