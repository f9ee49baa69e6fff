"""One member by itself: a test says what it sees and what becomes of what it wants."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from dipaco.dht.certificates import CertificateBook
from dipaco.dht.records import Claim, Holding, PeerRecord
from dipaco.dht.view import PathService, SwarmView
from dipaco.modules.config import GridConfig, RoundsConfig
from dipaco.modules.grid import Grid
from dipaco.modules.outer import Contribution
from dipaco.modules.plan import RunPlan
from dipaco.modules.state import StateReference
from dipaco.peer.member import actions as a
from dipaco.peer.member import events as e
from dipaco.peer.member.knowledge import Knowledge, MemberSettings
from dipaco.peer.member.member import Member

from .family import Family, genesis
from .make_plan import make_plan

ME = "Pb"
STEP_TOKENS = 10
START_S = 1000.0
AnyAction = TypeVar("AnyAction", bound=a.Action)


def small_plan(
    modules_per_level: tuple[int, ...] = (1, 1), duration_s: float = 20.0, **rounds: Any
) -> RunPlan:
    """Return a plan that starts at 1000 s, its rounds as the test says."""
    return make_plan(
        grid=GridConfig(modules_per_level=modules_per_level),
        rounds=RoundsConfig(duration_s=duration_s, **rounds),
    )


def grid_of(plan: RunPlan) -> Grid:
    return Grid(plan.model, plan.grid, plan.rounds.level_offsets)


def claim(
    peer: str, path: int = 0, state: str = "training", *, since_s: float = 1.0, **fields: Any
) -> Claim:
    """Return a claim, without the checks of a real peer id."""
    given = {"round": 0, "pinned": False, **fields}
    return Claim.model_construct(peer_id=peer, path=path, state=state, since_s=since_s, **given)


def record(
    peer: str,
    state: str = "training",
    reachable: str = "direct",
    path: int | None = None,
    round_index: int = 0,
) -> PeerRecord:
    """Return what a peer says of itself."""
    return PeerRecord.model_construct(
        peer_id=peer, state=state, reachable=reachable, path=path, round=round_index
    )


def holding(peer: str, state: StateReference) -> Holding:
    """Return an announcement of a state."""
    return Holding.model_construct(
        peer_id=peer,
        module=state.module,
        version=state.version,
        digest=state.digest,
        tokens=state.tokens,
        round=max(0, state.last_round),
        bytes=state.bytes,
    )


def view_of(
    now_s: float,
    claims: Iterable[Claim] = (),
    serving: Iterable[str | PeerRecord] = (),
    held: Mapping[str, Iterable[StateReference]] | None = None,
    *,
    duration_s: float = 20.0,
    last_rounds: Mapping[int, int] | None = None,
    their_round: int | None = None,
) -> SwarmView:
    """Return a view: who claims what, who is there besides, and who holds what.

    `their_round` is the round that the others say; that of `now_s`, if nothing is said.
    """
    claimed = {made.peer_id: made for made in claims}
    if their_round is None:
        their_round = max(0, int((now_s - START_S) // duration_s))
    peers = {
        peer: record(peer, made.state, path=made.path, round_index=their_round)
        for peer, made in claimed.items()
    }
    for there in serving:
        made_record = record(there, "serving") if isinstance(there, str) else there
        peers[made_record.peer_id] = made_record
    holdings: dict[str, list[Holding]] = defaultdict(list)
    for peer, states in (held or {}).items():
        for state in states:
            holdings[state.module].append(holding(peer, state))
    return SwarmView(
        now_s,
        claimed,
        peers,
        {module: tuple(found) for module, found in holdings.items()},
        {p: PathService(r, 1, 1.0, 1, 1.0) for p, r in (last_rounds or {}).items()},
        duration_s=duration_s,
    )


def knowledge(plan: RunPlan, me: str = ME, book: CertificateBook | None = None) -> Knowledge:
    """Return what the parts of a member share, at the start of the run."""
    known = Knowledge(MemberSettings(me), plan, grid_of(plan), book or CertificateBook())
    known.now_s = plan.start_s
    return known


def taken(known: Knowledge) -> list[a.Action]:
    """Return what the parts want done, and forget it."""
    actions, known.actions = known.actions, []
    return actions


def of(kind: type[AnyAction], actions: Iterable[a.Action]) -> list[AnyAction]:
    """Return the actions of one kind."""
    return [action for action in actions if isinstance(action, kind)]


class LoneMember:
    """A member on path 0, `begin` later. What needs no decision of the test is answered.

    Answered are copies of modules, everything that a beginning needs, and calls, but to those who
    are `silent`.
    """

    def __init__(
        self, plan: RunPlan | None = None, family: Family | None = None, **settings: Any
    ) -> None:
        self.plan = plan or small_plan()
        self.family = family or Family()
        self.book = CertificateBook()
        self.grid = grid_of(self.plan)
        self.now_s = self.plan.start_s
        self.claims: list[Claim] = []
        self.serving: list[str | PeerRecord] = []
        self.held: dict[str, list[StateReference]] = {}
        self.their_round: int | None = None
        """The round that the others say; the present one, if nothing is said."""
        self.claim: a.Say | None = None
        self.tokens = STEP_TOKENS
        self.is_finite = True
        self.silent: set[str] = set()
        self.asked_in: dict[str, int] = {}
        """The round of each module whose average, or what others hold, was wanted last."""
        self.worse: dict[str, float] = {}
        """By the digest of a genesis state: the loss of what a path began from beside it."""
        self.done: list[a.Action] = []
        self._settings = MemberSettings(ME, **{"pinned": 0, **settings})

    def begin(self, *anchors: StateReference) -> None:
        """Begin path 0 from `anchors`, genesis where there is none, all known to this peer."""
        for state in anchors:
            self.book.add_all(self.family.chain(state))
        self.member = Member(
            self._settings, self.plan, self.grid, book=self.book, held=list(anchors)
        )
        for _ in range(20):
            if self.of(a.Begun):
                break
            self.now_s += 0.25
            self.turn()
        assert self.of(a.Begun)
        self.turn()
        self.done.clear()

    def view(self) -> SwarmView:
        """Return what the member sees: what the test says, and its own claim."""
        claims = [*self.claims]
        if self.claim is not None and self.claim.path is not None:
            mine = self.claim
            path = mine.path or 0
            claims.append(claim(ME, path, mine.state, since_s=mine.since_s))
        return view_of(
            self.now_s,
            claims,
            self.serving,
            self.held,
            duration_s=self.plan.rounds.duration_s,
            their_round=self.their_round,
        )

    def look(self) -> list[a.Action]:
        """Let the member see the swarm."""
        return self.happen(e.Viewed(self.view()))

    def turn(self, step_s: float = 0.0) -> list[a.Action]:
        """Ask what to do."""
        return self.happen(e.Turn(step_s))

    def at(self, seconds: float) -> list[a.Action]:
        """Take a turn at so many seconds after the start of the run."""
        self.now_s = self.plan.start_s + seconds
        return self.turn()

    def leave(self) -> list[a.Action]:
        """Press Ctrl+C when nothing has been trained that could be merged."""
        self.tokens = 0
        return self.happen(e.LeaveWanted()) + self.turn() + self.turn()

    def happen(self, event: e.Event) -> list[a.Action]:
        """Report an event; returns all that comes of it."""
        actions = self.member.handle(event, self.now_s)
        self.done += actions
        found = list(actions)
        for action in actions:
            answer = self._answer(action)
            if answer is not None:
                found += self.happen(answer)
        return found

    def of(self, kind: type[AnyAction]) -> list[AnyAction]:
        """Return the actions of one kind so far."""
        return of(kind, self.done)

    def averaged(self, module: str, peers: Iterable[str], attempt: int = 0) -> list[a.Action]:
        """Let a meeting of `peers` succeed."""
        table = tuple(Contribution(0, peer, self.tokens) for peer in sorted(peers))
        return self.happen(e.Averaged(module, self.asked_in[module], attempt, table))

    def average_failed(
        self,
        module: str,
        attempt: int = 0,
        members: tuple[str, ...] = (),
        culprits: tuple[str, ...] = (),
        is_proven: bool = False,
    ) -> list[a.Action]:
        """Let a meeting fail."""
        round_index = self.asked_in[module]
        return self.happen(
            e.AverageFailed(module, round_index, attempt, "it broke", culprits, members, is_proven)
        )

    def answered(
        self, module: str, holdings: Mapping[str, StateReference | None]
    ) -> list[a.Action]:
        """Let those that were asked say what they hold."""
        return self.happen(e.Answered(module, self.asked_in[module], holdings))

    def stepped(self, module: str, peers: Iterable[str], round_index: int) -> StateReference:
        """Let the outer step succeed; returns the new state."""
        anchor = self.member.anchors[module]
        state = self.family.commit(anchor, round_index, peers, tokens=self.tokens)
        self.happen(e.OuterStepped(module, state, self.family.certificate(state)))
        return state

    def _answer(self, action: a.Action) -> e.Event | None:
        match action:
            case a.Say():
                self.claim = action
            case a.Look():
                return e.Viewed(self.view(), is_answer=True)
            case a.FetchPath():
                return e.PathReady(action.path)
            case a.FetchState(purpose="begin"):
                state = action.reference
                state = state if state.version else genesis(state.module)
                return e.StateFetched(state, {}, self.family.chain(state), action.purpose)
            case a.FetchState(purpose="adopt") if action.reference.version == 0:
                return e.StateFetched(genesis(action.reference.module), {}, (), action.purpose)
            case a.CheckState() if action.digest == genesis(action.module).digest:
                return e.Checked(
                    action.module, action.digest, self.worse.get(action.digest, 1.0), 1.0
                )
            case a.Call():
                answered = tuple(peer for peer in action.peers if peer not in self.silent)
                return e.CallAnswered(action.peers, answered)
            case a.Average() | a.Ask():
                self.asked_in[action.module] = action.round_index
            case a.TakeSnapshot():
                return e.SnapshotTaken(
                    action.module, action.round_index, self.tokens, self.is_finite
                )
        return None
