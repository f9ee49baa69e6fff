"""The run that a successor continues: its plan, its operator, its newest module states.

A predecessor is a run folder: the operator's own, a peer's cache, or what `dipaco-simulate
--out` wrote. Of a live swarm the newest states are fetched first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dipaco.base.errors import (
    ConfigurationError,
    IntegrityError,
    ManifestError,
    NetworkError,
    StorageError,
)
from dipaco.base.files import atomic_write, link_or_copy, storage_errors
from dipaco.modules.grow import path_parameters
from dipaco.modules.layout import layout_of
from dipaco.modules.state import ModuleState, read_state, read_state_summary
from dipaco.modules.store import StateStore
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
from .stages import read_marker


@dataclass
class Predecessor:
    """An opened predecessor. With `allow_genesis` a module without a state stays at its genesis."""

    folder: RunFolder
    manifest: SignedManifest
    allow_genesis: bool = False
    fetched: StateStore | None = None
    """The states taken from a live swarm, which stay as they were while the folder goes on."""

    @property
    def plan(self) -> RunPlan:
        """The verified plan of the old run."""
        return self.manifest.plan

    @property
    def path(self) -> Path:
        """Its run folder."""
        return self.folder.path

    @cached_property
    def grid(self) -> Grid:
        """The old grid."""
        return self.folder.grid(self.plan)

    @property
    def _states(self) -> StateStore:
        return self.fetched or self.folder.states

    def take_states_of(
        self, initial_peers: tuple[str, ...], folder: Path, say: Callable[[str], None]
    ) -> None:
        """Fetch the newest state of every module of the live swarm into `folder`, once.

        `folder/RUN` becomes a run folder like this one, with these states.

        A module that nobody serves is copied from the run's own folder. Raises the error of the
        step of joining that failed.
        """
        fetched = RunFolder(folder / self.plan.run_id)
        atomic_write(fetched.manifest_path, self.manifest.envelope)
        for sha256 in self.folder.blob_names(self.plan):
            if self.folder.blobs.has(sha256):
                link_or_copy(self.folder.blobs.path(sha256), fetched.blobs.path(sha256))
        marker = folder / "states-taken"
        if marker.is_file() and marker.read_text().startswith(self.plan.run_id):
            say(f"states: fetched earlier from the swarm; to fetch newer ones, remove {marker}")
        else:
            # The network is loaded only here.
            from dipaco.peer.reader import SwarmReader

            run, modules, taken = self.plan.run_id, self.grid.modules(), 0
            with SwarmReader(
                initial_peers, run=run, cache_folder=folder, keep_states=True
            ) as reader:
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
            atomic_write(marker, run.encode())
        self.fetched = fetched.states

    @cached_property
    def digests(self) -> dict[str, str]:
        """The digest of the newest good state of every module, chosen once.

        Raises ConfigurationError when modules have no state and the genesis is not allowed.
        """
        found, missing = {}, []
        for module in self.grid.modules():
            state = self._states.load_latest(module, layout_of(self.grid, module))
            if state is None and self.allow_genesis:
                state = self.folder.genesis_state(self.plan, module)
            if state is None:
                missing.append(module)
            else:
                found[module] = state.digest
        if missing:
            raise ConfigurationError(
                f"{self.path / 'states'} holds no state of {', '.join(missing[:4])}"
                f"{' ...' if len(missing) > 4 else ''} ({len(found)} of "
                f"{len(self.grid.modules())} modules have one); train every path first, give "
                f"--initial-peers of the live swarm, or --allow-genesis to take what that run "
                f"began with"
            )
        return found

    def load(self, module: str) -> ModuleState:
        """Return the chosen state of a module. Raises IntegrityError if it has vanished since."""
        digest = self.digests[module]
        file = self._states.find(digest)
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

    def base_bytes(self) -> bytes:
        """Return the base model of the successor: the trained model of a dense run, which is a
        better reader of prefixes than what it began with; otherwise the old run's base."""
        if self.is_dense:
            return parameters_bytes(path_parameters(self.grid, 0, self.load))
        return self.folder.blobs.read(self.plan.blobs.base)

    def path_steps(self) -> int:
        """Return the most inner steps that any path has behind it, `first_step` included."""
        per_step = self.plan.inner.batch_sequences * self.plan.model.sequence_length
        files = (self._states.find(digest) for digest in self.digests.values())
        # States still at their genesis count nothing.
        summaries = [read_state_summary(file) for file in files if file is not None]
        counted = [p.tokens // per_step for s in summaries for p in s.progress.values()]
        return self.plan.inner.first_step + max(counted, default=0)

    def tokens_folder(self, inputs: str) -> Path | None:
        """Return where the corpus lies as tokens, if the old run was prepared here from the same
        corpus. Such a folder is read and never written."""
        marker = read_marker(self.path / "work" / "tokens.json")
        if marker is None or marker.get("inputs") != inputs:
            return None
        outputs = marker.get("outputs")
        folder = self.path / "work" / str((outputs or {}).get("folder") or "tokens")
        parts = [folder / part / "progress.json" for part in ("train", "validation")]
        return folder.absolute() if all(part.is_file() for part in parts) else None


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
    return Predecessor(run, manifest, allow_genesis)


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
