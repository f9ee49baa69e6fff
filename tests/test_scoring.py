"""A peer that answers a score request while it trains, without a network: the parts around it are
stand-ins, what scores is real."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dipaco.dht.manifest import operator_fingerprint
from dipaco.dht.records import Claim, ScoresRecord
from dipaco.dht.score_request import ScoreRequest, sign_score_request, verify_score_request
from dipaco.dht.view import SwarmView
from dipaco.modules.compose import gather_module, load_path
from dipaco.modules.errors import NetworkError
from dipaco.modules.grid import Grid
from dipaco.modules.state import StateReference
from dipaco.modules.transformer import PathModel
from dipaco.peer.scoring.answering import Scoring
from dipaco.peer.scoring.job import ScoreJob
from dipaco.peer.trainer import PathTrainer
from dipaco.routing.batches import BatchStream
from dipaco.routing.document_scores import DocumentScores, RouterDocuments, score_router_documents
from dipaco.routing.run_folder import RunFolder
from support.operators import KEY
from support.tiny_run import make_tiny_run, tiny_documents

ME = "Qm" + "1" * 43 + "A"
OTHER = "Qm" + "1" * 43 + "B"
PATHS = 4
CPU = torch.device("cpu")
AMPLE_S = 100.0


class Swarm:
    """What a peer sees and publishes: the directory, fetcher and publisher of one stand-in."""

    period_s = 0.0

    def __init__(self, run: RunFolder, trained_path: int | None) -> None:
        self.run = run
        self.plan = run.plan()
        self.grid = run.grid(self.plan)
        self.requests: list[Any] = []
        self.records: dict[str, ScoresRecord] = {}
        self.fetched_blobs: list[str] = []
        self.served: tuple[str, ...] = ()
        claims = {}
        if trained_path is not None:
            claims[ME] = Claim(
                peer_id=ME, path=trained_path, state="training", since_s=1.0, round=0
            )
        self.view = SwarmView(now_s=0.0, claims=claims)

    # The directory.

    def score_requests(self, operator: str) -> list[Any]:
        assert operator == operator_fingerprint(KEY)
        return self.requests

    def scores(self, request_id: str) -> tuple[ScoresRecord, ...]:
        return tuple(r for r in self.records.values() if r.request == request_id)

    def publish_scores(self, record: ScoresRecord, life_s: float) -> bool:
        self.records[record.peer_id] = record
        return True

    def withdraw_scores(self, request_id: str) -> bool:
        self.records.pop(ME, None)
        return True

    # The fetcher.

    def blob(self, sha256: str, what: str, **_: Any) -> Path:
        if not self.run.blobs.has(sha256):
            raise NetworkError(f"could not fetch {what}: nobody has it")
        self.fetched_blobs.append(sha256)
        return self.run.blobs.path(sha256)

    def use_blobs(self, hashes: Any) -> None:
        self.served = (*self.served, *hashes)

    def winning_state(self, module: str, view: SwarmView, *, own: StateReference) -> None:
        return None

    # The publisher.

    def announce(self) -> None: ...

    def announce_blobs(self) -> None: ...

    def ask(self, documents: RouterDocuments | bytes, count: int, made_s: float = 50.0) -> str:
        """Let the operator ask; return the request's id."""
        data = documents if isinstance(documents, bytes) else documents.to_bytes()
        request = ScoreRequest(
            run_id=self.plan.run_id,
            documents_sha256=self.run.blobs.add_bytes(data),
            documents=count,
            made_s=made_s,
        )
        self.requests.insert(0, verify_score_request(sign_score_request(request, KEY)))
        return request.request_id


