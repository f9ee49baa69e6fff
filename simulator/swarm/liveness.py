"""Whether modules commit while they could.

While an honest trainer of a module lives, connected to more than half of those that train it, the
module commits at least every `LIVENESS_ROUNDS` rounds. Who crashed is waited for like one that
trains until its claim expires: before that, nobody can tell that it will not come back. Who is in
a split from all others is isolated. Where rounds are counted, one lasts its limit and until its
last group closes, half a commit window later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from dipaco.dht.records import record_life_s, refresh_period_s

from .world import Body, World

LIVENESS_ROUNDS = 4
# Of a round: who takes longer over an inner step hears the answer to a question too late.
SLOW_SHARE = 0.1
# Whose clock is further off does not know what can have happened by now.
RIGHT_CLOCK_S = 1.0


class Liveness:
    """The watch of the commits of every module."""

    def __init__(self, world: World, violated: Callable[[str, str], None]) -> None:
        self._world = world
        self._violated = violated
        rounds = world.plan.rounds
        self._round_s = rounds.duration_s + (rounds.window_s / 2 if rounds.inner_steps else 0.0)
        self._claim_s = record_life_s(refresh_period_s(rounds))
        self._since_s: dict[str, float] = {}
        """When the present chance of a module to commit began."""
        self._crashed: dict[str, dict[str, float]] = {}
        """When the claims on a module expire of those that crashed."""

    def committed(self, module: str) -> None:
        """Somebody has committed a module."""
        self._since_s[module] = self._world.now_s

    def crashed(self, module: str, peer: str) -> None:
        """Somebody that trained a module ended without a word."""
        self._crashed.setdefault(module, {})[peer] = self._world.now_s + self._claim_s

    def check(
        self, module: str, trainers: Collection[Body], others: int, *, takes_longer: bool
    ) -> None:
        """Does the module commit in so many rounds while it could?

        `trainers` are honest; `others` train it, or may be about to. Where peers take turns each
        may have to meet the others anew, or to wait for who never comes; where as many liars answer
        as train a module, these say which counted round it is (both `takes_longer`).
        """
        now_s = self._world.now_s
        # Who is slow has nothing to contribute in most rounds.
        fit = [
            m
            for m in trainers
            if m.is_awake
            and not is_slow(m)
            and not self._is_split_off(m)
            and abs(m.clock_error_s) < RIGHT_CLOCK_S
        ]
        sides = Counter(m.link.side for m in fit)
        together = max(sides.values(), default=0)
        back = {m.peer for m in trainers}
        crashed = self._crashed.get(module, {})
        claiming = sum(until_s > now_s and peer not in back for peer, until_s in crashed.items())
        can_meet = len(trainers) == 1 or any(map(is_in_reach, fit))
        if not fit or not can_meet or 2 * together <= len(trainers) + others + claiming:
            self._since_s.pop(module, None)
            return
        since_s = self._since_s.setdefault(module, now_s)
        rounds = LIVENESS_ROUNDS * (2 if takes_longer else 1)
        if now_s - since_s > (rounds + 0.5) * self._round_s:
            self._violated(
                "liveness",
                f"{module} has not committed for {(now_s - since_s) / self._round_s:.1f} rounds; "
                f"{', '.join(m.peer for m in fit)} train it",
            )

    def _is_split_off(self, machine: Body) -> bool:
        """Tell whether a split parts a machine from all others: it commits nothing that is shared,
        whoever trains that meanwhile (design 4.4)."""
        if not self._world.network.split:
            return False
        others = self._world.machines.values()
        return all(one is machine or one.link.side != machine.link.side for one in others)


def is_slow(machine: Body) -> bool:
    """Tell whether a machine takes long over an inner step."""
    return machine.step_s > SLOW_SHARE * machine.world.plan.rounds.duration_s


def is_in_reach(machine: Body) -> bool:
    """Tell whether calls reach a machine, if only through a relay."""
    return machine.link.can_be_called or machine.link.is_relayed
