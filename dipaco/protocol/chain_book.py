"""The chains of steps that a peer knows, by name: which is heavier, where two parted.

See design 4.4, chain.

Pure and not safe for threads: the member of a peer has a book of each module, and a reader has its
own. The caller checks the rows of a step before it adds the step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from .chain import Head, Step, genesis_name

# Steps whose contributors say who matters now.
RECENT_STEPS = 3
# Steps that are computed at most to have a state: the files of older ones are gone anywhere.
MAX_REPLAY = 3
# Names in a locator: the newest ten, then at doubled distances, and the genesis.
DENSE_NAMES = 10
# Steps of a module that are known beside what is kept; beyond, only the heaviest tips stay.
MAX_SIDE_STEPS, KEPT_TIPS = 1024, 8


@dataclass(frozen=True, slots=True)
class Link:
    """A step with what the steps before it make of it; `step` is None of a genesis."""

    module: str
    name: str
    step: Step | None
    parent: str
    version: int
    weight: int
    round_index: int

    @property
    def rank(self) -> tuple[int, str]:
        """Sort key of the heads of a module; the least wins: the heavier, then the smaller name."""
        return -self.weight, self.name

    def head(self, digest: str, size_bytes: int) -> Head:
        """Return what is announced of a state after this step."""
        place = (self.version, self.weight, self.round_index)
        return Head(self.module, self.name, *place, digest, size_bytes)


@dataclass(frozen=True, slots=True)
class Vouched:
    """What the state after a step can be computed from without believing anybody in particular."""

    before: Link
    """The step whose state is to be fetched, or is known: a genesis."""
    digest: str
    """Of that state, as the rows of the next step name it; empty of a genesis, which is known."""
    steps: tuple[Step, ...]
    """To be computed on top of it, oldest first."""


class ChainBook:
    """Steps of any number of modules of one run, each behind its parent."""

    def __init__(self, run_id: str, modules: Iterable[str]) -> None:
        self._links: dict[str, Link] = {}
        self._tips: dict[str, set[str]] = {}
        self._genesis: dict[str, str] = {}
        self._side_steps = dict.fromkeys(modules, 0)
        """Added since branches were forgotten last."""
        for module in self._side_steps:
            name = genesis_name(run_id, module)
            self._genesis[module] = name
            self._links[name] = Link(module, name, None, "", 0, 0, -1)
            self._tips[module] = {name}

    def __contains__(self, name: str) -> bool:
        return name in self._links

    def genesis(self, module: str) -> str:
        """Return the name of a module's genesis. Raises KeyError for an unknown module."""
        return self._genesis[module]

    def link(self, name: str) -> Link:
        """Return a step that was added, or a genesis. Raises KeyError."""
        return self._links[name]

    def add(self, step: Step) -> bool:
        """Add a step; returns whether its parent is known, so that it could be.

        Raises ValueError when it cannot follow its parent: another module, or no later round.
        """
        if step.name in self._links:
            return True
        parent = self._links.get(step.parent)
        if parent is None:
            return False
        if parent.module != step.module:
            raise ValueError(f"a step of {step.module} on top of one of {parent.module}")
        if step.round_index <= parent.round_index:
            raise ValueError(f"round {step.round_index} on top of round {parent.round_index}")
        self._links[step.name] = Link(
            step.module,
            step.name,
            step,
            step.parent,
            parent.version + 1,
            parent.weight + len(step.rows),
            step.round_index,
        )
        self._side_steps[step.module] += 1
        tips = self._tips[step.module]
        tips.discard(step.parent)
        tips.add(step.name)
        return True

    def heaviest(
        self, module: str, without: Collection[str] = (), absent: Collection[str] = ()
    ) -> Link:
        """Return the head that wins over all others of a module.

        Steps in `without` do not count, nor what stands on them. Steps in `absent` cannot be had:
        one is no head, but what others have built on it may be.
        """
        known = [self._links[name].version for name in without if name in self._links]
        oldest = min(known, default=math.inf)
        return min(
            (self._newest_of(tip, without, oldest, absent) for tip in self._tips[module]),
            key=lambda link: link.rank,
        )

    def tips(self, module: str) -> list[Link]:
        """Return the newest step of each chain of a module, that of the heaviest first."""
        return sorted((self._links[tip] for tip in self._tips[module]), key=lambda link: link.rank)

    def _newest_of(
        self, tip: str, without: Collection[str], oldest: float, absent: Collection[str]
    ) -> Link:
        """Return the newest link of the chain to `tip` that may be a head. `oldest` is the least
        version of those in `without`."""
        found = self._links[tip]
        for link in self.back_from(tip):
            if link.version < oldest:
                break
            if link.name in without:
                found = self._links[link.parent] if link.step is not None else link
        while found.name in absent and found.step is not None:
            found = self._links[found.parent]
        return found

    def back_from(self, name: str) -> Iterator[Link]:
        """Yield the chain that ends in a step, the newest first, down to the genesis or as far as
        it is known."""
        link: Link | None = self._links.get(name)
        while link is not None:
            yield link
            link = self._links.get(link.parent)

    def ancestor(self, one: str, other: str) -> Link:
        """Return the newest step that two chains have in common. Raises KeyError for none."""
        a, b = self._links[one], self._links[other]
        while a.name != b.name:
            if a.version >= b.version:
                a = self._links[a.parent]
            else:
                b = self._links[b.parent]
        return a

    def stands_on(self, name: str, base: str) -> bool:
        """Tell whether the chain to `name` goes through `base`, or ends there."""
        if base not in self._links:
            return False
        floor = self._links[base].version
        for link in self.back_from(name):
            if link.version <= floor:
                return link.name == base
        return False

    def steps_between(self, base: str, name: str) -> tuple[Step, ...]:
        """Return the steps from `base`, without it, to `name`, oldest first.

        Raises ValueError when `name` does not stand on `base`.
        """
        found: list[Step] = []
        for link in self.back_from(name):
            if link.name == base:
                return tuple(reversed(found))
            if link.step is None:
                break
            found.append(link.step)
        raise ValueError(f"{name[:16]} does not stand on {base[:16]}")

    def locator(self, name: str) -> tuple[str, ...]:
        """Return some names of a chain, newest first, from which others see where theirs parts."""
        names: list[str] = []
        distance, wait = 1, 0
        last = name
        for link in self.back_from(name):
            last = link.name
            if len(names) < DENSE_NAMES:
                names.append(link.name)
                continue
            wait += 1
            if wait >= distance:
                names.append(link.name)
                distance, wait = 2 * distance, 0
        if names[-1] != last:
            names.append(last)
        return tuple(names)

    def after(self, locator: Sequence[str], name: str, limit: int) -> tuple[tuple[Step, ...], bool]:
        """Return the steps of the chain to `name` behind the first of `locator` that is on it.

        Oldest first, at most `limit` of them, and whether there are more.
        """
        wanted = set(locator)
        found: list[Step] = []
        for link in self.back_from(name):
            if link.name in wanted or link.step is None:
                break
            found.append(link.step)
        found.reverse()
        return tuple(found[:limit]), len(found) > limit

    def contributors(self, name: str, steps: int = RECENT_STEPS) -> frozenset[str]:
        """Return whose rows are in the last `steps` steps of a chain."""
        found: set[str] = set()
        for link in self.back_from(name):
            if link.step is None or steps <= 0:
                break
            found |= link.step.peers
            steps -= 1
        return frozenset(found)

    def is_vouched_by_most(self, link: Link) -> bool:
        """Tell whether most of those who contributed before a step are in it: its rows name the
        state before it."""
        before = self.contributors(link.parent, RECENT_STEPS)
        if link.step is None:
            return False
        return not before or 2 * len(link.step.peers & before) > len(before)

    def vouched(self, name: str) -> tuple[Vouched, ...]:
        """Return how the state after a step is had by who trusts nothing but the chain: some ways,
        the best first.

        From the state before the newest step that is of most, so that one peer alone vouches for
        nothing where others do; from the genesis, which all know; and from the newest state that is
        named, as older ones are gone where one peer has gone on alone for long. The files of more
        than `MAX_REPLAY` steps are gone anywhere.
        """
        near = list(itertools.islice(self.back_from(name), MAX_REPLAY))
        near = [link for link in near if link.step is not None]
        if not near:
            return (Vouched(self._links[name], "", ()),)
        ways = [link for link in near if self.is_vouched_by_most(link)][:1]
        ways += [link for link in near[-1:] if link.version == 1]
        ways.append(near[0])
        names = dict.fromkeys(link.name for link in ways)
        return tuple(self._vouched_by(self._links[way], name) for way in names)

    def _vouched_by(self, newest: Link, name: str) -> Vouched:
        before = self._links[newest.parent]
        steps = self.steps_between(before.name, name)
        return Vouched(before, steps[0].state if before.step is not None else "", steps)

    def prune(self, module: str, keep: str, depth: int) -> None:
        """Forget the branches of a module that parted from the chain to `keep` more than `depth`
        steps ago: nobody has gone on from there."""
        self._side_steps[module] = 0
        floor = self._links[keep].version - depth
        chain = {link.name for link in self.back_from(keep)}
        dead, alive = set[str](), set[str]()
        for tip in sorted(self._tips[module] - {keep}):
            branch: list[str] = []
            for link in self.back_from(tip):
                if link.name in chain:
                    is_old = link.version < floor and bool(branch)
                    (dead if is_old else alive).update(branch)
                    break
                branch.append(link.name)
        for name in dead - alive:
            del self._links[name]
        self._tips[module] -= dead
        if not self._tips[module]:
            self._tips[module] = {keep}

    def trim(self, module: str, kept: Collection[str]) -> bool:
        """Where very many steps of a module were added, forget all branches but the heaviest and
        the chains to `kept`: what others invent stays bounded. Returns whether it was so."""
        if self._side_steps[module] <= MAX_SIDE_STEPS:
            return False
        heaviest = sorted(self._tips[module], key=lambda tip: self._links[tip].rank)[:KEPT_TIPS]
        alive = {link.name for name in (*kept, *heaviest) for link in self.back_from(name)}
        for name in [n for n, link in self._links.items() if link.module == module]:
            if name not in alive:
                del self._links[name]
        self._tips[module] = alive - {self._links[name].parent for name in alive}
        # What is left may be one long chain, which is wanted.
        self._side_steps[module] = MAX_SIDE_STEPS // 2
        return True
