"""Command-line options that the inference tools share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from dipaco.modules.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from .sources import StateSource


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where the model comes from and where it runs."""
    source = parser.add_argument_group("where the model is")
    source.add_argument(
        "--initial-peers",
        nargs="+",
        default=[],
        metavar="ADDR",
        help="addresses of any peers of a live swarm",
    )
    source.add_argument(
        "--state-dir",
        type=Path,
        metavar="DIR",
        help="a run on disk: a peer's cache or the --out of dipaco-simulate",
    )
    source.add_argument(
        "--run", metavar="RUN", help="id, its beginning, or name; if the swarm has several runs"
    )
    source.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help="keep fetched files here (default: a temporary folder)",
    )
    source.add_argument(
        "--allow-genesis",
        action="store_true",
        help="where nobody holds a module, take what the run began with",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    parser.add_argument(
        "--device", default="cpu", metavar="D", help="cpu, cuda or cuda:N (default cpu)"
    )
    parser.add_argument("--debug", action="store_true", help="tracebacks and debug logging")


def open_source_of(options: argparse.Namespace) -> StateSource:
    """Open the source that the options name. Raises ConfigurationError and what it raises."""
    from .sources import open_source

    return open_source(
        state_directory=options.state_dir,
        initial_peers=options.initial_peers,
        run=options.run,
        cache_directory=options.cache_dir,
        allow_genesis=options.allow_genesis,
    )


def prepare_process(options: argparse.Namespace) -> torch.device:
    """Set threads and return the device. Raises ConfigurationError."""
    # Importing PyTorch takes seconds; --help and mistakes should not.
    import torch

    if options.threads is not None:
        if options.threads < 1:
            raise ConfigurationError(f"--threads {options.threads} must be at least 1")
        torch.set_num_threads(options.threads)
    try:
        device = torch.device(options.device)
    except RuntimeError:
        raise ConfigurationError(
            f"--device '{options.device}' is not a device; give cpu or cuda"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            f"--device {options.device}: PyTorch sees no CUDA device; use --device cpu"
        )
    return device
