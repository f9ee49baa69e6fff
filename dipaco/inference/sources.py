"""Where the inference tools get a run from: a folder on disk, or a live swarm.

Both give the same things: the plan, the router, the base model, and the newest good state of each
module. A module without a state is *missing*; only when asked is the genesis taken in its place.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from dipaco.base.errors import (
    ConfigurationError,
    DipacoError,
    IntegrityError,
    NetworkError,
    RunSelectionError,
    StorageError,
)
from dipaco.modules.compose import load_path
from dipaco.modules.layout import layout_of
from dipaco.modules.state import ModuleState, PathProgress
from dipaco.modules.transformer import PathModel
from dipaco.protocol.config import ModelConfig
from dipaco.protocol.manifest import MANIFEST_FILE
from dipaco.protocol.plan import RunPlan, ShardIndex
from dipaco.routing.routers.document_routing import DocumentRouter
from dipaco.routing.run_folder import RunFolder
from dipaco.routing.tokens.run_tokens import read_first
from dipaco.routing.tokens.token_files import check_tokens, even_sample
from dipaco.routing.tokens.tokenizer import Tokenizer
from dipaco.training.scoring import LossSum

from .held_out_check import ROWS, ruined_module

if TYPE_CHECKING:
    from dipaco.peer.reader import SwarmReader

logger = logging.getLogger(__name__)

# How often a folder is listed again while a peer replaces what is in it.
_MAX_READS = 3


@dataclass(frozen=True)
class SourceSettings:
    """Which states are taken from a source."""

    allow_genesis: bool = False
    """Where a module has no state, its genesis is taken."""
    follow: bool = False
    """The source is looked at again and again: what a swarm gave stays on disk."""
    context_length: int | None = None
    """Tokens that a path reads at a time; None for those of a training sequence."""


@dataclass(frozen=True)
class SourceProgress:
    """A path's progress, as far as it is known."""

    tokens: int | None = None
    last_round: int | None = None
    held_out_loss: LossSum = field(default_factory=LossSum)