class Peer:
    """A peer with a real trainer on one path of the tiny run."""

    def __init__(self, swarm: Swarm, path: int) -> None:
        self.swarm, self.events = swarm, []
        self.now_s = 100.0
        node: Any = SimpleNamespace(
            me=ME,
            plan=swarm.plan,
            grid=swarm.grid,
            manifest=SimpleNamespace(operator_fingerprint=operator_fingerprint(KEY)),
            folder=swarm.run.path,
            run_folder=swarm.run,
            blobs=swarm.run.blobs,
            fetcher=swarm,
            held=SimpleNamespace(load=lambda module: None),
            clock=SimpleNamespace(now=lambda: self.now_s),
        )
        self.trainer = PathTrainer(swarm.plan, swarm.grid, CPU)
        stream = BatchStream(
            swarm.run.train_tokens(swarm.plan, path), seed=0, path=path, batch_sequences=2
        )
        states = {m: genesis(swarm, m) for m in swarm.grid.modules_of_path(path)}
        self.trainer.start_path(path, states, stream)
        events: Any = SimpleNamespace(emit=lambda kind, **values: self.events.append(values))
        publisher: Any = swarm
        self.scoring = Scoring(node, publisher, self.trainer, events, lambda: None)

    def refresh(self) -> None:
        directory: Any = self.swarm
        self.scoring.publish(directory, 60.0)
        self.scoring.read(directory)

    def turns(self, count: int = 40, slack_s: float = AMPLE_S) -> None:
        """Refresh and work until all that was begun has ended."""
        for _ in range(count):
            self.refresh()
            if self.scoring._fetching is not None:
                self.scoring._fetching.future.exception(60)
            self.scoring.turn(slack_s, 0.01)
            self.now_s += 1.0
        self.refresh()

    def states_of(self, path: int) -> list[str]:
        return [event["state"] for event in self.events if event["path"] == path]


def genesis(swarm: Swarm, module: str) -> Any:
    return swarm.run.genesis_state(swarm.plan, module)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_tiny_run(tmp_path_factory.mktemp("scoring") / "run")


@pytest.fixture(scope="module")
def documents(run: RunFolder) -> RouterDocuments:
    tokenizer = run.tokenizer(run.plan())
    texts = tiny_documents(PATHS, 10, seed=5)
    return RouterDocuments.from_documents(
        [np.array(tokenizer.document_tokens(text)) for text in texts], 32, 8
    )


def expected(run: RunFolder, documents: RouterDocuments, path: int) -> np.ndarray:
    plan = run.plan()
    grid = Grid(plan.model, plan.grid)
    model = PathModel(plan.model)
    modules = grid.modules_of_path(path)
    load_path(model, grid, path, {m: run.genesis_state(plan, m) for m in modules})
    return score_router_documents(model, documents)[0]


def test_all_paths_are_scored_and_training_is_not_touched(
    run: RunFolder, documents: RouterDocuments
) -> None:
    swarm = Swarm(run, trained_path=2)
    peer = Peer(swarm, path=2)
    peer.trainer.inner_step()
    before = {m: gather_module(peer.trainer.model, swarm.grid, m) for m in peer.trainer.modules}
    request = swarm.ask(documents, len(documents), made_s=60.0)
    peer.turns()
    for module, flat in before.items():
        assert torch.equal(flat, gather_module(peer.trainer.model, swarm.grid, module))
    entries = {entry.path: entry for entry in swarm.records[ME].entries}
    assert {path: entry.state for path, entry in entries.items()} == dict.fromkeys(
        range(PATHS), "done"
    )
    # Its own path first, from the committed states, and the bits of one pass.
    assert peer.events[0]["path"] == 2
    for path, entry in entries.items():
        assert entry.sha256 in swarm.served
        data = run.blobs.read(str(entry.sha256))
        scores = DocumentScores.from_bytes(data, len(documents), request=request, path=path)
        scores.check_documents(documents)
        assert np.array_equal(scores.nll, expected(run, documents, path))
        assert scores.states == {
            m: genesis(swarm, m).digest for m in swarm.grid.modules_of_path(path)
        }

    # A new life of the peer remembers, and leaving takes everything back.
    again = Peer(swarm, path=2)
    swarm.records.clear()
    again.refresh()
    again.turns(3)
    assert again.events == []
    assert {entry.state for entry in swarm.records[ME].entries} == {"done"}
    directory: Any = swarm
    again.scoring.withdraw(directory)
    assert swarm.records == {}


