"""Having the peers of a live run score the router documents, and taking its newest states.

The operator's process joins the swarm for as long as preparation lasts. It serves the documents,
publishes a signed request, and fetches the scores that peers announce, in any order and from
anybody who has them. Nothing is believed unchecked, the wait is bounded, and preparation scores
what is missing then itself, so no peer can hold up a successor.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dipaco.dht.coverage import whole_scope
from dipaco.dht.manifest import load_or_create_operator_key
from dipaco.dht.records import BlobRecord
from dipaco.dht.score_request import (
    MAX_SCORE_REQUEST_BYTES,
    ScoreRequest,
    SignedScoreRequest,
    sign_score_request,
    verify_score_request,
)
from dipaco.dht.scoring_policy import SCORERS, ScoringBoard, build_board
from dipaco.modules.errors import DipacoError, IntegrityError, NetworkError
from dipaco.modules.files import atomic_write
from dipaco.modules.store import StateStore
from dipaco.peer.node import Node, join_run
from dipaco.routing.document_scores import RouterDocuments, greatest_scores_bytes

from .local_scores import ScoresFolder
from .predecessor import Predecessor, operator_key_file

# Seconds between two looks at what peers announce, and between two lines that say so.
_LOOK_EVERY_S = 3.0
_SAY_EVERY_S = 30.0
# Second scores of the paths are waited for this much of what the first took.
SECOND_SHARE = 0.5
# What is published lives for a few of these.
_RENEW_EVERY_S = 60.0
_LIFE_S = 300.0
_FETCH_TIMEOUT_S = 120.0


class SwarmScores:
    """The live swarm of a predecessor. `open_swarm` makes one."""

    def __init__(
        self,
        node: Node,
        predecessor: Predecessor,
        folder: Path,
        *,
        operator_key: Path,
        wait_s: float,
        say: Callable[[str], None],
        look_every_s: float = _LOOK_EVERY_S,
    ) -> None:
        self._node = node
        self._predecessor = predecessor
        self._folder = folder
        self._operator_key = operator_key
        self._wait_s = wait_s
        self._say = say
        self._look_every_s = look_every_s
        self._signed: SignedScoreRequest | None = None
        self._documents_sha256 = ""
        self._renewed_at = float("-inf")
        self._refused: set[tuple[str, str]] = set()

    def request(self, documents: RouterDocuments) -> str:
        """Return the id of the score request for these documents, the same after a restart."""
        data = documents.to_bytes()
        self._documents_sha256 = self._node.blobs.add_bytes(data)
        file = self._folder / "score-request.json"
        self._signed = self._kept_request(file)
        if self._signed is None:
            request = ScoreRequest(
                run_id=self._node.run_id,
                documents_sha256=self._documents_sha256,
                documents=len(documents),
                made_s=round(self._node.clock.now(), 3),
            )
            key = load_or_create_operator_key(self._operator_key)
            envelope = sign_score_request(request, key)
            atomic_write(file, envelope)
            self._signed = verify_score_request(envelope)
        return self._signed.request_id

    def _kept_request(self, file: Path) -> SignedScoreRequest | None:
        """Return the request that an earlier call published for the same documents."""
        if not file.is_file() or file.stat().st_size > MAX_SCORE_REQUEST_BYTES:
            return None
        try:
            signed = verify_score_request(
                file.read_bytes(),
                run_id=self._node.run_id,
                operator_fingerprint=self._predecessor.manifest.operator_fingerprint,
            )
        except DipacoError:
            return None
        same = signed.request.documents_sha256 == self._documents_sha256
        return signed if same else None

    def gather(self, folder: ScoresFolder, paths: Sequence[int]) -> None:
        """Ask the peers for the scores of `paths` and wait until they are in `folder`, for `settle`
        to check, at most the time that was given.

        What is wrong in itself is refused with one line, and that hash is not asked for again.
        """
        grid, began = self._node.grid, time.monotonic()
        deadline = began + self._wait_s
        modules = {path: grid.modules_of_path(path) for path in paths}
        missing = [
            path
            for path in paths
            if folder.load(path, modules[path]) is None and not folder.opinions(path, modules[path])
        ]
        have, said_at, said_have = len(paths) - len(missing), float("-inf"), -1
        board = ScoringBoard(grid.path_count)
        while missing and time.monotonic() < deadline:
            self._renew()
            board = self._look(board)
            missing = [path for path in missing if not self._fetch(folder, board, path)]
            have = len(paths) - len(missing)
            if missing and (have > said_have or time.monotonic() - said_at >= _SAY_EVERY_S):
                left_s = max(0.0, deadline - time.monotonic())
                self._say(
                    f"scores: have {have}, need {len(paths)} scores; in progress: "
                    f"{_listed(set(board.scoring()) & set(missing))}; {left_s:.0f} s left to wait"
                )
                said_at, said_have = time.monotonic(), have
            if missing:
                threading.Event().wait(
                    min(self._look_every_s, max(0.0, deadline - time.monotonic()))
                )
        until = min(deadline, time.monotonic() + SECOND_SHARE * (time.monotonic() - began))
        self._compare(folder, [path for path in paths if path not in missing], until)
        if missing:
            self._say(
                f"scores: have {have}, need {len(paths)} scores after {self._wait_s:.0f} s; paths "
                f"{_listed(missing)} are scored here"
            )
        elif paths:
            self._say(f"scores: have {have}, need {len(paths)} scores: complete")

    def _compare(self, folder: ScoresFolder, paths: Sequence[int], until: float) -> None:
        """Fetch what second peers have scored, as far as that is there in time."""
        grid, board = self._node.grid, ScoringBoard(self._node.grid.path_count)
        alone = [p for p in paths if 0 < len(folder.opinions(p, grid.modules_of_path(p))) < SCORERS]
        while alone:
            self._renew()
            board = self._look(board)
            alone = [path for path in alone if not self._fetch(folder, board, path)]
            left_s = until - time.monotonic()
            if left_s <= 0:
                return
            if alone:
                threading.Event().wait(min(self._look_every_s, left_s))

    def _renew(self) -> None:
        """Publish the request and the documents, again before they expire."""
        assert self._signed is not None
        if time.monotonic() - self._renewed_at < _RENEW_EVERY_S:
            return
        node, sha256 = self._node, self._documents_sha256
        size = node.blobs.path(sha256).stat().st_size
        stored = node.directory.publish_blob(
            BlobRecord(peer_id=node.me, sha256=sha256, bytes=size), _LIFE_S
        )
        if node.directory.store_score_request(self._signed.envelope, _LIFE_S) and stored:
            self._renewed_at = time.monotonic()

    def _look(self, board: ScoringBoard) -> ScoringBoard:
        """Read what peers announce; a look that fails is no reason to give up."""
        assert self._signed is not None
        try:
            return build_board(
                self._signed.request,
                self._node.grid.path_count,
                self._node.directory.scores(self._signed.request_id),
                self._node.clock.now(),
            )
        except NetworkError as error:
            self._say(f"scores: {error}; looking again")
            return board

    def _fetch(self, folder: ScoresFolder, board: ScoringBoard, path: int) -> bool:
        """Fetch the scores of a path from one of those who announce them, and of whom there are
        none yet; return whether they arrived and are right."""
        node = self._node
        heard = folder.opinions(path, node.grid.modules_of_path(path))
        for sha256, peer in board.done().get(path, ()):
            if (sha256, peer) in self._refused or peer in heard:
                continue
            try:
                file = node.exchange.fetch(
                    sha256,
                    (peer,),
                    node.blobs,
                    max_bytes=greatest_scores_bytes(len(folder.documents)),
                    timeout_s=_FETCH_TIMEOUT_S,
                )
            except NetworkError as error:
                self._say(f"scores of path {path} from {peer[-8:]}: {error}")
                continue
            except IntegrityError as error:
                self._refuse(sha256, peer, path, error)
                continue
            try:
                data = file.read_bytes()
                folder.add(folder.checked(data, path, node.grid.modules_of_path(path)), peer)
                return True
            except IntegrityError as error:
                self._refuse(sha256, peer, path, error)
            finally:
                node.blobs.remove(sha256)
        return False

    def _refuse(self, sha256: str, peer: str, path: int, error: IntegrityError) -> None:
        self._refused.add((sha256, peer))
        self._say(f"scores of path {path} from {peer[-8:]} are refused: {error}")

    def states(self) -> StateStore:
        """Fetch the state that wins of every module, once, and return the store that has them.

        A preparation that was stopped goes on with the same states. A module that nobody serves
        is taken from the old run's folder; if that has none, the store has none either.
        """
        node, marker = self._node, self._folder / "states-taken"
        inputs = hashlib.sha256(self._predecessor.plan.canonical_json()).hexdigest()
        if marker.is_file() and marker.read_text().startswith(inputs):
            self._say(
                f"states: those of the swarm as they were {_age(marker)} ago; remove {marker} to "
                f"take newer ones"
            )
            return node.states
        view = node.directory.read_view(
            node.plan, node.grid, node.clock.now(), whole_scope(node.grid)
        )
        modules, said_at, fetched = node.grid.modules(), time.monotonic(), 0
        for number, module in enumerate(modules, 1):
            held = node.states.load_latest(module, node.grid.layout(module))
            own = held.reference if held is not None else None
            state = node.fetcher.winning_state(module, view, own=own)
            if state is not None:
                node.states.save(state)
                fetched += 1
            elif held is None:
                self._take_own(module)
            if time.monotonic() - said_at > _SAY_EVERY_S:
                said_at = time.monotonic()
                self._say(f"states: have {number}, need {len(modules)} modules")
        self._say(f"states: {fetched} of {len(modules)} modules were fetched from the swarm")
        atomic_write(marker, inputs.encode())
        return node.states

    def _take_own(self, module: str) -> None:
        """Take a module that nobody serves from the old run's folder. A bootstrap node may be
        writing there, so it is asked once, and not again by a preparation that goes on."""
        state = self._predecessor.folder.states.load_latest(module, self._node.grid.layout(module))
        if state is not None:
            self._node.states.save(state)


@contextmanager
def open_swarm(
    predecessor: Predecessor,
    out: Path,
    *,
    initial_peers: tuple[str, ...],
    operator_key: Path | None,
    wait_s: float,
    say: Callable[[str], None],
    host_maddrs: tuple[str, ...] = (),
) -> Iterator[SwarmScores]:
    """Join the swarm of `predecessor`, which then takes its states from there.

    The process is a member that others can fetch from, and holds and trains nothing. Raises the
    `DipacoError` of the step of joining that failed.
    """
    folder = out / "work" / "swarm"
    key_file = operator_key_file(predecessor, operator_key, out)
    node = join_run(
        initial_peers=initial_peers,
        run=predecessor.plan.run_id,
        cache_folder=folder,
        host_maddrs=host_maddrs,
        say=say,
    )
    try:
        swarm = SwarmScores(
            node, predecessor, folder, operator_key=key_file, wait_s=wait_s, say=say
        )
        predecessor.swarm_states = swarm.states
        yield swarm
    finally:
        node.close()
        node.identity.release()


def _listed(paths: Sequence[int] | set[int]) -> str:
    shown = ", ".join(str(path) for path in sorted(paths)[:8])
    return (shown or "none") + (" ..." if len(paths) > 8 else "")


def _age(file: Path) -> str:
    seconds = max(0.0, time.time() - file.stat().st_mtime)
    return f"{seconds / 60:.0f} minutes"
