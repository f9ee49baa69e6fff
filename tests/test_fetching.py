"""Which of the announced states of a module a reader takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from dipaco.dht.certificates import Certificate, CertificateBook
from dipaco.modules.blobs import BlobStore
from dipaco.modules.config import GridConfig
from dipaco.modules.errors import NetworkError
from dipaco.modules.grid import Grid
from dipaco.modules.plan import PathShard, RunBlobs, ShardIndex
from dipaco.modules.state import StateReference
from dipaco.peer.exchange.fetching import (
    MAX_OTHER_BYTES,
    MAX_READ_STATES,
    ContentFetcher,
    core_blobs,
    greatest_core_bytes,
    shard_bytes,
)
from dipaco.routing.run_folder import RunFolder
from support.family import MODULE, Family, genesis
from support.lone_member import view_of
from support.make_plan import make_plan

HEAVY = 2**53


class Certificates:
    """Knows what the holders would have told of their states; `family` has it all."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.book = CertificateBook()
        self.asked: list[StateReference] = []
        self.gate = None

    def fetch_chain(
        self, wanted: StateReference, holders: Sequence[str], limit_s: float
    ) -> tuple[Certificate, ...]:
        self.asked.append(wanted)
        chain = self.family.chain(wanted)
        self.book.add_all(chain)
        return chain

    def chain(self, module: str, digest: str) -> tuple[Certificate, ...]:
        return self.book.chain(module, digest)


class Reader(ContentFetcher):
    """A fetcher whose states come as their references, unless nobody serves them."""

    def __init__(self, family: Family, folder: Path, *, unserved: Sequence[str] = ()) -> None:
        nothing: Any = None
        blobs = BlobStore(folder)
        super().__init__(nothing, nothing, blobs, blobs)
        self.certificates: Any = Certificates(family)
        self.use_certifier(self.certificates)
        self.unserved = unserved

    def state(
        self, wanted: StateReference, holders: Sequence[str], *, is_copy: bool = False
    ) -> Any:
        if wanted.digest in self.unserved:
            raise NetworkError("nobody serves it")
        assert holders
        return wanted


def invented(name: str = "f") -> StateReference:
    return StateReference(MODULE, 9, name * 64, HEAVY, 8, 1)