class StateSource(ABC):
    """A run to read from. A context manager; closing it twice is harmless."""

    def __init__(self, run: RunFolder, plan: RunPlan, settings: SourceSettings) -> None:
        self._run = run
        self._allow_genesis = settings.allow_genesis
        self._states: dict[str, ModuleState | None] = {}
        self._shards: ShardIndex | None = None
        self._is_tokenizer_checked = False
        self.plan = plan
        self.model = _with_context(plan, settings.context_length)
        """The model that paths are put together in; it may read more than a training sequence."""
        self.grid = run.grid(plan)

    @abstractmethod
    def _newest_state(self, module: str) -> ModuleState | None:
        """Return the newest good state of a module, or None if there is none."""

    def _require_tokenizer(self) -> None:
        """Make sure that the tokenizer is here, and can be read: a child finds out, once."""
        if self._is_tokenizer_checked:
            return
        sha256 = self.plan.blobs.tokenizer
        self._require_blob(sha256)
        read_first(self._run.blobs.read(sha256))
        self._is_tokenizer_checked = True

    @abstractmethod
    def _require_blob(self, sha256: str) -> None:
        """Make sure that a blob is in the run folder's store. Raises IntegrityError."""

    @property
    @abstractmethod
    def advice(self) -> str:
        """What to do about a missing module, for error messages."""

    def state(self, module: str) -> ModuleState | None:
        """Return the newest good state of a module; the genesis if there is none and it is allowed,
        or if it is what a run before this one has learned.

        It is looked up once: later calls return the same state, so that all paths of an evaluation
        use one version of each module.
        """
        if module not in self._states:
            state = self._newest_state(module)
            if state is None and self._allow_genesis:
                state = self._genesis_state(module)
            elif state is None and self.plan.blobs.genesis is not None:
                with contextlib.suppress(IntegrityError, NetworkError):
                    state = self._genesis_state(module)
            self._states[module] = state
        return self._states[module]

    def check(self, path: int, states: Mapping[str, ModuleState], model: PathModel | None) -> bool:
        """Tell whether the states of a path are fit to read with. If they are not, one is refused,
        and `state` gives another one. States on this disk always are.

        :param model: to be lent for that; None: one is made
        """
        return True

    def missing_modules(self, path: int) -> tuple[str, ...]:
        """Return the modules that keep a path from being put together, having no state."""
        return tuple(m for m in self.grid.modules_of_path(path) if self.state(m) is None)

    def tokenizer(self) -> Tokenizer:
        """Return the run's tokenizer."""
        self._require_tokenizer()
        return self._run.tokenizer(self.plan)

    def document_router(self, device: torch.device) -> DocumentRouter:
        """Return what finds the path of a document, its base model on `device`."""
        self._require_tokenizer()
        for sha256 in (self.plan.blobs.base, self.plan.blobs.router):
            self._require_blob(sha256)
        return self._run.document_router(self.plan, device)

    def base_model(self, device: torch.device) -> PathModel:
        """Return the model that the run began with, for comparison."""
        self._require_blob(self.plan.blobs.base)
        return self._run.base_model(self.plan, device)

    def path_model(self, device: torch.device) -> PathModel:
        """Return a model that `load_path` fills, on the run's base if that is frozen."""
        if self.plan.model.adapters is not None:
            self._require_blob(self.plan.blobs.base)
        plan = self.plan.model_copy(update={"model": self.model})
        return self._run.path_model(plan, device)

    def blob(self, sha256: str) -> bytes:
        """Return the content of a blob of the run, fetched if need be. Raises IntegrityError."""
        if sha256 == self.plan.blobs.tokenizer:
            self._require_tokenizer()
        self._require_blob(sha256)
        return self._run.blobs.read(sha256)

    def shard_index(self) -> ShardIndex:
        """Return how large each path's shard is."""
        if self._shards is None:
            self._require_blob(self.plan.blobs.shards)
            self._shards = self._run.shard_index(self.plan)
        return self._shards

    @abstractmethod
    def progress(self, path: int) -> SourceProgress:
        """Return how far a path is, as the source shows it without fetching any state."""

    def digests(self, path: int) -> tuple[str, ...]:
        """Return the digests of what `assemble_path` would fill a path with; "" for what is
        missing. Asked for to see whether it changed."""
        return tuple(self._newest_digest(m) or "" for m in self.grid.modules_of_path(path))

    def _newest_digest(self, module: str) -> str | None:
        state = self.state(module)
        return state.digest if state is not None else None

    def drop_states(self) -> None:
        """Release the states from memory; they are read again when next asked for."""
        self._states.clear()

    def look_again(self) -> None:
        """Forget what was found: the next calls give what is newest then."""
        self._states.clear()

    def troubles(self) -> tuple[str, ...]:
        """Return why what is given may be old, a line each; asked for after `look_again`."""
        return ()

    def forget(self, path: int) -> None:
        """Drop the private state of a path from memory: no other path needs it."""
        if self.grid.has_private:
            self._states.pop(self.grid.modules_of_path(path)[-1], None)

    def close(self) -> None:
        """Release the states, and whatever else the source holds."""
        self._states.clear()

    def _genesis_state(self, module: str) -> ModuleState:
        plan = self.plan
        if plan.blobs.genesis is None:
            self._require_blob(plan.blobs.base)
        else:
            self._require_blob(plan.blobs.genesis)
            digests = self._run.genesis_index(plan)
            if digests is not None:
                self._require_blob(digests[module])
        return self._run.genesis_state(plan, module)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class DiskSource(StateSource):
    """A run folder: a peer's cache, the output of a simulation, or a prepared run."""

    def __init__(self, folder: Path, settings: SourceSettings | None = None) -> None:
        run = RunFolder(folder)
        super().__init__(run, run.plan(), settings or SourceSettings())
        self._in_place_of: dict[str, str] = {}
        """What was read in place of a state that is damaged, by digest."""

    def _newest_state(self, module: str) -> ModuleState | None:
        states, layout = self._run.states, layout_of(self.grid, module)
        for _ in range(_MAX_READS):
            newest = states.newest_digest(module)
            state = states.load_latest(module, layout)
            if state is not None and newest is not None and state.digest != newest:
                self._in_place_of[newest] = state.digest
            if state is not None or states.newest_digest(module) in (None, newest):
                return state
            # A running peer may have put newer files in the place of those that were listed.
        return None

    def _newest_digest(self, module: str) -> str | None:
        newest = self._run.states.newest_digest(module)
        if newest is None:
            return super()._newest_digest(module)
        return self._in_place_of.get(newest, newest)

    def look_again(self) -> None:
        """Forget what was found: the next calls read what is in the folder then."""
        super().look_again()
        self.__dict__.pop("_module_progress", None)

    def _require_blob(self, sha256: str) -> None:
        blobs = self._run.blobs
        if not blobs.has(sha256):
            raise IntegrityError(
                f"{self._run.path} has no {self._name_of(sha256)} of the run (blob {sha256[:16]}): "
                f"a peer that left early has not fetched everything. Copy what is missing from "
                f"blobs/ of the operator's run folder, or give --initial-peers for a live swarm"
            )

    def _name_of(self, sha256: str) -> str:
        blobs = self.plan.blobs
        named = (("tokenizer", blobs.tokenizer), ("router", blobs.router), ("base", blobs.base))
        return next((name for name, blob in named if blob == sha256), "file")

    def progress(self, path: int) -> SourceProgress:
        """Return what the headers of the states say."""
        entries = [
            entry
            for module in self.grid.modules_of_path(path)
            if (entry := self._module_progress.get(module, {}).get(path)) is not None
        ]
        if not entries:
            return SourceProgress()
        latest = max(entries, key=lambda entry: (entry.last_round, entry.tokens))
        return SourceProgress(latest.tokens, latest.last_round)

    @cached_property
    def _module_progress(self) -> dict[str, Mapping[int, PathProgress]]:
        """The progress that the newest state of each module counts."""
        found = {module: self._run.states.summaries(module) for module in self.grid.modules()}
        return {module: summaries[0].progress for module, summaries in found.items() if summaries}

    @property
    def advice(self) -> str:
        return (
            f"{self._run.states.folder} holds none; give the folder of a peer that keeps it, or "
            f"--initial-peers for a live swarm, or --allow-genesis to take what the run began with"
        )


