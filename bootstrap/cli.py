"""dipaco-bootstrap: plan and prepare a run, and serve it to the first peers.

dipaco-bootstrap plan examples/tiny/RUN.toml
dipaco-bootstrap prepare examples/tiny/RUN.toml --out my-run
dipaco-bootstrap serve my-run
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dipaco.modules.command_line import configure_logging, run_command
from dipaco.modules.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from .predecessor import Predecessor
    from .succession import ScoringSwarm


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
        "plan",
        help="check a RUN.toml and show what it means in parameters, bytes and memory",
        description="Check a RUN.toml and show the sizes of its modules, what a peer sends in a "
        "round and has on its disk and in memory. No data is read and nothing is written.",
    )
    _add_plan_arguments(command)
    command = commands.add_parser(
        "serve",
        help="start a bootstrap node for a run directory",
        description="Start a bootstrap node: the first address of a swarm. It serves what "
        "newcomers need and keeps copies of states. Ctrl+C leaves cleanly.",
    )
    _add_serve_arguments(command)
    return parser


def _add_prepare_arguments(parser: argparse.ArgumentParser) -> None:
    # Optional only for argparse; `parse` insists on it.
    parser.add_argument(
        "run_toml", nargs="?", type=Path, metavar="RUN.toml", help="what the run is to be"
    )
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
    parser.add_argument(
        "--from", type=Path, dest="predecessor", metavar="RUN",
        help="go on with the run in this directory: its tokenizer and its trained modules; the "
        "directory of prepare, of dipaco-simulate --out, or a peer's of that run",
    )  # fmt: skip
    parser.add_argument(
        "--initial-peers", nargs="+", default=(), metavar="ADDR",
        help="with --from: addresses of the run's live swarm, which gives its newest modules and "
        "scores router documents",
    )  # fmt: skip
    parser.add_argument(
        "--score-wait-s", type=float, default=1800.0, metavar="S",
        help="with --initial-peers: seconds to wait for the peers' scores; what is missing then "
        "is scored here (default: 1800)",
    )  # fmt: skip
    parser.add_argument(
        "--allow-genesis",
        action="store_true",
        help="with --from: a module that was never trained starts again as that run began it",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all)")
    parser.add_argument(
        "--device", default="auto", metavar="D", help="auto, cpu, cuda or cuda:1 (default: auto)"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_toml", type=Path, metavar="RUN.toml", help="what the run is to be")
    parser.add_argument(
        "--corpus-tokens", type=float, metavar="N",
        help="tokens of the training documents, for the sizes of shards: 160e9 for C4",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object and no tables")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    # Optional only for argparse; `parse` insists on it.
    parser.add_argument(
        "folder", nargs="?", type=Path, metavar="DIR", help="a prepared run directory"
    )
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
    from dipaco.modules.device import keep_freed_memory

    from .display import Display
    from .prepare import prepare

    keep_freed_memory()
    if arguments.threads is not None:
        if arguments.threads < 1:
            raise ConfigurationError(f"--threads must be at least 1, got {arguments.threads}")
        torch.set_num_threads(arguments.threads)
    if arguments.start_in_s is not None and not 0 <= arguments.start_in_s < 1e9:
        raise ConfigurationError(f"--start-in-s must be 0 or more, got {arguments.start_in_s}")
    if arguments.score_wait_s < 0 or not math.isfinite(arguments.score_wait_s):
        raise ConfigurationError(f"--score-wait-s must be 0 or more, got {arguments.score_wait_s}")
    if arguments.initial_peers and arguments.predecessor is None:
        raise ConfigurationError(
            "--initial-peers is for a successor of a live run; give its directory with --from"
        )
    try:
        display = Display()
        with open_source(arguments, display.say) as (predecessor, swarm):
            prepare(
                arguments.run_toml,
                arguments.out,
                start_in_s=arguments.start_in_s,
                operator_key=arguments.operator_key,
                device=choose_device(arguments.device),
                display=display,
                predecessor=predecessor,
                swarm=swarm,
            )
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", file=sys.stderr)
        raise
    return 0


@contextmanager
def open_source(
    arguments: argparse.Namespace, say: Callable[[str], None]
) -> Iterator[tuple[Predecessor | None, ScoringSwarm | None]]:
    """Open the run that `prepare --from` continues: a directory, and perhaps the live swarm."""
    if arguments.predecessor is None:
        yield None, None
        return
    from .predecessor import open_predecessor

    predecessor = open_predecessor(arguments.predecessor, allow_genesis=arguments.allow_genesis)
    if not arguments.initial_peers:
        yield predecessor, None
        return
    from .gather_scores import open_swarm

    with open_swarm(
        predecessor,
        arguments.out,
        initial_peers=tuple(arguments.initial_peers),
        operator_key=arguments.operator_key,
        wait_s=arguments.score_wait_s,
        say=say,
    ) as swarm:
        yield predecessor, swarm


def run_plan(arguments: argparse.Namespace) -> int:
    """Run `dipaco-bootstrap plan`."""
    from rich.console import Console

    from .plan_display import show_figures
    from .plan_figures import plan_figures
    from .run_config import load_run_config

    tokens = arguments.corpus_tokens
    if tokens is not None and not 1 <= tokens <= 1e18:
        raise ConfigurationError(f"--corpus-tokens must be 1 to 1e18, got {tokens:g}")
    figures = plan_figures(
        load_run_config(arguments.run_toml), None if tokens is None else int(tokens)
    )
    if arguments.json:
        print(json.dumps(figures.as_json()))
    else:
        show_figures(figures, Console(highlight=False, soft_wrap=True))
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


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line. RUN.toml or DIR may follow the addresses of an option, which takes
    all words that it gets."""
    parser = build_parser()
    parsed = parser.parse_args(arguments)
    last = {"prepare": ("run_toml", "RUN.toml"), "serve": ("folder", "DIR")}.get(parsed.command)
    if last is not None and getattr(parsed, last[0]) is None:
        for option in ("initial_peers", "announce_maddrs", "host_maddrs"):
            words = getattr(parsed, option, ())
            if words and not _is_address(words[-1]):
                setattr(parsed, last[0], Path(words.pop()))
                break
        else:
            parser.error(f"the following arguments are required: {last[1]}")
    return parsed


def _is_address(word: str) -> bool:
    """Tell a multiaddress from a path, which may begin with a slash as well."""
    return word.startswith("/") and word.split("/")[1] in (
        "ip4",
        "ip6",
        "dns",
        "dns4",
        "dns6",
        "dnsaddr",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of dipaco-bootstrap."""
    parsed = parse(arguments)
    level = logging.DEBUG if parsed.debug else logging.WARNING
    if parsed.command == "prepare":
        if parsed.initial_peers:
            configure_logging(parsed.debug)
        else:
            logging.basicConfig(level=level, format="%(levelname)s %(message)s")
        return run_command(lambda: run_prepare(parsed), parsed.debug)
    if parsed.command == "plan":
        logging.basicConfig(level=level, format="%(levelname)s %(message)s")
        return run_command(lambda: run_plan(parsed), parsed.debug)
    configure_logging(parsed.debug)
    return run_command(lambda: run_serve(parsed), parsed.debug)


if __name__ == "__main__":
    sys.exit(main())
