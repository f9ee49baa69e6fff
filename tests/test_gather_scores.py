"""What the operator's process believes of a swarm that scores for it. The peers are faked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dipaco.bootstrap import local_scores
from dipaco.bootstrap.gather_scores import SwarmScores
from dipaco.bootstrap.local_scores import (
    ScoresFolder,
    disagreement,
    local_request,
    parted_documents,
    score_paths,
    settle,
)
from dipaco.bootstrap.predecessor import Predecessor, open_predecessor
from dipaco.dht.records import ScoreEntry, ScoresRecord
from dipaco.dht.score_request import verify_score_request
from dipaco.modules.errors import IntegrityError, NetworkError
from dipaco.peer.exchange.clock import Clock
from dipaco.routing.document_scores import DocumentScores, RouterDocuments
from dipaco.routing.run_folder import RunFolder
from support.tiny_run import TINY_PREFIX_TOKENS, make_tiny_run, tiny_documents

OPERATOR, ALICE, BOB = (f"Qm{name:1>44}" for name in ("operatr", "aLice", "bob"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_tiny_run(tmp_path_factory.mktemp("run"), documents_per_path=8)


class Peers:
    """The network as `SwarmScores` sees it: what is announced, and what a fetch brings."""

    def __init__(self, run: RunFolder, folder: Path) -> None:
        self.predecessor: Predecessor = open_predecessor(run.path, allow_genesis=True)
        plan, grid = self.predecessor.plan, self.predecessor.grid
        tokenizer = run.tokenizer(plan)
        self.documents = RouterDocuments.from_documents(
            [np.array(tokenizer.document_tokens(text)) for text in tiny_documents(4, 5, seed=5)],
            plan.model.sequence_length,
            TINY_PREFIX_TOKENS,
        )
        self.grid = grid
        self.announced: dict[str, list[ScoreEntry]] = {ALICE: [], BOB: []}
        self.served: dict[tuple[str, str], bytes] = {}
        self.asked: list[tuple[str, str]] = []
        self.requests: list[bytes] = []
        self.published: list[str] = []
        self.clock = Clock()
        self.said: list[str] = []
        self.folder = folder
        own = RunFolder(folder / "node")
        self.node: Any = SimpleNamespace(
            me=OPERATOR,
            run_id=plan.run_id,
            plan=plan,
            grid=grid,
            clock=self.clock,
            blobs=own.blobs,
            directory=SimpleNamespace(
                publish_blob=self._publish_blob,
                store_score_request=self._store_request,
                scores=self._scores,
            ),
            exchange=SimpleNamespace(fetch=self._fetch),
        )
        self.swarm = self.open()

    def open(self, wait_s: float = 5.0) -> SwarmScores:
        return SwarmScores(
            self.node, self.predecessor, self.folder, wait_s=wait_s, say=self.said.append,
            operator_key=self.predecessor.path / "operator.pem", look_every_s=0.01,
        )  # fmt: skip

    def scores(self, of_path: int, **changes: Any) -> bytes:
        values: dict[str, Any] = {
            "request": self.swarm.request(self.documents),
            "path": of_path,
            "states": dict.fromkeys(self.grid.modules_of_path(of_path), "a" * 64),
            "nll": self.documents.targets * (of_path + 1.0),
            "tokens": self.documents.targets,
        }
        return DocumentScores(**{**values, **changes}).to_bytes()

    def announce(self, peer: str, path: int, data: bytes | None, sha256: str | None = None) -> None:
        """`data` None: the peer has only begun."""
        if data is not None:
            sha256 = sha256 or self.node.blobs.add_bytes(data)
            self.node.blobs.remove(sha256)
            self.served[peer, sha256] = data
        self.announced[peer].append(
            ScoreEntry(
                path=path,
                state="scoring" if data is None else "done",
                sha256=sha256,
                since_s=self.clock.now(),
            )
        )

    def gather(self, swarm: SwarmScores | None = None) -> ScoresFolder:
        swarm = swarm or self.swarm
        folder = ScoresFolder(self.folder / "scores", swarm.request(self.documents), self.documents)
        swarm.gather(folder, range(4))
        return folder

    def _publish_blob(self, record: Any, life_s: float) -> bool:
        self.published.append(record.sha256)
        return True

    def _store_request(self, envelope: bytes, life_s: float) -> bool:
        self.requests.append(envelope)
        return True

    def _scores(self, request_id: str) -> Sequence[ScoresRecord]:
        return [
            ScoresRecord(peer_id=peer, request=request_id, entries=tuple(entries))
            for peer, entries in self.announced.items()
        ]

    def _fetch(
        self, sha256: str, holders: Sequence[str], blobs: Any, *, max_bytes: int, timeout_s: float
    ) -> Path:
        self.asked.append((holders[0], sha256))
        data = self.served.get((holders[0], sha256))
        if data is None:
            raise NetworkError("it has gone")
        if len(data) > max_bytes:
            raise IntegrityError("it is too large")
        blobs.add_bytes(data)
        return Path(blobs.path(sha256))


@pytest.fixture
def peers(run: RunFolder, tmp_path: Path) -> Peers:
    return Peers(run, tmp_path)


def loaded(peers: Peers, folder: ScoresFolder) -> list[int]:
    """Return the paths of which somebody's scores are here; nobody has checked them yet."""
    modules = [peers.grid.modules_of_path(path) for path in range(4)]
    assert all(folder.load(path, modules[path]) is None for path in range(4))
    return [path for path in range(4) if folder.opinions(path, modules[path])]


