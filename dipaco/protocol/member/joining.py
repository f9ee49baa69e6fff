"""Joining a path (design 4.6, claims): look, claim, look again, give way, get what it needs.

    phase            what happens                    next
    IDLE             it is wanted                    CHOOSING; of a move CLAIMING
    CHOOSING         the swarm was read              CLAIMING
    CLAIMING         it was read, with the claim     SETTLING
    SETTLING         a moment has passed             LOOKING_AGAIN
    LOOKING_AGAIN    too many have chosen the path   CLAIMING another one
                     otherwise                       FETCHING
    FETCHING         all is here, and sound          IDLE; it has begun
                     it takes too long               CHOOSING another path; or IDLE, and it failed

The swarm is waited for in all but the first and the last of these for so long, then it failed.

What was fetched is scored before the path begins. Held-out texts are read with all states, and with
the genesis in place of each. The state for which the genesis is better by most, and by more than
`MUCH_WORSE_NATS`, is refused, no matter who vouches for it, and another one is looked for. A path
that has no row in the newest step of one of its modules is not scored: modules that were apart may
fit each other worse than at their genesis.

A fetch that fails is tried again, because holders often leave. If nothing comes for a long time, a
newcomer takes another path, and a peer that moves continues with its old one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum, auto

from dipaco.protocol.chain.steps import Head
from dipaco.protocol.policy import Decision, resolve_collision
from dipaco.protocol.records import ClaimState

from .actions import FetchPath, Say, Score, StartPath, Wait, Warn
from .events import Scored
from .followed_module import FollowedModule
from .knowledge import Knowledge
from .path_choice import PathChoice
from .situation import Role
from .taking import ruined_by

_MAX_LOOKS = 5
# How long newcomers wait before the second look: not equally long, or they would collide again.
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.2, 0.8
# How long an answer of the swarm is waited for by a peer that has a path; and how long what a path
# needs, by a newcomer that may take another path, and by a peer that has one.
_LOOK_LIMIT_S, _WITH_OTHERS_LIMIT_S, _MOVE_LIMIT_S = 300.0, 60.0, 20.0
# Where giving up would end the peer, it waits so long: machines have bad hours. And what is on its
# way is waited for so long: a state may take long on a slow line.
_LONGEST_S, _LONGEST_MOVE_ROUNDS = 3600.0, 0.5
_RETRY_S = 3.0
# After G a peer begins with the states that it has, after twice that with a genesis: no path is
# given up earlier.
_LEAST_GATHERS = 3.0


class _JoiningPhase(Enum):
    IDLE = auto()
    CHOOSING = auto()
    CLAIMING = auto()
    SETTLING = auto()
    LOOKING_AGAIN = auto()
    FETCHING = auto()


class Joining:
    """One path at a time; `has_begun` or `failure` once it is over."""

    def __init__(
        self, known: Knowledge, choice: PathChoice, module: Callable[[str], FollowedModule]
    ) -> None:
        self._known, self._choice, self._module = known, choice, module
        self._has_choice = not known.settings.obeys_owner and known.grid.path_count > 1
        self._phase = _JoiningPhase.IDLE
        self._until_s = self._since_s = self._began_s = 0.0
        self._looks = 0
        self._claim_s = 0.0
        self._chosen: Decision | None = None
        self._has_shard = False
        self._ask_s = math.inf
        """When the shard is to be asked for; infinite once it was asked for."""
        self._reason = ""
        self._scoring: tuple[Head, ...] = ()
        """The states that are being scored, to begin with."""
        self._sound: tuple[Head, ...] = ()
        """The states that were scored last, and may be begun with."""
        self.has_begun = False
        """Whether a path can be trained now."""
        self.failure = ""
        """Why no path can be trained."""

    @property
    def is_claiming(self) -> bool:
        """Whether a path is being chosen and claimed."""
        return self._phase not in (_JoiningPhase.IDLE, _JoiningPhase.FETCHING)

    @property
    def path(self) -> int | None:
        """The path that is claimed, or is about to be."""
        return self._chosen.path if self._chosen is not None else None

    def begin(self, decision: Decision | None = None) -> None:
        """Claim a path: `decision`, if given (a move), otherwise the least served one."""
        self.has_begun, self.failure = False, ""
        self._began_s = self._known.now_s
        self._claim(decision)

    # -- claiming

    def _claim(self, decision: Decision | None = None) -> None:
        self._since_s, self._looks = self._known.now_s, 0
        if decision is None:
            self._phase = _JoiningPhase.CHOOSING
            self._choice.look(anew=self._has_choice)
        else:
            self._take(decision)

    def _take(self, decision: Decision) -> None:
        self._chosen, self._claim_s = decision, self._known.now_s
        self._phase = _JoiningPhase.CLAIMING
        self._say("joining", decision.reason)
        self._choice.look()

    def _say(self, state: ClaimState, reason: str = "") -> None:
        pinned = self._known.settings.obeys_owner
        self._known.do(Say(state, self.path, self._claim_s, reason, pinned))

    def on_view(self) -> None:
        """Go on with a view that was asked for."""
        known, choice = self._known, self._choice
        if self._phase is _JoiningPhase.CHOOSING:
            self._take(choice.first_path())
        elif self._phase is _JoiningPhase.CLAIMING:
            self._phase = _JoiningPhase.SETTLING
            self._until_s = known.now_s + known.random.uniform(_SHORTEST_WAIT_S, _LONGEST_WAIT_S)
        elif self._phase is _JoiningPhase.LOOKING_AGAIN:
            self._looks += 1
            better = None
            if self._has_choice and self._looks < _MAX_LOOKS:
                over = choice.passed_over()
                better = resolve_collision(known.view, known.grid, known.me, exclude=over)
            if better is None:
                choice.settle()
                self._fetch()
            else:
                self._take(better)

    # -- getting what the path needs

    def _fetch(self) -> None:
        """Get the shard and a state of every module, because the claim stands."""
        assert self._chosen is not None
        self._phase = _JoiningPhase.FETCHING
        self._since_s = self._known.now_s
        self._has_shard, self._ask_s, self._reason = False, 0.0, ""
        self._scoring = self._sound = ()

    @property
    def _modules(self) -> tuple[str, ...]:
        return self._known.grid.modules_of_path(self._chosen.path) if self._chosen else ()

    def _turn_fetching(self) -> None:
        known, path = self._known, self.path
        assert path is not None
        if known.now_s >= self._ask_s:
            self._ask_s = math.inf
            known.do(FetchPath(path))
        modules = [self._module(module) for module in self._modules]
        for followed in modules:
            if not followed.is_wanted and known.view.covers_module(followed.module):
                followed.want()
                followed.consider()
        missing = [followed.module for followed in modules if not followed.is_settled]
        if self._has_shard and not missing and self._see_if_sound(path, modules):
            self._start(path)
        elif known.now_s > self._limit_s(missing):
            self._leave_alone(self._reason or f"waited in vain for {self._waits_for(missing)}")
        else:
            what = ""  # The fetched states are being scored.
            if missing or not self._has_shard:
                what = self._waits_for(missing) + (f" ({self._reason})" if self._reason else "")
            known.do(Wait(what, max(0.0, self._limit_s(missing) - known.now_s)))

    def _see_if_sound(self, path: int, modules: list[FollowedModule]) -> bool:
        """Have what is here scored, if it was not; returns whether it may be begun with."""
        heads = tuple(followed.head for followed in modules if followed.head is not None)
        fetched = [f for f in modules if f.head and f.head.version and f.role is not Role.TRAINER]
        if not fetched or not all(path in followed.link.paths for followed in modules):
            return True
        if heads not in (self._sound, self._scoring):
            self._scoring = heads
            self._known.do(Score(path, heads, tuple(followed.module for followed in fetched)))
        return heads == self._sound

    def on_scored(self, event: Scored) -> None:
        """Take in what held-out texts say about the fetched states."""
        if self._phase is not _JoiningPhase.FETCHING or event.heads != self._scoring:
            return
        self._scoring = ()
        ruined = ruined_by(event.loss, event.with_genesis)
        if ruined:
            other = event.with_genesis[ruined]
            reason = f"held-out loss {event.loss:.3f}, with the genesis {other:.3f}"
            self._module(ruined).refuse_state(reason)
        else:
            self._sound = event.heads

    def _limit_s(self, missing: list[str]) -> float:
        """Return when it is given up: later if all that is missing is on its way."""
        known, longest_s = self._known, _LONGEST_S
        limit_s = _WITH_OTHERS_LIMIT_S if self._has_choice else _LONGEST_S
        if known.path is not None:
            limit_s = _MOVE_LIMIT_S
            longest_s = max(limit_s, _LONGEST_MOVE_ROUNDS * known.schedule.duration_s)
        limit_s = max(limit_s, _LEAST_GATHERS * known.gather_s)
        is_coming = all(self._module(module).taking.is_fetching for module in missing)
        is_coming = is_coming and not self._reason and self._ask_s == math.inf
        return self._since_s + max(limit_s, longest_s if is_coming else 0.0)

    def _waits_for(self, missing: list[str]) -> str:
        if not self._has_shard:
            return f"the shard of path {self.path}"
        have = len(self._modules) - len(missing)
        return f"the state of {', '.join(missing)}: have {have} of {len(self._modules)}"

    def on_path(self, path: int, reason: str = "") -> None:
        """Go on with the shard, or with the reason why nobody gave it."""
        if self._phase is not _JoiningPhase.FETCHING or path != self.path:
            return
        self._has_shard = not reason
        if reason:
            self._ask_s, self._reason = self._known.now_s + _RETRY_S, reason

    def _start(self, path: int) -> None:
        """Train from the states that are here."""
        modules = [self._module(module) for module in self._modules]
        heads = tuple(followed.head for followed in modules if followed.head is not None)
        self._known.path = path
        self._known.do(StartPath(path, heads))
        for followed in modules:
            followed.follow(Role.TRAINER)
        self._phase, self.has_begun = _JoiningPhase.IDLE, True

    def _leave_alone(self, reason: str) -> None:
        """Give up the claimed path, which cannot be begun; choose another if that is possible."""
        known, path = self._known, self.path
        assert path is not None
        self._stop_wanting()
        self._choice.pass_over(path)
        is_late = known.now_s - self._began_s >= _LONGEST_S
        if known.path is not None or is_late or not self._has_choice:
            self._phase = _JoiningPhase.IDLE
            self.failure = reason if known.path is not None else f"{reason}; start again later"
            return
        known.do(Warn(f"looks for a path other than {path}: {reason}"))
        self._claim()
        known.do(Wait("the swarm's answer to a claim", _LONGEST_S))

    def _stop_wanting(self) -> None:
        for module in self._modules:
            self._module(module).stop_wanting()

    # -- time, and what is said

    def on_turn(self) -> None:
        """Do what is due now."""
        known = self._known
        if self._phase is _JoiningPhase.FETCHING:
            self._turn_fetching()
            return
        if self._phase is _JoiningPhase.SETTLING and known.now_s >= self._until_s:
            self._phase = _JoiningPhase.LOOKING_AGAIN
            self._choice.look()
        limit_s = _LONGEST_S if known.path is None else _LOOK_LIMIT_S
        left_s = self._since_s + limit_s - known.now_s
        if left_s > 0:
            known.do(Wait("the swarm's answer to a claim", left_s))
            return
        self._phase = _JoiningPhase.IDLE
        self.failure = f"the DHT did not answer for {limit_s:.0f} s"
        if known.path is None:
            self.failure += "; check the network and start again"

    def train(self) -> None:
        """Say that the claimed path is in training."""
        assert self._chosen is not None
        self._say("training", self._chosen.reason)

    def take_back(self, path: int) -> None:
        """Claim the path in training again, after a move that did not succeed."""
        self._phase = _JoiningPhase.IDLE
        self._claim_s = self._known.now_s
        self._chosen = Decision(path, "the move to another path failed")
        self._choice.settle()

    def stop(self) -> None:
        """Choose and want nothing any more; the last published claim stands."""
        if self._phase is _JoiningPhase.FETCHING:
            self._stop_wanting()
        self._phase = _JoiningPhase.IDLE

    def pause(self, reason: str) -> None:
        """Claim nothing, and say why."""
        self.stop()
        self._chosen, self._claim_s = None, self._known.now_s
        self._say("paused", reason)

    def leave(self) -> None:
        """Withdraw the claim."""
        self.stop()
        self._say("leaving")
