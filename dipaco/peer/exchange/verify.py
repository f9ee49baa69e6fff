"""Whether rows and steps of others may be believed, before anybody decides on them.

A row counts when its peer is admitted and has signed it, and when so much work can have been done
by now. A step holds no more peers of an invitation than it has places, so nobody makes a chain
heavy with many identities. Rows of rounds before an invitation ended stay good, so chains stand;
rows of later rounds are refused, no matter who tells them.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping

from dipaco.base.waits import BriefLock
from dipaco.protocol.admission import Admission, Gate
from dipaco.protocol.chain.steps import Head, Row, Step, verify_row
from dipaco.protocol.grid import Grid
from dipaco.protocol.plan import RunPlan
from dipaco.protocol.record_errors import RecordError
from dipaco.protocol.view import is_plausible_head, is_plausible_row, max_rounds

logger = logging.getLogger("dipaco.peer.exchange.verify")

_REMEMBERED_ROWS = 2**16
# Places are counted by module, round and invitation; of more than so many, those of the earliest
# rounds are forgotten: nobody has rows of rounds to come.
REMEMBERED_PLACES = 4096
# Rows of so many rounds, one or two of them still to come, show that a peer is there.
_NEW_ROUNDS = 5


class RowCheck:
    """Checks signature, admission and plausibility of rows; remembers what was right. Thread-safe.

    :param max_bytes: of a contribution to a module
    :param now: swarm time
    """

    def __init__(
        self,
        plan: RunPlan,
        grid: Grid,
        gate: Gate,
        *,
        max_bytes: Callable[[str], int],
        now: Callable[[], float],
    ) -> None:
        self._plan, self._grid, self._gate = plan, grid, gate
        self._max_bytes, self._now = max_bytes, now
        self.modules = frozenset(grid.modules())
        """All modules of the run."""
        self.empty_paths = frozenset[int]()
        """Paths whose shards have no sequences, once that is known: a step with a row of such a
        path could not be computed."""
        self._lock = BriefLock()
        self._signed: OrderedDict[bytes, None] = OrderedDict()
        self._places: dict[tuple[int, str, str], set[str]] = {}
        """Peers by round, module and invitation whose rows were let through."""

    def is_in(self, peer: str) -> bool:
        """Tell whether a peer is admitted and was not revoked."""
        return self._gate.admission_of(peer) is not None

    def is_out(self, peer: str) -> bool:
        """Tell whether a peer was admitted by an invitation that has ended."""
        return self._gate.is_out(peer)

    def admit(self, peer: str, admission: bytes) -> bool:
        """Take note of an admission that came with a message; returns whether it is good."""
        try:
            self._gate.check(peer, admission)
        except (RecordError, ValueError) as error:
            logger.debug("the admission of %s: %s", peer, error)
            return False
        return True

    def good_rows(
        self, module: str, rows: Iterable[Row], admissions: Mapping[str, bytes]
    ) -> tuple[Row, ...]:
        """Return the rows that may count in a step to come; the others are left out."""
        good: list[Row] = []
        for row in rows:
            try:
                self._check(row, module)
                self._check_admission(row, admissions)
                data = self._data_of(row.peer, admissions)
                found = self._gate.check(row.peer, data, is_here=self._is_new(row))
                self._check_places(row, found)
            except RecordError as error:
                logger.debug("a row is left out: %s", error)
                continue
            good.append(row)
        return tuple(good)

    def good_steps(
        self, module: str, steps: Iterable[Step], admissions: Mapping[str, bytes]
    ) -> tuple[Step, ...]:
        """Return the steps up to the first that is bad."""
        good: list[Step] = []
        for step in steps:
            try:
                count: Counter[tuple[str, int]] = Counter()
                for row in step.rows:
                    self._check(row, module)
                    found = self._check_admission(row, admissions)
                    count[found.invitation, found.places] += 1
                if any(number > places for (_, places), number in count.items()):
                    raise RecordError("a step has more peers of an invitation than it has places")
            except RecordError as error:
                logger.debug("a step is refused: %s", error)
                break
            good.append(step)
        return tuple(good)

    def _is_new(self, row: Row) -> bool:
        """Tell whether the peer of a row can be there: anybody may tell old ones again."""
        oldest = max_rounds(self._plan, self._now()) - _NEW_ROUNDS
        return bool(self._plan.rounds.inner_steps) or row.round_index >= oldest

    def is_plausible_head(self, head: Head) -> bool:
        """Tell whether the run can have got so far by now."""
        return is_plausible_head(head, self._plan, self._now())

    def _check(self, row: Row, module: str) -> None:
        """Check everything except the admission. Raises `RecordError`."""
        if row.module != module or module not in self.modules:
            raise RecordError(f"a row of {row.module[:64]} among those of {module[:64]}")
        if row.path in self.empty_paths:
            raise RecordError(f"a row of path {row.path}, whose shard has no sequences")
        if row.has_own_texts and self._plan.own_texts == "no":
            raise RecordError(f"a row of {row.peer} with own texts, which this run forbids")
        if not is_plausible_row(row, self._plan, self._now()):
            raise RecordError(f"a row of {row.peer} has more tokens than it can have trained")
        name = hashlib.sha256(row.statement + row.signature).digest()
        with self._lock:
            if name in self._signed:
                self._signed.move_to_end(name)
                return
        verify_row(row, self._grid, max_bytes=self._max_bytes(module))
        with self._lock:
            self._signed[name] = None
            while len(self._signed) > _REMEMBERED_ROWS:
                self._signed.popitem(last=False)

    def _check_admission(self, row: Row, admissions: Mapping[str, bytes]) -> Admission:
        """Return the admission of a row's peer, by which the row counts. Raises `RecordError`."""
        data = self._data_of(row.peer, admissions)
        found = self._gate.verify(row.peer, data)
        if not self._gate.counts(row.peer, data, row.round_index):
            raise RecordError(
                f"the invitation {found.invitation} had ended before round {row.round_index}"
            )
        return found

    def _data_of(self, peer: str, admissions: Mapping[str, bytes]) -> bytes:
        data = admissions.get(peer) or self._gate.data_of(peer)
        if data is None:
            raise RecordError(f"{peer} is not known to be admitted")
        return data

    def _check_places(self, row: Row, found: Admission) -> None:
        """Let through so many rows of an invitation's peers as it has places. Places change hands
        while a round lasts, and a step with a row too many would be refused by everybody."""
        # Not by parent, which the signer of a row is free to invent.
        key = (row.round_index, row.module, found.invitation)
        with self._lock:
            if key not in self._places and len(self._places) >= REMEMBERED_PLACES:
                del self._places[min(self._places)]
            peers = self._places.setdefault(key, set())
            if row.peer not in peers and len(peers) >= found.places:
                raise RecordError(
                    f"more peers of {found.invitation} than its places, {found.places}"
                )
            peers.add(row.peer)
