"""Carries a member's words to other peers: say, look, tell, ask, put.

Everything that can take long runs on other threads and reports its outcome as an event. Training
peers and bootstrap nodes both use it; `outer_steps` handles states and files.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from dipaco.base.errors import DipacoError, NetworkError
from dipaco.base.repetition import Complaints
from dipaco.peer.presence.own_status import Activity
from dipaco.protocol.member import actions as a
from dipaco.protocol.member import events as e

from .handlers import Handlers
from .running_node import RunningNode

logger = logging.getLogger("dipaco.peer.shell.messenger")

# Calls that take seconds, and files that are given to others, at the same time.
_CALLS_AT_ONCE, PUTS_AT_ONCE = 16, 16
# A complaint that others cause again and again is logged once in this time, and so many different
# ones are.
_COMPLAINT_PERIOD_S, _MAX_COMPLAINTS = 60.0, 20


class Messenger:
    """Carries out the actions that concern other peers. Called on the shell's thread."""

    def __init__(self, running: RunningNode, report: Callable[[e.Event], None]) -> None:
        self._running, self._node, self._report = running, running.node, report
        self._complaints = Complaints(_COMPLAINT_PERIOD_S, _MAX_COMPLAINTS)
        # Work that must end within seconds never waits behind work that may take minutes.
        self._calls = ThreadPoolExecutor(_CALLS_AT_ONCE, thread_name_prefix="calls")
        self._puts = ThreadPoolExecutor(PUTS_AT_ONCE, thread_name_prefix="puts")

    def stop(self) -> None:
        """Begin nothing more; what is under way is reported to nobody."""
        for threads in (self._calls, self._puts):
            threads.shutdown(wait=False, cancel_futures=True)

    def run(self, work: Callable[[], None]) -> Future[None]:
        """Do other work, one at a time, on the threads of calls; it reports its outcome itself."""
        return self._calls.submit(work)

    def handlers(self) -> Handlers:
        """Return what carries out which action."""
        return {
            a.Say: self._say,
            a.Warn: self._warn,
            a.Watch: self._watch,
            a.Look: functools.partial(self._call, self._look),
            a.Tell: self._tell,
            a.Ask: functools.partial(self._call, self._ask),
            a.Put: self._put_all,
        }

    def _call(self, work: Callable[[Any], None], action: a.Action) -> None:
        self._submit(self._calls, work, action)

    def _submit(
        self, threads: ThreadPoolExecutor, work: Callable[[Any], None], action: a.Action
    ) -> None:
        def run() -> None:
            try:
                work(action)
            except Exception as error:
                # Nothing that another peer sends ends this one, and the member must not wait.
                unforeseen = not isinstance(error, DipacoError)
                logger.debug("%s: %s", type(action).__name__, error, exc_info=unforeseen)
                self._report(e.Failed(action, str(error) or type(error).__name__))

        threads.submit(run)

    def _say(self, action: a.Say) -> None:
        self._running.status.claim = Activity(
            action.state,
            action.path,
            since_s=action.since_s,
            reason=action.reason,
            pinned=action.pinned,
        )
        self._running.refresher.announce()

    def _warn(self, action: a.Warn) -> None:
        logger.log(self._complaints.level(action.text), "%s", action.text)

    def _watch(self, action: a.Watch) -> None:
        self._running.refresher.watch(action.scope)

    def _look(self, action: a.Look) -> None:
        view = self._running.refresher.refresh(action.further)
        self._report(e.Viewed(view, is_answer=True))

    def _tell(self, action: a.Tell) -> None:
        self._node.chains.note_rows(action.rows)
        if action.peers:
            tell = self._node.exchange.tell
            tell(action.peers, action.module, action.rows, action.steps, action.keep)

    def _ask(self, action: a.Ask) -> None:
        answer = self._node.exchange.ask(action.peer, action.module, action.locator)
        if answer is None:
            raise NetworkError(f"{action.peer} does not answer")
        self._report(answer)

    def _put_all(self, action: a.Put) -> None:
        # A file that was not taken within a round is of no use.
        left = iter(action.peers)
        until_s = time.monotonic() + self._node.plan.rounds.duration_s
        for _ in range(action.copies):
            self._submit(self._puts, functools.partial(self._put, left, until_s), action)

    def _put(self, left: Iterator[str], until_s: float, action: a.Put) -> None:
        """Have one more peer take the file; `left` is shared by all that are to."""
        file = self._node.contributions.find(action.row.file)
        if file is None:
            return
        for peer in left:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or self._node.exchange.put(peer, action.row, file, left_s):
                return
            logger.debug("%s does not take a file", peer)
