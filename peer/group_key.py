"""Which averagers may meet: the names and keys under which a group forms in the DHT. Pure.

One averager serves a level; what it averages next is chosen by its group key alone. The key names
module, round, attempt and the anchor's digest, so that peers which disagree about any of these
never meet (DESIGN 4.2).
"""

from __future__ import annotations

import re

from dipaco.routing.plan import PROTOCOL_VERSION

_MODULE_BITS, _ROUND_BITS, _ATTEMPT_BITS, _DIGEST_BITS = 32, 32, 8, 64


def averager_prefix(run_id: str, level: str) -> str:
    """Return the DHT key and RPC namespace of a level's averagers, the same on every peer."""
    return f"dipaco-{PROTOCOL_VERSION}/{run_id}/{level}"


def group_bits(module_index: int, round_index: int, attempt: int, anchor_digest: str) -> str:
    """Return the group key of one attempt at one outer step, as Hivemind's string of bits.

    `module_index` is the module's place in `Grid.modules()`, `anchor_digest` the 64
    hexadecimal digits of the state that the outer gradient was taken from. Raises ValueError for
    numbers outside of their fields: a truncated number would let strangers meet.
    """
    if not re.fullmatch(r"[0-9a-f]{64}", anchor_digest):
        raise ValueError(f"anchor digest must be 64 hexadecimal digits, got {anchor_digest!r}")
    return (
        _bits("module index", module_index, _MODULE_BITS)
        + _bits("round", round_index, _ROUND_BITS)
        + _bits("attempt", attempt, _ATTEMPT_BITS)
        + _bits("digest", int(anchor_digest[: _DIGEST_BITS // 4], 16), _DIGEST_BITS)
    )


def _bits(name: str, value: int, width: int) -> str:
    if not 0 <= value < 2**width:
        raise ValueError(f"{name} must lie in [0, 2**{width}), got {value}")
    return format(value, f"0{width}b")
