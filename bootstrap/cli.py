"""dipaco-bootstrap: prepare a run, and serve it to the first peers.

dipaco-bootstrap prepare examples/tiny/RUN.toml --out my-run
dipaco-bootstrap serve my-run
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dipaco.dht.logs import configure_logging
from dipaco.modules.errors import ConfigurationError, run_command

if TYPE_CHECKING:
    import torch


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of `dipaco-bootstrap`; a test freezes it."""
    parser = argparse.ArgumentParser(
        prog="dipaco-bootstrap",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "prepare",
        help="make tokenizer, base model, router, shards and the signed manifest of a run",
        description="Make a run directory from a RUN.toml. May be stopped at any time; the same "
        "command goes on where it was.",
    )
    _add_prepare_arguments(command)
    command = commands.add_parser(
        "serve",
        help="start a bootstrap node for a run directory",
        description="Start a bootstrap node: the first address of a swarm. It serves what "
        "newcomers need and keeps copies of states. Ctrl+C leaves cleanly.",
    )
    _add_serve_arguments(command)
    return parser


def _add_prepare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_toml", type=Path, metavar="RUN.toml", help="what the run is to be")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="the run directory to make"
    )
    parser.add_argument(
        "--start-in-s", type=float, metavar="S",
        help="seconds from now until round 0 begins (default: 0); signs the manifest again",
    )  # fmt: skip
    parser.add_argument(
        "--operator-key", type=Path, metavar="FILE",
        help="the key that signs the manifest, made if missing (default: DIR/operator.pem)",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all)")
    parser.add_argument(
        "--device", default="auto", metavar="D", help="auto, cpu, cuda or cuda:1 (default: auto)"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="a prepared run directory")
    parser.add_argument(
        "--port",
        type=int,
        default=31337,
        metavar="PORT",
        help="TCP port to listen on; 0 takes a free one (default: 31337)",
    )
    parser.add_argument(
        "--host-maddrs",
        nargs="+",
        default=(),
        metavar="ADDR",
        help="addresses to listen on (default: /ip4/0.0.0.0/tcp/PORT)",
    )
    parser.add_argument(
        "--announce-maddrs",
        nargs="+",
        default=(),
        metavar="ADDR",
        help="addresses to tell others, for example a public one behind a router",
    )
    parser.add_argument(
        "--initial-peers",
        nargs="+",
        default=(),
        metavar="ADDR",
        help="other bootstrap nodes or peers of the same swarm",
    )
    parser.add_argument(
        "--identity-path",
        type=Path,
        metavar="FILE",
        help="this node's key; its address stays the same (default: DIR/identity.key)",
    )
    parser.add_argument(
        "--address-file", type=Path, metavar="FILE", help="write the addresses to FILE"
    )
    parser.add_argument(
        "--refresh-period-s",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds between status lines (default: 30)",
    )
    parser.add_argument("--log-json", type=Path, metavar="FILE", help="append events as JSON lines")
    parser.add_argument("--debug", action="store_true", help="tracebacks and debug messages")


def run_prepare(arguments: argparse.Namespace) -> int:
    """Run `dipaco-bootstrap prepare`."""
    import torch

    from .prepare import prepare

    if arguments.threads is not None:
        if arguments.threads < 1:
            raise ConfigurationError(f"--threads must be at least 1, got {arguments.threads}")
        torch.set_num_threads(arguments.threads)
    if arguments.start_in_s is not None and not 0 <= arguments.start_in_s < 1e9:
        raise ConfigurationError(f"--start-in-s must be 0 or more, got {arguments.start_in_s}")
    try:
        prepare(
            arguments.run_toml,
            arguments.out,
            start_in_s=arguments.start_in_s,
            operator_key=arguments.operator_key,
            device=choose_device(arguments.device),
        )
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        raise
    return 0


def run_serve(arguments: argparse.Namespace) -> int:
    """Run `dipaco-bootstrap serve`."""
    # Importing Hivemind and PyTorch takes seconds; --help and mistakes should not.
    from . import serve

    return serve.run(arguments)


def choose_device(name: str) -> torch.device:
    """Return the device of a --device flag. Raises ConfigurationError if there is none such."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(
            f"--device {name} cannot be used here ({reason}); use auto, cpu, or cuda:N"
        ) from None
    return device


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of dipaco-bootstrap."""
    parsed = build_parser().parse_args(arguments)
    level = logging.DEBUG if parsed.debug else logging.WARNING
    if parsed.command == "prepare":
        logging.basicConfig(level=level, format="%(levelname)s %(message)s")
        return run_command(lambda: run_prepare(parsed), parsed.debug)
    configure_logging(parsed.debug)
    return run_command(lambda: run_serve(parsed), parsed.debug)


if __name__ == "__main__":
    sys.exit(main())
