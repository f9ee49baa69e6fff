"""Signatures of commits: sent to the group, or gathered where it is large.

What is simplified: in a group of up to `GREATEST_TOLD` everybody sends its signature to all. In a
larger one they are asked for, as `dipaco.peer.exchange.certifier` does it in any group.
"""

from __future__ import annotations

import bisect

from dipaco.dht.certificates import Certificate, CommitStatement
from dipaco.peer.member import events

from .network import CALL_BYTES, CERTIFICATES, Reply
from .work import SimulatedState, signature
from .world import Body

# Of a small group's.
CERTIFICATE_BYTES = 700
# A statement, and a row of it with its signature: see `dipaco.dht.certificate_check`.
STATEMENT_BYTES, SIGNED_ROW_BYTES = 85, 110
GREATEST_TOLD = 16
GREATEST_EARLY = 64
# As the certifier: pauses before the passes, questions of one, and how long an answer may take.
GATHER_PAUSES_S, GATHER_QUESTIONS = (0.3, 1.5, 6.0, 24.0), 8
ANSWER_LIMIT_S = 3.0


def certificate_bytes(certificate: Certificate) -> int:
    """Return how long a certificate with all signatures is on the wire."""
    return STATEMENT_BYTES + SIGNED_ROW_BYTES * len(certificate.statement.table)


class Signing:
    """Of one life of one machine."""

    def __init__(self, machine: Body) -> None:
        self._machine = machine
        self._world = machine.world
        self._early: dict[str, Certificate] = {}
        """Signatures of steps that this machine has not done yet."""
        self._gathered: dict[str, Certificate] = {}
        """Certificates of commits in large groups, with the signatures that are here."""

    def with_early(self, certificate: Certificate) -> Certificate:
        """Return this machine's certificate with the signatures that came before it."""
        early = self._early.pop(certificate.statement.digest, None)
        return certificate if early is None else certificate.merged(early)

    def share(self, state: SimulatedState) -> None:
        """Certify a commit, together with the others of the group."""
        me, statement = self._machine.peer, state.statement
        assert statement is not None
        known = self._machine.book.get(statement.module, statement.digest)
        certificate = known or Certificate(statement, {me: signature(me, statement)})
        if len(statement.table) > GREATEST_TOLD:
            self._gathered[statement.digest] = certificate
            while len(self._gathered) > GREATEST_EARLY:
                del self._gathered[next(iter(self._gathered))]
            pause_s = GATHER_PAUSES_S[0]
            others = _others_in_order(me, statement)
            self._machine.later(pause_s, self._gather, state, others, 0, frozenset())
            return
        for row in statement.table:
            other = self._world.machines.get(row.peer)
            if other is not None and row.peer != me:
                self._world.network.tell(
                    me,
                    row.peer,
                    other.hear_signature,
                    certificate,
                    size=CERTIFICATE_BYTES,
                    kind=CERTIFICATES,
                )

    def _gather(
        self, state: SimulatedState, others: tuple[str, ...], passes: int, asked: frozenset[str]
    ) -> None:
        """Ask the members whose signatures are missing, as `peer.exchange.certifier` does.

        `others`: all of the group, in the order in which they are asked.
        """
        digest, me = state.reference.digest, self._machine.peer
        own = self._gathered.get(digest)
        if own is None:
            return
        is_complete = len(own.signers) == len(own.statement.table)
        peer = next((p for p in others if p not in own.signers and p not in asked), None)
        if peer is not None and len(asked) < GATHER_QUESTIONS:

            def answered(answer: Certificate | None) -> None:
                known = self._gathered.get(digest)
                world = self._world
                if answer is not None and known and world.is_signed(answer, known):
                    self._gathered[digest] = self._world.stock.shared(known.merged(answer))
                self._gather(state, others, passes, asked | {peer})

            self._world.network.call(
                me, peer, "certificate", digest, answered, limit_s=ANSWER_LIMIT_S
            )
            return
        self._machine.deliver(events.ChainFetched(state.reference, (own,)))
        if not is_complete and passes + 1 < len(GATHER_PAUSES_S):
            pause_s = GATHER_PAUSES_S[passes + 1]
            self._machine.later(pause_s, self._gather, state, others, passes + 1, frozenset())

    def hear(self, certificate: Certificate) -> None:
        """A member of a group has signed what it committed."""
        statement = certificate.statement
        if not self._world.is_signed(certificate):
            return
        known = self._early.get(statement.digest)
        self._early[statement.digest] = certificate.merged(known) if known else certificate
        while len(self._early) > GREATEST_EARLY:
            del self._early[next(iter(self._early))]
        state = self._world.stock.states[statement.digest]
        self._machine.deliver(events.ChainFetched(state.reference, (certificate,)))

    def serve(self, digest: str, reply: Reply) -> None:
        """Answer who gathers signatures."""
        found = self._gathered.get(digest)
        reply(found, CALL_BYTES if found is None else CALL_BYTES + certificate_bytes(found))


def _others_in_order(me: str, statement: CommitStatement) -> tuple[str, ...]:
    """Return the others of a group, beginning with the member after this one."""
    peers = sorted(statement.peers - {me})
    place = bisect.bisect(peers, me)
    return (*peers[place:], *peers[:place])
