"""Fills a ledger file with the certificates of a swarm: of each module the chain that wins.

Run by `dipaco-ledger` and by a bootstrap node with `--ledger`. A chain is followed for 64 commits,
so a keeper may be away for about as many rounds and misses nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from dipaco.dht.certificate_check import decode_certificate
from dipaco.dht.certificates import Certificate
from dipaco.dht.ledger import Said
from dipaco.dht.ledger_file import LedgerFile, check_for_ledger
from dipaco.dht.records import RecordError
from dipaco.dht.repetition import Complaints
from dipaco.dht.view import SwarmView, greatest_rounds
from dipaco.modules.errors import DipacoError
from dipaco.modules.grid import Grid
from dipaco.modules.state import StateReference

from .certifier import CertificateAsker
from .fetching import ContentFetcher

logger = logging.getLogger("dipaco.peer.exchange.ledger_keeper")

# How often it looks: once a round, within these bounds.
SHORTEST_PERIOD_S, LONGEST_PERIOD_S = 10.0, 600.0
# Signatures come some seconds after a commit: so many of the newest certificates are asked for
# again, of so many holders.
NEWEST, HOLDERS_ASKED = 8, 2
COMPLAINT_PERIOD_S, MAX_COMPLAINTS = 60.0, 100


class LedgerKeeper:
    """Looks at the swarm and adds what is new to a ledger. One thread at a time."""

    def __init__(
        self,
        file: LedgerFile,
        grid: Grid,
        fetcher: ContentFetcher,
        asker: CertificateAsker,
        read_view: Callable[[], SwarmView],
        now: Callable[[], float],
    ) -> None:
        self.file = file
        self._plan = file.manifest.plan
        self._grid = grid
        self._fetcher = fetcher
        self._asker = asker
        self._read_view = read_view
        self._now = now
        self._complaints = Complaints(COMPLAINT_PERIOD_S, MAX_COMPLAINTS)

    @property
    def period_s(self) -> float:
        """Return how often to look."""
        return min(LONGEST_PERIOD_S, max(SHORTEST_PERIOD_S, self._plan.rounds.duration_s))

    def run(self, stopping: threading.Event, say: Callable[[str], None]) -> None:
        """Look again and again until stopped; what fails is said, and tried again."""
        while True:
            began_s = time.monotonic()
            try:
                if new := self.look():
                    say(f"ledger: {new} certificates more in {self.file.path}")
            except DipacoError as error:
                say(f"ledger: {error}")
            if stopping.wait(max(1.0, self.period_s - (time.monotonic() - began_s))):
                return

    def look(self) -> int:
        """Read the swarm once; returns how many certificates said anything new.

        Raises `DipacoError`.
        """
        view = self._read_view()
        rounds = greatest_rounds(self._plan, self._now())
        sayings = [
            Said(peer, record.round, record.name, record.team)
            for peer, record in sorted(view.peers.items())
            if (record.name or record.team) and record.round < rounds
        ]
        new = self.file.add((), sayings)
        for module in self._grid.modules():
            wanted, chain = self._fetcher.winning_chain(module, view)
            if wanted is None:
                continue
            found = [c for c in chain if self._may_stand(c, c, "a peer")]
            newest = self._newest(wanted, view.holders(wanted), found)
            new += self.file.add([*newest, *found[NEWEST:]])
        return new

    def _newest(
        self, wanted: StateReference, holders: Sequence[str], chain: Sequence[Certificate]
    ) -> list[Certificate]:
        """Return the newest certificates of a chain; while signatures are missing, its holders are
        asked again."""
        known = {c.statement: self.file.get(c) or c for c in chain[:NEWEST]}
        for holder in holders[:HOLDERS_ASKED]:
            if all(len(c.signers) == len(c.statement.table) for c in known.values()):
                break
            try:
                answer = self._asker.certificates(holder, wanted.module, wanted.digest, NEWEST)
                for data in answer[:NEWEST]:
                    certificate = decode_certificate(data, self._plan.run_id)
                    # Of this chain only: more of another one would fill the disk.
                    checked = known.get(certificate.statement)
                    if checked and self._may_stand(certificate, checked, holder):
                        known[certificate.statement] = checked.merged(certificate)
            except RecordError as error:
                self._refuse(holder, wanted.module, error)
            except DipacoError as error:
                logger.debug("no certificates of %s: %s", wanted.module, error)
        return list(known.values())

    def _may_stand(self, certificate: Certificate, checked: Certificate, sender: str) -> bool:
        try:
            now_s, gate = self._now(), self.file.gate
            check_for_ledger(certificate, self._plan, self._grid, now_s, checked=checked, gate=gate)
        except RecordError as error:
            self._refuse(sender, certificate.statement.module, error)
            return False
        return True

    def _refuse(self, sender: str, module: str, error: RecordError) -> None:
        logger.log(
            self._complaints.level(sender), "not in the ledger: certificates of %s from %s: %s",
            module, sender, error,
        )  # fmt: skip
