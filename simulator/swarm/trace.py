"""The log of a history: what every machine heard, decided and did, a line each."""

from __future__ import annotations

import hashlib
from dataclasses import fields, is_dataclass
from typing import Any

from dipaco.dht.certificates import Certificate
from dipaco.dht.view import SwarmView
from dipaco.modules.state import StateReference

SHORT = 8
# Of these there are too many, and they say little.
QUIET = frozenset({"turn", "stepped", "wait"})


class Trace:
    """Off, it keeps nothing but a count."""

    def __init__(self, *, keep: bool = False, quiet: bool = True) -> None:
        self.keep = keep
        self.quiet = quiet
        self.count = 0
        self.lines: list[str] = []

    def add(self, time_s: float, peer: str, kind: str, what: Any) -> None:
        """Write a line: when, who, in which direction, and what."""
        self.count += 1
        if not self.keep:
            return
        if self.quiet and getattr(what, "kind", "") in QUIET:
            return
        self.lines.append(f"{time_s:9.2f} {peer:>10} {kind:<6} {shown(what)}")

    def digest(self) -> str:
        """Return the hash of all lines: equal for equal histories."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()


def shown(what: Any) -> str:
    """Return a value in one short line."""
    if isinstance(what, str):
        return what[:SHORT] if len(what) == 64 else what
    if isinstance(what, StateReference):
        digest = what.digest[:SHORT] or "-"
        return f"{what.module} v{what.version} {digest} r{what.last_round} {what.tokens}t"
    if isinstance(what, Certificate):
        statement = what.statement
        rows = ",".join(f"{row.peer}:{row.tokens}" for row in statement.table)
        return (
            f"<{statement.module} v{statement.version} {statement.parent[:SHORT]}->"
            f"{statement.digest[:SHORT]} r{statement.round_index} [{rows}] "
            f"by {','.join(sorted(what.signers))}>"
        )
    if isinstance(what, SwarmView):
        return _view(what)
    if is_dataclass(what) and not isinstance(what, type):
        kind = getattr(what, "kind", type(what).__name__)
        parts = [
            f"{item.name}={shown(getattr(what, item.name))}"
            for item in fields(what)
            if item.name != "kind"
        ]
        return f"{kind} {' '.join(parts)}".rstrip()
    if isinstance(what, dict):
        return "{" + ", ".join(f"{shown(k)}: {shown(v)}" for k, v in what.items()) + "}"
    if isinstance(what, frozenset | set):
        return "{" + ", ".join(sorted(shown(item) for item in what)) + "}"
    if isinstance(what, tuple | list):
        return "(" + ", ".join(shown(item) for item in what) + ")"
    if isinstance(what, float):
        return f"{what:.2f}"
    return str(what)


def _view(view: SwarmView) -> str:
    claims = " ".join(
        f"{claim.peer_id}:{claim.path}{claim.state[0]}" for claim in view.claims.values()
    )
    states = " ".join(
        f"{module}:" + ",".join(f"{h.peer_id}=v{h.version}/{h.digest[:4]}" for h in held)
        for module, held in view.holdings.items()
    )
    return f"view at {view.now_s:.2f} claims[{claims}] peers={len(view.peers)} {states}"
