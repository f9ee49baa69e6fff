"""`dipaco-peer`: join a swarm and train.

dipaco-peer /ip4/203.0.113.5/tcp/31337/p2p/12D3KooW...
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace

from dipaco.base.command_line import Command
from dipaco.base.errors import ConfigurationError
from dipaco.peer.node.given_address import kept_addresses, known_addresses

from .kept_flags import as_last_time, keep_flags, kept_flags
from .pause_command import COMMANDS as CONTROL_COMMANDS
from .peer_settings import PeerSettings
from .trainers import run_trainers, trainer_settings


def run(settings: PeerSettings) -> int:
    """Join and train until stopped; with --check only look whether that would work."""
    if settings.forget_texts:
        from .texts_at_home import forget_texts

        print(forget_texts(settings.cache_folder))
        keep_flags(settings.cache_folder, settings.typed)
        return 0
    if line := as_last_time(settings.typed):
        print(line, flush=True)
    if not settings.initial_peers:
        # A look at this machine alone needs no address.
        with contextlib.suppress(*([ConfigurationError] if settings.check else [])):
            found = known_addresses if settings.check else kept_addresses
            settings = replace(settings, initial_peers=found(settings.cache_folder))
    # Importing Hivemind and PyTorch takes seconds; --help and mistakes should not, and a
    # user who waits is told so.
    joining = f"joining through {settings.initial_peers[0]}" if settings.initial_peers else ""
    print("looking at this machine" if settings.check else joining, flush=True)
    if settings.check:
        from dipaco.peer.check.doctor import run_doctor

        each = trainer_settings(settings) if settings.devices else (settings,)
        return max(run_doctor(one) for one in each)
    if settings.devices:
        return run_trainers(settings)
    from .training_peer import run_peer

    return run_peer(settings)


COMMAND = Command(
    "dipaco-peer",
    PeerSettings,
    run,
    last_time=kept_flags,
    description="Join a swarm with one address and train a path of its model on this machine.",
    epilog="Example: dipaco-peer /ip4/203.0.113.5/tcp/31337/p2p/12D3KooWPeer\n"
    "Ctrl+C leaves cleanly; dipaco-peer alone continues as last time. A second Ctrl+C exits at "
    "once.\n"
    "dipaco-peer pause | resume | status: rest, go on, say what it does and what you have given.",
)


def main(words: Sequence[str] | None = None) -> int:
    """Entry point: `dipaco-peer`, with `pause`, `resume` and `status`. Returns the exit code."""
    words = sys.argv[1:] if words is None else words
    if words and words[0] in CONTROL_COMMANDS:
        return CONTROL_COMMANDS[words[0]].main(words[1:])
    return COMMAND.main(words)


if __name__ == "__main__":
    sys.exit(main())
