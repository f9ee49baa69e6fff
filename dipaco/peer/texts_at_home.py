"""What a volunteer's documents become on this machine (design 4.14, texts), and their removal."""

from __future__ import annotations

import glob
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch

from dipaco.base.errors import AddressError, ConfigurationError, CorpusError, DipacoError
from dipaco.base.files import storage_errors
from dipaco.modules.memory import release_memory
from dipaco.peer.node.node import Node
from dipaco.protocol.identity import KEY_FILE, is_in_use
from dipaco.protocol.plan import RunPlan
from dipaco.routing.documents.corpus import CorpusConfig, holds_chats
from dipaco.routing.own_texts import HELD_OUT_FRACTION, OwnTexts, open_own_texts
from dipaco.routing.routers.document_routing import DocumentRouter
from dipaco.routing.routers.kinds import ROUTER_KINDS
from dipaco.routing.tokens.run_tokens import read_first
from dipaco.training.interruption import PassInterrupted

from .peer_settings import PeerSettings

FOLDER = "own-texts"
# Seconds between two lines of progress.
_SAY_EVERY_S = 15.0


def look_at_texts(settings: PeerSettings, plan: RunPlan) -> str:
    """Return what the first document of `--texts` is, in words. It is read, and nothing is kept.

    Raises ConfigurationError if the run forbids own texts, CorpusError if it cannot be read.
    """
    check_texts_are_allowed(plan)
    try:
        kind = "a chat" if holds_chats(_corpus_of(settings)) else "a text"
    except CorpusError as error:
        raise _named(error, settings) from None
    return f"the run allows them; the first of them is {kind}, and stays on this machine"


def check_texts_are_allowed(plan: RunPlan) -> None:
    """Raise ConfigurationError if volunteers may not, or cannot, train on their texts in a run."""
    if plan.own_texts == "no":
        raise ConfigurationError(
            f"--texts: run '{plan.name}' does not allow texts of volunteers (own_texts = \"no\"); "
            "start without --texts, or ask the operator for a run that does"
        )
    kind = ROUTER_KINDS.get(plan.routing.kind)
    if kind is not None and kind.needs_labels:
        raise ConfigurationError(
            f"--texts: run '{plan.name}' routes documents by labels that your texts do not have; "
            "start without --texts"
        )


def texts_at_home(
    settings: PeerSettings,
    node: Node,
    device: torch.device,
    say: Callable[[str], None],
    is_stopped: Callable[[], bool],
) -> OwnTexts | None:
    """Return the documents of `--texts` as rows, None without that flag.

    Raises ConfigurationError if the run forbids them, CorpusError if they cannot be read, and
    `PassInterrupted` once `is_stopped`.
    """
    if settings.texts is None:
        return None
    plan, said_s = node.plan, time.monotonic()
    check_texts_are_allowed(plan)

    def progress(what: str, done: int) -> None:
        nonlocal said_s
        if is_stopped():
            raise PassInterrupted
        if time.monotonic() - said_s >= _SAY_EVERY_S:
            said_s = time.monotonic()
            say(f"your texts: {done:,} {what}")

    def router() -> DocumentRouter:
        for sha256, what in (
            (plan.blobs.tokenizer, "the tokenizer"),
            (plan.blobs.router, "the router"),
            (plan.blobs.base, "the base model"),
        ):
            node.fetcher.blob(sha256, what)
        read_first(node.run_folder.blobs.read(plan.blobs.tokenizer))
        return node.run_folder.document_router(plan, device)

    folder = node.cache_folder / FOLDER / node.run_id
    try:
        found = open_own_texts(plan, _corpus_of(settings), folder, router, progress=progress)
    except (CorpusError, ConfigurationError) as error:
        # A library's words about a document would appear in the traceback of --debug.
        raise _named(error, settings) from None
    release_memory(device)
    say(_routed_line(found))
    if settings.path is not None and settings.path not in found.documents:
        raise ConfigurationError(
            f"--path {settings.path}: none of your documents is for it; leave --path out, or take "
            f"one of {', '.join(map(str, found.documents))}"
        )
    return found


def _named(error: CorpusError | ConfigurationError, settings: PeerSettings) -> DipacoError:
    remedy = " (here --text-field)" if "under [data]" in str(error) else ""
    return type(error)(f"--texts {settings.texts}: {error}{remedy}")


def _corpus_of(settings: PeerSettings) -> CorpusConfig:
    given = str(settings.texts)
    if Path(given).is_dir():
        raise CorpusError(f"it is a folder; name the files in it: '{given}/**/*.txt'")
    if not Path(given).is_file() and not glob.glob(given, recursive=True):
        raise CorpusError("it matches no file; check its name")
    return CorpusConfig(
        train=(given,), text_field=settings.text_field, held_out_fraction=HELD_OUT_FRACTION
    )


def _routed_line(found: OwnTexts) -> str:
    by_path = sorted(found.documents.items(), key=lambda entry: (-entry[1], entry[0]))
    paths = ", ".join(f"{count:,} for path {path}" for path, count in by_path)
    said = f"your texts: {paths}; {found.held_out_documents:,} more are held out"
    left_out = found.left_out_chats
    if left_out:
        said += f"; {left_out:,} chat{'s' * (left_out > 1)} left out, with nothing to learn"
    return said


def forget_texts(cache_folder: Path) -> str:
    """Remove what was made of an owner's documents in all runs; returns a line for the owner.

    Raises AddressError while a peer is running with the folder.
    """
    if is_in_use(cache_folder / KEY_FILE):
        raise AddressError(f"a peer is running with {cache_folder}; stop it first (Ctrl+C)")
    folder = cache_folder / FOLDER
    if not folder.exists():
        return f"there are no texts of yours in {cache_folder}"
    with storage_errors(folder):
        shutil.rmtree(folder)
    return f"removed {folder}; what the model has learned from your texts stays in the model"
