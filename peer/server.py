"""The shell of a node that trains nothing: it keeps copies for others, as its member decides."""

from __future__ import annotations

import threading

from dipaco.modules.state import StateReference

from .background import Background
from .errands import Errands
from .guests import tell_member
from .member import actions as a
from .member import events as e
from .member.knowledge import MemberSettings
from .member.recording import start_member
from .node import Node
from .publisher import PeerStatus, Publisher
from .reporting.events import EventLog
from .shell import Shell

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
        member = start_member(
            MemberSettings(node.me, trains=False),
            node.plan,
            node.held.all(),
            node.certifier.all(),
        )
        self._shell = shell = Shell(member, node.clock.now, self._carry_out)
        self._is_in = node.is_in
        self._background = background
        self._stopping = stopping
        self._errands = Errands(
            publisher,
            node.fetcher,
            node.exchange,
            node.certifier,
            node.held,
            status,
            events,
            shell.report,
        )
        tell_member(node.gate, shell.report)
        background.on_failure(shell.wake)
        publisher.on_view(self._errands.see)
        node.exchange.set_offer_handler(self._note_offer)

    def _note_offer(self, peer: str, offered: StateReference) -> bool:
        if not self._is_in(peer):
            return False
        self._shell.report(e.Offered(peer, offered))
        return True

    def _carry_out(self, action: a.Action) -> None:
        if not self._errands.carry_out(action):
            raise AssertionError(f"nobody carries out {action}")

    def run(self) -> None:
        """Serve until `stopping` is set, then leave. Raises what ended a background thread."""
        is_told = False
        try:
            while True:
                self._background.check()
                if self._stopping.is_set() and not is_told:
                    is_told = True
                    self._shell.happen(e.LeaveWanted("stopped"))
                if isinstance(self._shell.turn(e.Turn()), a.Left):
                    return
                self._shell.wait(LONGEST_WAIT_S)
        finally:
            self._errands.stop()
