"""Scoring the operator's router documents with one path, a slice at a time.

What is needed (documents, and the states of a path that is not trained here) is fetched in the
background; the slices run on the thread that trains, between inner steps, from a snapshot of
committed states, so training goes on and no boundary is missed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
from dipaco.dht.coverage import scope_of
from dipaco.dht.score_request import ScoreRequest
from dipaco.modules.errors import DipacoError, IntegrityError, NetworkError
from dipaco.modules.state import ModuleState, StateReference
from dipaco.peer.node import Node
from dipaco.peer.path_files import PathFiles
from dipaco.peer.publisher import Publisher
from dipaco.peer.trainer import PathTrainer
from dipaco.routing.document_scores import (
    SCORING_BATCH,
    DocumentScores,
    RouterDocuments,
    score_router_documents,
)

# Rows a second that are assumed before the first slice was measured, if no step was.
FIRST_ROWS_PER_S = 16.0
SHORTEST_SLICE_S = 0.1
LONGEST_SLICE_S = 2.0
# The part of the time until the next boundary to use: a slice may take longer than foreseen.
SHARE_OF_SLACK = 0.5


class DocumentsError(IntegrityError):
    """Router documents that this run's paths cannot score."""


def fetch_documents(node: Node, request: ScoreRequest) -> RouterDocuments:
    """Return the router documents of a request, fetched if needed. Called in the background.

    Raises `NetworkError` when nobody serves them, and `DocumentsError` when they are not what was
    asked for or do not fit the model.
    """
    model = node.plan.model
    # Rows as long as the model takes, in four bytes a token, and a header.
    greatest_bytes = 4 * request.documents * model.sequence_length + 2**21
    path = node.fetcher.blob(
        request.documents_sha256, "the router documents", max_bytes=greatest_bytes
    )
    try:
        documents = RouterDocuments.from_bytes(path.read_bytes(), model.vocabulary_size)
    except IntegrityError as error:
        raise DocumentsError(str(error)) from None
    if len(documents) != request.documents or documents.tokens.shape[1] > model.sequence_length:
        raise DocumentsError(
            f"the router documents are {documents.tokens.shape}, but the request is for "
            f"{request.documents} of at most {model.sequence_length} tokens"
        )
    return documents


def fetch_states(node: Node, publisher: Publisher, path: int) -> dict[str, ModuleState]:
    """Return the states that win of the modules of a path. Called in the background.

    Raises `NetworkError` when a state is announced and nobody serves it.
    """
    files, modules = PathFiles(node), node.grid.modules_of_path(path)
    view = publisher.view
    if not all(map(view.covers_module, modules)):
        scope = scope_of(modules, (), node.grid)
        view = node.directory.read_view(node.plan, node.grid, node.clock.now(), scope)
    states = {}
    for module in modules:
        own = node.held.load(module)
        known = own.reference if own is not None else StateReference.untrained(module)
        found = node.fetcher.winning_state(module, view, own=known)
        if found is own is None and any(state.version for state in view.states(module)):
            raise NetworkError(
                f"states of {module} are announced but nobody serves one that is certified"
            )
        states[module] = found or own or files.genesis_state(module)
    return states


class ScoreJob:
    """The scores of one path so far. Used on the thread that trains."""

    def __init__(
        self,
        request_id: str,
        path: int,
        documents: RouterDocuments,
        states: Mapping[str, ModuleState],
    ) -> None:
        self.path = path
        self.request_id = request_id
        self._documents = documents
        self._states = dict(states)
        self._nll = np.zeros(len(documents), dtype=np.float64)
        self._tokens = np.zeros(len(documents), dtype=np.int64)
        self.rows_done = 0
        self.seconds = 0.0

    @property
    def rows(self) -> int:
        """Documents in all."""
        return len(self._documents)

    @property
    def finished(self) -> bool:
        """Whether every document is scored."""
        return self.rows_done == self.rows

    def score_slice(self, trainer: PathTrainer, slack_s: float, step_s: float) -> bool:
        """Score as many documents as take about an inner step, and fit well into `slack_s`.

        Whole batches, which give the bits of one pass, unless not even one fits. Returns whether
        anything was scored. Raises `ConfigurationError` when a row does not fit in memory.
        """
        rows = self._rows_of_slice(trainer, slack_s, step_s)
        if rows == 0:
            return False
        started = time.perf_counter()
        part = slice(self.rows_done, self.rows_done + rows)
        with trainer.model_of(self.path, self._states) as model:
            self._nll[part], self._tokens[part] = score_router_documents(
                model, self._documents, start=part.start, stop=part.stop, device=trainer.device
            )
        self.rows_done = part.stop
        self.seconds += time.perf_counter() - started
        return True

    def _rows_of_slice(self, trainer: PathTrainer, slack_s: float, step_s: float) -> int:
        row_s = self._row_s(trainer, step_s)
        affordable = int(SHARE_OF_SLACK * slack_s / row_s) if slack_s > 0 else 0
        wanted = int(min(max(step_s, SHORTEST_SLICE_S), LONGEST_SLICE_S) / row_s)
        wanted = max(SCORING_BATCH, wanted - wanted % SCORING_BATCH)
        # A slice that could not be a whole batch is made up by the next one.
        wanted -= self.rows_done % SCORING_BATCH
        return max(0, min(wanted, affordable, self.rows - self.rows_done))

    def _row_s(self, trainer: PathTrainer, step_s: float) -> float:
        """Return the seconds that a document takes: measured, or those of training a sequence."""
        if self.rows_done:
            return max(self.seconds / self.rows_done, 1e-6)
        if step_s > 0:
            return step_s / trainer.plan.inner.batch_sequences
        return 1.0 / FIRST_ROWS_PER_S

    def scores(self) -> DocumentScores:
        """Return the finished scores. Raises IntegrityError if they are not finite numbers."""
        assert self.finished
        return DocumentScores(
            request=self.request_id,
            path=self.path,
            states={module: state.digest for module, state in self._states.items()},
            nll=self._nll,
            tokens=self._tokens,
        )


def reason_of(error: BaseException) -> str:
    """Return one line about a failure."""
    return str(error) if isinstance(error, DipacoError) else f"{type(error).__name__}: {error}"