class SwarmSource(StateSource):
    """A live swarm, through a reader that fetches and never publishes. Takes over the reader."""

    def __init__(self, reader: SwarmReader, settings: SourceSettings | None = None) -> None:
        self._reader = reader
        run = RunFolder(reader.folder)
        settings = settings or SourceSettings()
        super().__init__(run, reader.plan, settings)
        self._keeps = settings.follow
        self._unserved: set[str] = set()
        """Modules whose last good state is given, as nobody serves one."""
        self._checked: set[tuple[str, ...]] = set()
        """Digests of the states of paths that were checked, in the order of the modules."""

    def _newest_state(self, module: str) -> ModuleState | None:
        self._unserved.discard(module)
        try:
            state = self._reader.winning_state(module)
        except (NetworkError, IntegrityError) as error:
            logger.warning("no state of %s: %s", module, error)
            state = None
        if state is None and self._keeps:
            layout = layout_of(self.grid, module)
            state = self._run.states.load_latest(module, layout)
            if state is not None:
                self._unserved.add(module)
        return state

    def check(self, path: int, states: Mapping[str, ModuleState], model: PathModel | None) -> bool:
        """See `ruined_module`. A path that cannot be checked, because nobody serves texts for it,
        is reported. A path without a row in the newest step of one of its modules is not checked
        either: its modules may fit each other worse than at their genesis.
        """
        digests = tuple(state.digest for state in states.values())
        fetched = [m for m, state in states.items() if state.version and m not in self._unserved]
        is_trained = all(path in self._reader.paths_of_last_step(module) for module in fetched)
        if digests in self._checked or not fetched or len(fetched) < len(states) or not is_trained:
            return True
        try:
            ruined = ruined_module(
                model or self.path_model(torch.device("cpu")),
                self.grid,
                path,
                states,
                self._held_out_rows(path),
                self.plan.routing.prefix_tokens,
                self._genesis_state,
            )
        except DipacoError as error:
            logger.warning("path %d is not checked with held-out texts: %s", path, error)
            return True
        if ruined is None:
            self._checked.add(digests)
            return True
        self._reader.refuse(states[ruined])
        self._states.pop(ruined, None)
        return False

    def _held_out_rows(self, path: int) -> torch.Tensor:
        self._require_blob(self.shard_index().paths[path].validation_sha256)
        rows = even_sample(self._run.validation_tokens(self.plan, path), ROWS)
        check_tokens(rows, self.plan.model.vocabulary_size, f"the held-out split of path {path}")
        return torch.from_numpy(rows.astype(np.int64))

    def troubles(self) -> tuple[str, ...]:
        """Return which modules nobody serves, and which run goes on in place of this one."""
        found = []
        if self._unserved:
            names = ", ".join(sorted(self._unserved))
            found.append(f"no peer serves {names}: the last good states are used")
        elif not self._reader.view().present:
            found.append("no peer of the run is in sight: the last good states are used")
        with contextlib.suppress(DipacoError):
            if (successor := self._reader.successor()) is not None:
                plan = successor.plan
                found.append(
                    f"run '{self.plan.name}' is continued as '{plan.name}' ({plan.run_id}); to "
                    f"serve that one, start again with --run {plan.run_id}"
                )
        return tuple(found)

    def _require_blob(self, sha256: str) -> None:
        file = self._reader.fetch_blob(sha256)
        if not self._run.blobs.has(sha256):
            self._run.blobs.add_file(file)

    def look_again(self) -> None:
        """Forget what was found: the next calls read the swarm again."""
        super().look_again()
        self._reader.look_again()

    def progress(self, path: int) -> SourceProgress:
        """Return what the path's latest trainer published."""
        service = self._reader.view().progress.get(path)
        if service is None:
            return SourceProgress()
        loss = LossSum(service.validation_nll, service.validation_tokens)
        return SourceProgress(service.tokens or None, service.last_round, loss)

    @property
    def advice(self) -> str:
        return (
            "no peer serves it now; try again in a minute, or give --allow-genesis to take what "
            "the run began with"
        )

    def close(self) -> None:
        """Leave the swarm."""
        super().close()
        self._reader.close()