def test_scores_come_from_whoever_has_them(peers: Peers) -> None:
    for path, peer in enumerate((ALICE, BOB, ALICE, BOB)):
        peers.announce(peer, path, peers.scores(path))
    folder = peers.gather()
    assert loaded(peers, folder) == [0, 1, 2, 3]
    assert peers.said[-1] == "scores: have 4, need 4 scores: complete"
    (scores,) = folder.opinions(2, peers.grid.modules_of_path(2)).values()
    assert np.array_equal(scores.nll, peers.documents.targets * 3.0)
    signed = verify_score_request(peers.requests[0], run_id=peers.node.run_id)
    assert signed.operator_fingerprint == peers.predecessor.manifest.operator_fingerprint
    assert signed.request.documents == len(peers.documents)
    assert peers.published == [signed.request.documents_sha256]
    assert peers.node.blobs.read(peers.published[0]) == peers.documents.to_bytes()


def test_the_wait_is_bounded_and_says_what_it_waits_for(peers: Peers) -> None:
    peers.announce(ALICE, 0, peers.scores(0))
    peers.announce(BOB, 3, None)
    folder = peers.gather(peers.open(wait_s=0.2))
    assert loaded(peers, folder) == [0]
    assert "have 1, need 4 scores; in progress: 3;" in peers.said[0]
    assert peers.said[-1] == (
        "scores: have 1, need 4 scores after 0 s; paths 1, 2, 3 are scored here"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nll": np.zeros(3), "tokens": np.zeros(3, np.int64)}, "are of 3 documents, not 20"),
        ({"request": "f" * 16}, "answer the request ffff"),
        ({"path": 2}, "are of path 2, not 1"),
        ({"states": {"L0.E0": "a" * 64}}, "name the modules of another path"),
        ({"tokens": np.full(20, 5)}, "are of other documents"),
    ],
)
def test_wrong_scores_are_refused_once_and_others_are_taken(
    peers: Peers, changes: dict[str, Any], message: str
) -> None:
    bad = peers.scores(1, **changes)
    peers.announce(ALICE, 1, bad)
    for path in (0, 2, 3):
        peers.announce(BOB, path, peers.scores(path))
    folder = peers.gather(peers.open(wait_s=0.2))
    assert loaded(peers, folder) == [0, 2, 3]
    refusals = [line for line in peers.said if "are refused" in line]
    assert len(refusals) == 1
    assert message in refusals[0]
    peers.announce(BOB, 1, peers.scores(1))
    assert loaded(peers, peers.gather(peers.open(wait_s=1.0))) == [0, 1, 2, 3]


