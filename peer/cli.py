"""`dipaco-peer`: join a swarm and train.

dipaco-peer --initial-peers /ip4/203.0.113.5/tcp/31337/p2p/12D3KooW...
"""

from __future__ import annotations

import sys

from dipaco.modules.command_line import Command

from .settings import PeerSettings


def run(settings: PeerSettings) -> int:
    """Join and train until stopped; with --check only look whether that would work."""
    # Importing Hivemind and PyTorch takes seconds; --help and mistakes should not.
    if settings.check:
        from .check.doctor import run_doctor

        return run_doctor(settings)
    from .app import run_peer

    return run_peer(settings)


COMMAND = Command(
    "dipaco-peer",
    PeerSettings,
    run,
    description="Join a swarm with one address and train a path of its model on this machine.",
    epilog="Example: dipaco-peer --initial-peers /ip4/203.0.113.5/tcp/31337/p2p/12D3KooWPeer. "
    "Ctrl+C leaves cleanly; a second Ctrl+C exits at once. Exit codes: docs/exit-codes.md.",
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
