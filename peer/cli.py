"""`dipaco-peer`: join a swarm and train.

dipaco-peer --initial-peers /ip4/203.0.113.5/tcp/31337/p2p/Qm...
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from dipaco.dht.logs import configure_logging
from dipaco.modules.errors import run_command

from .settings import PeerSettings, default_cache_folder


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of `dipaco-peer`; a test freezes it."""
    parser = argparse.ArgumentParser(
        prog="dipaco-peer",
        description="Join a swarm with one address and train a path of its model on this machine.",
        epilog="Example: dipaco-peer --initial-peers /ip4/203.0.113.5/tcp/31337/p2p/QmPeer. "
        "Ctrl+C leaves cleanly; a second Ctrl+C exits at once. Exit codes: docs/exit-codes.md.",
    )
    network = parser.add_argument_group("network")
    network.add_argument(
        "--initial-peers",
        nargs="+",
        required=True,
        metavar="ADDR",
        help="addresses of any peers of the swarm; one is enough",
    )
    network.add_argument("--run", help="run id, its beginning, or its name (if there are several)")
    network.add_argument(
        "--stay",
        action="store_true",
        help="stay in this run when the operator starts its successor",
    )
    network.add_argument(
        "--port",
        type=int,
        default=0,
        metavar="PORT",
        help="TCP port to listen on (default: a free one)",
    )
    network.add_argument(
        "--host-maddrs",
        nargs="+",
        default=(),
        metavar="ADDR",
        help="addresses to listen on (default: /ip4/0.0.0.0/tcp/PORT)",
    )
    network.add_argument(
        "--announce-maddrs",
        nargs="+",
        default=(),
        metavar="ADDR",
        help="addresses to tell others, for example the router's when its port is forwarded",
    )
    network.add_argument(
        "--identity-path",
        type=Path,
        metavar="FILE",
        help="this peer's key; made on first use (default: identity.key in the cache directory)",
    )
    work = parser.add_argument_group("work")
    work.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    work.add_argument(
        "--path", type=int, metavar="P", help="train this path only (default: the least served)"
    )
    work.add_argument("--max-rounds", type=int, metavar="N", help="leave after so many rounds")
    work.add_argument(
        "--micro-batch-size",
        type=int,
        metavar="N",
        help="sequences on the device at once (default: the batch, halved if memory runs out)",
    )
    work.add_argument(
        "--optimizer",
        choices=("adamw", "adamw8bit"),
        default="adamw",
        help="adamw8bit keeps AdamW's state in 8 bits (bitsandbytes), a quarter of the memory",
    )
    work.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads for arithmetic (default: all)"
    )
    work.add_argument(
        "--no-compile", action="store_true", help="do not compile the model (CUDA only)"
    )
    files = parser.add_argument_group("files and output")
    files.add_argument(
        "--cache-dir",
        type=Path,
        default=default_cache_folder(),
        metavar="DIR",
        help="states, shards and AdamW states; a restart resumes from it (default: %(default)s)",
    )
    files.add_argument("--log-json", type=Path, metavar="FILE", help="append events as JSON lines")
    files.add_argument(
        "--address-file", type=Path, metavar="FILE", help="write this peer's addresses to FILE"
    )
    files.add_argument("--debug", action="store_true", help="tracebacks and debug messages")
    parser.add_argument("--version", action="version", version=f"dipaco {version('dipaco')}")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code."""
    options = build_parser().parse_args(arguments)
    configure_logging(options.debug)

    def body() -> int:
        settings = PeerSettings(
            initial_peers=tuple(options.initial_peers),
            cache_folder=options.cache_dir,
            run=options.run,
            stay=options.stay,
            identity_path=options.identity_path,
            host_maddrs=tuple(options.host_maddrs),
            announce_maddrs=tuple(options.announce_maddrs),
            port=options.port,
            device=options.device,
            path=options.path,
            max_rounds=options.max_rounds,
            micro_batch_size=options.micro_batch_size,
            optimizer=options.optimizer,
            threads=options.threads,
            compile_model=not options.no_compile,
            log_json=options.log_json,
            address_file=options.address_file,
            debug=options.debug,
        )
        # Importing Hivemind and PyTorch takes seconds; --help and mistakes should not.
        from .app import run_peer

        return run_peer(settings)

    return run_command(body, options.debug)


if __name__ == "__main__":
    sys.exit(main())
