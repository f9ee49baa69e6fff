"""What grows in a peer's machine that is on for two days: files, rows, steps, peers that are known.

    TMPDIR=/dev/shm python benchmarks/soak.py    # 48 hours, 576 rounds of 300 s: some minutes

A small swarm lives in virtual time (`dipaco.simulator.swarm`) under churn: peers crash, leave, lose
their disks, come back, and others come under names of their own; some messages get lost. Beside
each machine are the stores of a real peer in a folder of its own: chains, contributions, states,
admissions, contributors and the checks of rows. They hear what the simulated machine hears, and
take up what lies on the disk after each crash. States and contributions are small; all else is as
in a real peer.

Every virtual hour all containers in the members and their stores are counted, and the files. What
is larger in the last quarter than in the second, by a fifth and by more than a few entries, is
named as growing. The chain does: every step that was ever taken is in it. What has a bound may grow
up to it. Exit code 1 when anything else grows, or when a machine does not find on its disk what it
has served. The memory of the process is told too; most of it is the simulator's own accounts.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import statistics
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from parts.common import Report, scratch_folder
from support.wire.peers import key, peer

from dipaco.base.blobs import BlobStore
from dipaco.modules.layout import layout_of
from dipaco.modules.state import ModuleState
from dipaco.modules.store import StateStore
from dipaco.peer.exchange.chain_store import ChainStore
from dipaco.peer.exchange.contact.known_contributors import (
    MAX_PEERS,
    MAX_PEERS_OF_MODULE,
    Contributors,
)
from dipaco.peer.exchange.contact.known_peers import KnownPeers
from dipaco.peer.exchange.files.contribution_files import ContributionFiles
from dipaco.peer.exchange.verify import REMEMBERED_ROUNDS, REMEMBERED_ROWS, RowCheck
from dipaco.peer.node.states import States
from dipaco.protocol.admission import MAX_VERIFIED, Gate
from dipaco.protocol.chain import MAX_ROWS, Head, Row, Step, sign_row
from dipaco.protocol.identity import raw_public_key
from dipaco.protocol.invitations import MAX_PLACES, Terms, make_invitation
from dipaco.protocol.member.actions import SaveAll
from dipaco.simulator.swarm.carrying import Carrying
from dipaco.simulator.swarm.engine import Engine
from dipaco.simulator.swarm.invariants import Invariants
from dipaco.simulator.swarm.machine import Machine
from dipaco.simulator.swarm.machine_store import Store
from dipaco.simulator.swarm.network import Link
from dipaco.simulator.swarm.scenario import small_plan
from dipaco.simulator.swarm.world import START_S, Content, File, World

ROUND_S, GRID, GRID_MODULES = 300.0, (2, 2), 4
LIFE_ROUNDS, NEW_NAME, LEAVES, LOSES_DISK = 12.0, 0.4, 0.4, 0.2
LOSS = 0.01
FILE_BYTES = 512
# Bytes of contributions that others may still ask for.
KEPT_CONTENTS = 5000
OPERATOR = key(1_000_000)
# By a fifth and by so many it must be larger to count as growing.
GROWTH, LEAST = 1.2, 24
# The chain of a module holds every step, and says who was in it.
CHAINS = (
    "_links",
    "_genesis",
    "steps",
    "chain",
    "places",
    "saved",
    "log bytes",
    "_admissions",
    # Of the last 64 steps, and of all those that a peer has still to take.
    "_tellers",
)
PROCESS = "memory of the process, MiB"
# What has a bound, and which one.
BOUNDS = {
    "check._signed": REMEMBERED_ROWS,
    "check._rounds": REMEMBERED_ROUNDS,
    "check._rounds[]": REMEMBERED_ROUNDS * MAX_ROWS,
    "gate._verified": MAX_VERIFIED,
    "gate._verified[]": 2 * MAX_VERIFIED,
    "gate._places[]": MAX_PLACES,
    "contributors._addresses": MAX_PEERS,
    "contributors._addresses[]": MAX_PEERS,
    "contributors._rounds[]": MAX_PEERS_OF_MODULE * GRID_MODULES,
    # Those that are asked are admitted, up to the places of the run.
    "member.modules[]._asked_s": MAX_PLACES * GRID_MODULES,
}
# What is not a container of a peer's, but what it stands on, or is counted as one entry.
LEAVES_OF_WALK = (World, Engine, Machine, Row, Step, Head, ModuleState, Path, str, bytes)


class SoakWorld(World):
    """A world whose rows are signed, and whose files and states have bytes."""

    def begin(self, folder: Path) -> None:
        """Be ready for machines, whose folders will be in `folder`."""
        self.folder = folder
        self.invitation = make_invitation(Terms(self.run_id, 10_000, 0), OPERATOR)
        self.numbers: dict[str, int] = {}
        self.contents: dict[str, bytes] = {}
        self._admissions: dict[str, bytes] = {}
        self._states: dict[str, ModuleState] = {}
        self._digests: dict[str, str] = {}

    def name(self) -> str:
        """Return the id of a peer that was never here."""
        number = len(self.numbers)
        self.numbers[peer(number)] = number
        return peer(number)

    def admission(self, name: str) -> bytes:
        """Return what says that a peer is in."""
        if name not in self._admissions:
            public_key = raw_public_key(key(self.numbers[name]))
            self._admissions[name] = self.invitation.admit(public_key, START_S)
        return self._admissions[name]

    def make_file(self, row: Row, begin: int, end: int, content: Content = "good") -> Row:
        body = row.mark + hashlib.sha256(f"{row.peer}/{begin}/{end}".encode()).digest()
        body = body.ljust(FILE_BYTES, b"\0")
        row = replace(row, file=hashlib.sha256(body).hexdigest(), bytes=len(body))
        row = sign_row(row, key(self.numbers[row.peer]))
        self.files[row.file] = File(row, begin, end, content)
        self.contents[row.file] = body
        if len(self.contents) > KEPT_CONTENTS:
            del self.contents[next(iter(self.contents))]
        return row

    def head(self, step: str) -> Head:
        head = super().head(step)
        if step not in self._digests:
            self._digests[step] = self.state(head).digest
        return replace(head, digest=self._digests[step])

    def state(self, head: Head) -> ModuleState:
        """Return the state after a step; its numbers say which one it is."""
        found = self._states.get(head.step)
        if found is None:
            layout = layout_of(self.grid, head.module)
            number = int(head.step[:6], 16)
            values = torch.full((layout.size,), float(number))
            zeros = torch.zeros(layout.size)
            found = ModuleState(head.module, head.version, values, zeros, {}, layout)
            self._states[head.step] = found
            if len(self._states) > 64:
                del self._states[next(iter(self._states))]
        return found


class DiskStore(Store):
    """What a machine has in the simulation, and beside it the stores of a real peer."""

    def __init__(self, world: SoakWorld, folder: Path, name: str) -> None:
        self.world, self.folder, self.name = world, folder, name
        super().__init__(world)
        self.files = _Files(self)

    def restart(self) -> None:
        """Take up what lies on the disk."""
        super().restart()
        world, folder = self.world, self.folder
        modules = world.grid.modules()
        self.chains = ChainStore(world.run_id, modules, folder / "chains")
        self.contributions = ContributionFiles(folder / "contributions")
        states = StateStore(folder / "states")
        self.states = States(
            world.grid, states, BlobStore(folder / "blobs"), self.chains, lambda: world.now_s
        )
        self.contributors = Contributors(lambda: world.now_s)
        self.chains.on_served = self._served
        self.chains.has_contributed = self.contributors.has_contributed
        self.gate = Gate(
            world.run_id, raw_public_key(OPERATOR), start_s=START_S, round_s=ROUND_S,
            now=lambda: world.now_s,
        )  # fmt: skip
        self.check = RowCheck(
            world.plan, world.grid, self.gate,
            max_bytes=lambda module: FILE_BYTES, now=lambda: world.now_s,
        )  # fmt: skip
        found = {head.module: head for head in self.states.load_from_disk()}
        if found != self.held:
            lost = sorted(set(self.held.items()) ^ set(found.items()))
            world.watch.wrong(world.machines[self.name], f"finds other states: {lost}")

    def _served(self, step: Step) -> None:
        self.contributors.step_taken(step)
        for admission in self.chains.admissions_of(step.peers).items():
            self.gate.verify(*admission)
            self.gate.contributed(admission[0], step.round_index)

    def add_rows(self, rows: Iterable[Row]) -> None:
        rows = tuple(rows)
        super().add_rows(rows)
        self.chains.note_admissions({row.peer: self.world.admission(row.peer) for row in rows})
        self.chains.note_rows(rows)

    def serve(self, module: str, step: str, steps: Iterable[Step]) -> bool:
        steps = tuple(steps)
        new = [found for found in steps if found.name not in self.chains._modules[module].steps]
        is_known = super().serve(module, step, steps)
        if is_known:
            self.states.serve(module, step, new)
        return is_known

    def prune(self, module: str, round_index: int) -> None:
        super().prune(module, round_index)
        self.files = _Files(self, self.files)
        self.contributions.prune(module, round_index)

    def hold(self, head: Head, *, save: bool) -> None:
        before = self.computed_from.get(head.step)
        super().hold(head, save=save)
        world = self.world
        state = world.state(head)
        self.states.put(head.step, state, None if before is None else world.state(before))
        self.states.hold(head)
        if save:
            self.states.save(state)

    def drop(self, module: str) -> None:
        super().drop(module)
        self.states.drop(module)


class _Files(set[str]):
    """Files of contributions, which are on the disk too."""

    def __init__(self, store: DiskStore, names: Iterable[str] = ()) -> None:
        super().__init__(names)
        self._store = store

    def add(self, name: str) -> None:
        store, world = self._store, self._store.world
        body = world.contents.get(name)
        if name not in self and body is not None:
            store.contributions.add(world.files[name].row, (body,))
        super().add(name)


class SoakCarrying(Carrying):
    """Lets the real check see all rows and steps that come."""

    def _plausible(
        self, rows: Iterable[Row], steps: Iterable[Step]
    ) -> tuple[tuple[Row, ...], tuple[Step, ...]]:
        rows, steps = super()._plausible(rows, steps)
        store, world = self._machine.store, self._world
        peers = {row.peer for row in rows} | {p for step in steps for p in step.peers}
        admissions = {name: world.admission(name) for name in peers}
        for module in {row.module for row in rows}:
            of_module = [row for row in rows if row.module == module]
            good = store.check.good_rows(module, of_module, admissions)
            if len(good) != len(of_module):
                self._wrong("a good row is refused")
        for module in {step.module for step in steps}:
            found = [step for step in steps if step.module == module]
            if len(store.check.good_steps(module, found, admissions)) != len(found):
                self._wrong("a good step is refused")
        return rows, steps

    def _save_all(self, action: SaveAll) -> None:
        super()._save_all(action)
        store = self._machine.store
        assert isinstance(store, DiskStore)
        store.states.save_all()


class SoakMachine(Machine):
    """A machine with a disk."""

    carries = SoakCarrying

    def __init__(self, world: SoakWorld, name: str, link: Link, **given: Any) -> None:
        super().__init__(world, name, link, **given)
        self.known = KnownPeers(world.folder / name)

    def open_disk(self) -> None:
        """Begin with an empty disk."""
        world: Any = self.world
        self.lives = getattr(self, "lives", 0) + 1
        self.store = DiskStore(world, world.folder / self.peer / str(self.lives), self.peer)

    def crash(self, *, hangs: bool, empty_disk: bool) -> None:
        super().crash(hangs=hangs, empty_disk=False)
        if empty_disk:
            self.open_disk()

    def read(self, is_answer: bool, further: tuple[int, ...] = ()) -> None:
        super().read(is_answer, further)
        store, world = self.store, self.world
        seen = {name: (address_of(name),) for name in self.member_view()}
        store.contributors.note_addresses(seen)
        for name in seen:
            store.gate.check(name, world.admission(name))
        for name in store.contributors.all():
            store.contributors.called(name, world.network.can_call(self.peer, name))

    def member_view(self) -> tuple[str, ...]:
        """Return the peers that it sees."""
        view = self.world.directory.read(self.peer, self.believed_s, self.scope)
        return tuple(view.peers)

    def remember(self) -> None:
        """Write down who is there, as a peer does every minute."""
        self.known._written_s = float("-inf")
        view = self.world.directory.read(self.peer, self.believed_s, self.scope)
        given = [address_of(self.peer)]
        self.known.note(self.world.run_id, given, view, self.peer, self.store.contributors.all())


def address_of(name: str) -> str:
    return f"/ip4/203.0.113.5/tcp/31337/p2p/{name}"


class Soak:
    """A swarm that lives."""

    def __init__(self, folder: Path, *, members: int, hours: float, seed: int) -> None:
        self.rounds = int(hours * 3600 / ROUND_S)
        self.engine = Engine(seed, START_S - ROUND_S / 2)
        plan = small_plan(GRID, duration_s=ROUND_S)
        self.world = SoakWorld(plan, self.engine)
        self.world.begin(folder)
        self.watch = Invariants(self.world)
        self.world.network.conditions.loss = LOSS
        self.samples: list[Counter[str]] = []
        self.happened: Counter[str] = Counter()
        self.ended_s = START_S + self.rounds * ROUND_S
        boot = self._place(trains=False)
        self.engine.at(START_S - 0.45 * ROUND_S, boot.start)
        for _ in range(members):
            machine = self._place()
            self.engine.at(START_S + self.engine.between(-0.4, 0.1) * ROUND_S, machine.start)
            self._live(machine)
        self.engine.after(ROUND_S, self.watch.sample)
        for hour in range(1, int(hours) + 1):
            self.engine.at(START_S + 3600.0 * hour, self._sample)

    def run(self) -> None:
        self.engine.run(self.ended_s)

    def _place(self, *, trains: bool = True) -> SoakMachine:
        engine = self.engine
        link = Link(latency_s=engine.between(0.005, 0.15), uplink_bytes_s=5e6, downlink_bytes_s=2e7)
        step_s = engine.random.choice((0.5, 2.0, 8.0)) * engine.between(0.7, 1.4)
        machine = SoakMachine(self.world, self.world.name(), link, step_s=step_s, trains=trains)
        machine.open_disk()
        for path in range(self.world.grid.path_count):
            machine.store.shards.add(path)
        return machine

    def _live(self, machine: SoakMachine) -> None:
        life_s = self.engine.random.expovariate(1.0 / (LIFE_ROUNDS * ROUND_S))
        self.engine.at(max(START_S, self.engine.now_s) + life_s, self._end_life, machine)

    def _end_life(self, machine: SoakMachine) -> None:
        engine = self.engine
        how = "left" if engine.chance(LEAVES) else "crashed"
        if how == "left":
            machine.ask_to_leave()
        else:
            machine.crash(hangs=engine.chance(0.5), empty_disk=engine.chance(LOSES_DISK))
        self.happened[how] += 1
        engine.after(1.0 + engine.random.expovariate(1.0 / ROUND_S), self._come_back, machine)

    def _come_back(self, machine: SoakMachine) -> None:
        if machine.is_alive:  # It takes its time to leave.
            self.engine.after(5.0, self._come_back, machine)
            return
        if self.engine.chance(NEW_NAME):
            self.happened["new names"] += 1
            machine = self._place()
        machine.start()
        self._live(machine)

    def _sample(self) -> None:
        """Count everything in the machines that live; the greatest of each kind counts."""
        found: dict[str, int] = defaultdict(int)
        for machine in self.world.machines.values():
            if machine.is_alive:
                machine.remember()
                for name, count in sizes_of(machine).items():
                    found[name] = max(found[name], count)
        found[PROCESS] = int(resident_mib())
        self.samples.append(Counter(found))
        hours = len(self.samples)
        print(f"{hours} h: {found['files']} files, {found['bytes of files']} B", file=sys.stderr)

    def growing(self) -> dict[str, tuple[float, float]]:
        """Return what is larger in the last quarter than in the second one, with both means."""
        quarter = max(1, len(self.samples) // 4)
        names = sorted({name for sample in self.samples for name in sample})
        found = {}
        for name in names:
            before = statistics.mean(s[name] for s in self.samples[quarter : 2 * quarter])
            after = statistics.mean(s[name] for s in self.samples[-quarter:])
            if after > GROWTH * before and after > before + LEAST:
                found[name] = round(before, 1), round(after, 1)
        return found


def sizes_of(machine: SoakMachine) -> Counter[str]:
    """Return how many entries the containers of a machine have, and how many files it has."""
    store, found = machine.store, Counter[str]()
    roots = {
        "member": machine.member,
        "chains": store.chains,
        "contributions": store.contributions,
        "states": store.states,
        "contributors": store.contributors,
        "gate": store.gate,
        "check": store.check,
    }
    seen: set[int] = set()
    for name, root in roots.items():
        for place, count in containers(root, name, seen):
            found[place] += count
    folders = (store.folder, machine.world.folder / machine.peer / "known_peers.json")
    for folder in folders:
        for file in [folder] if folder.is_file() else folder.rglob("*"):
            if file.is_file():
                is_chain = file.suffix == ".log"
                found["log bytes" if is_chain else "bytes of files"] += file.stat().st_size
                found["files"] += 1
    return found


def containers(found: object, place: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    """Yield where containers are in an object, and how many entries each has."""
    if id(found) in seen or isinstance(found, LEAVES_OF_WALK):
        return
    seen.add(id(found))
    if isinstance(found, Mapping | set | frozenset | list | tuple | deque):
        yield place, len(found)
        values = found.values() if isinstance(found, Mapping) else found
        for value in tuple(values):
            yield from containers(value, f"{place}[]", seen)
    elif type(found).__module__.startswith("dipaco."):
        names = [f.name for f in fields(found)] if is_dataclass(found) else []
        for name in dict.fromkeys((*names, *getattr(found, "__dict__", ()))):
            yield from containers(getattr(found, name, None), f"{place}.{name}", seen)


def is_chain(place: str) -> bool:
    """Tell whether a container is of the chain, which grows with every step."""
    return place.rstrip("[]").rpartition(".")[2] in CHAINS or place in CHAINS


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=48.0)
    parser.add_argument("--members", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    logging.disable(logging.INFO)
    report = Report("soak", ("what", "greatest", "second quarter", "last quarter", "bound"))
    began_s = time.monotonic()
    with scratch_folder() as folder:
        soak = Soak(folder, members=chosen.members, hours=chosen.hours, seed=chosen.seed)
        soak.run()
    growing = soak.growing()
    greatest: Counter[str] = Counter()
    for sample in soak.samples:
        greatest |= sample
    for name, count in sorted(greatest.items(), key=lambda found: -found[1]):
        if count > LEAST or name in growing:
            bound = "the chain" if is_chain(name) else BOUNDS.get(name, "")
            report.row(name, count, *growing.get(name, ("", "")), bound)
    unbounded = [name for name in growing if greatest[name] > BOUNDS.get(name, 0)]
    others = sorted(name for name in unbounded if not is_chain(name) and name != PROCESS)
    wrong = [str(violation) for violation in soak.watch.violations]
    report.figures = {
        "hours": chosen.hours,
        "rounds": soak.rounds,
        "members": chosen.members,
        "seed": chosen.seed,
        "seconds": round(time.monotonic() - began_s, 1),
        "happened": dict(soak.happened),
        "greatest": dict(greatest),
        "growing": growing,
        "growing_beside_the_chain": others,
        "wrong": wrong,
    }
    report.notes += [f"{dict(soak.happened)}, {soak.rounds} rounds"]
    report.notes += [f"grows: {', '.join(others) or 'nothing but the chain'}", *wrong[:20]]
    report.print(chosen.json)
    return int(bool(others or wrong))


if __name__ == "__main__":
    sys.exit(main())
