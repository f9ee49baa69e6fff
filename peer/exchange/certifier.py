"""This peer's certificates: signed at a commit, completed by the other members, served, kept.

A commit is signed at once. In the background the other members of the group are asked for their
certificates of the same state; each answer has all signatures that its sender knows, so that a
group of n is complete after about log2(n) questions of each. Who takes a foreign state asks its
holders for the chain. Malformed or forged certificates are refused with one log line that names
the sender, and nothing of that answer is used.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dipaco.dht.admission import Gate
from dipaco.dht.certificate_check import (
    decode_certificate,
    sign_statement,
    verify_certificate,
)
from dipaco.dht.certificates import (
    LONGEST_CHAIN,
    Certificate,
    CertificateBook,
    CommitStatement,
)
from dipaco.dht.identity import Identity
from dipaco.dht.records import RecordError
from dipaco.dht.repetition import Complaints
from dipaco.modules.errors import DipacoError, NetworkError, StorageError
from dipaco.modules.grid import Grid
from dipaco.modules.outer import Contribution
from dipaco.modules.state import StateReference

from .certificate_files import CertificateFiles
from .messages import MAX_CERTIFICATES

logger = logging.getLogger("dipaco.peer.exchange.certifier")

# When the other members are asked, in seconds after the commit and then after the last time.
PAUSES_S = (0.3, 1.5, 6.0, 24.0)
MAX_QUESTIONS = 8
"""Of one commit at one time."""
MAX_GATHERING = 64
# Of a chain: most peers are a version or two behind.
FIRST_COUNT = 4
MAX_PAGES = 16
MAX_HOLDERS = 3
CHAIN_LIMIT_S = 20.0
STOP_LIMIT_S = 1.0
COMPLAINT_PERIOD_S = 60.0
MAX_COMPLAINTS = 100


class CertificateAsker(Protocol):
    """Asks other peers: the exchange."""

    def certificates(self, peer: str, module: str, digest: str, count: int) -> Sequence[bytes]:
        """Return a peer's certificates of a state and those before it. Raises `DipacoError`."""
        ...


@dataclass
class _Gathering:
    """A commit whose signatures are not all here."""

    module: str
    digest: str
    due_s: float
    passes: int = 0