@pytest.mark.parametrize("data", [b"", b"x" * 100, b"x" * 2**22])
def test_bytes_that_are_no_scores_are_refused(peers: Peers, data: bytes) -> None:
    peers.announce(ALICE, 1, data)
    assert loaded(peers, peers.gather(peers.open(wait_s=0.1))) == []
    assert sum("are refused" in line for line in peers.said) == 1
    assert len(peers.asked) == 1


def test_a_holder_that_has_gone_is_asked_again(peers: Peers) -> None:
    peers.announce(ALICE, 0, peers.scores(0))
    data = peers.served.copy()
    peers.served.clear()
    assert loaded(peers, peers.gather(peers.open(wait_s=0.1))) == []
    assert any("it has gone" in line for line in peers.said)
    peers.served.update(data)
    assert loaded(peers, peers.gather(peers.open(wait_s=0.1))) == [0]


def test_a_restart_asks_the_same_request_and_keeps_what_came(peers: Peers) -> None:
    peers.announce(ALICE, 0, peers.scores(0))
    peers.gather(peers.open(wait_s=0.1))
    peers.announced[ALICE].clear()
    asked = len(peers.asked)
    again = peers.open(wait_s=0.1)
    assert loaded(peers, peers.gather(again)) == [0]
    assert len(peers.asked) == asked
    assert len(set(peers.requests)) == 1
    other = RouterDocuments(peers.documents.tokens[1:], TINY_PREFIX_TOKENS)
    assert again.request(other) != peers.swarm.request(peers.documents)


def test_scoring_here_gives_what_a_peer_gives(peers: Peers, tmp_path: Path) -> None:
    old = peers.predecessor
    request = local_request(peers.documents, old.plan.run_id)
    folder = ScoresFolder(tmp_path / "here", request, peers.documents)
    done: list[tuple[int, int]] = []
    score_paths(
        folder, old.grid, old.load, old.digests, (0, 3), torch.device("cpu"),
        lambda path, rows: done.append((path, rows)),
    )  # fmt: skip
    assert done == [(0, 20), (3, 20)]
    first, last = (folder.load(p, old.grid.modules_of_path(p), old.digests) for p in (0, 3))
    assert first is not None
    assert last is not None
    assert np.array_equal(first.nll, last.nll)  # All paths begin as the base model.
    changed = {**old.digests, "L0.E0": "b" * 64}
    assert folder.load(0, old.grid.modules_of_path(0), changed) is None
    assert folder.load(3, old.grid.modules_of_path(3), changed) is not None


# -- a sample that the operator scores itself


def losses(seed: int, count: int = 4) -> dict[int, np.ndarray]:
    """Losses a token of 32 documents by path: documents differ by about 0.5, paths by 0.15."""
    random = np.random.default_rng(seed)
    documents = 3.0 + 0.5 * random.standard_normal(32)
    return {path: documents + 0.15 * random.standard_normal(32) for path in range(count)}


@pytest.mark.parametrize("seed", range(20))
def test_what_peers_scored_some_rounds_ago_agrees(seed: int) -> None:
    own = losses(seed)
    drift = np.random.default_rng(100 + seed).standard_normal(32)
    for path, values in own.items():
        assert disagreement(values, own, path) is None
        assert disagreement(values * 1.1 + 0.03 * drift, own, path) is None


@pytest.mark.parametrize("seed", range(20))
def test_what_cannot_be_a_paths_scores_does_not_agree(seed: int) -> None:
    own = losses(seed)
    random = np.random.default_rng(200 + seed)
    assert "differ from those here" in str(disagreement(random.permutation(own[1]), own, 1))
    assert "more like those of path 2" in str(disagreement(own[2], own, 1))
    assert "beside" in str(disagreement(own[1] - 1.5, own, 1))
    assert "beside" in str(disagreement(own[1] * 0.5, own, 1))


