"""Where workers and module states are kept while another worker trains.

    memory   main memory; on a CPU, AdamW states are not even copied
    folder   files, with one worker in memory at a time: hundreds of paths. Every segment and every
             outer step is saved, so a killed simulation repeats at most one segment

Both give the same bits. `open_storage` makes the `Storage` of a simulation: a `WorkerShelf` for
what a worker leaves when it makes room for the next, and the newest state of every module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dipaco.base.files import remove_stale_temporaries, storage_errors
from dipaco.modules.grid import Grid
from dipaco.modules.state import (
    ModuleState,
    PathProgress,
    StateSummary,
    read_state,
    read_state_summary,
    write_state,
)
from dipaco.routing.run_folder import RunFolder
from dipaco.training.inner import KeptOptimizer

from .live_folder import (
    LiveFolder,
    lost_file,
    read_local,
    read_lost,
    read_luggage,
    read_notes,
    worker_file,
    write_lost,
    write_worker,
)
from .settings import SimulatorSettings

# Module states on disk that stay in memory too: those of shared modules are read by many workers.
_CACHED_STATE_BYTES = 2**30


@dataclass
class Luggage:
    """The large part of a worker that is not on the bench."""

    local: dict[str, torch.Tensor] = field(default_factory=dict)
    """Flat fp32, of the modules whose local parameters are not those of the anchor."""
    optimizer: KeptOptimizer | Mapping[str, Any] | None = None
    """An AdamW as it is, or an `InnerLoop.state_dict`; None before the first step."""


class WorkerShelf(ABC):
    """Keeps the luggage of workers by their number."""

    writes_through = False
    """Whether a worker is put here after every segment, even if it stays on the bench."""

    def __init__(self, device: torch.device, *, keeps_optimizers: bool) -> None:
        self.device = device
        """Where local parameters are put."""
        self.keeps_optimizers = keeps_optimizers
        """Whether AdamW is kept as it is, on the device of the model."""

    @abstractmethod
    def keep_lost(self, number: int, module: str, lost: torch.Tensor) -> None:
        """Keep what the encoding of a worker's contribution lost, flat fp32."""

    @abstractmethod
    def lost(self, number: int, module: str) -> torch.Tensor | None:
        """Return what the encoding of a worker's last contribution lost, or None before it."""

    @abstractmethod
    def put(self, number: int, notes: Mapping[str, Any], luggage: Luggage) -> None:
        """Keep the luggage of a worker; `notes` are its counters."""

    @abstractmethod
    def take(self, number: int) -> Luggage:
        """Return the luggage of a worker that goes on the bench; empty if it was never parked."""

    @abstractmethod
    def local(self, number: int, module: str) -> torch.Tensor | None:
        """Return the local parameters of one module of a worker, or None if none are kept."""

    def notes(self, number: int) -> dict[str, Any] | None:
        """Return the notes that an earlier process left of a worker, or None."""
        return None

    @abstractmethod
    def forget_local(self, number: int, module: str) -> None:
        """Forget the local parameters of a module, which equal its anchor again."""


class MemoryShelf(WorkerShelf):
    """Keeps luggage in memory, of the machine or of the device."""

    def __init__(self, device: torch.device, *, keeps_optimizers: bool) -> None:
        super().__init__(device, keeps_optimizers=keeps_optimizers)
        self._kept: dict[int, Luggage] = {}
        self._lost: dict[tuple[int, str], torch.Tensor] = {}

    def keep_lost(self, number: int, module: str, lost: torch.Tensor) -> None:
        """Keep it."""
        self._lost[number, module] = lost

    def lost(self, number: int, module: str) -> torch.Tensor | None:
        """Return it."""
        return self._lost.get((number, module))

    def put(self, number: int, notes: Mapping[str, Any], luggage: Luggage) -> None:
        """Keep the luggage; the worker keeps its counters itself."""
        self._kept[number] = luggage

    def take(self, number: int) -> Luggage:
        """Hand the luggage out."""
        return self._kept.pop(number, None) or Luggage()

    def local(self, number: int, module: str) -> torch.Tensor | None:
        """Return the local parameters of one module."""
        return self._kept[number].local.get(module) if number in self._kept else None

    def forget_local(self, number: int, module: str) -> None:
        """Free the local parameters of a module."""
        if number in self._kept:
            self._kept[number].local.pop(module, None)