def open_source(
    *,
    state_folder: Path | None = None,
    initial_peers: Sequence[str] = (),
    run: str | None = None,
    cache_folder: Path | None = None,
    settings: SourceSettings | None = None,
) -> StateSource:
    """Open the source that a command line names: `--state-dir`, `--initial-peers`, or
    `--cache-dir` alone, which is a peer's cache.

    Raises ConfigurationError unless one of them is given, and what the source raises.
    """
    settings = settings or SourceSettings()
    if state_folder is None and not initial_peers:
        state_folder, cache_folder = cache_folder, None
    if (state_folder is None) == (not initial_peers):
        raise ConfigurationError(
            "give either --state-dir DIR (a run on disk), --initial-peers ADDRESS (a live swarm), "
            "or --cache-dir DIR alone (the cache of a peer)"
        )
    if state_folder is not None:
        return DiskSource(run_folder_in(state_folder, run), settings)
    # Imported here: a run on disk can be used without the network layer, and sooner.
    from dipaco.peer.reader import SwarmReader

    reader = SwarmReader(
        tuple(initial_peers), run=run, cache_folder=cache_folder, keep_states=settings.follow
    )
    try:
        return SwarmSource(reader, settings)
    except BaseException:
        reader.close()
        raise


def run_folder_in(folder: Path, run: str | None) -> Path:
    """Return the folder of a run: `folder` itself, or that of a run in a peer's cache, where each
    has one. `run` is an id, its beginning, or a name.

    Raises RunSelectionError when there are several, or none of that name.
    """
    if (folder / MANIFEST_FILE).is_file() or not folder.is_dir():
        return folder
    runs = sorted(file.parent for file in folder.glob(f"*/{MANIFEST_FILE}"))
    if not runs:
        return folder  # its reader says what is missing
    names = {one: RunFolder(one).plan().name for one in runs}
    chosen = [o for o in runs if run is None or o.name.startswith(run) or names[o] == run]
    if len(chosen) == 1:
        return chosen[0]
    known = ", ".join(f"{names[one]} ({one.name[:16]})" for one in runs)
    asked = (
        f"'{run}' names {'several' if chosen else 'none'} of the runs" if run else "the runs are"
    )
    raise RunSelectionError(f"in {folder} {asked} {known}; give one of them with --run NAME")


def _with_context(plan: RunPlan, context_length: int | None) -> ModelConfig:
    """Return the model of a run that reads so many tokens at a time.

    Raises ConfigurationError if neither training nor the run's base is made for so many.
    """
    model = plan.model
    if context_length is None:
        return model
    if context_length > model.context:
        made_for = "its base is made for" if model.context_length else "it was trained on"
        raise ConfigurationError(
            f"--context {context_length} is more than the {model.context} tokens that run "
            f"'{plan.name}' can read: {made_for} no more; give --context {model.context} or less"
        )
    return model.model_copy(update={"sequence_length": context_length})


def assemble_path(
    source: StateSource,
    path: int,
    *,
    model: PathModel | None = None,
    device: torch.device | None = None,
) -> PathModel:
    """Return the model of `path` in evaluation mode, filled with the newest states of its modules.

    A `model` of the run's shape is overwritten in place and returned, which spares memory when
    paths are used one after the other; else a new one is made on `device` (default: CPU).

    Raises ConfigurationError if there is no such path; StorageError (disk) or NetworkError
    (swarm), naming the module, if there is no state of one of its modules.
    """
    if model is None:
        model = source.path_model(device or torch.device("cpu"))
    states = path_states(source, path, model)
    load_path(model, source.grid, path, states)
    return model.eval()


def path_states(
    source: StateSource, path: int, model: PathModel | None = None
) -> dict[str, ModuleState]:
    """Return the newest states of the modules of a path that are fit to be read with; `model` is
    lent for that. Raises as `assemble_path` does."""
    while not source.check(path, states := _newest_states(source, path), model):
        pass  # Each time there is one state less to try, and there are few.
    return states


def _newest_states(source: StateSource, path: int) -> dict[str, ModuleState]:
    states: dict[str, ModuleState] = {}
    for module in source.grid.modules_of_path(path):
        state = source.state(module)
        if state is None:
            kind = NetworkError if isinstance(source, SwarmSource) else StorageError
            raise kind(
                f"path {path} cannot be put together: there is no state of its module {module}; "
                f"{source.advice}"
            )
        states[module] = state
    return states