def test_paths_that_are_alike_agree_with_each_other() -> None:
    """As when a run has just begun, and as documents that are all alike."""
    own = dict.fromkeys(range(4), losses(1)[0])
    assert disagreement(own[0] * 1.001, own, 2) is None
    flat = dict.fromkeys(range(4), np.full(32, 3.0))
    noise = np.random.default_rng(1).standard_normal(32)
    assert disagreement(flat[0] + 0.02 * noise, flat, 2) is None


def test_two_peers_part_in_what_one_of_them_made_up() -> None:
    honest = losses(3)[0]
    random = np.random.default_rng(4)
    later = honest * 0.97 + 0.03 * random.standard_normal(32)
    assert len(parted_documents(honest, later)) == 0
    later[[4, 20]] += 2.0
    assert sorted(parted_documents(honest, later)) == [4, 20]


class Settling:
    """Honest scores of all paths by ALICE, with what others say beside them."""

    PATHS = (0, 1, 2, 3)

    def __init__(self, peers: Peers, folder: Path) -> None:
        self.old, documents = peers.predecessor, peers.documents
        request = local_request(documents, self.old.plan.run_id)
        self.folder = ScoresFolder(folder, request, documents)
        honest = ScoresFolder(folder / "honest", request, documents)
        grid, device = self.old.grid, torch.device("cpu")
        score_paths(honest, grid, self.old.load, self.old.digests, self.PATHS, device)
        found = {path: honest.load(path, grid.modules_of_path(path)) for path in self.PATHS}
        self.honest = {path: scores for path, scores in found.items() if scores is not None}

    def lie(self, path: int, rows: Sequence[int]) -> DocumentScores:
        """The honest scores with other numbers for some documents."""
        scores = self.honest[path]
        nll = scores.nll.copy()
        nll[list(rows)] += 3.0 * scores.tokens[list(rows)]
        return dataclasses.replace(scores, nll=nll)

    def settle(self) -> list[str]:
        return settle(
            self.folder, self.old.grid, self.old.load, self.PATHS, torch.device("cpu"),
            np.random.default_rng(7),
        )  # fmt: skip

    def kept(self, path: int) -> DocumentScores | None:
        return self.folder.load(path, self.old.grid.modules_of_path(path))


def test_one_who_serves_permuted_numbers_is_named_and_the_other_is_believed(
    peers: Peers, tmp_path: Path
) -> None:
    settling = Settling(peers, tmp_path / "here")
    for scores in settling.honest.values():
        settling.folder.add(scores, ALICE)
    assert settling.settle() == []
    for path in (1, 3):
        scores = settling.honest[path]
        nll = scores.tokens * np.linspace(9.0, 0.5, len(scores.nll))
        settling.folder.add(dataclasses.replace(scores, nll=nll), BOB)
    lines = settling.settle()
    assert [line.partition(" do not agree")[0] for line in lines] == [
        f"scores of path {path} by {BOB[-8:]}" for path in (1, 3)
    ]
    assert all(line.endswith(f"those of {ALICE[-8:]} are taken") for line in lines)
    for path, scores in settling.honest.items():
        kept = settling.kept(path)
        assert kept is not None
        assert np.array_equal(kept.nll, scores.nll)
    assert settling.settle() == [], "told once"


def test_scores_that_were_taken_stay_when_others_that_agree_come(
    peers: Peers, tmp_path: Path
) -> None:
    """A second `prepare` would train the router anew, and with it all that follows."""
    settling = Settling(peers, tmp_path / "here")
    asked_first, asked_last = sorted((ALICE, BOB))
    scores = settling.honest[1]
    settling.folder.add(scores, asked_last)
    assert settling.settle() == []
    later = dataclasses.replace(scores, nll=0.999 * scores.nll)
    settling.folder.add(later, asked_first)
    assert settling.settle() == []
    kept = settling.kept(1)
    assert kept is not None
    assert np.array_equal(kept.nll, scores.nll)


