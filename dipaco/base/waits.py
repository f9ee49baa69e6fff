"""Which thread of a peer may wait for what, and the assertions that hold it in tests.

The thread that decides and the one that answers other peers wait for no disk and no other process,
because everybody else waits for them. Nobody waits for these with a `BriefLock` in hand, because
another thread needs that lock for a moment. Code that is about to wait (each fsync, each
transaction of the index, each call of the DHT process or the exchange) calls `may_wait_for`, which
asserts both where the environment has DIPACO_ASSERT_WAITS=1, and does nothing elsewhere.

The threads, and what each may wait for:

- main, which decides: its inbox, and the model between two inner steps
- `exchange`, which answers other peers and sends what this one asks: sockets
- `model` (inner steps, snapshots, anchors): the processor
- `outer` (encodes contributions, computes steps), `saving`, `telling`, `checking` and
  `blocking`: the disk
- `states` (fetches and scores states), `puts` (gives files to mailboxes): other peers, the disk
- `calls` (looks, tells, asks): other peers and the DHT process, for seconds
- `refresher`, `clock`, `blob keeper`, `successor`, `reachability`, `pause-reason`:
  other peers, the DHT process, other programs, the disk
- `dht`, `dht answers`: the DHT process, which they start again
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

_IS_ASSERTED = os.environ.get("DIPACO_ASSERT_WAITS") == "1"


class _Thread(threading.local):
    never_waits = False
    brief_locks = 0
    """How many it holds."""


_thread = _Thread()


def may_wait_for(what: str) -> None:
    """Assert that this thread may wait for something whose time nobody here can bound."""
    if _IS_ASSERTED:
        name = threading.current_thread().name
        assert not _thread.never_waits, f"thread {name!r}, for which others wait, waits for {what}"
        assert not _thread.brief_locks, f"thread {name!r} holds a brief lock and waits for {what}"


@contextlib.contextmanager
def never_waiting() -> Iterator[None]:
    """Let this thread wait for nothing of that kind until the end of the block."""
    _thread.never_waits = True
    try:
        yield
    finally:
        _thread.never_waits = False


class BriefLock:
    """A reentrant lock for what is in memory: it is held for moments and over no wait."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()
        _thread.brief_locks += 1

    def __exit__(self, *error: object) -> None:
        _thread.brief_locks -= 1
        self._lock.release()