def test_more_contributors_win_over_more_tokens(tmp_path: Path) -> None:
    family = Family()
    many = family.commits(genesis(), range(3), ("Pa", "Pb", "Pc"))
    lone = family.commits(genesis(), range(3), ("Pd",), tokens=HEAVY // 8)
    view = view_of(0.0, held={"Pa": [many], "Pd": [lone], "Pe": [genesis()]})
    assert Reader(family, tmp_path).winning_state(MODULE, view) == many


def test_what_nobody_signed_is_left_out(tmp_path: Path) -> None:
    family = Family()
    signed = family.commits(genesis(), range(2), ("Pa",))
    reader = Reader(family, tmp_path)
    view = view_of(0.0, held={"Px": [invented()], "Pa": [signed]})
    assert reader.winning_state(MODULE, view) == signed
    assert reader.winning_state(MODULE, view_of(0.0, held={"Px": [invented()]})) is None


def test_the_next_best_is_taken_where_the_best_is_not_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family = Family()
    older = family.commits(genesis(), range(2), ("Pa",))
    newer = family.commits(older, range(2, 3), ("Pa",))
    reader = Reader(family, tmp_path, unserved=(newer.digest,))
    view = view_of(0.0, held={"Pa": [newer], "Pb": [older]})
    assert reader.winning_state(MODULE, view) == older
    assert "nobody serves it" in caplog.text


def test_what_is_at_hand_is_replaced_by_better_states_only(tmp_path: Path) -> None:
    family = Family()
    older = family.commits(genesis(), range(2), ("Pa",))
    newer = family.commits(older, range(2, 3), ("Pa",))
    reader = Reader(family, tmp_path)
    view = view_of(0.0, held={"Pa": [newer], "Pb": [older]})
    assert reader.winning_state(MODULE, view, own=older) == newer
    assert reader.winning_state(MODULE, view, own=newer) is None
    assert reader.winning_state(MODULE, view, own=StateReference.untrained(MODULE)) == newer


def test_a_state_that_many_announce_is_among_those_looked_into(tmp_path: Path) -> None:
    family = Family()
    signed = family.commits(genesis(), range(2), ("Pa", "Pb"))
    reader = Reader(family, tmp_path)
    held = {f"Px{n}": [invented(f"{n:064x}"[-1])] for n in range(16)}
    held |= {
        f"Py{n}": [StateReference(MODULE, 9, f"{n:064x}", HEAVY, 8, 1)]
        for n in range(2 * MAX_READ_STATES)
    }
    held |= {"Pa": [signed], "Pb": [signed]}
    assert reader.winning_state(MODULE, view_of(0.0, held=held)) == signed
    assert len(reader.certificates.asked) == MAX_READ_STATES


class Asked:
    """An exchange, and a directory, that note how large a blob may be and give none."""

    peer_id = "me"

    def __init__(self) -> None:
        self.greatest: dict[str, int] = {}

    def find_blob_holders(self, sha256: str) -> tuple[str, ...]:
        return ("stranger",)

    def fetch(self, sha256: str, *arguments: Any, max_bytes: int, **options: Any) -> Path:
        self.greatest[sha256] = max_bytes
        raise NetworkError("nobody has it")


@pytest.mark.parametrize("kind", ["shared_run", "private_run"])
def test_every_blob_of_a_run_has_a_bound(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run: RunFolder = request.getfixturevalue(kind)
    plan, asked = run.plan(), Asked()
    stranger: Any = asked
    fetcher = ContentFetcher(stranger, stranger, BlobStore(tmp_path), BlobStore(tmp_path / "s"))
    fetcher.use_plan(plan, run.grid(plan), lambda: 0.0)
    index = run.shard_index(plan)
    fetcher.use_shards(index)
    fetcher.use_genesis({"L0.E0": "7" * 64})
    for sha256 in fetcher.all_blobs():
        with pytest.raises(NetworkError):
            fetcher.blob(sha256)
    assert set(asked.greatest) == {*core_blobs(plan), *shard_bytes(index, plan.model), "7" * 64}
    for sha256, greatest in asked.greatest.items():
        assert greatest < 2**27, "of a tiny run"
        if run.blobs.has(sha256):
            assert run.blobs.path(sha256).stat().st_size <= greatest
    for sha256, size in shard_bytes(index, plan.model).items():
        assert run.blobs.path(sha256).stat().st_size == size
    for given, expected in ((None, MAX_OTHER_BYTES), (5, 5)):
        with pytest.raises(NetworkError):
            fetcher.blob("8" * 64, max_bytes=given)
        assert asked.greatest["8" * 64] == expected


def test_the_indices_of_many_paths_fit_their_bounds() -> None:
    paths = tuple(
        PathShard(
            path=n,
            train_sha256="a" * 64,
            train_sequences=2**53,
            train_documents=2**53,
            validation_sha256="b" * 64,
            validation_sequences=2**53,
        )
        for n in range(4096)
    )
    index = ShardIndex(sequence_length=2**20, paths=paths)
    plan = make_plan(
        grid=GridConfig(modules_per_level=(64, 64)),
        blobs=RunBlobs(
            tokenizer="1" * 64, router="2" * 64, base="3" * 64, shards="4" * 64, genesis="5" * 64
        ),
    )
    grid = Grid(plan.model, plan.grid)
    greatest = greatest_core_bytes(plan, grid)
    assert len(json.dumps(index.model_dump(mode="json"), indent=4)) <= greatest["4" * 64]
    genesis = dict.fromkeys(grid.modules(), "d" * 64)
    assert len(json.dumps(genesis, indent=4)) <= greatest["5" * 64]
