"""Members in a world in which nothing goes wrong: a shell of a hundred lines, for tests.

Every action is answered at once, a meeting when it closes. What goes wrong is the business of the
swarm simulator (`dipaco.simulator.swarm`).
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence

from dipaco.dht.certificates import Certificate, CertificateBook, CommitStatement
from dipaco.dht.records import Claim, Holding, PeerRecord
from dipaco.dht.view import SwarmView
from dipaco.modules.grid import Grid
from dipaco.modules.outer import Contribution
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import StateReference
from dipaco.peer.member import actions as a
from dipaco.peer.member import events as e
from dipaco.peer.member.knowledge import MemberSettings
from dipaco.peer.member.member import Member

STEP_TOKENS = 10
TICK_S = 0.25


def peer_id(name: str) -> str:
    """Return the id of the peer that a test calls `name`."""
    return name.rjust(44, "1")


class CalmPeer:
    """One member and what its machine holds."""

    def __init__(self, world: CalmWorld, name: str, **settings: object) -> None:
        self.world = world
        self.name = name
        self.book = CertificateBook()
        self.member = Member(
            MemberSettings(name, **settings),  # type: ignore[arg-type]
            world.plan,
            world.grid,
            book=self.book,
        )
        self.claim: a.Say | None = None
        self.held: dict[str, StateReference] = {}
        self.tokens: dict[str, int] = {}
        self.snapshots: dict[tuple[str, int], int] = {}
        self.tables: dict[str, tuple[Contribution, ...]] = {}
        self.done: list[a.Action] = []
        self.alive = True

    def happen(self, event: e.Event) -> None:
        """Report an event, and carry out what comes of it."""
        for action in self.member.handle(event, self.world.now_s):
            self.done.append(action)
            answer = self.carry_out(action)
            if answer is not None:
                self.happen(answer)

    def of(self, kind: type[a.Action]) -> list[a.Action]:
        """Return the actions of one kind so far."""
        return [action for action in self.done if isinstance(action, kind)]

    def carry_out(self, action: a.Action) -> e.Event | None:
        world = self.world
        match action:
            case a.Say():
                self.claim = action
            case a.Look():
                return e.Viewed(world.view(), is_answer=True)
            case a.FetchPath():
                return e.PathReady(action.path)
            case a.FetchState():
                state = action.reference
                chain = world.chain(state)
                return e.StateFetched(state, {}, chain, action.purpose)
            case a.FetchChain():
                return e.ChainFetched(action.reference, world.chain(action.reference))
            case a.StartPath():
                self.tokens = {state.module: 0 for state in action.states}
                self.held |= {state.module: state for state in action.states}
            case a.TakeStep():
                self.tokens = {m: count + STEP_TOKENS for m, count in self.tokens.items()}
                return e.Stepped(STEP_TOKENS)
            case a.TakeSnapshot():
                tokens = self.tokens[action.module]
                self.snapshots[action.module, action.round_index] = tokens
                return e.SnapshotTaken(action.module, action.round_index, tokens, True)
            case a.Average():
                world.meetings[
                    action.module, action.round_index, action.attempt, action.anchor
                ].append((self, action))
            case a.Ask():
                asked = {p: world.peers[p].held.get(action.module) for p in action.peers}
                return e.Answered(action.module, action.round_index, asked)
            case a.Call():
                return e.CallAnswered(action.peers, action.peers)
            case a.CheckState():
                return e.Checked(action.module, action.digest, 1.0, 1.0)
            case a.TakeOuterStep():
                return self._outer_step(action)
            case a.Commit():
                self.tokens[action.module] -= self.snapshots[action.module, action.round_index]
                self.held[action.module] = action.reference
            case a.Offer():
                world.peers[action.peer].happen(e.Offered(self.name, action.reference))
                held = world.peers[action.peer].held.get(action.reference.module)
                is_kept = held is not None and held.digest == action.reference.digest
                reference = action.reference
                return e.OfferAnswered(reference.module, reference.digest, action.peer, is_kept)
            case a.Keep():
                self.held[action.reference.module] = action.reference
        return None

    def _outer_step(self, action: a.TakeOuterStep) -> e.Event:
        module = action.module
        anchor = self.held[module]
        table = self.tables.pop(module, ())
        if action.alone:
            path = self.member.path or 0
            own = self.snapshots[module, action.round_index]
            table = (Contribution(path, self.name, own),)
        tokens = sum(row.tokens for row in table)
        digest = hashlib.sha256(f"{anchor.digest}{table}".encode()).hexdigest()
        state = StateReference(
            module, anchor.version + 1, digest, anchor.tokens + tokens, action.round_index, 1
        )
        statement = CommitStatement(
            "run", module, state.version, anchor.digest, digest, action.round_index, table
        )
        certificate = Certificate(statement, {row.peer: b"" for row in table})
        self.world.book.add(certificate)
        return e.OuterStepped(module, state, certificate)


class CalmWorld:
    """All peers, one clock, one DHT that everybody sees whole."""

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self.grid = Grid(plan.model, plan.grid, plan.rounds.level_offsets)
        self.now_s = plan.start_s
        self.peers: dict[str, CalmPeer] = {}
        self.book = CertificateBook()
        self.meetings: dict[tuple[str, int, int, str], list[tuple[CalmPeer, a.Average]]] = (
            defaultdict(list)
        )

    def add(self, names: Sequence[str], **settings: object) -> list[CalmPeer]:
        """Let peers join."""
        added = [CalmPeer(self, peer_id(name), **settings) for name in names]
        self.peers |= {peer.name: peer for peer in added}
        return added

    def chain(self, state: StateReference) -> tuple[Certificate, ...]:
        """Return the certificates of a state's chain."""
        return self.book.chain(state.module, state.digest)

    def view(self) -> SwarmView:
        """Return what everybody sees now."""
        alive = [peer for peer in self.peers.values() if peer.alive]
        claims = {
            peer.name: Claim(
                peer_id=peer.name,
                path=peer.claim.path,
                state=peer.claim.state,
                since_s=peer.claim.since_s,
                round=peer.member.position.round_index,
                pinned=peer.claim.pinned,
            )
            for peer in alive
            if peer.claim is not None and peer.claim.state in ("joining", "training")
        }
        records = {
            peer.name: PeerRecord(
                peer_id=peer.name,
                protocol=1,
                software="test",
                device="test",
                state=peer.claim.state if peer.claim else "serving",
                path=peer.claim.path if peer.claim else None,
                tokens_per_s=0.0,
                round=peer.member.position.round_index,
                reachable="direct",
                addresses=(),
                bytes_up=0,
                bytes_down=0,
            )
            for peer in alive
        }
        holdings: dict[str, list[Holding]] = defaultdict(list)
        for peer in alive:
            for state in peer.held.values():
                holdings[state.module].append(
                    Holding(
                        peer_id=peer.name,
                        module=state.module,
                        version=state.version,
                        digest=state.digest or "0" * 64,
                        tokens=state.tokens,
                        round=max(0, state.last_round),
                        bytes=state.bytes,
                    )
                )
        return SwarmView(
            self.now_s,
            claims,
            records,
            {module: tuple(held) for module, held in holdings.items()},
            duration_s=self.plan.rounds.duration_s,
        )

    def run(self, seconds: float) -> None:
        """Let time pass: turns four times a second, a view every refresh period."""
        until_s, viewed_s = self.now_s + seconds, self.now_s
        while self.now_s < until_s:
            for peer in [peer for peer in self.peers.values() if peer.alive]:
                peer.happen(e.Turn(TICK_S))
            self._close_meetings()
            self.now_s += TICK_S
            if self.now_s - viewed_s >= 1.0:
                viewed_s = self.now_s
                for peer in [peer for peer in self.peers.values() if peer.alive]:
                    peer.happen(e.Viewed(self.view()))

    def _close_meetings(self) -> None:
        for key, members in list(self.meetings.items()):
            members = [(peer, action) for peer, action in members if peer.alive]
            if not members or self.now_s < members[0][1].close_s:
                continue
            del self.meetings[key]
            module, round_index, attempt, _ = key
            table = tuple(
                sorted(
                    (
                        Contribution(
                            peer.member.path or 0, peer.name, peer.snapshots[module, round_index]
                        )
                        for peer, _ in members
                    ),
                    key=lambda row: (row.path, row.peer),
                )
            )
            for peer, _ in members:
                if len(members) == 1:
                    peer.happen(e.AverageFailed(module, round_index, attempt, "no other peer came"))
                else:
                    peer.tables[module] = table
                    peer.happen(e.Averaged(module, round_index, attempt, table))
