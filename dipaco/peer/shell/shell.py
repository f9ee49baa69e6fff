"""The shell around a member: it passes events to it, one after the other, and has actions carried
out.

Training peers and bootstrap nodes have the same one. `messenger` does what concerns other peers,
and `outer_steps` what concerns states; a node that trains adds what concerns its model (`session`).
Background work reports its outcome here from any thread; the member itself is called on one thread
only.

The model has another thread. While it takes an inner step, which can last half a minute on a slow
machine, events are handled here, so others need not wait for its end. An action that concerns the
model is done when the step has ended, and until then nothing else happens.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from dipaco.base.waits import never_waiting
from dipaco.peer.keeping.path_files import PathFiles
from dipaco.peer.node.node import Node
from dipaco.protocol.member.actions import Action, Left, TakeStep, Wait
from dipaco.protocol.member.events import Event, LeaveWanted, Meanwhile, Turn, Viewed
from dipaco.protocol.member.knowledge import MemberSettings
from dipaco.protocol.member.member import Member
from dipaco.protocol.member.situation import REMEMBERED_STEPS
from dipaco.training.trainer import PathTrainer

from .handlers import Handlers
from .messenger import Messenger
from .outer_steps import OuterSteps
from .running_node import RunningNode

# What a member says once a turn, after everything else was done.
Instruction = TakeStep | Wait | Left

# A member is asked at least so often (`Turn`).
LONGEST_WAIT_S = 0.25


def _start_member(node: Node, settings: MemberSettings) -> Member:
    """Return the member of a node, which knows what lies on this disk."""
    held, remembered = node.held.all(), node.chains.remembered
    chains = {head.module: remembered(head.module, REMEMBERED_STEPS) for head in held}
    return Member(settings, node.plan, node.grid, chains=chains, held=held)


class Shell:
    """One node in one run. `run` and `happen` are for one thread, `report` is for all.

    A node that trains gives its `trainer`, the handlers of the actions that only it has, which run
    on the model's thread, and `next_turn`: called before every turn, it lets happen what the
    machine's owner wants.
    """

    def __init__(
        self,
        running: RunningNode,
        settings: MemberSettings,
        *,
        files: PathFiles | None = None,
        trainer: PathTrainer | None = None,
        model_handlers: Handlers | None = None,
        next_turn: Callable[[], Turn] = Turn,
    ) -> None:
        node, refresher, background = running.node, running.refresher, running.background
        self.member = _start_member(node, settings)
        self._now, self._background, self._stopping = node.clock.now, background, running.stopping
        self._next_turn = next_turn
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self.messenger = Messenger(running, self.report)
        self.outer_steps = OuterSteps(
            node,
            files or PathFiles(node),
            running.events,
            self.report,
            announce=refresher.announce,
            trainer=trainer,
            fail=background.fail,
        )
        self._handlers: Handlers = {**self.messenger.handlers(), **self.outer_steps.handlers()}
        self._model_handlers: Handlers = {
            Wait: lambda action: None,
            **self.outer_steps.model_handlers(),
            **(model_handlers or {}),
        }
        self._model = ThreadPoolExecutor(1, thread_name_prefix="model")
        background.on_failure(self._wake)
        refresher.on_view(lambda view: self.report(Viewed(view)))
        node.exchange.listen(self.report)

    def run(self) -> Left:
        """Do what the member wants until it has left, for which `stopping` is set.

        Raises what ended a background thread.
        """
        is_told = False
        try:
            with never_waiting():
                while True:
                    self._background.check()
                    if self._stopping.is_set() and not is_told:
                        is_told = True
                        self.happen(LeaveWanted())
                    instruction = self._turn(self._next_turn())
                    if isinstance(instruction, Left):
                        return instruction
                    outcome = self._carry_out(instruction)
                    if outcome is not None:
                        self.happen(outcome)
                    if isinstance(instruction, Wait):
                        self._wait()
        finally:
            self._model.shutdown()
            self.messenger.stop()
            self.outer_steps.stop()

    def report(self, event: Event) -> None:
        """Let an event happen in the next turn. From any thread."""
        self._inbox.put(event)

    def happen(self, event: Event) -> Instruction | None:
        """Hand an event in and carry out what comes of it; returns what to do next, if it says.

        What an action's handler returns happens before the next event, after the other actions.
        """
        instruction: Instruction | None = None
        waiting = deque([event])
        while waiting:
            event = waiting.popleft()
            for action in self.member.handle(event, self._now()):
                if isinstance(action, Instruction):
                    instruction = action
                    continue
                outcome = self._carry_out(action)
                if outcome is not None:
                    waiting.append(outcome)
        return instruction

    def _turn(self, turn: Turn) -> Instruction:
        """Let happen what was reported, then ask what to do."""
        for _ in range(self._inbox.qsize()):
            event = self._inbox.get()
            if event is not None:
                self.happen(event)
        return self.happen(turn) or Wait("", 0.0)

    def _carry_out(self, action: Action) -> Event | None:
        if handler := self._handlers.get(type(action)):
            return handler(action)
        handler = self._model_handlers.get(type(action))
        assert handler is not None, f"nobody carries out {action}"
        return self._with_model(handler, action)

    def _with_model(self, handler: Callable[[Any], Event | None], action: Action) -> Event | None:
        """Do something on the model's thread; if it is an inner step, events happen meanwhile."""
        doing = self._model.submit(handler, action)
        if isinstance(action, TakeStep):
            doing.add_done_callback(lambda _: self._wake())
            try:
                while not doing.done():
                    self._wait()
                    if not doing.done():
                        self.happen(Meanwhile())
            finally:
                wait([doing])
        return doing.result()

    def _wait(self) -> None:
        """Wait until something is reported; it happens before this returns."""
        try:
            event = self._inbox.get(timeout=LONGEST_WAIT_S)
        except queue.Empty:
            return
        if event is not None:
            self.happen(event)

    def _wake(self) -> None:
        """End a wait. From any thread."""
        self._inbox.put(None)