class Certifier:
    """The certificates of one run. Thread-safe; `start` begins the background work."""

    def __init__(
        self,
        run_id: str,
        grid: Grid,
        identity: Identity,
        asker: CertificateAsker,
        folder: Path,
        *,
        pauses_s: Sequence[float] = PAUSES_S,
        monotonic: Callable[[], float] = time.monotonic,
        gate: Gate | None = None,
    ) -> None:
        self.gate = gate
        """Who is in, of a run by invitation."""
        self.admission = b""
        """This peer's, of a run by invitation; follows its signatures."""
        self._run_id = run_id
        self._grid = grid
        self._identity = identity
        self._asker = asker
        self._files = CertificateFiles(folder, run_id, grid)
        self._pauses_s = tuple(pauses_s)
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._book = CertificateBook()
        self._book.add_all(self._load())
        self._unsaved: set[str] = set()
        self._open: OrderedDict[str, _Gathering] = OrderedDict()
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._listeners: list[Callable[[Certificate], None]] = []
        self._complaints = Complaints(COMPLAINT_PERIOD_S, MAX_COMPLAINTS)

    def _load(self) -> Iterator[Certificate]:
        """Yield what lies on the disk; who signed it is known to be in from then on."""
        for certificate in self._files.load():
            try:
                if self.gate is not None:
                    self._verify(certificate, None)
            except RecordError as error:
                logger.warning("a certificate on disk is not used: %s", error)
                continue
            yield certificate

    def listen(self, listener: Callable[[Certificate], None]) -> None:
        """Call `listener`, on the background thread, when a commit has further signatures."""
        self._listeners.append(listener)

    # -- what is known

    def get(self, module: str, digest: str) -> Certificate | None:
        """Return the certificate of a state, if it is known."""
        with self._lock:
            return self._book.get(module, digest)

    def chain(self, module: str, digest: str) -> tuple[Certificate, ...]:
        """Return the certificates of a state and of those before it, the newest first."""
        with self._lock:
            return self._book.chain(module, digest)

    def all(self) -> tuple[Certificate, ...]:
        """Return everything that is known, also from an earlier life."""
        with self._lock:
            return self._book.all()

    # -- committing

    def sign(
        self, state: StateReference, parent: str, table: Sequence[Contribution]
    ) -> Certificate:
        """Return this peer's certificate of a step from `parent`; nothing is kept of it yet."""
        statement = CommitStatement(
            run_id=self._run_id,
            module=state.module,
            version=state.version,
            parent=parent,
            digest=state.digest,
            round_index=state.last_round,
            table=tuple(table),
        )
        return sign_statement(statement, self._identity.key, self.admission)

    def committed(
        self, state: StateReference, parent: str, table: Sequence[Contribution]
    ) -> Certificate:
        """Certify a commit, serve the certificate, and have the others' signatures gathered."""
        certificate = self.sign(state, parent, table)
        self._take((certificate,))
        with self._lock:
            self._book.keep(state.module, state.digest)
        if len(certificate.statement.table) > 1:
            due_s = self._monotonic() + self._pauses_s[0]
            with self._lock:
                self._open[state.digest] = _Gathering(state.module, state.digest, due_s)
                while len(self._open) > MAX_GATHERING:
                    self._open.popitem(last=False)
        self._wake.set()
        return certificate

    def _take(self, certificates: Iterable[Certificate]) -> bool:
        with self._lock:
            new = [c for c in certificates if self._book.add(c)]
            self._unsaved |= {certificate.statement.module for certificate in new}
        return bool(new)

    # -- gathering, on the background thread

    def start(self, thread: Callable[[str, Callable[[], None]], threading.Thread]) -> None:
        """Begin to gather signatures; `thread` is `Background.thread`."""
        self._thread = thread("certifier", self._run)
        self._thread.start()

    def stop(self) -> None:
        """End the background work, and write what is not on disk yet."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(STOP_LIMIT_S)
        self._save()

    def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            self.gather_due()
            self._save()
            with self._lock:
                due_s = min((g.due_s for g in self._open.values()), default=None)
            self._wake.wait(None if due_s is None else max(0.0, due_s - self._monotonic()))

    def gather_due(self) -> None:
        """Ask once more for the signatures whose time has come."""
        now = self._monotonic()
        with self._lock:
            due = [gathering for gathering in self._open.values() if gathering.due_s <= now]
        for gathering in due:
            is_complete = self._gather(gathering)
            gathering.passes += 1
            with self._lock:
                if is_complete or gathering.passes >= len(self._pauses_s):
                    self._open.pop(gathering.digest, None)
                else:
                    gathering.due_s = self._monotonic() + self._pauses_s[gathering.passes]

    def _gather(self, gathering: _Gathering) -> bool:
        """Ask members whose signatures are missing; tell whether none is missing any more."""
        asked: set[str] = set()
        while not self._stopping:
            own = self.get(gathering.module, gathering.digest)
            if own is None:
                return True
            missing = self._missing(own)
            waiting = [peer for peer in missing if peer not in asked]
            if not waiting or len(asked) == MAX_QUESTIONS:
                return not missing
            asked.add(waiting[0])
            self._ask_member(waiting[0], own)
        return True

    def _missing(self, certificate: Certificate) -> list[str]:
        """Return who has not signed, beginning with the member after this one.

        Who begins behind itself, and goes on behind the signatures that came, gets twice as many
        with every answer.
        """
        peers = sorted({row.peer for row in certificate.statement.table})
        after = [peer for peer in peers if peer > self._identity.peer_id]
        ring = after + peers[: len(peers) - len(after)]
        return [peer for peer in ring if peer not in certificate.signers]

    def _ask_member(self, peer: str, own: Certificate) -> None:
        statement = own.statement
        try:
            answers = self._asker.certificates(peer, statement.module, statement.digest, 1)
            for data in answers[:1]:
                found = decode_certificate(data, self._run_id)
                if found.statement != statement:
                    raise RecordError("it signed another statement of this state")
                self._verify(found, own)
                self._take_signatures(found)
        except RecordError as error:
            self._refuse(peer, statement.module, error)
        except DipacoError as error:
            logger.debug("no certificate of %s: %s", statement.module, error)

    def _take_signatures(self, found: Certificate) -> None:
        if not self._take((found,)):
            return
        merged = self.get(found.statement.module, found.statement.digest)
        assert merged is not None
        for listener in self._listeners:
            listener(merged)

    def _refuse(self, peer: str, module: str, error: RecordError) -> None:
        logger.log(
            self._complaints.level(peer), "refused certificates of %s from %s: %s",
            module, peer, error,
        )  # fmt: skip

    # -- the chains of others

    def fetch_chain(
        self, wanted: StateReference, holders: Sequence[str], limit_s: float = CHAIN_LIMIT_S
    ) -> tuple[Certificate, ...]:
        """Return the chain of a state, the newest first, asking its holders for what is missing.

        Blocks for about `limit_s` at most. Empty when no holder has a chain that can be checked;
        what is wrong is refused, with what else came in the same answer.
        """
        deadline = self._monotonic() + limit_s
        others = [peer for peer in holders if peer != self._identity.peer_id]
        for holder in others[:MAX_HOLDERS]:
            if self._is_known(wanted) or self._monotonic() > deadline:
                break
            try:
                self._take(self._ask_for_chain(holder, wanted, deadline))
            except RecordError as error:
                self._refuse(holder, wanted.module, error)
            except DipacoError as error:
                logger.debug("no certificates of %s: %s", wanted.module, error)
        self._wake.set()
        return self.chain(wanted.module, wanted.digest)

    def _is_known(self, wanted: StateReference) -> bool:
        """Tell whether the chain of a state is here as far back as anybody keeps it."""
        if wanted.version == 0:
            return True
        chain = self.chain(wanted.module, wanted.digest)
        return len(chain) >= min(wanted.version, LONGEST_CHAIN)

    def _ask_for_chain(
        self, holder: str, wanted: StateReference, deadline: float
    ) -> list[Certificate]:
        """Return what a holder has of a chain, verified and linked. Raises `DipacoError`."""
        found = list(self.chain(wanted.module, wanted.digest))
        for page_number in range(MAX_PAGES):
            last = found[-1].statement if found else None
            if len(found) >= LONGEST_CHAIN or (last is not None and last.version == 1):
                break
            if self._monotonic() > deadline:
                raise NetworkError(f"peer {holder} takes too long")
            digest = last.parent if last is not None else wanted.digest
            wanting = LONGEST_CHAIN - len(found)
            count = min(wanting, MAX_CERTIFICATES) if page_number else FIRST_COUNT
            page = self._asker.certificates(holder, wanted.module, digest, count)
            for data in page[:count]:
                certificate = decode_certificate(data, self._run_id)
                self._check_link(certificate, wanted, found)
                found.append(certificate)
            if not page:
                break
            found += self.chain(wanted.module, found[-1].statement.parent)
        return found

    def _check_link(
        self, certificate: Certificate, wanted: StateReference, newer: Sequence[Certificate]
    ) -> None:
        """Check that a certificate continues a chain that begins at `wanted`, and verify it."""
        statement = certificate.statement
        checked = self.get(statement.module, statement.digest)
        self._verify(certificate, checked)
        if newer:
            before = newer[-1].statement
            expected = (before.module, before.version - 1, before.parent)
            # A round can have a second step: whoever left took one alone before its time.
            is_in_order = statement.round_index <= before.round_index
        else:
            expected = (wanted.module, wanted.version, wanted.digest)
            is_in_order = statement.round_index == wanted.last_round
        if (statement.module, statement.version, statement.digest) != expected or not is_in_order:
            raise RecordError(
                f"version {statement.version} of round {statement.round_index} is not the one "
                f"before, or not the state {wanted.digest[:12]} asked for"
            )

    def _verify(self, certificate: Certificate, checked: Certificate | None) -> None:
        verify_certificate(certificate, self._run_id, self._grid, checked=checked, gate=self.gate)

    # -- the disk

    def _save(self) -> None:
        with self._lock:
            modules, self._unsaved = self._unsaved, set()
            known = self._book.all()
        for module in modules:
            try:
                self._files.save(module, (c for c in known if c.statement.module == module))
            except StorageError as error:
                logger.warning("certificates of %s kept in memory only: %s", module, error)