def test_few_wrong_numbers_among_many_are_noticed_where_two_have_scored(
    peers: Peers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample alone would hardly draw these documents."""
    monkeypatch.setattr(local_scores, "SAMPLE_DOCUMENTS", 4)
    settling = Settling(peers, tmp_path / "here")
    drawn = np.random.default_rng(7).choice(len(peers.documents), 4, replace=False)
    hidden = [row for row in range(len(peers.documents)) if row not in drawn][:2]
    settling.folder.add(settling.lie(2, hidden), BOB)
    assert settling.settle() == [], "nobody else has scored"
    settling.folder.add(settling.honest[2], ALICE)
    (line,) = settling.settle()
    assert line.startswith(f"scores of path 2 by {BOB[-8:]} do not agree")
    assert "2 documents differ from here by 3.00 a token" in line
    kept = settling.kept(2)
    assert kept is not None
    assert np.array_equal(kept.nll, settling.honest[2].nll)


def test_where_nobody_is_right_the_path_is_scored_here(peers: Peers, tmp_path: Path) -> None:
    settling = Settling(peers, tmp_path / "here")
    rows = range(0, len(peers.documents), 2)
    settling.folder.add(settling.lie(1, rows), BOB)
    (line,) = settling.settle()
    assert line.endswith("the path is scored here")
    assert settling.kept(1) is None
    settling.folder.save(settling.honest[1])
    assert settling.settle() == [], "what was scored here stays"
    assert settling.kept(1) is not None


def test_what_a_killed_process_was_writing_is_nobodys_scores(peers: Peers, tmp_path: Path) -> None:
    settling = Settling(peers, tmp_path)
    folder, modules = settling.folder, settling.old.grid.modules_of_path(1)
    folder.add(settling.honest[1], ALICE)
    (whole,) = tmp_path.rglob(ALICE)
    whole.with_name(f".{BOB}.1-00.tmp").write_bytes(whole.read_bytes())
    whole.with_name(BOB).write_bytes(whole.read_bytes()[:-1])
    assert list(folder.opinions(1, modules)) == [ALICE]


def test_what_nobody_has_checked_is_not_taken_also_when_an_earlier_version_has_left_it(
    peers: Peers, tmp_path: Path
) -> None:
    settling = Settling(peers, tmp_path / "here")
    folder = settling.folder
    lie = settling.lie(1, range(len(peers.documents)))
    folder.add(lie, BOB)
    assert settling.kept(1) is None
    opinions = next((tmp_path / "here").rglob(BOB)).parent
    # That kept a first peer's scores where it kept its own.
    opinions.with_name("P00001.safetensors").write_bytes(lie.to_bytes())
    (opinions / BOB).write_bytes(b"damaged")
    assert settling.settle() == []
    assert settling.kept(1) is None
    folder.add(settling.honest[1], ALICE)
    assert settling.settle() == []
    kept = settling.kept(1)
    assert kept is not None
    assert np.array_equal(kept.nll, settling.honest[1].nll)


def test_a_second_peer_is_waited_for_while_it_scores(peers: Peers) -> None:
    for path in range(4):
        peers.announce(ALICE, path, peers.scores(path))
    peers.announce(BOB, 2, peers.scores(2, nll=peers.documents.targets * 7.0))
    folder = peers.gather()
    modules = [peers.grid.modules_of_path(path) for path in range(4)]
    assert sorted(folder.opinions(2, modules[2])) == sorted((ALICE, BOB))
    assert list(folder.opinions(1, modules[1])) == [ALICE]
    # A restart asks for what has come since, and for nothing twice.
    asked = len(peers.asked)
    peers.announce(BOB, 1, peers.scores(1))
    peers.gather(peers.open())
    assert sorted(folder.opinions(1, modules[1])) == sorted((ALICE, BOB))
    assert len(peers.asked) == asked + 1