class DiskShelf(WorkerShelf):
    """Keeps each worker in a file of its own. Raises StorageError and IntegrityError."""

    writes_through = True

    def __init__(self, folder: Path) -> None:
        super().__init__(torch.device("cpu"), keeps_optimizers=False)
        self._folder = folder
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        remove_stale_temporaries(folder, older_than_s=0.0)

    def keep_lost(self, number: int, module: str, lost: torch.Tensor) -> None:
        """Write it into a file of its own, before the step that its contribution is for."""
        write_lost(lost_file(self._folder, number, module), lost)

    def lost(self, number: int, module: str) -> torch.Tensor | None:
        """Read it."""
        file = lost_file(self._folder, number, module)
        return read_lost(file) if file.exists() else None

    def put(self, number: int, notes: Mapping[str, Any], luggage: Luggage) -> None:
        """Replace the file of a worker."""
        assert not isinstance(luggage.optimizer, KeptOptimizer)
        write_worker(self._file(number), notes, luggage.local, luggage.optimizer)

    def take(self, number: int) -> Luggage:
        """Read the file of a worker; it stays."""
        file = self._file(number)
        return Luggage(*read_luggage(file)) if file.exists() else Luggage()

    def local(self, number: int, module: str) -> torch.Tensor | None:
        """Read the local parameters of one module alone."""
        file = self._file(number)
        return read_local(file, module) if file.exists() else None

    def forget_local(self, number: int, module: str) -> None:
        """Leave the file as it is: the version in its notes says that the anchor is newer."""

    def notes(self, number: int) -> dict[str, Any] | None:
        """Read the notes alone."""
        file = self._file(number)
        return read_notes(file) if file.exists() else None

    def _file(self, number: int) -> Path:
        return worker_file(self._folder, number)


Genesis = Callable[[str], ModuleState]


