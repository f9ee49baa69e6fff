"""The ledger on disk: every certificate that was seen, for as long as the run lasts.

Peers forget certificates after some hundred rounds, so whoever wants the sums of a run keeps one of
these from the beginning. It is one SQLite file. What was added is there after a kill at any
instant, adding it again changes nothing, and several processes may add to one file. Signatures are
kept, so that a ledger can be given to others, who check it as they would check a peer.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from dipaco.modules.errors import StorageError
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan

from .admission import Gate
from .certificate_check import decode_certificate, encode_certificate, verify_certificate
from .certificates import Certificate
from .ledger import Credit, Ledger, Said
from .manifest import SignedManifest, verify_manifest
from .records import NAME_PATTERN, RecordError
from .view import greatest_contribution, greatest_rounds

FILE_FORMAT = "dipaco-ledger-file/1"
# While another process writes.
LOCKED_LIMIT_S = 30.0
MERGED_AT_ONCE = 256

_TABLES = """
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS certificates (
    statement BLOB PRIMARY KEY, module TEXT NOT NULL, digest TEXT NOT NULL,
    certificate BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_module ON certificates (module, digest);
CREATE TABLE IF NOT EXISTS said (
    peer TEXT PRIMARY KEY, round INTEGER NOT NULL, name TEXT NOT NULL, team TEXT NOT NULL
) WITHOUT ROWID;
"""


def check_for_ledger(
    certificate: Certificate,
    plan: RunPlan,
    grid: Grid,
    now_s: float,
    *,
    checked: Certificate | None,
    gate: Gate | None = None,
) -> None:
    """Check that a certificate may stand in the ledger of a run. Raises `RecordError`.

    Besides what `verify_certificate` asks for, its round has begun, and no row has more tokens than
    a peer can have trained.
    """
    verify_certificate(certificate, plan.run_id, grid, checked=checked, gate=gate)
    said = certificate.statement
    what = f"version {said.version} of {said.module}"
    if said.round_index >= greatest_rounds(plan, now_s):
        raise RecordError(f"{what} is of round {said.round_index}, which has not begun")
    most = greatest_contribution(plan, now_s, said.round_index)
    for row in said.table:
        if row.tokens > most:
            raise RecordError(f"{what} names {row.tokens} tokens of a peer, at most {most} can be")


class LedgerFile:
    """One run's certificates in a file. What is added must have been checked. Close it at the end.

    Raises `StorageError` when the file cannot be used, is of another run, or is something else.
    """

    def __init__(self, path: Path, manifest: SignedManifest | None = None) -> None:
        """Open `path`, or make it for the run of `manifest`; without one it has to be there."""
        self.path = Path(path)
        if manifest is None and not self.path.is_file():
            raise StorageError(
                f"{self.path} is no ledger; make one with dipaco-ledger FILE --initial-peers ADDR"
            )
        with self._errors():
            self._base = sqlite3.connect(
                self.path, timeout=LOCKED_LIMIT_S, isolation_level=None, check_same_thread=False
            )
        try:
            with self._errors():
                self._base.execute("PRAGMA synchronous = FULL")
                self._base.executescript(_TABLES)
            self.manifest = self._manifest(manifest)
            self.gate = Gate.of(self.manifest)
            """Of a run by invitation: who was let in."""
        except BaseException:
            self._base.close()
            raise

    def _manifest(self, manifest: SignedManifest | None) -> SignedManifest:
        with self._transaction():
            about = dict(self._base.execute("SELECT name, value FROM about"))
            if not about and manifest is not None:
                values = (("format", FILE_FORMAT.encode()), ("manifest", manifest.envelope))
                self._base.executemany("INSERT INTO about VALUES (?, ?)", values)
                return manifest
        if about.get("format") != FILE_FORMAT.encode() or "manifest" not in about:
            raise StorageError(f"{self.path} is no ledger of this version; give another file")
        found = verify_manifest(about["manifest"])
        if manifest is not None and manifest.plan.run_id != found.plan.run_id:
            raise StorageError(
                f"{self.path} is the ledger of run {found.plan.run_id}, not of "
                f"{manifest.plan.run_id}; give another file"
            )
        return found

    @property
    def run_id(self) -> str:
        """The run that it is of."""
        return self.manifest.plan.run_id

    def close(self) -> None:
        """Let go of the file."""
        self._base.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StorageError(
                f"the ledger {self.path} cannot be used ({error}); give another file, or free "
                "some space there"
            ) from None

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of it or nothing, also when the process is killed."""
        with self._errors():
            self._base.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._base.execute("ROLLBACK")
                raise
            self._base.execute("COMMIT")

    # -- adding

    def add(self, certificates: Iterable[Certificate], sayings: Iterable[Said] = ()) -> int:
        """Add checked certificates and what peers call themselves; returns how many said anything
        new. Of one statement the signatures are put together."""
        new = 0
        with self._transaction():
            for certificate in certificates:
                new += self._add(certificate)
            for said in sayings:
                self._say(said)
        return new

    def _add(self, certificate: Certificate) -> bool:
        said = certificate.statement
        key = hashlib.sha256(said.to_bytes()).digest()
        row = self._base.execute(
            "SELECT certificate FROM certificates WHERE statement = ?", (key,)
        ).fetchone()
        if row is not None:
            before = decode_certificate(row[0], self.run_id)
            if certificate.signers <= before.signers:
                return False
            certificate = before.merged(certificate)
        self._base.execute(
            "INSERT OR REPLACE INTO certificates VALUES (?, ?, ?, ?)",
            (key, said.module, said.digest, encode_certificate(certificate)),
        )
        return True

    def _say(self, said: Said) -> None:
        if not _can_be_said(said.name, said.team):
            return
        before = self.sayings(said.peer).get(said.peer)
        if before is None or said.rank > before.rank:
            self._base.execute(
                "INSERT OR REPLACE INTO said VALUES (?, ?, ?, ?)",
                (said.peer, said.round_index, said.name, said.team),
            )

    def merge(self, other: LedgerFile, now_s: float, refused: Callable[[RecordError], None]) -> int:
        """Add what another ledger of this run has, checked as if a peer had sent it.

        Returns how many certificates said anything new; what cannot be is passed to `refused`.
        """
        if other.run_id != self.run_id:
            raise StorageError(f"{other.path} is of run {other.run_id}, not of {self.run_id}")
        plan = self.manifest.plan
        grid = Grid(plan.model, plan.grid, plan.rounds.level_offsets)
        rounds = greatest_rounds(plan, now_s)
        sayings = [s for s in other.sayings().values() if 0 <= s.round_index < rounds]
        new = self.add((), sayings)
        batch: list[Certificate] = []
        for module in other.modules():
            for certificate in other.certificates(module):
                try:
                    checked = self.get(certificate)
                    check_for_ledger(
                        certificate, plan, grid, now_s, checked=checked, gate=self.gate
                    )
                except RecordError as error:
                    refused(error)
                    continue
                batch.append(certificate)
                if len(batch) == MERGED_AT_ONCE:
                    new += self.add(batch)
                    batch = []
        return new + self.add(batch)

    # -- reading

    def get(self, certificate: Certificate) -> Certificate | None:
        """Return what is here of the same statement."""
        key = hashlib.sha256(certificate.statement.to_bytes()).digest()
        with self._errors():
            row = self._base.execute(
                "SELECT certificate FROM certificates WHERE statement = ?", (key,)
            ).fetchone()
        return decode_certificate(row[0], self.run_id) if row else None

    def modules(self) -> tuple[str, ...]:
        """Return the modules that have certificates."""
        with self._errors():
            rows = self._base.execute("SELECT DISTINCT module FROM certificates ORDER BY module")
            return tuple(row[0] for row in rows)

    def certificates(self, module: str) -> Iterator[Certificate]:
        """Yield the certificates of a module. Raises `StorageError` for a damaged file."""
        with self._errors():
            rows = self._base.execute(
                "SELECT certificate FROM certificates WHERE module = ? ORDER BY digest, statement",
                (module,),
            ).fetchall()
        for row in rows:
            try:
                yield decode_certificate(row[0], self.run_id)
            except RecordError as error:
                raise StorageError(f"the ledger {self.path} is damaged: {error}") from None

    def sayings(self, peer: str | None = None) -> dict[str, Said]:
        """Return what peers call themselves, one of them or all."""
        where = "" if peer is None else " WHERE peer = ?"
        with self._errors():
            rows = self._base.execute(
                f"SELECT peer, round, name, team FROM said{where}", () if peer is None else (peer,)
            ).fetchall()
        # The file may be somebody else's: what no record can say is not shown.
        return {row[0]: Said(*row) for row in rows if _can_be_said(*row[2:])}

    def credits(self) -> dict[str, Credit]:
        """Return the credit of each peer: see `ledger`."""
        ledger = Ledger()
        for module in self.modules():
            ledger.count(module, self.certificates(module))
        return ledger.credits()


def read_credits(path: Path) -> tuple[str, dict[str, Credit], dict[str, Said]]:
    """Return a ledger's run, its credits and what its peers call themselves."""
    with closing(LedgerFile(path)) as file:
        return file.run_id, file.credits(), file.sayings()


def _can_be_said(*names: object) -> bool:
    return all(isinstance(name, str) and re.fullmatch(NAME_PATTERN, name) for name in names)
