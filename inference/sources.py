"""Where the inference tools get a run from: a directory on disk, or a live swarm.

Both give the same things: the plan, the router, the base model, and the newest good state of each
module. A module without a state is *missing*; only when asked is the genesis taken in its place.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from dipaco.modules.errors import ConfigurationError, IntegrityError, NetworkError
from dipaco.modules.state import ModuleState
from dipaco.modules.transformer import PathModel
from dipaco.routing.document_routing import DocumentRouter
from dipaco.routing.plan import RunPlan
from dipaco.routing.run_directory import RunDirectory
from typing_extensions import Self

if TYPE_CHECKING:
    from dipaco.peer.client import ReadOnlyClient

logger = logging.getLogger(__name__)


class StateSource(ABC):
    """A run to read from. A context manager; closing it twice is harmless."""

    def __init__(self, run: RunDirectory, plan: RunPlan, *, allow_genesis: bool = False) -> None:
        self._run = run
        self._allow_genesis = allow_genesis
        self._states: dict[str, ModuleState | None] = {}
        self.plan = plan
        self.grid = run.grid(plan)

    @abstractmethod
    def _committed_state(self, module: str) -> ModuleState | None:
        """Return the newest good state of a module, or None if there is none."""

    @abstractmethod
    def _require_blob(self, sha256: str) -> None:
        """Make sure that a blob is in the run directory's store. Raises IntegrityError."""

    @property
    @abstractmethod
    def advice(self) -> str:
        """What to do about a missing module, for error messages."""

    def state(self, module: str) -> ModuleState | None:
        """Return the newest good state of a module; the genesis if there is none and it is allowed.

        Asked for once: later calls return the same state, so that all paths of an evaluation use
        one version of each module.
        """
        if module not in self._states:
            state = self._committed_state(module)
            if state is None and self._allow_genesis:
                state = self._genesis_state(module)
            self._states[module] = state
        return self._states[module]

    def missing_modules(self, path: int) -> tuple[str, ...]:
        """Return the modules of a path of which there is no state."""
        return tuple(m for m in self.grid.modules_of_path(path) if self.state(m) is None)

    def document_router(self, device: torch.device) -> DocumentRouter:
        """Return what finds the path of a document, its base model on `device`."""
        for sha256 in (self.plan.blobs.tokenizer, self.plan.blobs.base, self.plan.blobs.router):
            self._require_blob(sha256)
        router = self._run.document_router(self.plan)
        router.base_model.to(device)
        return router

    def base_model(self, device: torch.device) -> PathModel:
        """Return the model that the run began with, for comparison."""
        self._require_blob(self.plan.blobs.base)
        return self._run.base_model(self.plan).to(device)

    def forget(self, path: int) -> None:
        """Drop the private state of a path from memory: no other path needs it."""
        if self.grid.has_private:
            self._states.pop(self.grid.modules_of_path(path)[-1], None)

    def close(self) -> None:
        """Let go of the states, and of what else the source holds."""
        self._states.clear()

    def _genesis_state(self, module: str) -> ModuleState:
        plan = self.plan
        self._require_blob(plan.blobs.base)
        if plan.blobs.genesis is not None:
            self._require_blob(plan.blobs.genesis)
        return self._run.genesis_state(plan, module)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class DiskSource(StateSource):
    """A run directory: a peer's cache, the output of a simulation, or a prepared run."""

    def __init__(self, directory: Path, *, allow_genesis: bool = False) -> None:
        run = RunDirectory(directory)
        super().__init__(run, run.plan(), allow_genesis=allow_genesis)

    def _committed_state(self, module: str) -> ModuleState | None:
        return self._run.states.load_latest(module, self.grid.layout(module))

    def _require_blob(self, sha256: str) -> None:
        self._run.blobs.require(sha256)

    @property
    def advice(self) -> str:
        return (
            f"{self._run.path / 'states'} holds none; give the directory of a peer that keeps it, "
            f"or --initial-peers for a live swarm, or --allow-genesis to take what the run began "
            f"with"
        )


class SwarmSource(StateSource):
    """A live swarm, through a client that fetches and never publishes. Takes over the client."""

    def __init__(self, client: ReadOnlyClient, *, allow_genesis: bool = False) -> None:
        self._client = client
        super().__init__(
            RunDirectory(client.directory_path), client.plan, allow_genesis=allow_genesis
        )

    def _committed_state(self, module: str) -> ModuleState | None:
        try:
            return self._client.best_state(module)
        except (NetworkError, IntegrityError) as error:
            logger.warning("no state of %s: %s", module, error)
            return None

    def _require_blob(self, sha256: str) -> None:
        file = self._client.fetch_blob(sha256)
        if not self._run.blobs.has(sha256):
            self._run.blobs.add_file(file)

    @property
    def advice(self) -> str:
        return (
            "no peer serves it now; try again in a minute, or give --allow-genesis to take what "
            "the run began with"
        )

    def close(self) -> None:
        """Leave the swarm."""
        super().close()
        self._client.close()


def open_source(
    *,
    state_directory: Path | None = None,
    initial_peers: Sequence[str] = (),
    run: str | None = None,
    cache_directory: Path | None = None,
    allow_genesis: bool = False,
) -> StateSource:
    """Open the source that a command line names: `--state-dir` or `--initial-peers`.

    Raises ConfigurationError unless exactly one is given, and what the source raises.
    """
    if (state_directory is None) == (not initial_peers):
        raise ConfigurationError(
            "give either --state-dir DIR (a run on disk) or --initial-peers ADDRESS (a live swarm)"
        )
    if state_directory is not None:
        return DiskSource(state_directory, allow_genesis=allow_genesis)
    # Imported here: what is on disk can be used without the network layer, and sooner.
    from dipaco.peer.client import ReadOnlyClient

    client = ReadOnlyClient(tuple(initial_peers), run=run, cache_directory=cache_directory)
    try:
        return SwarmSource(client, allow_genesis=allow_genesis)
    except BaseException:
        client.close()
        raise