def test_what_was_kept_is_believed_only_if_it_is_there(
    run: RunFolder, documents: RouterDocuments
) -> None:
    swarm = Swarm(run, trained_path=0)
    request = swarm.ask(documents, len(documents), made_s=61.0)
    sha256 = run.blobs.add_bytes(b"scores")
    kept = {"0": sha256, "1": "f" * 64, "2": "../../etc/passwd", "99": sha256}
    (run.path / "scores").mkdir(exist_ok=True)
    file = run.path / "scores" / f"{request}.json"
    file.write_text(json.dumps(kept))
    peer = Peer(swarm, path=0)
    assert set(peer.scoring._remembered(request)) == {0}
    file.write_text("[1, 2")
    assert peer.scoring._remembered(request) == {}


def test_it_gives_way_and_stops_when_the_request_ends(
    run: RunFolder, documents: RouterDocuments
) -> None:
    swarm = Swarm(run, trained_path=1)
    peer = Peer(swarm, path=1)
    request = swarm.ask(documents, len(documents), made_s=62.0)
    peer.turns(4, slack_s=0.0)  # There is no time to score anything.
    assert peer.states_of(1) == ["claimed"]
    other = {"path": 1, "state": "scoring", "sha256": None, "since_s": 99.0}
    swarm.records[OTHER] = ScoresRecord.model_validate(
        {"peer_id": OTHER, "request": request, "entries": (other,)}
    )
    peer.turns(1, slack_s=0.0)
    assert peer.states_of(1) == ["claimed", "gave_way"]
    swarm.requests.clear()
    swarm.records.clear()
    peer.turns(2)
    assert peer.scoring._job is None
    assert swarm.records == {}


def test_bad_documents_are_refused_once_and_missing_ones_tried_later(
    run: RunFolder, documents: RouterDocuments
) -> None:
    swarm = Swarm(run, trained_path=1)
    peer = Peer(swarm, path=1)
    swarm.ask(b"nonsense", 5, made_s=63.0)
    peer.turns(5)
    assert peer.states_of(1) == ["claimed", "failed"]
    assert [event["state"] for event in peer.events] == ["claimed", "failed"]
    # A newer request takes its place; its documents are other than it says.
    swarm.ask(documents, len(documents) - 1, made_s=64.0)
    peer.turns(5)
    assert "but the request is for" in peer.events[-1]["reason"]
    missing = ScoreRequest(
        run_id=swarm.plan.run_id, documents_sha256="f" * 64, documents=5, made_s=65.0
    )
    swarm.requests.insert(0, verify_score_request(sign_score_request(missing, KEY)))
    peer.events.clear()
    peer.turns(12)
    assert peer.states_of(1) == ["claimed", "failed"]
    assert "nobody has it" in peer.events[-1]["reason"]
    assert ME not in swarm.records or swarm.records[ME].entries == ()


def test_a_slice_fits_into_the_time_that_there_is(
    run: RunFolder, documents: RouterDocuments
) -> None:
    swarm = Swarm(run, trained_path=0)
    peer = Peer(swarm, path=0)
    job = ScoreJob("a" * 16, 0, documents, peer.trainer.anchors())
    assert not job.score_slice(peer.trainer, 0.0, 1.0)
    assert not job.score_slice(peer.trainer, -5.0, 1.0)
    # A step of 2 sequences takes 1 s: a document takes half of that at most.
    assert job._rows_of_slice(peer.trainer, 4.0, 1.0) == 4
    assert job._rows_of_slice(peer.trainer, 1e3, 1.0) == 16
    assert job._rows_of_slice(peer.trainer, 0.4, 1.0) == 0
    assert job.score_slice(peer.trainer, 4.0, 1.0)
    assert job.rows_done == 4
    job.seconds = 0.016
    # Then whole batches again.
    assert job._rows_of_slice(peer.trainer, 1e3, 0.1) == 12
