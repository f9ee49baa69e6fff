"""The chains of steps that a peer knows, by name: which is heavier, where two parted.

See design 4.4, chain.

The first part of a chain, on which everything else stands, is a `Trunk`: it grows by what is
pruned, and has no rows. Where another chain turns out to part from within it, the steps above that
place are links like others again, without rows.

Pure and not safe for threads: the member of a peer has a book of each module, and a reader has its
own. The caller checks the rows of a step before it adds the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from .steps import Head, Row, Step, genesis_name, rank
from .trunk import Trunk

# How many of the last steps show who contributes now.
RECENT_STEPS = 3
# Most steps that are computed to get a state: the files of older ones are gone everywhere.
MAX_REPLAY = 3
# Names in a locator: the newest ten, then at doubled distances, and the genesis.
_DENSE_NAMES = 10
# Of the branches that a peer tells of so many stay, the heaviest; an honest one tells of one or
# two. Of a step so many tellers are remembered.
BRANCHES_OF_A_TELLER, _TELLERS = 8, 8


@dataclass(frozen=True, slots=True)
class Link:
    """A step, with what follows from the steps before it; `step` is None for a genesis, and for a
    step so old that its rows are not here any more."""

    module: str
    name: str
    step: Step | None
    parent: str
    version: int
    weight: int
    round_index: int
    peers: frozenset[str] = frozenset()
    """The peers whose rows are in it."""

    @property
    def rank(self) -> tuple[int, str]:
        """Its place among the heads of the module (`steps.rank`)."""
        return rank(self.weight, self.name)

    @property
    def paths(self) -> frozenset[int]:
        """The paths that have rows in it."""
        return frozenset(row.path for row in self.step.rows) if self.step else frozenset()

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
    """The digest of that state as the rows of the next step name it; empty for a genesis."""
    steps: tuple[Step, ...]
    """The steps to compute on top of it, oldest first."""


class ChainBook:
    """Steps of any number of modules of one run, each on top of its parent."""

    def __init__(self, run_id: str, modules: Iterable[str]) -> None:
        self._genesis = {module: genesis_name(run_id, module) for module in modules}
        self._links = {
            name: Link(module, name, None, "", 0, 0, -1) for module, name in self._genesis.items()
        }
        self._trunks: dict[str, Trunk] = {}
        """By module; there is none where nothing was pruned."""
        self._tips = {module: {name} for module, name in self._genesis.items()}
        self._children: dict[str, set[str]] = {}
        """For links, and for the last step of a trunk."""
        self._tellers: dict[str, list[str]] = {}
        """Others who told of a step."""
        self.edition = 0
        """Counts up when a step is added or forgotten."""

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def __len__(self) -> int:
        return len(self._links) + sum(map(len, self._trunks.values()))

    def genesis(self, module: str) -> str:
        """Return the name of a module's genesis. Raises KeyError for an unknown module."""
        return self._genesis[module]

    def link(self, name: str) -> Link:
        """Return a step that was added, or a genesis. Raises KeyError."""
        found = self._find(name)
        if found is None:
            raise KeyError(name)
        return found

    def begin_with(self, module: str, trunk: Trunk) -> None:
        """Take up the first part of a chain, before any step of the module was added."""
        if len(trunk):
            self._trunks[module] = trunk
            self._children[self._genesis[module]] = {trunk.name(1)}
            self._tips[module] = {trunk.name(len(trunk))}
            self.edition += 1

    def _find(self, name: str) -> Link | None:
        if name in self._links:
            return self._links[name]
        for module, trunk in self._trunks.items() if name else ():
            if (version := trunk.version(name)) is not None:
                return self._in_trunk(module, version)
        return None

    def _in_trunk(self, module: str, version: int) -> Link:
        trunk = self._trunks[module]
        parent = trunk.name(version - 1) if version > 1 else self._genesis[module]
        place = version, trunk.weight(version), trunk.round_index(version)
        return Link(module, trunk.name(version), None, parent, *place, trunk.peers(version))

    def add(self, step: Step, teller: str = "", used: Collection[str] = ()) -> bool:
        """Add a step; returns whether its parent is known, so that it could be.

        :param teller: the peer that told of it; empty for this peer itself
        :param used: steps that stay even where the teller has too many branches

        Raises ValueError when it cannot follow its parent: another module, or no later round.
        """
        if step.name not in self:
            parent = self._find(step.parent)
            if parent is None:
                return False
            self._link(step, parent)
        if teller:
            self.note_teller(step.name, teller)
            self._bound_branches(step.module, teller, used)
        return True

    def _link(self, step: Step, parent: Link) -> None:
        if parent.module != step.module:
            raise ValueError(f"a step of {step.module} on top of one of {parent.module}")
        if step.round_index <= parent.round_index:
            raise ValueError(f"round {step.round_index} on top of round {parent.round_index}")
        trunk = self._trunks.get(step.module)
        if trunk is not None and parent.version < len(trunk):
            self._unfold(step.module, trunk, parent.version)
        place = parent.version + 1, parent.weight + len(step.rows), step.round_index
        self._links[step.name] = Link(step.module, step.name, step, step.parent, *place, step.peers)
        self._children.setdefault(step.parent, set()).add(step.name)
        self._tips[step.module].discard(step.parent)
        self._tips[step.module].add(step.name)
        self.edition += 1

    def _unfold(self, module: str, trunk: Trunk, version: int) -> None:
        """Make the steps of a trunk behind a version links like others."""
        for above in range(version + 1, len(trunk) + 1):
            link = self._in_trunk(module, above)
            self._links[link.name] = link
            self._children.setdefault(link.parent, set()).add(link.name)
        trunk.cut(version)
        if not version:
            del self._trunks[module]

    def note_teller(self, name: str, teller: str) -> None:
        """Note that a peer told of a step that is here, and so may have what belongs to it."""
        if name not in self._links:
            return  # It is so old that nobody has its files.
        tellers = self._tellers.setdefault(name, [])
        if len(tellers) < _TELLERS and teller not in tellers:
            tellers.append(teller)

    def tellers(self, name: str) -> tuple[str, ...]:
        """Return others who told of a step."""
        return tuple(self._tellers.get(name, ()))

    def _bound_branches(self, module: str, teller: str, used: Collection[str]) -> None:
        """Let a branch stay only as long as it is among the heaviest of one who told of it: what
        somebody invents displaces nothing that others told of."""
        while True:
            tips = [tip for tip in self._tips[module] if teller in self._tellers.get(tip, ())]
            told = [self.link(tip) for tip in tips]
            if len(told) <= BRANCHES_OF_A_TELLER:
                return
            lightest = max(told, key=lambda link: (link.name not in used, link.rank))
            tellers = self._tellers[lightest.name]
            tellers.remove(teller)
            if not tellers and lightest.name not in used:
                self._forget(lightest.name)

    def _forget(self, name: str) -> None:
        """Forget a step on which no other stands any more."""
        link = self._links.pop(name)
        parent, tips = link.parent, self._tips[link.module]
        self._tellers.pop(name, None)
        tips.discard(name)
        self._children[parent].discard(name)
        if not self._children[parent]:
            del self._children[parent]
            tips.add(parent)
        self.edition += 1

    def tips(self, module: str) -> list[Link]:
        """Return the newest step of each chain of a module, that of the heaviest first."""
        return sorted(map(self.link, self._tips[module]), key=lambda link: link.rank)

    def on_top_of(self, name: str) -> list[Link]:
        """Return the steps that stand on one, in the order of their names."""
        return [self.link(child) for child in sorted(self._children.get(name, ()))]

    def with_row(self, row: Row) -> list[Link]:
        """Return the steps that contain a row."""
        links = [link for link in self._links.values() if link.round_index == row.round_index]
        return [link for link in links if link.step and row in link.step.rows]

    def back_from(self, name: str) -> Iterator[Link]:
        """Yield the chain that ends in a step, the newest first, down to the genesis or as far as
        it is known."""
        yield from self._above_trunk(name)
        link = self._find(name)
        if link is not None:
            trunk = self._trunks.get(link.module, ())
            for version in range(min(link.version, len(trunk)), 0, -1):
                yield self._in_trunk(link.module, version)
            yield self._links[self._genesis[link.module]]

    def _above_trunk(self, name: str) -> Iterator[Link]:
        """Yield the chain that ends in a step, as far as it is above a trunk, or a genesis."""
        link = self._links.get(name)
        while link is not None and link.version:
            yield link
            link = self._links.get(link.parent)

    def ancestor(self, one: str, other: str) -> Link:
        """Return the newest step that two chains have in common. Raises KeyError for none."""
        ones, others = self.back_from(one), self.back_from(other)
        a, b = next(ones, None), next(others, None)
        while a is not None and b is not None:
            if a.name == b.name:
                return a
            if a.version >= b.version:
                a = next(ones, None)
            else:
                b = next(others, None)
        raise KeyError(one)

    def stands_on(self, name: str, base: str) -> bool:
        """Tell whether the chain to `name` goes through `base`, or ends there."""
        found = self._find(base)
        if found is None:
            return False
        floor = found.version
        for link in self.back_from(name):
            if link.version <= floor:
                return link.name == base
        return False

    def steps_between(self, base: str, name: str) -> tuple[Step, ...]:
        """Return the steps from `base`, without it, to `name`, oldest first.

        Raises ValueError when `name` does not stand on `base`, or their rows are not here.
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
        newest = self.link(name)
        far = (_DENSE_NAMES - 2 + 2**n for n in range(1, newest.version.bit_length() + 1))
        wanted = {newest.version - back for back in (*range(_DENSE_NAMES), *far)}
        names = [link.name for link in self._above_trunk(name) if link.version in wanted]
        trunk = self._trunks.get(newest.module)
        if trunk is not None:
            top = min(newest.version, len(trunk))
            names += [trunk.name(v) for v in sorted(wanted, reverse=True) if 0 < v <= top]
        return (*names, self._genesis[newest.module])

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
        """Return the peers whose rows are in the last `steps` steps of a chain."""
        links = itertools.islice(self.back_from(name), steps)
        return frozenset(peer for link in links for peer in link.peers)

    def is_vouched_by_most(self, link: Link) -> bool:
        """Tell whether most of those who contributed before a step are in it: its rows name the
        state before it."""
        before = self.contributors(link.parent, RECENT_STEPS)
        if link.step is None:
            return False
        return not before or 2 * len(link.peers & before) > len(before)

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
            # Raises KeyError for a step whose rows are not here: nobody names its state.
            return (Vouched(self._links[name], "", ()),)
        ways = [link for link in near if self.is_vouched_by_most(link)][:1]
        ways += [link for link in near[-1:] if link.version == 1]
        ways.append(near[0])
        names = dict.fromkeys(link.name for link in ways)
        return tuple(self._vouched_by(self.link(way), name) for way in names)

    def _vouched_by(self, newest: Link, name: str) -> Vouched:
        before = self.link(newest.parent)
        steps = self.steps_between(before.name, name)
        return Vouched(before, steps[0].state if before.version else "", steps)

    def prune(self, keep: str, depth: int) -> None:
        """Forget what is older than `depth` steps on the chain to `keep`: branches that parted
        before, as nobody has gone on from there, and the rows of the steps. Branches whose rows
        are not here go too: if they are told again, they are asked for."""
        newest = self.link(keep)
        floor, tips = newest.version - depth, self._tips[newest.module]
        chain = {link.name: link for link in self._above_trunk(keep)}
        for tip in sorted(tips - chain.keys()):
            back = self._above_trunk(tip)
            branch = list(itertools.takewhile(lambda link: link.name not in chain, back))
            is_old = bool(branch) and branch[-1].version <= floor
            if is_old or any(link.step is None for link in branch):
                for link in branch:
                    if link.name not in self._children:
                        self._forget(link.name)
        old = [link for link in chain.values() if link.version < floor]
        if old:
            self._fold(newest.module, old[::-1])

    def _fold(self, module: str, links: Sequence[Link]) -> None:
        """Put links, the oldest first, on top of a trunk; nothing else stands on those below the
        last of them."""
        trunk = self._trunks.setdefault(module, Trunk())
        for link in links:
            trunk.append(link.name, link.round_index, link.peers)
            if link.version > 1:
                del self._children[link.parent]
            del self._links[link.name]
            self._tellers.pop(link.name, None)
