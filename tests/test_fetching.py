"""Which of the announced states of a module a reader takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from dipaco.dht.certificates import Certificate, CertificateBook
from dipaco.modules.blobs import BlobStore
from dipaco.modules.errors import NetworkError
from dipaco.modules.state import StateReference
from dipaco.peer.exchange.fetching import MAX_READ_STATES, ContentFetcher
from support.family import MODULE, Family, genesis
from support.lone_member import view_of

HEAVY = 2**53


class Certificates:
    """Knows what the holders would have told of their states; `family` has it all."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.book = CertificateBook()
        self.asked: list[StateReference] = []

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

    def state(self, wanted: StateReference, holders: Sequence[str]) -> Any:
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
