"""Getting blobs and module states from the peers that hold them, checked by hash."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from dipaco.base.blobs import BlobStore
from dipaco.base.errors import DipacoError, IntegrityError, NetworkError, StorageError
from dipaco.base.files import spare_bytes, storage_errors
from dipaco.base.kept_files import KeptFiles
from dipaco.base.progress import StageProgress, shown_bytes
from dipaco.dht.directory import Directory
from dipaco.modules.base_source import take_base_from_hub_cache
from dipaco.modules.canonical_file import MAX_HEADER_BYTES
from dipaco.modules.frozen_file import base_file_bytes
from dipaco.modules.layout import layout_of
from dipaco.modules.state import ModuleState, max_state_bytes, read_state
from dipaco.peer.exchange.files.contribution_files import check_is_of
from dipaco.peer.exchange.files.partial_file import MAX_UNFINISHED, prune_partial_files
from dipaco.protocol.chain.steps import Head, Row
from dipaco.protocol.config import ModelConfig
from dipaco.protocol.grid import Grid
from dipaco.protocol.plan import RunPlan, ShardIndex
from dipaco.routing.tokens.token_files import token_dtype

from .exchange import Exchange

logger = logging.getLogger("dipaco.peer.exchange.fetching")

_ReadT = TypeVar("_ReadT")

# The most bytes of a blob that the run does not name.
_MAX_OTHER_BYTES = 2**30
FETCH_TIMEOUT_S, LEAST_FILE_TIMEOUT_S = 600.0, 30.0
_ASK_AGAIN = "start again; then other holders are asked too"
# A program that cannot do without a blob looks for holders again and again, for so long.
NEEDED_LIMIT_S, NEEDED_AGAIN_S = 30.0, 2.0


class ContentFetcher:
    """Finds holders in the DHT, fetches from them, and checks. Blocking; bounded."""

    def __init__(
        self,
        directory: Directory,
        exchange: Exchange,
        blobs: BlobStore,
        kept: KeptFiles,
        plan: RunPlan,
        grid: Grid,
        given_peers: Iterable[str] = (),
        say: Callable[[str], None] = logger.info,
    ) -> None:
        """Peers whose addresses were given, `given_peers`, are asked directly. `say` is told of the
        progress of downloads that take longer than some seconds."""
        self._directory, self._exchange = directory, exchange
        self.blobs, self._kept = blobs, kept
        self._plan, self._grid = plan, grid
        self._given_peers, self._say = tuple(given_peers), say
        self._max_bytes = max_core_bytes(plan, grid)
        """The most bytes of each blob of the run, by hash; replaced as a whole."""
        # A path's first states are fetched at the same time, and each of them needs the base.
        self._base_turn, self._hub_cache_lacks_it = threading.Lock(), False

    def _progress(self, what: str) -> Callable[[int, int], None]:
        stage = StageProgress(f"fetching {what}", self._say, shown=lambda n: shown_bytes(int(n)))
        return stage.update

    def use_shards(self, index: ShardIndex) -> None:
        """Learn the shard files, which are blobs too."""
        self._max_bytes = self._max_bytes | shard_bytes(index, self._plan.model)

    def use_genesis(self, digests: Mapping[str, str]) -> None:
        """Learn the states that a successor run begins with, which are blobs too."""
        sizes = {
            digest: max_state_bytes(layout_of(self._grid, module), 0)
            for module, digest in digests.items()
        }
        self._max_bytes = self._max_bytes | sizes

    def all_blobs(self) -> tuple[str, ...]:
        """Return the hashes that the run consists of."""
        return tuple(self._max_bytes)

    def blob(self, sha256: str, what: str = "a blob") -> Path:
        """Return the file of a blob, fetched if needed; its size is bounded.

        Raises `NetworkError` when nobody can give it in time, naming `what`,
        `IntegrityError` when all that was given had another hash, and `StorageError` when it may
        be more than there is room for.
        """
        try:
            if self.blobs.has(sha256) or self._is_in_hub_cache(sha256):
                return self.blobs.path(sha256)
            self._check_room(sha256)
            return self._exchange.get(
                sha256,
                self._blob_sources(sha256),
                self.blobs,
                max_bytes=self._max_bytes.get(sha256, _MAX_OTHER_BYTES),
                timeout_s=FETCH_TIMEOUT_S,
                mirrors=self._plan.mirrors,
                # The base is the largest blob, and volunteers' lines are slow.
                mirrors_first=sha256 == self._plan.blobs.base,
                on_progress=self._progress(what),
            )
        except DipacoError as error:
            raise type(error)(f"could not fetch {what}: {error}") from None

    def _check_room(self, sha256: str) -> None:
        """Raise `StorageError` for a blob of the run that may be more than this disk has room for:
        how large blobs are is what an operator says."""
        folder, partial = self.blobs.folder, self.blobs.partial_path(sha256)
        with storage_errors(folder):
            room = spare_bytes(folder) + (partial.stat().st_size if partial.exists() else 0)
        if (needed := self._max_bytes.get(sha256, 0)) > room:
            raise StorageError(
                f"it has up to {shown_bytes(needed)}, and there is room for {shown_bytes(room)} in "
                f"{folder}; free some space there, or give another folder with --cache-dir"
            )

    def _is_in_hub_cache(self, sha256: str) -> bool:
        """Return whether a blob is the frozen base and could be made here, which is tried once."""
        if sha256 != self._plan.blobs.base:
            return False
        with self._base_turn:
            if self.blobs.has(sha256):
                return True
            if self._hub_cache_lacks_it:
                return False
            found = take_base_from_hub_cache(self._plan, self.blobs, self._say)
            self._hub_cache_lacks_it = not found
            return found

    def sound(self, sha256: str, what: str, read: Callable[[], _ReadT]) -> _ReadT:
        """Return what `read` makes of a blob that is here. A damaged blob is fetched again.

        Raises what `read` does of a blob that is whole, and what `needed_blob` does.
        """
        try:
            return read()
        except IntegrityError:
            if self.blobs.verify(sha256):
                raise
        self._say(f"{what} is damaged on this disk and is fetched again")
        self.blobs.remove(sha256)
        self.needed_blob(sha256, what)
        return read()

    def needed_blob(self, sha256: str, what: str) -> Path:
        """Return the file of a blob as `blob` does, for a program that ends without it.

        In a busy swarm a holder may have just gone, so others are looked for during
        `NEEDED_LIMIT_S`. The error says what to do.
        """
        until_s, is_said = time.monotonic() + NEEDED_LIMIT_S, False
        while True:
            try:
                return self.blob(sha256, what)
            except DipacoError as error:
                left_s = until_s - time.monotonic()
                if left_s < 0 or not isinstance(error, NetworkError):
                    raise type(error)(f"{error}; {_ASK_AGAIN}") from None
                if not is_said:
                    self._say(f"{error}; tries again for {left_s:.0f} s at most")
                is_said = True
            time.sleep(NEEDED_AGAIN_S)

    def _blob_sources(self, sha256: str) -> tuple[str, ...]:
        """Return whom to ask for a blob: those that announce it, and the given addresses too, as
        records may be kept from a newcomer."""
        found = self._directory.find_blob_holders(sha256)
        return tuple(dict.fromkeys((*found, *self._given_peers)))

    def contribution(self, row: Row, holders: Sequence[str]) -> Path:
        """Fetch the file of a row; the caller removes it. Raises `NetworkError`, and
        `IntegrityError` when it was not made for this row.

        It may take the share of the time for a state that it has of a state's bytes: the line of
        this machine can do both, and somebody may send a file very slowly.
        """
        share = row.bytes / (8 * layout_of(self._grid, row.module).size)
        path = self._exchange.get(
            row.file,
            tuple(holders),
            self._kept,
            max_bytes=row.bytes,
            timeout_s=max(LEAST_FILE_TIMEOUT_S, min(share, 1.0) * FETCH_TIMEOUT_S),
        )
        try:
            check_is_of(row, path)
        except IntegrityError:
            path.unlink(missing_ok=True)
            raise
        return path

    def state(self, wanted: Head, holders: Sequence[str]) -> ModuleState:
        """Fetch one module state by its digest and check it against the module's shape.

        Raises `IntegrityError` or `NetworkError`; nothing is kept of a bad state.
        """
        layout = layout_of(self._grid, wanted.module)
        paths = self._grid.paths_of_module(wanted.module)

        def read(path: Path) -> ModuleState:
            return read_state(path, layout, wanted.digest, module=wanted.module, paths=paths)

        if self._kept.find(wanted.digest) is not None:
            # A peer of this machine has it, or an earlier life left it.
            return read(self._kept.path(wanted.digest))
        prune_partial_files(self._kept, MAX_UNFINISHED)
        path = self._exchange.get(
            wanted.digest,
            tuple(holders),
            self._kept,
            max_bytes=max_state_bytes(layout, len(paths)),
            timeout_s=FETCH_TIMEOUT_S,
            on_progress=self._progress(f"{wanted.module} version {wanted.version}"),
        )
        try:
            state = read(path)
        except IntegrityError:
            path.unlink(missing_ok=True)
            raise
        self._kept.enter(wanted.digest, "fetched", wanted.module)
        return state


def max_core_bytes(plan: RunPlan, grid: Grid) -> dict[str, int]:
    """Return the most bytes of each blob that everybody needs, whatever its path, by hash.

    The manifest names them by their hashes alone. What they can be follows from the run's shape,
    with room for what JSON and file headers add.
    """
    blobs, model = plan.blobs, plan.model
    greatest = {
        blobs.shards: 2**16 + 1024 * grid.path_count,
        blobs.base: MAX_HEADER_BYTES + base_file_bytes(model),
        blobs.tokenizer: 2**24 + 1024 * model.vocabulary_size,
        # At most two numbers for each feature and path, in eight bytes.
        blobs.router: MAX_HEADER_BYTES + 16 * (model.hidden_size + 64) * grid.path_count,
    }
    if blobs.genesis is not None:
        greatest[blobs.genesis] = 2**16 + 128 * len(grid.modules())
    return greatest


def shard_bytes(index: ShardIndex, model: ModelConfig) -> dict[str, int]:
    """Return the sizes of all token files, by hash."""
    dtype = token_dtype(model.vocabulary_size, marked=index.marked)
    row_bytes = model.sequence_length * dtype.itemsize
    sizes: dict[str, int] = {}
    for shard in index.paths:
        sizes[shard.train_sha256] = shard.train_sequences * row_bytes
        sizes[shard.validation_sha256] = shard.validation_sequences * row_bytes
    return sizes
