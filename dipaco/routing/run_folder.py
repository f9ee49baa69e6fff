"""A run on disk: the manifest, the blobs that it names, and the states of the modules.

    manifest.json   the signed plan
    blobs/          tokenizer, router, base model, shard index, token files, each by its SHA-256
    store/RUN/      what is made in training: the last good states of the modules, contributions and
                    chains; named by the run's id, as states of two runs of one shape cannot be told
                    apart by what is in them

`dipaco-bootstrap prepare` writes one; a peer's cache, the simulator's output and the inference
tools have the same form, so each can read the others'.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from dipaco.base.blobs import BlobStore
from dipaco.base.errors import (
    ConfigurationError,
    IntegrityError,
    ManifestError,
    StorageError,
)
from dipaco.base.files import atomic_write, link_or_copy
from dipaco.modules.adapters import initial_adapters
from dipaco.modules.canonical_file import header_of
from dipaco.modules.foreign_model import new_path
from dipaco.modules.frozen_base import FrozenBase
from dipaco.modules.frozen_file import open_base
from dipaco.modules.grow import check_genesis, check_genesis_index
from dipaco.modules.layout import layout_of
from dipaco.modules.saved_states import StateStore
from dipaco.modules.state import ModuleState, genesis_state, read_state
from dipaco.modules.transformer import PathModel
from dipaco.protocol.config import ModelConfig, parse_config
from dipaco.protocol.grid import Grid
from dipaco.protocol.manifest import MANIFEST_FILE
from dipaco.protocol.plan import PathShard, RunPlan, ShardIndex
from dipaco.routing.routers.document_routing import DocumentRouter
from dipaco.routing.routers.kinds import Router, load_router
from dipaco.routing.tokens.token_files import open_tokens
from dipaco.routing.tokens.tokenizer import Tokenizer
from dipaco.routing.tokens.tokenizer_kinds import read_tokenizer

STORE_FOLDER = "store"
"""In a run folder, where what is made in training is."""
_CPU = torch.device("cpu")


class RunFolder:
    """Opens the parts of a run. Nothing is read before it is asked for.

    Every blob but the token files is checked against its hash when it is read; token files are
    checked once, when they enter the blob store, because they are large. Errors: IntegrityError
    for a blob that is missing or wrong.
    """

    def __init__(self, path: Path | str, owner: str = "") -> None:
        """Open a folder; `owner` is the peer that saves states there."""
        self.path, self._owner = Path(path), owner
        # Read once: at thousands of paths that takes a while.
        self._shard_indices: dict[str, ShardIndex] = {}
        self._genesis_indices: dict[str, dict[str, str]] = {}

    @property
    def manifest_path(self) -> Path:
        """Where the signed plan is."""
        return self.path / MANIFEST_FILE

    @cached_property
    def blobs(self) -> BlobStore:
        """The large parts of the run, by SHA-256."""
        return BlobStore(self.path / "blobs")

    @cached_property
    def states(self) -> StateStore:
        """The last good states of the modules. Raises as `plan` does."""
        return StateStore(self.path / STORE_FOLDER / self.plan().run_id, self._owner)

    def plan(self) -> RunPlan:
        """Return the plan inside the manifest, validated. The signature is not checked here.

        Raises StorageError if there is no manifest, ManifestError if it is not one,
        ConfigurationError if the plan in it is impossible.
        """
        try:
            envelope = json.loads(self.manifest_path.read_bytes())
        except FileNotFoundError:
            lack = "is not a run folder: it has no manifest.json"
            what = lack if self.path.exists() else "does not exist"
            raise StorageError(
                f"{self.path} {what}; give the folder that dipaco-bootstrap prepare or "
                "dipaco-simulate wrote, or the cache folder of a peer"
            ) from None
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"{self.manifest_path} is not JSON: {error}") from None
        if not isinstance(envelope, dict) or not isinstance(envelope.get("plan"), dict):
            raise ManifestError(f"{self.manifest_path} holds no plan; is it a manifest?")
        return parse_config(RunPlan, envelope["plan"], str(self.manifest_path))

    def shard_index(self, plan: RunPlan) -> ShardIndex:
        """Return what each path's shard is. Raises IntegrityError if it does not fit the plan."""
        paths = plan.grid.path_count
        index = self._read_shard_index(plan.blobs.shards, paths)
        if len(index.paths) != paths or index.sequence_length != plan.model.sequence_length:
            raise IntegrityError(
                f"the shard index of {self.path} describes {len(index.paths)} paths of "
                f"{index.sequence_length} tokens, but the plan has {paths} paths of "
                f"{plan.model.sequence_length} tokens; prepare the run again"
            )
        return index

    def _read_shard_index(self, sha256: str, paths: int) -> ShardIndex:
        found = self._shard_indices.get(sha256)
        if found is None:
            what = f"the shard index of {self.path}"
            values = self._read_json(sha256, what, len(PathShard.model_fields) + 2, paths)
            found = self._shard_indices[sha256] = parse_config(ShardIndex, values, what)
        return found

    def _read_json(self, sha256: str, what: str, parts_each: int, count: int) -> Any:
        """Read a table of so many lines. Of as many bytes with more parts, Python makes objects
        that take twenty times the memory."""
        content = self.blobs.read(sha256)
        if sum(map(content.count, (b",", b"[", b"{"))) > 16 + parts_each * count:
            raise IntegrityError(f"{what} has more parts than one of {count} lines can have")
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise IntegrityError(f"{what} is not JSON: {error}") from None

    def grid(self, plan: RunPlan) -> Grid:
        """Return the grid of the plan."""
        return Grid(plan.model, plan.grid, plan.rounds.level_offsets)

    def path_model(self, plan: RunPlan, device: torch.device = _CPU) -> PathModel:
        """Return a model on `device` that any path can be loaded into, on the run's base if that
        is frozen.

        Raises IntegrityError if the frozen base is missing, damaged, or of another model.
        """
        if plan.model.adapters is None:
            return PathModel(plan.model).to(device)
        base = self._frozen_base(plan.model, plan.blobs.base)
        return new_path(plan.model, base.on(device)).to(device)

    def _frozen_base(self, model: ModelConfig, sha256: str) -> FrozenBase:
        return open_base(self.blobs.require(sha256), sha256, model)

    def first_parameters(self, plan: RunPlan) -> dict[str, torch.Tensor]:
        """Return what every path begins with if the run is no successor, fp32 on the CPU by name:
        the base model's parameters, or adapters drawn from the run's seed."""
        if plan.model.adapters is not None:
            return initial_adapters(plan.model, plan.seed)
        return self.base_parameters(plan)

    def base_parameters(self, plan: RunPlan) -> dict[str, torch.Tensor]:
        """Return the parameters of a base model that is trained on: fp32 on the CPU, by name."""
        return self._load_parameters(plan.blobs.base)

    def base_model(self, plan: RunPlan, device: torch.device = _CPU) -> PathModel:
        """Return the base model on `device` and in evaluation mode.

        Raises IntegrityError if its parameters are not those of the plan's model.
        """
        return self.load_base_model(plan.model, plan.blobs.base, device)

    def load_base_model(
        self, config: ModelConfig, sha256: str, device: torch.device = _CPU
    ) -> PathModel:
        """Return the model whose parameters are a blob, as `base_model` does."""
        if config.adapters is not None:
            base = self._frozen_base(config, sha256)
            return new_path(config.without_adapters, base.on(device)).eval()
        model = PathModel(config)
        parameters = self._load_parameters(sha256)
        expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
        found = {name: tuple(p.shape) for name, p in parameters.items()}
        if found != expected:
            wrong = sorted(set(expected.items()) ^ set(found.items()))[0][0]
            raise IntegrityError(
                f"the base model of {self.path} is not the plan's model: they differ in {wrong}"
            )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(parameters[name])
        return model.to(device).eval()

    def _load_parameters(self, sha256: str) -> dict[str, torch.Tensor]:
        data = self.blobs.read(sha256)
        header_of(np.frombuffer(data, np.uint8), f"the base model of {self.path}")
        try:
            return safetensors.torch.load(data)
        except safetensors.SafetensorError as error:
            raise IntegrityError(f"the base model of {self.path} is broken: {error}") from None

    def tokenizer(self, plan: RunPlan) -> Tokenizer:
        """Return the tokenizer. Raises IntegrityError if it has more pieces than the model."""
        tokenizer = read_tokenizer(self.blobs.read(plan.blobs.tokenizer))
        rows = plan.model.without_padding.vocabulary_size
        if tokenizer.vocabulary_size > rows:
            raise IntegrityError(
                f"the tokenizer of {self.path} has {tokenizer.vocabulary_size} pieces, the model "
                f"only {rows}; prepare the run again"
            )
        return tokenizer

    def router(self, plan: RunPlan) -> Router:
        """Return the router. Raises IntegrityError if it is not for this many paths."""
        router = load_router(self.blobs.read(plan.blobs.router))
        paths = plan.grid.path_count
        if router.path_count != paths:
            raise IntegrityError(
                f"the router of {self.path} knows {router.path_count} paths, the plan {paths}; "
                f"prepare the run again"
            )
        return router

    def document_router(self, plan: RunPlan, device: torch.device = _CPU) -> DocumentRouter:
        """Return what finds the path of a document: tokenizer, base model on `device`, router.

        Raises IntegrityError as they do, and if the plan cannot route.
        """
        routing, paths = plan.routing, plan.grid.path_count
        if routing.prefix_tokens >= plan.model.sequence_length or routing.train_paths > paths:
            raise IntegrityError(
                f"the run of {self.path} routes by {routing.prefix_tokens} tokens to "
                f"{routing.train_paths} paths, but it has {paths} paths, and sequences of "
                f"{plan.model.sequence_length} tokens; ask its operator for another run"
            )
        return DocumentRouter(
            self.tokenizer(plan),
            self.base_model(plan, device),
            self.router(plan),
            plan.routing.prefix_tokens,
        )

    def train_tokens(self, plan: RunPlan, path: int) -> np.ndarray:
        """Return the training sequences of a path, [N, T], as a read-only memory map.

        Raises IntegrityError if the token file is missing or has another size than the index says.
        """
        shard = self._shard(plan, path)
        return self._tokens(plan, shard.train_sha256, shard.train_sequences)

    def validation_tokens(self, plan: RunPlan, path: int) -> np.ndarray:
        """Return the held-out scoring windows of a path (`scoring_windows`), [N, T].

        Raises IntegrityError as `train_tokens` does.
        """
        shard = self._shard(plan, path)
        return self._tokens(plan, shard.validation_sha256, shard.validation_sequences)

    def genesis_state(
        self, plan: RunPlan, module: str, first: Mapping[str, torch.Tensor] | None = None
    ) -> ModuleState:
        """Return the state that a module starts the run from.

        It is cut out of what paths begin with, or is the state that the plan of a successor run
        names. To read several, give the `first_parameters`, which are otherwise made for each one.
        Raises IntegrityError if that state is missing, or cannot begin a run.
        """
        layout = layout_of(self.grid(plan), module)
        digests = self.genesis_index(plan)
        if digests is None:
            return genesis_state(module, layout, first or self.first_parameters(plan))
        if module not in digests:
            raise IntegrityError(f"the genesis of {self.path} names no state of module {module}")
        digest = digests[module]
        state = read_state(self.blobs.require(digest), layout, digest, module=module)
        return check_genesis(state, module)

    def genesis_index(self, plan: RunPlan) -> dict[str, str] | None:
        """Return the digest of each module's first state in a successor run, else None.

        Raises IntegrityError if the index is missing, damaged, or not of this run's modules.
        """
        sha256 = plan.blobs.genesis
        if sha256 is None:
            return None
        if sha256 not in self._genesis_indices:
            grid = self.grid(plan)
            what = f"the genesis index of {self.path}"
            index = self._read_json(sha256, what, 1, len(grid.modules()))
            self._genesis_indices[sha256] = check_genesis_index(index, grid)
        return self._genesis_indices[sha256]

    def blob_names(self, plan: RunPlan) -> tuple[str, ...]:
        """Return the SHA-256 of every blob of the run, also of those that are not here."""
        names = [value for value in plan.blobs.model_dump().values() if value is not None]
        for shard in self.shard_index(plan).paths:
            names += [shard.train_sha256, shard.validation_sha256]
        if plan.blobs.genesis is not None and self.blobs.has(plan.blobs.genesis):
            names += (self.genesis_index(plan) or {}).values()
        return tuple(dict.fromkeys(names))

    def _shard(self, plan: RunPlan, path: int) -> PathShard:
        shards = self.shard_index(plan).paths
        if not 0 <= path < len(shards):
            raise ValueError(f"path {path} is not one of the {len(shards)} paths of this run")
        return shards[path]

    def _tokens(self, plan: RunPlan, sha256: str, sequences: int) -> np.ndarray:
        if not self.blobs.has(sha256):
            raise IntegrityError(f"the token file {sha256} is missing from {self.path / 'blobs'}")
        tokens = open_tokens(
            self.blobs.path(sha256),
            plan.model.sequence_length,
            plan.model.vocabulary_size,
            marked=self.shard_index(plan).marked,
        )
        if len(tokens) != sequences:
            raise IntegrityError(
                f"the token file {sha256} holds {len(tokens)} sequences, the shard index says "
                f"{sequences}; remove it and fetch or prepare it again"
            )
        return tokens


def link_run(run: RunFolder, output: Path) -> RunFolder:
    """Make `output` a run folder of the same run: its manifest, and links to its blobs.

    Blobs are hard-linked, or copied where the file system cannot. Does nothing if `output` is the
    run folder itself. Raises ConfigurationError if it holds another run.
    """
    if output.resolve() == run.path.resolve():
        return run
    linked = RunFolder(output)
    if linked.manifest_path.exists() and linked.plan().run_id != run.plan().run_id:
        raise ConfigurationError(f"--out {output} holds another run; give an empty folder")
    for sha256 in run.blob_names(run.plan()):
        link_or_copy(run.blobs.require(sha256), linked.blobs.path(sha256))
    atomic_write(linked.manifest_path, run.manifest_path.read_bytes())
    return linked
