"""The state of a module that a peer begins to train from."""

from __future__ import annotations

import threading
import time

from dipaco.modules.errors import NetworkError
from dipaco.modules.state import ModuleState

from .node import Node
from .path_files import PathFiles
from .publisher import Publisher

SHORTEST_WAIT_S = 10.0


def starting_state(
    module: str, node: Node, publisher: Publisher, files: PathFiles, stopping: threading.Event
) -> ModuleState:
    """Return the heaviest state of a module: announced, on this disk, or genesis.

    A heavier state than this disk's that is announced is waited for, a round at most; then, or
    when `stopping` is set, raises `NetworkError`. Called by the session when it begins a path.
    """
    own = node.held.load(module)
    own_tokens = own.tokens if own is not None else 0
    deadline = time.monotonic() + max(SHORTEST_WAIT_S, node.plan.rounds.duration_s)
    while True:
        view = publisher.view
        found = node.fetcher.heaviest_state(module, view, at_least_tokens=own_tokens)
        if found is not None:
            return found
        heavier = [h for h in view.holdings.get(module, ()) if h.tokens > own_tokens]
        if not heavier:
            return own if own is not None else files.genesis_state(module)
        if time.monotonic() > deadline or stopping.is_set():
            raise NetworkError(
                f"{module} has {len(heavier)} announced holders, and none could serve it; "
                "start the same command again in a minute"
            )
        stopping.wait(1.0)
        publisher.refresh()
