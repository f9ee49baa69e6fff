"""Peers that lie, in each way that costs them little.

Bare identities only write records: claims, and holdings with invented digests. A liar also answers
calls: it holds states of 2^53 tokens, serves invented states and forged chains, signed by nobody
but itself and its inventions, and offers them to everybody. An insider trains like anybody, and
spoils every reduce that it is in, says that it has trained far more than it has, or gives all the
same wrong averages of some pieces.

Nobody can sign for another, change another's record, or make bytes that have a given digest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dipaco.dht.certificates import Certificate, CommitStatement
from dipaco.dht.coverage import bucket_count, home_bucket
from dipaco.dht.view import greatest_contribution
from dipaco.modules.outer import Contribution
from dipaco.modules.state import StateReference
from dipaco.peer.member.actions import ClaimState

from .machine import Machine
from .network import Link, Reply
from .publishing import Standing, make_standing, module_record, peer_record
from .work import ModuleWork, SimulatedState, signature
from .world import World

RECORD_LIFE_S = 600.0
GREATEST_TOKENS = 2**53
# Rows of an invented group, and how long an invented chain is.
INVENTED = tuple(f"bare{number}" for number in range(12))
INVENTED_CHAIN = 6


class BareIdentities:
    """Many names with records, and nobody behind them."""

    def __init__(self, world: World, count: int) -> None:
        self._world = world
        self._names = [f"bare{number}" for number in range(count)]
        self._since_s = world.now_s
        self.publish()

    def publish(self) -> None:
        """Write the records again and again: the oldest claims, on every path."""
        world = self._world
        modules = world.grid.modules()
        now_round = max(0, world.plan.rounds.round_at(world.now_s - world.plan.start_s))
        for number, name in enumerate(self._names):
            path = number % world.grid.path_count
            state: ClaimState = "training" if number % 3 else "joining"
            pinned = number % 4 == 0
            standing = make_standing(state, path, self._since_s, now_round, pinned=pinned)
            module = modules[number % len(modules)]
            tokens = GREATEST_TOKENS if number % 2 else 1000 * (now_round + 1)
            digest = f"{number:02x}" * 32
            held = StateReference(module, now_round + 1, digest, tokens, now_round, 1000)
            _publish(world, name, standing, {module: held})
        world.engine.after(20.0, self.publish)


class Liar:
    """A machine without a member, that answers calls."""

    def __init__(
        self,
        world: World,
        peer: str,
        link: Link,
        *,
        serves: bool,
        others: Sequence[str] = INVENTED,
    ) -> None:
        self._world, self._peer, self._link = world, peer, link
        self._others = others
        """Identities that sign with it."""
        self._serves = serves
        """Whether it made the states that it announces, or only their digests."""
        self._lies: dict[str, tuple[SimulatedState, tuple[Certificate, ...]]] = {}
        self._since_s = world.now_s
        world.network.join(peer, link, self)
        world.engine.after(world.engine.between(1.0, 30.0), self._act)

    def _act(self) -> None:
        """Publish lies, and offer them to everybody."""
        world, engine = self._world, self._world.engine
        now_round = max(0, world.plan.rounds.round_at(world.now_s - world.plan.start_s))
        path = engine.random.randrange(world.grid.path_count)
        held: dict[str, StateReference] = {}
        for module in world.grid.modules():
            state, _ = self._lies[module] = self._lie(module, now_round)
            announced = state.reference
            if engine.chance(0.3):
                announced = StateReference(
                    module, announced.version, announced.digest, GREATEST_TOKENS, now_round, 1000
                )
            held[module] = announced
            for machine in world.machines.values():
                if machine.is_alive and engine.chance(0.5):
                    world.network.call(
                        self._peer,
                        machine.peer,
                        "offer",
                        announced,
                        _ignore,
                        limit_s=10.0,
                    )
        standing = make_standing("training", path, self._since_s, now_round, pinned=False)
        _publish(world, self._peer, standing, held)
        engine.after(engine.between(0.3, 1.5) * world.plan.rounds.duration_s, self._act)

    def _lie(self, module: str, now_round: int) -> tuple[SimulatedState, tuple[Certificate, ...]]:
        """Invent a chain from a true state, and the state at its end."""
        world, engine = self._world, self._world.engine
        random = engine.random
        real = world.stock.states_of(module)
        parent = random.choice(real[-6:]).reference if engine.chance(0.5) else real[0].reference
        path = world.grid.paths_of_module(module)[0]
        signers = [self._peer, *self._others]
        tokens = GREATEST_TOKENS if engine.chance(0.3) else parent.tokens + 100_000
        chain: list[Certificate] = []
        version, digest, state = parent.version, parent.digest, world.stock.states[parent.digest]
        length = random.randrange(1, INVENTED_CHAIN)
        for step in range(length):
            version += 1
            round_index = max(0, now_round - length + 1 + step)
            name = f"{self._peer} {module} {world.now_s} {step}"
            state = world.stock.invent(module, version, name, tokens, round_index)
            table = tuple(Contribution(path, peer, 1 + tokens // 20) for peer in sorted(signers))
            statement = CommitStatement(
                world.plan.run_id,
                module,
                version,
                digest,
                state.reference.digest,
                round_index,
                table,
            )
            signed = {peer: signature(peer, statement) for peer in signers}
            chain.insert(0, Certificate(statement, signed))
            digest = state.reference.digest
        return state, tuple(chain)

    def serve(self, caller: str, what: str, content: Any, reply: Reply) -> None:
        """Answer as suits a liar."""
        if what == "ping":
            reply(True)
        elif what == "holdings":
            lie = self._lies.get(content)
            reply((lie[0].reference if lie is not None else None,))
        elif what in ("chain", "state"):
            lie = self._lies.get(content.module)
            if lie is None or lie[0].reference.digest != content.digest:
                reply(None)
            elif what == "chain":
                reply(lie[1])
            else:
                reply(lie if self._serves else None)
        elif what == "offer":
            reply((False,))
        else:
            reply(None)


class Saboteur(Machine):
    """An insider in whose groups no reduce succeeds."""

    is_honest = False
    spoils_reduces = True


class Falsifier(Machine):
    """An insider that averages wrongly what it reduces, in a run that checks reducers."""

    is_honest = False

    def forget(self) -> None:
        """Begin anew, with hardly anything wrong, or much."""
        super().forget()
        self.falsified_share = self.world.engine.random.choice((0.002, 0.05, 0.5))


class Braggart(Machine):
    """An insider that says of every boundary that it trained as much as can be believed by the
    clock: where rounds are counted, and fewer have passed, more than that."""

    is_honest = False

    def claimed_tokens(self, work: ModuleWork, round_index: int) -> int:
        """Return the greatest number that is not refused, as the clock says."""
        now_round = self.world.plan.rounds.round_at(self.believed_s - self.world.plan.start_s)
        return greatest_contribution(self.world.plan, self.believed_s - 1.0, max(0, now_round))


def _publish(
    world: World, peer: str, standing: Standing, held: Mapping[str, StateReference]
) -> None:
    """Write what a peer says of itself, and of the modules of its path and those it holds."""
    path = standing["path"]
    bucket = home_bucket(peer, path, bucket_count(world.grid.path_count))
    record = peer_record(world, peer, standing, 1e6)
    world.directory.write(peer, f"peers/{bucket}", record, RECORD_LIFE_S)
    for module in sorted({*world.grid.modules_of_path(path or 0), *held}):
        said = module_record(peer, module, standing, held.get(module))
        world.directory.write(peer, f"modules/{module}", said, RECORD_LIFE_S)


def _ignore(answer: Any) -> None:
    """Nobody waits for this answer."""
