"""One trainer of one module, at a boundary, and what it wants done."""

import hashlib

from dipaco.protocol.chain.steps import Head, Row
from dipaco.protocol.config import GridConfig, RoundsConfig
from dipaco.protocol.grid import Grid
from dipaco.protocol.member import actions as a
from dipaco.protocol.member import events as e
from dipaco.protocol.member.followed_module import FollowedModule
from dipaco.protocol.member.knowledge import Knowledge, MemberSettings, mailbox_order
from dipaco.protocol.member.situation import Role
from dipaco.protocol.records import Claim, PeerRecord
from dipaco.protocol.view import SwarmView

from .make_plan import make_plan

MODULE, DURATION_S, GATHER_S, GRACE_S = "L0.E0", 100.0, 20.0, 4.0
ROUNDS = RoundsConfig(duration_s=DURATION_S, gather_s=GATHER_S, grace_s=GRACE_S)
PLAN = make_plan(rounds=ROUNDS, grid=GridConfig(modules_per_level=(1,)))
# The same with fixed steps.
COUNTED = PLAN.model_copy(update={"rounds": ROUNDS.model_copy(update={"inner_steps": 4})})
GRID = Grid(PLAN.model, PLAN.grid)
BOUNDARY_S = PLAN.start_s + DURATION_S


def name(text):
    return hashlib.sha256(text.encode()).hexdigest()


def view_of(peers, closed=(), held=()):
    claims, records = {}, {}
    for peer in peers:
        reachable = "outgoing" if peer in closed else "direct"
        claims[peer] = Claim.model_construct(
            peer_id=peer, path=0, state="training", since_s=PLAN.start_s, round=0,
            reachable=reachable, pinned=False,
        )  # fmt: skip
        records[peer] = PeerRecord.model_construct(peer_id=peer, path=0, state="training", reachable=reachable, round=0)
    return SwarmView(
        now_s=BOUNDARY_S, claims=claims, peers=records, holdings={MODULE: tuple(held)}, duration_s=DURATION_S
    )


class Trainer:
    """A trainer of the only module, at the boundary of round 0."""

    def __init__(self, me, peers, closed="", plan=PLAN, **view):
        self.known = known = Knowledge(MemberSettings(me), plan, GRID)
        known.view, known.has_view, known.path = view_of(peers, closed, **view), True, 0
        known.now_s = BOUNDARY_S
        self.module = module = FollowedModule(known, MODULE)
        self.done = []
        genesis = self.module.book.genesis(MODULE)
        module.want()
        module.consider()
        module.handle(e.StateHere(MODULE, Head(MODULE, genesis, 0, 0, -1, name(genesis), 10**6)))
        module.follow(Role.TRAINER)
        module.publishing.begin(0, BOUNDARY_S)
        self.take(a.Publish)

    def head(self, step):
        """Return the state after a step that is in the book, as everybody computes it."""
        return self.module.book.link(step.name).head(name(step.name), 10**6)

    def stand_on(self, *steps):
        """Stand on the last of some steps, of which each stands on the one before."""
        for step in steps:
            self.module.book.add(step)
            self.module.take(self.head(step), self.module.head)

    def take(self, kind):
        """Return what was wanted of this kind since the last time, and forget all."""
        self.done += self.known.actions
        self.known.actions = []
        found = [action for action in self.done if isinstance(action, kind)]
        self.done = []
        return found

    def row(self, peer, **fields):
        parent = fields.get("parent", self.module.stand)
        given = {
            "module": MODULE, "round_index": 0, "parent": parent, "state": name(parent), "path": 0,
            "peer": peer, "tokens": 10, "file": name(f"file {peer}"), "bytes": 100, **fields,
        }  # fmt: skip
        return Row(**given)

    def gathered(self, *rows):
        """The files of some rows are here."""
        for row in rows:
            self.module.handle(e.Gathered(MODULE, row))

    def publish(self):
        self.module.handle(e.Published(MODULE, self.row(self.known.me)))

    def hear(self, *peers, gathered=True):
        for peer in peers:
            row = self.row(peer)
            self.module.hear_rows([row], peer)
            if gathered:
                self.gathered(row)

    def refuse(self, peer):
        asked = a.Gather(MODULE, (self.row(peer),))
        self.module.handle(e.Failed(asked, "it is too short", is_final=True))

    def wait(self, seconds):
        self.known.now_s += seconds
        self.module.on_time()

    def nobody_answers(self):
        """Let every request fail: the peers that were asked are silent."""
        for ask in self.take(a.Ask):
            self.module.handle(e.Failed(ask, "it is silent"))
        self.wait(0.1)

    def proposed(self):
        return [step for tell in self.take(a.Tell) for step in tell.steps]


def first_and_second(peers="ABC"):
    order = mailbox_order(MODULE, 0, set(peers))
    return order[0], order[1]
