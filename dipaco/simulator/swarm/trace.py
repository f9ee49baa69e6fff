"""How events and actions look in the log of a history."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from dipaco.protocol.chain.steps import Head, Row, Step
from dipaco.protocol.view import SwarmView

_SHORT = 8
# There are too many of these, and they say little.
QUIET = frozenset({"Turn", "Stepped", "Wait", "TakeStep"})


def shown(what: Any) -> str:
    """Return a value in one short line."""
    if isinstance(what, str):
        return what[:_SHORT] if len(what) == 64 else what
    if isinstance(what, Head):
        return f"{what.module} v{what.version} w{what.weight} {what.step[:_SHORT]}"
    if isinstance(what, Row):
        return f"{what.peer}:{what.tokens}t r{what.round_index} on {what.parent[:_SHORT]}"
    if isinstance(what, Step):
        peers = ",".join(row.peer for row in what.rows)
        return f"<{what.name[:_SHORT]} on {what.parent[:_SHORT]} r{what.round_index} [{peers}]>"
    if isinstance(what, SwarmView):
        return _view(what)
    if is_dataclass(what) and not isinstance(what, type):
        named = ((item.name, getattr(what, item.name)) for item in fields(what))
        parts = [f"{name}={shown(value)}" for name, value in named if value]
        return f"{type(what).__name__} {' '.join(parts)}".rstrip()
    if isinstance(what, dict):
        return "{" + ", ".join(f"{shown(k)}: {shown(v)}" for k, v in what.items()) + "}"
    if isinstance(what, tuple | list):
        return "(" + ", ".join(shown(item) for item in what) + ")"
    return f"{what:.2f}" if isinstance(what, float) else str(what)


def _view(view: SwarmView) -> str:
    claims = " ".join(f"{c.peer_id}:{c.path}{c.state[0]}" for c in view.claims.values())
    heads = " ".join(
        f"{module}:" + ",".join(f"{h.peer_id}={h.head.step[:4]}" for h in held)
        for module, held in view.holdings.items()
    )
    return f"at {view.now_s:.2f} claims[{claims}] peers={len(view.peers)} {heads}"
