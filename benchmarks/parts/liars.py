"""Peers that lie or flood: what each kind does before it starts as any other peer.

`become` is called in a peer's process before it starts, and replaces what the kind does otherwise.
A stranger is no peer: `be_a_stranger` joins as a reader does and asks for everything.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dipaco.base.blobs import BlobStore
from dipaco.base.errors import NetworkError
from dipaco.modules.outer import OuterGradient
from dipaco.peer.exchange.exchange import Exchange
from dipaco.peer.exchange.responder import Responder
from dipaco.peer.node.entrance import Listening
from dipaco.peer.node.join_run import join_run
from dipaco.peer.owner.uplink import Uplink
from dipaco.peer.shell import outer_steps
from dipaco.protocol.chain.steps import Row, Step, genesis_name, sign_row
from dipaco.protocol.member.events import Published
from dipaco.training.trainer import Snapshot

FLOODS_A_SECOND = 16
ROWS_AT_ONCE = 64
STRANGERS_THREADS = 2


def _contribution(factor: float) -> None:
    """Its contributions are so many times as large."""
    honest = Snapshot.outer_gradient

    def changed(snapshot: Snapshot) -> OuterGradient:
        gradient = honest(snapshot)
        return OuterGradient(gradient.anchor, gradient.anchor - gradient[:] * factor)

    Snapshot.outer_gradient = changed


def thousand() -> None:
    """A contribution is a thousand times as large."""
    _contribution(1000.0)


def flipped() -> None:
    """Eight times as large, and in the other direction."""
    _contribution(-8.0)


def tokens() -> None:
    """It says that it has trained a thousand times as many tokens, with a negated contribution."""
    _contribution(-1.0)
    credible = outer_steps.claimed_tokens
    outer_steps.claimed_tokens = lambda plan, count, number: credible(plan, 1000 * count, number)


def garbage() -> None:
    """Its files do not decode."""
    encode = Snapshot.encode
    Snapshot.encode = lambda *given: bytes([255]) * len(encode(*given))


def silent() -> None:
    """Its rows come and its files never do: who asks waits."""

    async def wait(*_: Any) -> None:
        await asyncio.sleep(600)

    Responder._send = wait


def forker() -> None:
    """It tells one half of the peers a step and the other half another one."""
    honest = Exchange.tell

    def tell(exchange, peers, module, rows=(), steps=(), keep=False):
        if not steps or len(steps[-1].rows) < 2:
            return honest(exchange, peers, module, rows, steps, keep)
        other = (*steps[:-1], Step.of(steps[-1].rows[:-1]))
        honest(exchange, peers[::2], module, rows, steps, keep)
        honest(exchange, peers[1::2], module, rows, other, keep)
        return None

    Exchange.tell = tell


def flood() -> None:
    """A thousand rows a second, of rounds to come and on invented steps, and files to everybody."""
    publish = outer_steps.OuterSteps._publish
    flooding: list[threading.Thread] = []

    def go_on(node: Any, row: Row) -> None:
        while True:
            peers = [peer for peer in node.exchange.connected_peers() if peer != node.me]
            rows = []
            for number in range(ROWS_AT_ONCE):
                data = os.urandom(row.bytes)
                name = hashlib.sha256(data).hexdigest()
                parent = name if number % 2 else row.parent
                later = row.round_index + number % 3
                made = replace(row, file=name, round_index=later, parent=parent)
                rows.append(sign_row(made, node.identity.key))
            node.exchange.tell(peers, row.module, rows)
            for peer in peers:
                node.exchange.put(peer, rows[-3], data, 2.0)
            time.sleep(1.0 / FLOODS_A_SECOND)

    def until_it_leaves(node: Any, row: Row) -> None:
        with suppress(NetworkError):
            go_on(node, row)

    def published(steps, action, snapshot):
        report = steps._report

        def watched(event):
            if isinstance(event, Published) and not flooding:
                given = (steps._node, event.row)
                flooding.append(threading.Thread(target=until_it_leaves, args=given, daemon=True))
                flooding[0].start()
            report(event)

        steps._report = watched
        try:
            publish(steps, action, snapshot)
        finally:
            steps._report = report

    outer_steps.OuterSteps._publish = published


LIARS: dict[str, Callable[[], None]] = {
    one.__name__: one for one in (thousand, flipped, tokens, garbage, silent, forker, flood)
}


def become(kind: str) -> None:
    """Make a liar of this process, whose peer was not started yet."""
    LIARS[kind]()


def be_a_stranger() -> None:
    """Join without an admission, as readers do; then tell, ask, get and put without a pause."""
    folder = Path(sys.argv[sys.argv.index("--cache-dir") + 1])
    entry = sys.argv[sys.argv.index("--initial-peers") + 1]
    node = join_run(
        initial_peers=[entry],
        run=None,
        cache_folder=folder,
        listening=Listening(host_maddrs=("/ip4/127.0.0.1/tcp/0",)),
        uplink=Uplink(None),
        say=print,
    )
    node.serve_run()
    blobs = BlobStore(folder / "taken")

    def get(digest: str, peer: str) -> None:
        try:
            limits = {"max_bytes": 2**24, "timeout_s": 2.0}
            node.exchange.get(digest, (peer,), blobs, **limits).unlink(missing_ok=True)
        except Exception as error:
            print(error, flush=True)

    def ask_without_end() -> None:
        number = 0
        while True:
            number += 1
            for module in node.grid.modules():
                parent, data = genesis_name(node.run_id, module), os.urandom(4096)
                names = [hashlib.sha256(data + bytes([k])).hexdigest() for k in range(ROWS_AT_ONCE)]
                rows = [
                    sign_row(
                        Row(module, number % 9, parent, "0" * 64, 0, node.me, 1000, name, 4096),
                        node.identity.key,
                    )
                    for name in names
                ]
                peers = [peer for peer in node.exchange.connected_peers() if peer != node.me]
                node.exchange.tell(peers, module, rows)
                for peer in peers:
                    answer = node.exchange.ask(peer, module, [parent], 1.0)
                    node.exchange.put(peer, rows[0], data, 1.0)
                    for _ in range(4 if answer and answer.held else 0):
                        get(answer.held.digest, peer)

    for _ in range(STRANGERS_THREADS):
        threading.Thread(target=ask_without_end, daemon=True).start()
    # Until Ctrl+C.
    threading.Event().wait()
