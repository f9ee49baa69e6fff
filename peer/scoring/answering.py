"""Answering the operator's score requests while training (DiPaCo section 2.4.2, design 4.8).

The publisher's thread renews what this peer says of a request and reads what the others say;
the thread that trains decides by the pure functions of `dipaco.dht.scoring_policy`, and scores
one path at a time. Finished scores are blobs of the run, remembered in `scores/` of its folder, so
neither a restart nor a second look at the request repeats them.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from dipaco.dht.directory import Directory
from dipaco.dht.records import MAX_SCORE_ENTRIES, ScoreEntry, ScoresRecord
from dipaco.dht.repetition import RecentFailures
from dipaco.dht.score_request import SignedScoreRequest
from dipaco.dht.scoring_policy import ScoringBoard, build_board, keeps_scoring, path_to_score
from dipaco.modules.blobs import is_sha256
from dipaco.modules.errors import DipacoError, StorageError
from dipaco.modules.files import atomic_write
from dipaco.modules.state import ModuleState
from dipaco.peer.node import Node
from dipaco.peer.publisher import Publisher
from dipaco.peer.reporting.events import EventLog
from dipaco.peer.trainer import PathTrainer
from dipaco.routing.document_scores import RouterDocuments

from .job import DocumentsError, ScoreJob, fetch_documents, fetch_states, reason_of

logger = logging.getLogger("dipaco.peer.scoring.answering")

# A path that could not be scored here is left to others, and tried again after this time.
RETRY_AFTER_S = 20.0
# Periods that a peer waits for the one before it: time to claim, and to be seen.
PATIENCE_PERIODS = 2.5


@dataclass
class _Answer:
    """What this peer does about one request. Its entries are guarded by the lock of `Scoring`."""

    signed: SignedScoreRequest
    entries: dict[int, ScoreEntry]
    documents: RouterDocuments | None = None
    refused: bool = False


@dataclass
class _Fetching:
    """What a path needs, on its way here. No states: this peer trains the path."""

    request_id: str
    path: int
    future: Future[tuple[RouterDocuments, dict[str, ModuleState] | None]]


class Scoring:
    """An annex of the publisher; `turn` is called by the session, between two inner steps."""

    def __init__(
        self,
        node: Node,
        publisher: Publisher,
        trainer: PathTrainer,
        events: EventLog,
        wake: Callable[[], None],
    ) -> None:
        self._node = node
        self._publisher = publisher
        self._trainer = trainer
        # Not the session's: a long fetch must not keep an outer round waiting.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scoring")
        self._events = events
        self._wake = wake
        self._lock = threading.Lock()
        self._answer: _Answer | None = None
        self._board: ScoringBoard | None = None
        self._published: str | None = None
        self._fetching: _Fetching | None = None
        self._job: ScoreJob | None = None
        self._open_since: dict[int, float] = {}
        self._idle_since = time.monotonic()
        self._failed = RecentFailures[int](RETRY_AFTER_S)

    # -- on the publisher's thread

    def publish(self, directory: Directory, life_s: float) -> None:
        """Renew this peer's claim and scores."""
        with self._lock:
            answer = self._answer
            entries = tuple(answer.entries.values()) if answer is not None else ()
        request_id = answer.signed.request_id if answer is not None and entries else None
        if self._published not in (None, request_id):
            directory.withdraw_scores(str(self._published))
        self._published = request_id
        if request_id is not None:
            # What is scored at the moment first, should there be more than a record holds.
            ordered = sorted(entries, key=lambda entry: (entry.state == "done", entry.path))
            directory.publish_scores(
                ScoresRecord(
                    peer_id=self._node.me,
                    request=request_id,
                    entries=tuple(ordered[:MAX_SCORE_ENTRIES]),
                ),
                life_s,
            )

    def read(self, directory: Directory) -> None:
        """Look for the newest request of the run's operator, and who answers it."""
        requests = directory.score_requests(self._node.manifest.operator_fingerprint)
        signed = requests[0] if requests else None
        with self._lock:
            answer = self._answer
        if signed is None:
            answer = None
        elif answer is None or answer.signed.request_id != signed.request_id:
            answer = _Answer(signed, self._remembered(signed.request_id))
        board = None
        if answer is not None:
            board = build_board(
                answer.signed.request,
                self._node.grid.path_count,
                directory.scores(answer.signed.request_id),
                self._node.clock.now(),
            )
        with self._lock:
            self._answer, self._board = answer, board
        if answer is not None:
            self._wake()

    def withdraw(self, directory: Directory) -> None:
        """Withdraw claim and scores: nobody serves them when this peer has left."""
        if self._published is not None:
            directory.withdraw_scores(self._published)
            self._published = None

    # -- on the thread that trains

    def turn(self, slack_s: float, step_s: float) -> bool:
        """Do what is next; return whether a slice was scored.

        `slack_s` is the time that the next inner step or boundary can wait, `step_s` what an
        inner step takes.
        """
        with self._lock:
            answer, board = self._answer, self._board
        if answer is None or board is None or answer.refused:
            self._drop("the request has ended")
            return False
        now = time.monotonic()
        self._open_since = {path: self._open_since.get(path, now) for path in board.open_paths()}
        current = self._job or self._fetching
        if current is not None and current.request_id != answer.signed.request_id:
            self._drop("there is a newer request")
        elif current is not None and not keeps_scoring(board, self._node.me, current.path):
            self._forget(answer, current.path, "gave_way", "another peer scores it, or has")
        if self._job is None and self._fetching is None:
            self._choose(answer, board, now)
        self._take_fetched(answer)
        return self._slice(answer, slack_s, step_s)

    def pause(self) -> None:
        """Leave what is being scored to others: this peer has no path for a while."""
        with self._lock:
            answer = self._answer
        current = self._job or self._fetching
        if answer is not None and current is not None:
            self._forget(answer, current.path, "gave_way", "this peer pauses")

    def close(self) -> None:
        """Begin nothing more; called when the session ends."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _choose(self, answer: _Answer, board: ScoringBoard, now: float) -> None:
        if len(answer.entries) >= MAX_SCORE_ENTRIES:
            return
        path = path_to_score(
            board,
            self._publisher.view,
            self._node.me,
            open_s={path: now - since for path, since in self._open_since.items()},
            idle_s=now - self._idle_since,
            patience_s=PATIENCE_PERIODS * self._publisher.period_s,
            exclude=self._failed.keys() | answer.entries.keys(),
        )
        if path is None:
            return
        entry = ScoreEntry(path=path, state="scoring", sha256=None, since_s=self._node.clock.now())
        with self._lock:
            answer.entries[path] = entry
        self._publisher.announce()
        self._emit(answer, path, "claimed")
        own = path == self._trainer.path
        self._fetching = _Fetching(
            answer.signed.request_id, path, self._executor.submit(self._fetch, answer, path, own)
        )
        self._fetching.future.add_done_callback(lambda _: self._wake())

    def _fetch(
        self, answer: _Answer, path: int, own: bool
    ) -> tuple[RouterDocuments, dict[str, ModuleState] | None]:
        """In the background."""
        documents = answer.documents or fetch_documents(self._node, answer.signed.request)
        return documents, None if own else fetch_states(self._node, self._publisher, path)

    def _take_fetched(self, answer: _Answer) -> None:
        fetching = self._fetching
        if fetching is None or not fetching.future.done():
            return
        self._fetching = None
        try:
            answer.documents, states = fetching.future.result()
        except DocumentsError as error:
            logger.warning("score request %s: %s", answer.signed.request_id, error)
            answer.refused = True
            self._forget(answer, fetching.path, "failed", reason_of(error))
            return
        except Exception as error:
            self._fail(answer, fetching.path, error)
            return
        if states is None and self._trainer.path != fetching.path:
            self._forget(answer, fetching.path, "gave_way", "this peer has moved to another path")
            return
        if states is None:
            states = self._trainer.anchors()
        # The documents may be scored with other paths by others, who ask for them.
        self._node.fetcher.use_blobs((answer.signed.request.documents_sha256,))
        self._publisher.announce_blobs()
        self._job = ScoreJob(answer.signed.request_id, fetching.path, answer.documents, states)

    def _slice(self, answer: _Answer, slack_s: float, step_s: float) -> bool:
        job = self._job
        if job is None:
            return False
        try:
            scored = job.score_slice(self._trainer, slack_s, step_s)
            if job.finished:
                self._finish(answer, job)
        except DipacoError as error:
            self._job = None
            self._fail(answer, job.path, error)
            return False
        return scored

    def _finish(self, answer: _Answer, job: ScoreJob) -> None:
        sha256 = self._node.blobs.add_bytes(job.scores().to_bytes())
        entry = ScoreEntry(
            path=job.path, state="done", sha256=sha256, since_s=self._node.clock.now()
        )
        self._job = None
        self._idle_since = time.monotonic()
        with self._lock:
            answer.entries[job.path] = entry
        self._remember(answer)
        self._node.fetcher.use_blobs((sha256,))
        self._publisher.announce_blobs()
        self._emit(answer, job.path, "done", seconds=round(job.seconds, 3), sha256=sha256)

    def _fail(self, answer: _Answer, path: int, error: Exception) -> None:
        logger.warning("path %d could not be scored: %s", path, reason_of(error))
        self._failed.add(path)
        self._forget(answer, path, "failed", reason_of(error))

    def _forget(self, answer: _Answer, path: int, state: str, reason: str) -> None:
        """Give back the claim on a path."""
        self._job, self._fetching = None, None
        self._idle_since = time.monotonic()
        with self._lock:
            answer.entries.pop(path, None)
        self._publisher.announce()
        self._emit(answer, path, state, reason=reason)

    def _drop(self, reason: str) -> None:
        """Stop scoring: there is nobody to tell."""
        current = self._job or self._fetching
        if current is None:
            return
        logger.info("path %d is not scored any more: %s", current.path, reason)
        self._job, self._fetching = None, None
        self._idle_since = time.monotonic()

    def _emit(
        self,
        answer: _Answer,
        path: int,
        state: str,
        *,
        reason: str = "",
        seconds: float = 0.0,
        sha256: str | None = None,
    ) -> None:
        self._events.emit(
            "score",
            request=answer.signed.request_id,
            path=path,
            state=state,
            documents=answer.signed.request.documents,
            reason=reason,
            seconds=seconds,
            sha256=sha256,
        )

    # -- on disk

    def _remember(self, answer: _Answer) -> None:
        done = {
            str(path): entry.sha256
            for path, entry in sorted(answer.entries.items())
            if entry.state == "done"
        }
        file = self._node.folder / "scores" / f"{answer.signed.request_id}.json"
        try:
            atomic_write(file, [json.dumps(done, indent=1).encode()])
        except StorageError as error:
            logger.warning("the scores are not kept over a restart: %s", error)

    def _remembered(self, request_id: str) -> dict[int, ScoreEntry]:
        """Return the scores that an earlier process of this peer finished and that are here."""
        file = self._node.folder / "scores" / f"{request_id}.json"
        try:
            found = {
                int(path): str(sha256) for path, sha256 in json.loads(file.read_bytes()).items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError) as error:
            logger.warning("%s is not used: %s", file, error)
            return {}
        kept = {
            path: sha256
            for path, sha256 in found.items()
            if path in range(self._node.grid.path_count)
            and is_sha256(sha256)
            and self._node.blobs.verify(sha256)
        }
        self._node.fetcher.use_blobs(kept.values())
        now = self._node.clock.now()
        return {
            path: ScoreEntry(path=path, state="done", sha256=sha256, since_s=now)
            for path, sha256 in kept.items()
        }
