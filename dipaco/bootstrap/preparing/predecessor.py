"""The run that a successor continues: its plan, its operator, its newest module states.

A predecessor is a run folder: the operator's own, a peer's cache, or what `dipaco-simulate
--out` wrote. Of a live swarm the newest states are fetched first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dipaco.base.blobs import BlobStore
from dipaco.base.errors import (
    ConfigurationError,
    IntegrityError,
    ManifestError,
    NetworkError,
    StorageError,
)
from dipaco.base.files import atomic_write, json_object, link_or_copy, storage_errors
from dipaco.modules.grow import path_parameters
from dipaco.modules.layout import layout_of
from dipaco.modules.state import ModuleState, read_state, read_state_summary
from dipaco.protocol.grid import Grid
from dipaco.protocol.manifest import (
    SignedManifest,
    load_or_create_operator_key,
    operator_fingerprint,
    verify_manifest,
)
from dipaco.protocol.plan import RunPlan
from dipaco.routing.run_folder import RunFolder

from .pretrain import parameters_bytes

WORK_FOLDER = "work"


@dataclass
class Predecessor:
    """An opened predecessor. With `allow_genesis` a module without a state stays at its genesis."""

    path: Path
    """The folder of the old run, as it was given."""
    folder: RunFolder
    """The run folder that states and blobs are read from: the same, or one like it with the newest
    states of a live swarm (`with_states_of`)."""
    manifest: SignedManifest
    allow_genesis: bool = False

    @property
    def plan(self) -> RunPlan:
        """The verified plan of the old run."""
        return self.manifest.plan

    @property
    def work(self) -> Path:
        """The folder of its preparation's work, if it was prepared there."""
        return self.path / WORK_FOLDER

    @property
    def how_rows_were_read(self) -> dict[str, Any]:
        """The keys of [data] by which its documents were read, if it was prepared there."""
        for made in sorted(self.work.glob("tokens*/*/made.json")):
            if (found := json_object(made)) is not None and "read" in found:
                return dict(found["read"])
        return {}

    @cached_property
    def grid(self) -> Grid:
        """The old grid."""
        return self.folder.grid(self.plan)

    def with_states_of(
        self, initial_peers: tuple[str, ...], folder: Path, say: Callable[[str], None]
    ) -> Predecessor:
        """Return this with the newest state of every module of the live swarm, which is fetched
        once: `folder/RUN` becomes a run folder like this one, and stays as it is while this one
        goes on.

        A module that nobody serves is copied from here. Raises the error of the step of joining
        that failed.
        """
        fetched = RunFolder(folder / self.plan.run_id)
        marker = folder / "states-taken"
        if marker.is_file() and marker.read_text().startswith(self.plan.run_id):
            say(f"states: fetched earlier from the swarm; to fetch newer ones, remove {marker}")
        else:
            atomic_write(fetched.manifest_path, self.manifest.envelope)
            for sha256 in self._blobs_here():
                self.copy_blob(sha256, fetched.blobs)
            self._fetch_states(initial_peers, folder, fetched, say)
            atomic_write(marker, self.plan.run_id.encode())
        return replace(self, folder=fetched)

    def _blobs_here(self) -> list[str]:
        plan, blobs = self.plan, self.folder.blobs
        names = [value for value in plan.blobs.model_dump().values() if value is not None]
        if blobs.has(plan.blobs.shards):
            names = list(self.folder.blob_names(plan))
        return [sha256 for sha256 in names if blobs.has(sha256)]

    def _fetch_states(
        self,
        initial_peers: tuple[str, ...],
        folder: Path,
        fetched: RunFolder,
        say: Callable[[str], None],
    ) -> None:
        # The network layer is imported only here.
        from dipaco.peer.reader import SwarmReader

        run, modules, taken = self.plan.run_id, self.grid.modules(), 0
        with SwarmReader(initial_peers, run=run, cache_folder=folder, keep_states=True) as reader:
            for module in modules:
                try:
                    state = reader.winning_state(module)
                except NetworkError as error:
                    say(f"states: {error}")
                    state = None
                if state is not None:
                    taken += 1
                    continue
                own = self.folder.states.load_latest(module, layout_of(self.grid, module))
                if own is not None:
                    fetched.states.save(own)
        say(f"states: {taken} of {len(modules)} modules were fetched from the swarm")

    @cached_property
    def digests(self) -> dict[str, str]:
        """The digest of the newest good state of every module, chosen once.

        Raises ConfigurationError when modules have no state and the genesis is not allowed.
        """
        found, missing = {}, []
        for module in self.grid.modules():
            state = self.folder.states.load_latest(module, layout_of(self.grid, module))
            if state is None and self.allow_genesis:
                state = self.folder.genesis_state(self.plan, module)
            if state is None:
                missing.append(module)
            else:
                found[module] = state.digest
        if missing:
            raise ConfigurationError(
                f"{self.folder.states.folder} holds no state of {', '.join(missing[:4])}"
                f"{' ...' if len(missing) > 4 else ''} ({len(found)} of "
                f"{len(self.grid.modules())} modules have one); train every path first, give "
                f"--initial-peers of the live swarm, or --allow-genesis to take what that run "
                f"began with"
            )
        return found

    def load(self, module: str) -> ModuleState:
        """Return the chosen state of a module. Raises IntegrityError if it has vanished since."""
        digest = self.digests[module]
        file = self.folder.states.find(digest)
        if file is not None:
            return read_state(file, layout_of(self.grid, module), digest, module=module)
        state = self.folder.genesis_state(self.plan, module)
        if state.digest != digest:
            raise IntegrityError(
                f"the state {digest[:12]} of {module} has vanished from {self.path}; is a peer "
                f"still training there? stop it, or give --initial-peers, and start again"
            )
        return state

    @property
    def is_dense(self) -> bool:
        """Whether the old run has one path, which is trained whole: an ordinary dense model."""
        return self.grid.path_count == 1 and self.plan.model.adapters is None

    def trained_model_bytes(self) -> bytes:
        """Return the trained model of a dense run, as a base model's file."""
        return parameters_bytes(path_parameters(self.grid, 0, self.load))

    def copy_blob(self, sha256: str, blobs: BlobStore) -> str:
        """Put a blob of the old run into another store; return its name. Raises IntegrityError."""
        link_or_copy(self.folder.blobs.require(sha256), blobs.path(sha256))
        return sha256

    def path_steps(self) -> int:
        """Return the most inner steps that any path has behind it, `first_step` included."""
        per_step = self.plan.inner.batch_sequences * self.plan.model.sequence_length
        files = (self.folder.states.find(digest) for digest in self.digests.values())
        # States still at their genesis count nothing.
        summaries = [read_state_summary(file) for file in files if file is not None]
        counted = [p.tokens // per_step for s in summaries for p in s.progress.values()]
        return self.plan.inner.first_step + max(counted, default=0)


def open_predecessor(folder: Path, *, allow_genesis: bool = False) -> Predecessor:
    """Open the run folder `folder` as a predecessor; its manifest's signature is checked.

    Raises StorageError when it is no run folder, ManifestError for a bad manifest.
    """
    run = RunFolder(folder)
    if not folder.is_dir() or not run.manifest_path.is_file():
        raise StorageError(
            f"--from {folder} is not a run folder: it has no manifest.json; give the --out "
            f"of dipaco-bootstrap prepare or of dipaco-simulate, or a peer's folder of the run"
        )
    manifest = verify_manifest(run.manifest_path.read_bytes(), older=True)
    return Predecessor(folder, run, manifest, allow_genesis)


def operator_key_file(predecessor: Predecessor, given: Path | None, out: Path) -> Path:
    """Return the file with the key of the old run's operator, who has to sign the successor.

    It is the one `given`, else `out/operator.pem`, else `operator.pem` of the old run, of which
    `out` gets a copy so that a further successor finds it there. Raises ConfigurationError when
    there is none, ManifestError when it is another operator's: peers would not move over.
    """
    own, old = out / "operator.pem", predecessor.path / "operator.pem"
    file = given or (own if own.exists() else old)
    signer = predecessor.manifest.operator_fingerprint
    if not file.is_file():
        raise ConfigurationError(
            f"there is no {file}; a successor is signed with the key of the old run's operator "
            f"({signer}), give it with --operator-key FILE"
        )
    fingerprint = operator_fingerprint(load_or_create_operator_key(file))
    if fingerprint != signer:
        raise ManifestError(
            f"{file} is the key {fingerprint}, but the run {predecessor.plan.run_id} in "
            f"{predecessor.path} was signed by {signer}; peers would not move to it. Give that "
            f"operator's key with --operator-key FILE"
        )
    if file == old:
        with storage_errors(old):
            content = old.read_bytes()
        atomic_write(own, content, mode=0o600)
        return own
    return file


def check_start(plan: RunPlan, old: RunPlan) -> None:
    """Raise ConfigurationError unless the successor begins after the run that it succeeds."""
    if plan.start_s <= old.start_s:
        raise ConfigurationError(
            f"the successor would begin {old.start_s - plan.start_s:.0f} s before the run that it "
            f"continues; give --start-in-s {math.ceil(old.start_s - plan.start_s) + 60}"
        )
