"""Keeps copies of what reaches the parsers of a process: the samples of `benchmarks/fuzz.py`.

Python imports this file by itself at its start where the folder is on PYTHONPATH; it does nothing
unless DIPACO_TAP names a folder. The parsers are replaced before anybody imports them from their
modules, and forked processes inherit that.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_SAMPLES = 200
"""Of one kind, from one process."""


def keep(folder: Path, kind: str, data: bytes, seen: dict[str, set[bytes]]) -> None:
    """Write a sample that this process has not seen yet."""
    of_kind = seen.setdefault(kind, set())
    digest = hashlib.sha256(data).digest()[:12]
    if digest in of_kind or len(of_kind) >= MAX_SAMPLES:
        return
    of_kind.add(digest)
    target = folder / kind
    target.mkdir(parents=True, exist_ok=True)
    (target / digest.hex()).write_bytes(data)


def tap(owner: Any, name: str, keep_sample: Callable[..., None]) -> None:
    """Replace a function or a class method of `owner` by one that keeps its arguments first."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def tapped(*arguments: Any, **options: Any) -> Any:
        keep_sample(*arguments)
        return original(*arguments, **options)

    setattr(owner, name, tapped)


def tap_all(folder: Path) -> None:
    """Tap every parser that is reached by bytes from the network."""
    import msgpack

    from dipaco.dht import record_validator
    from dipaco.peer.exchange.streams import messages
    from dipaco.protocol import chain, manifest

    seen: dict[str, set[bytes]] = {}
    put = functools.partial(keep, folder, seen=seen)
    tap(
        record_validator.RecordValidator,
        "validate",
        lambda _, r: put(
            "record", msgpack.packb((r.key, r.subkey, r.value, float(r.expiration_time)))
        ),
    )
    tap(manifest, "verify_manifest", lambda data, *_: put("manifest", bytes(data)))
    tap(chain, "unpack_row", lambda values: put("row", msgpack.packb(values)))
    tap(chain, "unpack_step", lambda values: put("step", msgpack.packb(values)))
    tap(messages, "decode_request", lambda data: put("request", data))
    tap(messages, "decode", lambda kind, data: put(f"message-{kind.__name__}", data))


if os.environ.get("DIPACO_TAP"):
    tap_all(Path(os.environ["DIPACO_TAP"]))
