"""Whether rows and steps of others may be believed, before anybody decides on them (skeleton)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from dipaco.dht.admission import Gate
from dipaco.dht.chain import Row, Step
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan


class RowCheck:
    """Checks signature, admission and plausibility of rows; remembers what was right. Thread-safe.

    :param greatest_bytes: of a contribution to a module
    :param now: swarm time
    """

    def __init__(
        self,
        plan: RunPlan,
        grid: Grid,
        gate: Gate,
        *,
        greatest_bytes: Callable[[str], int],
        now: Callable[[], float],
    ) -> None:
        raise NotImplementedError

    def is_in(self, peer: str) -> bool:
        """Tell whether a peer is admitted and was not revoked."""
        raise NotImplementedError

    def good_rows(
        self, module: str, rows: Iterable[Row], admissions: Mapping[str, bytes]
    ) -> tuple[Row, ...]:
        """Return the rows that may count; the others are left out."""
        raise NotImplementedError

    def good_steps(
        self, module: str, steps: Iterable[Step], admissions: Mapping[str, bytes]
    ) -> tuple[Step, ...]:
        """Return the steps up to the first that is bad."""
        raise NotImplementedError
