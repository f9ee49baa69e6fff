"""Command-line options that the inference tools share."""

from __future__ import annotations

import argparse
import glob
from pathlib import Path
from typing import TYPE_CHECKING

from dipaco.modules.errors import ConfigurationError, CorpusError, StorageError

if TYPE_CHECKING:
    import torch
    from dipaco.modules.plan import RunPlan
    from dipaco.routing.corpus import CorpusConfig

    from .rerouter import Rerouter
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
        help="keep fetched files and scores here (default: a temporary folder)",
    )
    source.add_argument(
        "--allow-genesis",
        action="store_true",
        help="where nobody holds a module, take what the run began with",
    )
    source.add_argument(
        "--current",
        action="store_true",
        help="use the newest states of every path, not those with the least held-out loss",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    parser.add_argument(
        "--device", default="cpu", metavar="D", help="cpu, cuda or cuda:N (default cpu)"
    )
    parser.add_argument("--debug", action="store_true", help="tracebacks and debug logging")


def add_corpus_arguments(
    parser: argparse.ArgumentParser, *, required: bool, otherwise: str = ""
) -> None:
    """Add the options that say which documents are read; `otherwise` is what is done without."""
    parser.add_argument(
        "--data",
        nargs="+",
        required=required,
        default=[],
        metavar="FILE",
        help=f"documents: jsonl, parquet or txt files or patterns, also compressed{otherwise}",
    )
    parser.add_argument(
        "--text-field", default="text", metavar="F", help="field of the text (default: text)"
    )
    parser.add_argument("--label-field", metavar="F", help="field of the label, such as domain")


def corpus_of(options: argparse.Namespace) -> CorpusConfig:
    """Return the documents of `--data`. Raises ConfigurationError and CorpusError."""
    from dipaco.modules.config import parse_config
    from dipaco.routing.corpus import CorpusConfig

    if options.limit_documents is not None and options.limit_documents < 1:
        raise ConfigurationError(f"--limit-documents {options.limit_documents} must be at least 1")
    for pattern in options.data:
        if not Path(pattern).is_file() and not glob.glob(pattern, recursive=True):
            raise CorpusError(f"--data '{pattern}' matches no file; check its name")
    values = {
        "train": options.data,
        "text_field": options.text_field,
        "label_field": options.label_field,
        "train_limit": options.limit_documents,
    }
    return parse_config(CorpusConfig, values, "--data")


def check_labels(options: argparse.Namespace, plan: RunPlan) -> None:
    """Raise ConfigurationError if the run routes by a label and `--label-field` names none."""
    from dipaco.routing.routers import ROUTER_KINDS

    kind = ROUTER_KINDS.get(plan.routing.kind)
    if kind is not None and kind.needs_labels and not options.label_field:
        raise ConfigurationError(
            "this run routes documents by a label of the data; name the field of --data that "
            "holds it with --label-field F"
        )


def add_rerouter_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that says which rerouter is used."""
    parser.add_argument(
        "--rerouter",
        type=Path,
        metavar="FILE",
        help="what 'dipaco-reroute fit' wrote (default: rerouter.safetensors beside the states)",
    )


def parse_windows(text: str | None, option: str) -> tuple[int, ...]:
    """Read windows such as "16,64", none for None. Raises ConfigurationError, naming `option`."""
    if text is None:
        return ()
    from .rerouting import GREATEST_WINDOW

    windows = []
    for part in text.split(","):
        if not part.strip().isdecimal() or not 1 <= int(part) <= GREATEST_WINDOW:
            raise ConfigurationError(
                f"{option} '{text}': '{part}' is no number of tokens; write {option} 16,64,128"
            )
        windows.append(int(part))
    return tuple(sorted(set(windows)))


def rerouter_of(options: argparse.Namespace, source: StateSource) -> Rerouter:
    """Read the rerouter that the options name. Raises StorageError, IntegrityError and
    ConfigurationError, saying how to make one."""
    from dipaco.modules.files import storage_errors

    from .rerouter import REROUTER_FILE, load_rerouter

    file = options.rerouter
    if file is None:
        if options.state_dir is None:
            raise ConfigurationError(
                "rerouting in a live swarm needs --rerouter FILE; 'dipaco-reroute fit "
                "--initial-peers ADDRESS --out FILE' makes one"
            )
        file = options.state_dir / REROUTER_FILE
    if not file.is_file():
        raise StorageError(
            f"there is no rerouter {file}; make one with 'dipaco-reroute fit', or name it with "
            f"--rerouter FILE"
        )
    with storage_errors(file.parent):
        data = file.read_bytes()
    return load_rerouter(data, source.plan, str(file))


def open_source_of(options: argparse.Namespace) -> StateSource:
    """Open the source that the options name. Raises ConfigurationError and what it raises."""
    import torch

    from .sources import SourceSettings, open_source

    return open_source(
        state_folder=options.state_dir,
        initial_peers=options.initial_peers,
        run=options.run,
        cache_folder=options.cache_dir,
        settings=SourceSettings(
            allow_genesis=options.allow_genesis,
            current=options.current,
            device=torch.device(options.device),
        ),
    )


def prepare_process(options: argparse.Namespace) -> torch.device:
    """Set threads and return the device. Raises ConfigurationError."""
    # Importing PyTorch takes seconds; --help and mistakes should not.
    import torch
    from dipaco.modules.device import keep_freed_memory

    keep_freed_memory()
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
