"""`dipaco-generate`: continue a prompt with the path that it is routed to.

dipaco-generate --initial-peers ADDR "The city lies"
dipaco-generate --state-dir my-run-simulated "def main" --temperature 0
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dipaco.dht.logs import run_logged
from dipaco.modules.errors import ConfigurationError

from .options import (
    add_rerouter_argument,
    add_source_arguments,
    open_source_of,
    prepare_process,
    rerouter_of,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `dipaco-generate`; returns the exit code."""
    return run_logged(run, parse(arguments))


def build_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(
        prog="dipaco-generate",
        description="Route a prompt, load its path alone, and continue the text.",
    )
    parser.add_argument(
        "prompt", nargs="?", help="how the text begins; - reads it from standard input"
    )
    add_source_arguments(parser)
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=128,
        metavar="N",
        help="generate at most N tokens (default 128)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 always takes the likeliest token (default 0.8)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=50,
        metavar="K",
        help="choose among the K likeliest tokens; 0 is all (default 50)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="the same seed chooses the same tokens (default 0)",
    )
    parser.add_argument(
        "--path",
        type=int,
        metavar="P",
        help="use this path, whatever the prompt (with --reroute: instead of the router's choice)",
    )
    parser.add_argument(
        "--reroute",
        type=int,
        metavar="W",
        help="choose the path again every W tokens and say so on standard error",
    )
    add_rerouter_argument(parser)
    return parser


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line. A prompt may follow the addresses, which take all words they get."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    peers = options.initial_peers
    if options.prompt is None and peers and not peers[-1].startswith("/"):
        options.prompt = peers.pop()
    if options.prompt is None:
        parser.error("the following arguments are required: prompt")
    return options


def run(options: argparse.Namespace) -> int:
    """Run the command. Raises the errors of `dipaco.modules.errors`."""
    # Importing PyTorch takes seconds; --help and mistakes should not.
    from .generate import PathChooser, Sampling, generate_tokens, prompt_tokens, stream_text
    from .sources import assemble_path

    _check_reroute(options)
    device = prepare_process(options)
    sampling = Sampling(options.temperature, options.top_k, options.seed, options.max_tokens)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    with open_source_of(options) as source:
        rerouter = rerouter_of(options, source).to(device) if options.reroute else None
        tokenizer = source.tokenizer()
        tokens = prompt_tokens(tokenizer, prompt)
        path = options.path
        if path is None:  # only then are the router and its base model needed
            path = int(source.document_router(device).route_tokens([tokens])[0])
        chooser = None
        if rerouter is not None:
            chooser = PathChooser(source, rerouter, path, tokens, options.reroute, _say)
            path = chooser.path
        model = assemble_path(source, path, device=device)
        modules = ", ".join(source.grid.modules_of_path(path))
        best = source.best_round(path)
        states = "newest states" if best is None else f"best states, of round {best}"
        _say(f"path {path} ({modules}; {states})")
        print(prompt, end="", flush=True)
        reroute = chooser.of(model) if chooser else None
        for piece in stream_text(tokenizer, generate_tokens(model, tokens, sampling, reroute)):
            print(piece, end="", flush=True)
    print(flush=True)
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _check_reroute(options: argparse.Namespace) -> None:
    from .rerouting import GREATEST_WINDOW

    window = options.reroute
    if window is not None and not 1 <= window <= GREATEST_WINDOW:
        raise ConfigurationError(
            f"--reroute {window} must be 1 to {GREATEST_WINDOW} tokens, such as --reroute 64"
        )


if __name__ == "__main__":
    sys.exit(main())
