"""Getting blobs and module states from whoever holds them, checked by hash."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

from dipaco.dht.certificates import Certificate, CertificateBook
from dipaco.dht.directory import Directory
from dipaco.dht.view import SwarmView, plausible_state
from dipaco.modules.best_parameters import (
    BestParameters,
    greatest_best_path_bytes,
    path_layout,
    read_best_parameters,
)
from dipaco.modules.blobs import BlobStore
from dipaco.modules.command_line import shown_bytes
from dipaco.modules.config import ModelConfig
from dipaco.modules.errors import DipacoError, IntegrityError, NetworkError
from dipaco.modules.grid import Grid
from dipaco.modules.plan import RunPlan, ShardIndex
from dipaco.modules.progress import StageProgress
from dipaco.modules.state import (
    ModuleState,
    StateReference,
    greatest_state_bytes,
    read_state,
)
from dipaco.peer.member.descent import Descent
from dipaco.routing.token_files import token_dtype

from .certifier import CHAIN_LIMIT_S, Certifier
from .exchange import Exchange
from .partial_file import prune_partial_files
from .steps import StepReplay

logger = logging.getLogger("dipaco.peer.exchange.fetching")

# Of blobs whose kind this file does not know: what this peer itself has added.
MAX_OTHER_BYTES = 2**30
FETCH_TIMEOUT_S = 600.0
ASK_AGAIN = "start again, other holders are then asked too"
# How often it is looked whether another peer of this machine has fetched a blob.
TURN_S = 0.5
# Unfinished downloads of states that are kept for another attempt.
MAX_SCRATCH_PARTIALS = 8
# What a reader looks into: states of a module, at once, and for how long altogether.
MAX_READ_STATES = 64
CHAINS_AT_ONCE = 8
CHAINS_LIMIT_S = 60.0


class ContentFetcher:
    """Finds holders in the DHT, fetches from them, and checks. Blocking; bounded."""

    def __init__(
        self, directory: Directory, exchange: Exchange, blobs: BlobStore, scratch: BlobStore
    ) -> None:
        self._directory = directory
        self._exchange = exchange
        self.blobs = blobs
        self._scratch = scratch
        self._mirrors: tuple[str, ...] = ()
        self._plan: RunPlan | None = None
        self._grid: Grid | None = None
        self._certifier: Certifier | None = None
        self._replay: StepReplay | None = None
        self._now: Callable[[], float] = time.time
        self.say: Callable[[str], None] = logger.info
        self._all_blobs: tuple[str, ...] = ()
        self._greatest: dict[str, int] = {}

    def use_plan(self, plan: RunPlan, grid: Grid, now: Callable[[], float]) -> None:
        """Learn the run's mirrors, shapes and clock once its manifest is verified."""
        self._plan = plan
        self._now = now
        self._mirrors = plan.mirrors
        self._grid = grid
        self._all_blobs = core_blobs(plan)
        self._greatest = greatest_core_bytes(plan, grid)

    def use_display(self, say: Callable[[str], None]) -> None:
        """Say how far downloads are that take longer than some seconds."""
        self.say = say

    def _progress(self, what: str) -> Callable[[int, int], None]:
        stage = StageProgress(f"fetching {what}", self.say, shown=lambda n: shown_bytes(int(n)))
        return stage.update

    def use_certifier(self, certifier: Certifier) -> None:
        """Fetch with every state the certificates that say where it comes from."""
        self._certifier = certifier

    def use_replay(self, replay: StepReplay) -> None:
        """Make states of those before them, where that takes fewer bytes."""
        self._replay = replay

    def use_shards(self, index: ShardIndex) -> None:
        """Learn the shard files, which are blobs too."""
        assert self._plan is not None
        shards = shard_bytes(index, self._plan.model)
        self._greatest |= shards
        self.use_blobs(shards)

    def use_genesis(self, digests: Mapping[str, str]) -> None:
        """Learn the states that a successor run begins with, which are blobs too."""
        assert self._grid is not None
        for module, digest in digests.items():
            self._greatest[digest] = greatest_state_bytes(self._grid.layout(module), 0)
        self.use_blobs(digests.values())

    def use_blobs(self, hashes: Iterable[str]) -> None:
        """Learn further blobs: those that lie here are announced and served with the others."""
        self._all_blobs = tuple(dict.fromkeys((*self._all_blobs, *hashes)))

    def all_blobs(self) -> tuple[str, ...]:
        """Return the hashes that the run consists of."""
        return self._all_blobs

    def has_blob(self, sha256: str) -> bool:
        """Tell whether a blob is on this disk."""
        return self.blobs.has(sha256)

    def blob(
        self,
        sha256: str,
        what: str = "a blob",
        timeout_s: float = FETCH_TIMEOUT_S,
        max_bytes: int | None = None,
    ) -> Path:
        """Return the file of a blob, fetched if needed.

        Its size is bounded by what the run says of it, or else by `max_bytes`.
        Raises `NetworkError` when nobody can give it in time, naming `what`, and
        `IntegrityError` when all that was given had another hash.
        """
        shared, until_s = self.blobs.shared, time.monotonic() + timeout_s
        try:
            while not self.blobs.has(sha256):
                with nullcontext(True) if shared is None else shared.turn(sha256) as is_my_turn:
                    if is_my_turn and not self.blobs.has(sha256):
                        return self._exchange.fetch(
                            sha256,
                            self._directory.find_blob_holders(sha256),
                            self.blobs,
                            max_bytes=self._greatest.get(sha256, max_bytes or MAX_OTHER_BYTES),
                            timeout_s=timeout_s,
                            mirrors=self._mirrors,
                            on_progress=self._progress(what),
                        )
                if not is_my_turn:
                    if time.monotonic() > until_s:
                        raise NetworkError(
                            f"another peer of this machine has not fetched it in {timeout_s:.0f} s"
                        )
                    time.sleep(TURN_S)
            return self.blobs.path(sha256)
        except DipacoError as error:
            raise type(error)(f"could not fetch {what}: {error}") from None

    def needed_blob(self, sha256: str, what: str) -> Path:
        """Return the file of a blob as `blob` does, for a program that ends without it: the error
        says what to do."""
        try:
            return self.blob(sha256, what)
        except DipacoError as error:
            raise type(error)(f"{error}; {ASK_AGAIN}") from None

    def best_path(self, path: int, sha256: str) -> BestParameters:
        """Fetch the best states of a path and check all but their score.

        Raises `IntegrityError` or `NetworkError`; nothing is kept of what is bad.
        """
        assert self._grid is not None
        prune_partial_files(self._scratch, MAX_SCRATCH_PARTIALS)
        file = self._exchange.fetch(
            sha256,
            self._directory.find_blob_holders(sha256),
            self._scratch,
            max_bytes=greatest_best_path_bytes(self._grid),
            timeout_s=FETCH_TIMEOUT_S,
            on_progress=self._progress(f"the best states of path {path}"),
        )
        try:
            return read_best_parameters(file, self._grid, sha256, path=path)
        finally:
            file.unlink(missing_ok=True)

    def blob_holders(self, sha256: str) -> tuple[str, ...]:
        """Return the peers, other than this one, that serve a blob."""
        return self._directory.find_blob_holders(sha256)

    def state(
        self, wanted: StateReference, holders: Sequence[str], *, is_copy: bool = False
    ) -> ModuleState:
        """Fetch one module state by its digest and check it against the module's shape.

        A copy that is only to be kept for others waits for what this peer needs itself.

        Raises `IntegrityError` or `NetworkError`; nothing is kept of a bad state.
        """
        assert self._grid is not None
        layout = self._grid.layout(wanted.module)
        paths = self._grid.paths_of_module(wanted.module)

        def read(path: Path) -> ModuleState:
            return read_state(path, layout, wanted.digest, module=wanted.module, paths=paths)

        prune_partial_files(self._scratch, MAX_SCRATCH_PARTIALS)
        state = self._shared_state(wanted, read)
        if state is None and self._replay is not None and self._replay.is_near(wanted):
            if self._certifier is not None:
                self._certifier.fetch_chain(wanted, holders)
            state = self._replay.state(wanted, holders)
        if state is None:
            path = self._exchange.fetch(
                wanted.digest,
                tuple(holders),
                self._scratch,
                max_bytes=greatest_state_bytes(layout, len(paths)),
                timeout_s=FETCH_TIMEOUT_S,
                is_copy=is_copy,
                on_progress=self._progress(f"{wanted.module} version {wanted.version}"),
            )
            try:
                state = read(path)
            finally:
                path.unlink(missing_ok=True)
        self._check_plausible(state)
        if self._certifier is not None:
            self._certifier.fetch_chain(state.reference, holders)
        return state

    def _shared_state(
        self, wanted: StateReference, read: Callable[[Path], ModuleState]
    ) -> ModuleState | None:
        """Return a state that another peer of this machine has saved, if it is undamaged."""
        if self.blobs.shared is None:
            return None
        path = self.blobs.shared.path(wanted.digest)
        try:
            return read(path) if path.is_file() else None
        except DipacoError as error:
            logger.warning("state %s here: %s; it is fetched", wanted.digest[:12], error)
            return None

    def _check_plausible(self, state: ModuleState) -> None:
        """Refuse counts that cannot be: what was announced need not be what is inside."""
        assert self._plan is not None
        assert self._grid is not None
        if not plausible_state(state.reference, self._plan, self._grid, self._now()):
            raise IntegrityError(
                f"it says version {state.version} with {state.tokens} tokens behind it, more than "
                "the run can have trained so far"
            )

    def winning_state(
        self,
        module: str,
        view: SwarmView,
        *,
        own: StateReference | None = None,
        stored: Callable[[StateReference], ModuleState | None] = lambda state: None,
    ) -> ModuleState | None:
        """Fetch the announced state of `module` whose certified chain wins over the others and
        over `own`, as trainers choose too (design 4.4).

        What nobody signed is left out. A state that cannot be fetched or is wrong is skipped with
        one log line. None: there is nothing better than `own`. What `stored` has is not fetched.
        Called by readers.
        """
        descent, among = self._certified(module, view)
        for state in reversed(descent.in_order(among)):
            if own is not None and not descent.wins(state, own, among):
                continue
            try:
                return stored(state) or self.state(state, view.holders(state))
            except (IntegrityError, NetworkError) as error:
                logger.warning("state %s of %s: %s", state.digest[:12], module, error)
        return None

    def winning_chain(
        self, module: str, view: SwarmView
    ) -> tuple[StateReference | None, tuple[Certificate, ...]]:
        """Return the announced state that wins, and what certificates there are of it and before
        it, the newest first. For the ledger."""
        descent, among = self._certified(module, view)
        order = descent.in_order(among)
        return (order[-1], descent.book.chain(module, order[-1].digest)) if order else (None, ())

    def _certified(self, module: str, view: SwarmView) -> tuple[Descent, list[StateReference]]:
        """Return the announced states of a module that somebody signed, and their descent."""
        announced = {state.digest: state for state in view.states(module) if state.version}
        # Those that many announce first; among inventions the order must not be their maker's.
        states = sorted(
            announced.values(), key=lambda state: (-len(view.holders(state)), state.digest)
        )[:MAX_READ_STATES]
        descent = self._learn_descent(states, view)
        return descent, [state for state in states if descent.is_certified(state)]

    def _learn_descent(self, states: Sequence[StateReference], view: SwarmView) -> Descent:
        """Ask for the certificates of some states; bounded, however slow their holders are."""
        assert self._certifier is not None
        certifier, deadline = self._certifier, time.monotonic() + CHAINS_LIMIT_S

        def learn(state: StateReference) -> None:
            left_s = deadline - time.monotonic()
            if left_s > 0:
                certifier.fetch_chain(state, view.holders(state), min(left_s, CHAIN_LIMIT_S))

        if states:
            with ThreadPoolExecutor(max_workers=min(CHAINS_AT_ONCE, len(states))) as pool:
                list(pool.map(learn, states))
        book = CertificateBook()
        for state in states:
            book.add_all(certifier.chain(state.module, state.digest))
        gate = certifier.gate
        return Descent(book) if gate is None else Descent(book, gate.weigh)


