"""The shell around a member: it hands events in, one after the other, and has actions carried out.

Background work reports its outcome here from any thread; the member itself is called on one thread
only. A training peer and a bootstrap node have the same shell, see `session` and `errands`.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable

from dipaco.protocol.member.actions import Action, Left, TakeStep, Wait
from dipaco.protocol.member.events import Event, Turn
from dipaco.protocol.member.knowledge import MemberSettings
from dipaco.protocol.member.member import Member

from .node import Node

Instruction = TakeStep | Wait | Left


def start_member(node: Node, settings: MemberSettings) -> Member:
    """Return the member of a node, which knows what lies on this disk."""
    held = node.held.all()
    steps = [step for head in held for step in node.chains.steps_to(head.module, head.step)]
    return Member(settings, node.plan, node.grid, steps=steps, held=held)


class Shell:
    """Called on the thread that trains; `report` is for all threads.

    `carry_out` does an action, or has it done; what it returns is reported at once, before the
    next action.
    """

    def __init__(
        self,
        member: Member,
        now: Callable[[], float],
        carry_out: Callable[[Action], Event | None],
    ) -> None:
        self.member = member
        self._now = now
        self._carry_out = carry_out
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()

    def report(self, event: Event) -> None:
        """Let an event happen in the next turn. From any thread."""
        self._inbox.put(event)

    def wake(self) -> None:
        """End a wait. From any thread."""
        self._inbox.put(None)

    def wait(self, seconds: float) -> None:
        """Wait until something is reported; it happens before this returns."""
        try:
            event = self._inbox.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return
        if event is not None:
            self.happen(event)

    def turn(self, turn: Turn) -> Instruction:
        """Let happen what was reported, then ask what to do."""
        for _ in range(self._inbox.qsize()):
            event = self._inbox.get()
            if event is not None:
                self.happen(event)
        return self.happen(turn) or Wait("", 0.0)

    def happen(self, event: Event) -> Instruction | None:
        """Hand an event in and carry out what comes of it; returns what to do next, if it says."""
        instruction: Instruction | None = None
        waiting = deque([event])
        while waiting:
            event = waiting.popleft()
            for action in self.member.handle(event, self._now()):
                if isinstance(action, Instruction):
                    instruction = action
                    continue
                answer = self._carry_out(action)
                if answer is not None:
                    waiting.append(answer)
        return instruction
