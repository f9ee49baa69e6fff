"""A reader of a swarm, for evaluation and generation, which only fetches."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from pathlib import Path

from dipaco.base.errors import IntegrityError, NetworkError, StorageError
from dipaco.modules.layout import layout_of
from dipaco.modules.state import ModuleState, read_state
from dipaco.peer.keeping.path_files import PathFiles
from dipaco.peer.keeping.winning_states import WinningStates
from dipaco.peer.node.entrance import Listening
from dipaco.peer.node.join_run import join_run
from dipaco.peer.node.node import Node
from dipaco.protocol.chain.steps import Head, Step
from dipaco.protocol.coverage import whole_scope
from dipaco.protocol.manifest import SignedManifest, newest_run
from dipaco.protocol.view import SwarmView

logger = logging.getLogger(__name__)


class SwarmReader:
    """Fetches blobs and the states that win, and serves nobody. A context manager.

    Files go to `cache_folder`, or to a temporary folder that is removed at the end. With
    `keep_states` the states that were fetched stay there too, and are not fetched again.
    """

    def __init__(
        self,
        initial_peers: tuple[str, ...],
        *,
        run: str | None = None,
        cache_folder: Path | None = None,
        keep_states: bool = False,
    ) -> None:
        self._keeps_states = keep_states
        self._temporary: str | None = None
        if cache_folder is None:
            self._temporary = tempfile.mkdtemp(prefix="dipaco-reader-")
            cache_folder = Path(self._temporary)
        try:
            self._node: Node = join_run(
                initial_peers=initial_peers,
                run=run,
                cache_folder=cache_folder,
                listening=Listening(client_mode=True),
            )
        except BaseException:
            self._remove_temporary()
            raise
        self._use(self._node)
        self._view: SwarmView | None = None

    def _use(self, node: Node) -> None:
        self._winning = WinningStates(node, PathFiles(node))
        self.manifest, self.gate = node.manifest, node.gate
        self.plan, self.grid, self.folder = node.plan, node.grid, node.folder
        """The verified plan of the run, its grid, and a folder that `RunFolder` can open."""

    def __enter__(self) -> SwarmReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the swarm and remove temporary files."""
        self._node.close()
        self._remove_temporary()

    def _remove_temporary(self) -> None:
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                shutil.rmtree(self._temporary)

    def view(self) -> SwarmView:
        """Read the swarm once and keep the answer, so that all modules are of one moment."""
        if self._view is None:
            node = self._node
            self._view = node.directory.read_view(
                node.plan, node.grid, node.clock.now(), whole_scope(node.grid)
            )
        return self._view

    def successor(self) -> SignedManifest | None:
        """Return the newest run that this one is continued as. Raises `NetworkError`."""
        newest = newest_run(self.manifest, self._node.directory.list_manifests())
        return newest if newest.plan.run_id != self.plan.run_id else None

    def follow(self, manifest: SignedManifest) -> None:
        """Read the run from now on that this one is continued as."""
        self._node = self._node.open_successor(manifest)
        self._node.serve_run()
        self._use(self._node)
        self.look_again()

    def look_again(self) -> None:
        """Forget the view of the swarm: the next question reads it anew."""
        self._view = None

    def _stored(self, wanted: Head) -> ModuleState | None:
        """Return a state that was fetched before, if it is whole."""
        file = self._node.states.find(wanted.digest) if self._keeps_states else None
        if file is None:
            return None
        try:
            layout = layout_of(self.grid, wanted.module)
            return read_state(file, layout, wanted.digest, module=wanted.module)
        except (IntegrityError, StorageError) as error:
            logger.warning("state %s on disk is fetched again: %s", wanted.digest[:12], error)
            return None

    def fetch_blob(self, sha256: str) -> Path:
        """Fetch a blob and return its file. Raises `NetworkError` when nobody has it."""
        self._node.load_shard_index()
        return self._node.fetcher.needed_blob(sha256, "a blob")

    def chain(self, module: str, view: SwarmView) -> tuple[Step, ...]:
        """Return the steps of the heaviest chain of a module that anybody in a view serves, oldest
        first."""
        book = self._winning.chains(module, view)
        return book.steps_between(book.genesis(module), book.tips(module)[0].name)

    def paths_of_last_step(self, module: str) -> frozenset[int]:
        """Return the paths that have rows in the step to the state that was fetched last."""
        return self._winning.paths_of_last_step(module)

    def refuse(self, state: ModuleState) -> None:
        """Never return the last fetched state again, nor any that stands on it."""
        self._winning.refuse(state.module)
        self._node.states.kept.remove(state.digest)

    def winning_state(self, module: str) -> ModuleState | None:
        """Fetch the state of a module whose chain is the heaviest; None when there is none yet.

        Raises `NetworkError` when states are announced and none can be had.
        """
        self._node.load_shard_index()
        view = self.view()
        state = self._winning.state(module, view, stored=self._stored)
        if state is not None and self._keeps_states:
            self._node.states.save(state)
        holders = sum(holding.head.version > 0 for holding in view.holdings.get(module, ()))
        if state is None and holders:
            raise NetworkError(
                f"{module} has {holders} announced holders, but none of them serves a correct "
                "state; try again in a minute"
            )
        return state