def core_blobs(plan: RunPlan) -> tuple[str, ...]:
    """Return the hashes that everybody needs, whatever its path."""
    blobs = plan.blobs
    names = (blobs.shards, blobs.base, blobs.tokenizer, blobs.router, blobs.genesis)
    return tuple(name for name in names if name is not None)


def greatest_core_bytes(plan: RunPlan, grid: Grid) -> dict[str, int]:
    """Return what each of the core blobs can have at most, by hash.

    The manifest names them by their hashes alone. What they can be follows from the run's shape,
    with room for what JSON and file headers add.
    """
    blobs, model = plan.blobs, plan.model
    greatest = {
        blobs.shards: 2**16 + 1024 * grid.path_count,
        blobs.base: 2**22 + 4 * path_layout(grid).size,
        blobs.tokenizer: 2**24 + 1024 * model.vocabulary_size,
        # At most two numbers for each feature and path, in eight bytes.
        blobs.router: 2**26 + 16 * (model.hidden_size + 64) * grid.path_count,
    }
    if blobs.genesis is not None:
        greatest[blobs.genesis] = 2**16 + 128 * len(grid.modules())
    return greatest


def shard_bytes(index: ShardIndex, model: ModelConfig) -> dict[str, int]:
    """Return the sizes of all token files, by hash."""
    row_bytes = model.sequence_length * token_dtype(model.vocabulary_size).itemsize
    sizes: dict[str, int] = {}
    for shard in index.paths:
        sizes[shard.train_sha256] = shard.train_sequences * row_bytes
        sizes[shard.validation_sha256] = shard.validation_sequences * row_bytes
    return sizes
