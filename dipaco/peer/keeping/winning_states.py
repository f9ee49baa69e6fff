"""The winning states, for all who do not train: readers, archives, operators of a successor.

See design 4.4, chain. Nobody is believed who announces a state. The heaviest chain is read from
several peers; a state is fetched by the digest that the rows of a step in it name, and the last
steps are computed here, from their files. A step that cannot be obtained is passed over.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from dipaco.base.errors import DipacoError, IntegrityError, NetworkError
from dipaco.modules.layout import layout_of
from dipaco.modules.state import ModuleState
from dipaco.peer.exchange.files.transfer import spread
from dipaco.peer.node.node import Node
from dipaco.protocol.chain.chain_book import ChainBook, Link, Vouched
from dipaco.protocol.chain.steps import MARK_BYTES, Head, Row, Step
from dipaco.protocol.view import SwarmView

from .path_files import PathFiles

logger = logging.getLogger("dipaco.peer.keeping.winning_states")

# Of a module: heads of which a chain is read, heads whose holders are asked until then, holders of
# each, and pages of one.
_HEADS_READ, _HEADS_TRIED, _HOLDERS_ASKED, _MAX_PAGES = 4, 16, 3, 1000
# Chains that are tried, the heaviest first, and states of each that cannot be had.
_CHAINS_TRIED, _STATES_TRIED = 8, 4


class WinningStates:
    """The winning states of one run. Its methods block, within bounds."""

    def __init__(self, node: Node, files: PathFiles) -> None:
        self._node, self._files = node, files
        self._not_given: set[str] = set()
        """Rows whose files nobody gave for the state that is looked for: they may take long."""
        self._given: dict[str, tuple[str, frozenset[int]]] = {}
        """By module: after which step the state is that was given last, and which paths have rows
        in that step."""
        self._refused: set[str] = set()
        """Steps whose states were given and refused."""

    def paths_of_last_step(self, module: str) -> frozenset[int]:
        """Return the paths that have rows in the step to the state that was given last."""
        return self._given.get(module, ("", frozenset()))[1]

    def refuse(self, module: str) -> None:
        """Never give the state again that was given last, nor one that stands on it."""
        if module in self._given:
            self._refused.add(self._given[module][0])

    def chains(self, module: str, view: SwarmView) -> ChainBook:
        """Return the chains of a module that those who announce states of it give, checked.

        A holder is not believed about its weight: its steps are asked for from the genesis. A head
        whose chain nobody gives does not hide another one.
        """
        book = ChainBook(self._node.run_id, [module])
        announced = {holding.head.step: holding.head for holding in view.holdings.get(module, ())}
        ranked = sorted(announced.values(), key=lambda head: head.rank)
        for head in ranked[:_HEADS_TRIED]:
            if sum(other.step in book for other in ranked) >= _HEADS_READ:
                break
            for peer in spread(head.step, view.holders(module, head.step), "")[:_HOLDERS_ASKED]:
                if head.step in book:
                    break
                self._read_chain(book, module, peer)
        return book

    def _read_chain(self, book: ChainBook, module: str, peer: str) -> None:
        """Ask one peer for its chain, page by page. What it tells beside that is not taken in."""
        locator = book.locator(book.tips(module)[0].name)
        before = ""
        for _ in range(_MAX_PAGES):
            answer = self._node.exchange.ask(peer, module, locator)
            if answer is None:
                return
            for step in answer.steps:
                if before and step.parent != before:
                    return
                try:
                    if not book.add(step, peer):
                        return
                except ValueError:
                    return
                before = step.name
            if not answer.has_more or not answer.steps:
                return
            locator = book.locator(before)

    def state(
        self,
        module: str,
        view: SwarmView,
        *,
        stored: Callable[[Head], ModuleState | None] = lambda head: None,
    ) -> ModuleState | None:
        """Return the newest state of the heaviest chain that can be obtained.

        What `stored` has is not fetched. None: nothing was trained yet, or no state can be
        obtained. The last states of a chain are tried, then those of the next one, so what one peer
        has made alone for many rounds, and gives to nobody, does not hide another chain.
        """
        book, in_vain = self.chains(module, view), set[str]()
        self._not_given.clear()
        for tip in book.tips(module)[:_CHAINS_TRIED]:
            for link in itertools.islice(book.back_from(tip.name), _STATES_TRIED):
                if link.step is None:
                    break
                if link.name in in_vain or self._is_refused(book, link):
                    continue
                state = self._state_after(book, link, view, stored)
                if state is not None:
                    self._given[module] = link.name, link.paths
                    return state
                in_vain.add(link.name)
        return None

    def _is_refused(self, book: ChainBook, link: Link) -> bool:
        if not self._refused:
            return False
        return any(back.name in self._refused for back in book.back_from(link.name))

    def _state_after(
        self,
        book: ChainBook,
        link: Link,
        view: SwarmView,
        stored: Callable[[Head], ModuleState | None],
    ) -> ModuleState | None:
        """Return the state after a step, if it can be had in one of the ways that there are."""
        reason = ""
        for way in book.vouched(link.name):
            try:
                return self._state_by(way, view, stored)
            except (IntegrityError, NetworkError, ValueError) as error:
                # A state of some steps ago is often gone; there is another way.
                logger.debug("version %d of %s: %s", link.version, link.module, error)
                reason = str(error)
        logger.warning("version %d of %s is passed over: %s", link.version, link.module, reason)
        return None

    def _state_by(
        self,
        found: Vouched,
        view: SwarmView,
        stored: Callable[[Head], ModuleState | None],
    ) -> ModuleState:
        node, module = self._node, found.before.module
        announced = [holding.peer_id for holding in view.holdings.get(module, ())]
        signed = [peer for step in found.steps for peer in sorted(step.peers)]
        sources = tuple(peer for peer in dict.fromkeys((*signed, *announced)) if peer != node.me)
        if found.before.step is None:
            state = self._files.genesis_state(module)
        else:
            head = found.before.head(found.digest, 0)
            state = stored(head) or node.fetcher.state(head, sources)
        for step in found.steps:
            if step.state != state.digest:
                raise IntegrityError("its rows name a state that the chain does not lead to")
            state = self._stepped(state, step, sources)
        return state

    def _stepped(self, state: ModuleState, step: Step, sources: tuple[str, ...]) -> ModuleState:
        """Return the state after one more step, from the files of its rows."""
        node, paths = self._node, self._node.grid.paths_of_module(state.module)
        files = [self._file(row, sources) for row in step.rows]
        return node.rule.step(state, files, step.outer_rows, step.round_index, paths)

    def _file(self, row: Row, sources: Iterable[str]) -> bytes:
        node = self._node
        if row.name in self._not_given:
            raise NetworkError(f"no peer serves the file of {row.peer}")
        self._not_given.add(row.name)
        path: Path = node.fetcher.contribution(row, tuple(dict.fromkeys((row.peer, *sources))))
        self._not_given.discard(row.name)
        try:
            data = path.read_bytes()[MARK_BYTES:]
        finally:
            path.unlink(missing_ok=True)
        try:
            node.rule.codec.check(data, layout_of(node.grid, row.module).size)
        except DipacoError as error:
            raise IntegrityError(f"a file of {row.peer} is not a contribution: {error}") from None
        return data
