"""The shell of a node that trains nothing: mailbox and keeper, as its member decides."""

from __future__ import annotations

import threading

from dipaco.peer.reporting.events import EventLog
from dipaco.protocol.member import actions as a
from dipaco.protocol.member import events as e
from dipaco.protocol.member.knowledge import MemberSettings

from .background import Background
from .errands import Errands
from .node import Node
from .outer_steps import OuterSteps
from .path_files import PathFiles
from .publisher import PeerStatus, Publisher
from .shell import Shell, start_member

LONGEST_WAIT_S = 0.5


class Server:
    """One bootstrap node in one run. `run` returns when it was stopped and has left."""

    def __init__(
        self,
        node: Node,
        status: PeerStatus,
        publisher: Publisher,
        background: Background,
        events: EventLog,
        stopping: threading.Event,
    ) -> None:
        member = start_member(node, MemberSettings(node.me, trains=False))
        self._shell = shell = Shell(member, node.clock.now, self._carry_out)
        self._background = background
        self._stopping = stopping
        self._node = node
        self._errands = Errands(
            publisher, node.exchange, node.chains, node.contributions, status, shell.report
        )
        self._outer_steps = OuterSteps(
            node, PathFiles(node), events, shell.report, announce=publisher.announce
        )
        background.on_failure(shell.wake)
        publisher.on_view(self._errands.see)
        node.exchange.listen(shell.report)

    def _carry_out(self, action: a.Action) -> e.Event | None:
        if self._errands.carry_out(action):
            return None
        if isinstance(action, a.SaveAll):
            self._node.held.save_all()
            return None
        is_done, event = self._outer_steps.carry_out(action)
        assert is_done, f"nobody carries out {action}"
        return event

    def run(self) -> None:
        """Serve until `stopping` is set, then leave. Raises what ended a background thread."""
        is_told = False
        try:
            while True:
                self._background.check()
                if self._stopping.is_set() and not is_told:
                    is_told = True
                    self._shell.happen(e.LeaveWanted())
                if isinstance(self._shell.turn(e.Turn()), a.Left):
                    return
                self._shell.wait(LONGEST_WAIT_S)
        finally:
            self._errands.stop()
            self._outer_steps.stop()