class KeptStates(Mapping[str, ModuleState], ABC):
    """The newest state of every module. What its header says can be read without the tensors."""

    def __init__(self, grid: Grid) -> None:
        self._modules = grid.modules()

    @abstractmethod
    def put(self, state: ModuleState) -> None:
        """Make `state` the newest of its module."""

    @abstractmethod
    def summary(self, module: str) -> StateSummary:
        """Return version and progress of a module's newest state."""

    @abstractmethod
    def digest(self, module: str) -> str:
        """Return the digest of a module's newest state."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


class MemoryStates(KeptStates):
    """Keeps all states in memory."""

    def __init__(self, grid: Grid, given: Mapping[str, ModuleState], genesis: Genesis) -> None:
        super().__init__(grid)
        self._states = {module: given.get(module) or genesis(module) for module in self._modules}

    def __getitem__(self, module: str) -> ModuleState:
        return self._states[module]

    def put(self, state: ModuleState) -> None:
        """Keep it."""
        self._states[state.module] = state

    def summary(self, module: str) -> StateSummary:
        """Return version and progress."""
        state = self._states[module]
        return StateSummary(module, state.version, state.progress)

    def digest(self, module: str) -> str:
        """Return the digest."""
        return self._states[module].digest


class DiskStates(KeptStates):
    """Keeps each state in a file; a module without one has its genesis state.

    The states used last stay in memory, up to a bound. `given` states are written at once, unless
    a file is there already.
    """

    def __init__(
        self, folder: Path, grid: Grid, given: Mapping[str, ModuleState], genesis: Genesis
    ) -> None:
        super().__init__(grid)
        self._folder = folder
        self._grid = grid
        self._genesis = genesis
        self._cached: OrderedDict[str, ModuleState] = OrderedDict()
        self._cached_bytes = 0
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        remove_stale_temporaries(folder, older_than_s=0.0)
        self._digests: dict[str, str] = {}
        self._summaries: dict[str, StateSummary] = {}
        for module in self._modules:
            if (file := self._file(module)).exists():
                self._summaries[module] = read_state_summary(file)
            elif module in given:
                self.put(given[module])

    def __getitem__(self, module: str) -> ModuleState:
        if module in self._cached:
            self._cached.move_to_end(module)
            return self._cached[module]
        file = self._file(module)
        if file.exists():
            state = read_state(file, self._grid.layout(module), module=module)
        else:
            state = self._genesis(module)
        self._cache(state)
        return state

    def put(self, state: ModuleState) -> None:
        """Replace the file of its module."""
        write_state(state, self._file(state.module))
        self._summaries[state.module] = StateSummary(state.module, state.version, state.progress)
        self._digests[state.module] = state.digest
        self._cache(state)

    def summary(self, module: str) -> StateSummary:
        """Return version and progress; a genesis has neither."""
        no_progress: dict[int, PathProgress] = {}
        return self._summaries.get(module) or StateSummary(module, 0, no_progress)

    def digest(self, module: str) -> str:
        """Return the digest, computed once."""
        if module not in self._digests:
            self._digests[module] = self[module].digest
        return self._digests[module]

    def _forget(self, module: str) -> None:
        if module in self._cached:
            self._cached_bytes -= 8 * self._cached.pop(module).layout.size

    def _cache(self, state: ModuleState) -> None:
        self._forget(state.module)
        self._cached[state.module] = state
        self._cached_bytes += 8 * state.layout.size
        while self._cached_bytes > _CACHED_STATE_BYTES and len(self._cached) > 1:
            _, dropped = self._cached.popitem(last=False)
            self._cached_bytes -= 8 * dropped.layout.size

    def _file(self, module: str) -> Path:
        return self._folder / module


class Storage:
    """The shelf and the states of one simulation. This one is in memory."""

    found_round: int | None = None
    """The round in which an earlier process left the simulation; None if this one begins it."""

    def __init__(self, states: KeptStates, shelf: WorkerShelf) -> None:
        self.states = states
        self.shelf = shelf

    def note_next_round(self, round_index: int) -> None:
        """Note which round comes next, for a process that continues from here; only on disk."""


class DiskStorage(Storage):
    """A simulation in a `LiveFolder`. `identity` says which one, see `ReferenceSwarm.identity`.

    Raises ConfigurationError if the folder holds another simulation, IntegrityError if it is
    broken.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        grid: Grid,
        given: Mapping[str, ModuleState],
        genesis: Genesis,
    ) -> None:
        self._live = LiveFolder(folder)
        self._identity = identity
        self.found_round = self._live.check(identity)
        super().__init__(
            DiskStates(self._live.anchors, grid, given, genesis), DiskShelf(self._live.workers)
        )

    def note_next_round(self, round_index: int) -> None:
        """Write the number of the round beside states and workers."""
        self._live.save(self._identity, round_index)


def open_storage(
    run: RunFolder,
    settings: SimulatorSettings,
    identity: Mapping[str, Any],
    given: Mapping[str, ModuleState],
) -> Storage:
    """Return the storage that the settings name.

    Modules begin with the `given` states, or with those of the run's genesis. Raises what
    `DiskStorage` raises.
    """
    plan = run.plan()
    grid = run.grid(plan)
    base = run.base_parameters(plan) if plan.blobs.genesis is None else None

    def genesis(module: str) -> ModuleState:
        return run.genesis_state(plan, module, base)

    if settings.folder is not None:
        return DiskStorage(settings.folder, identity, grid, given, genesis)
    on_cpu = torch.device(settings.device).type == "cpu"
    shelf = MemoryShelf(torch.device("cpu"), keeps_optimizers=on_cpu)
    return Storage(MemoryStates(grid, given, genesis), shelf)
