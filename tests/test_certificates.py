"""The family tree of states: what a book of certificates answers."""

from __future__ import annotations

import random

import pytest
from dipaco.dht.certificates import (
    FOLLOWED,
    KEPT_PER_MODULE,
    KEPT_ROWS_PER_MODULE,
    LONGEST_CHAIN,
    Certificate,
    CertificateBook,
    CommitStatement,
)
from dipaco.modules.outer import Contribution
from hypothesis import given
from hypothesis import strategies as st

MODULE = "L0.E0"


def certificate(
    digest: str, parent: str, round_index: int, peers: str, signers: str | None = None
) -> Certificate:
    table = tuple(Contribution(path=0, peer=peer, tokens=10) for peer in sorted(peers))
    statement = CommitStatement("run", MODULE, round_index + 1, parent, digest, round_index, table)
    signed = peers if signers is None else signers
    return Certificate(statement, dict.fromkeys(signed, b""))


def book(*certificates: Certificate) -> CertificateBook:
    made = CertificateBook()
    made.add_all(certificates)
    return made


def test_a_fork_has_a_common_ancestor_and_contributors_on_both_sides() -> None:
    known = book(
        certificate("a1", "genesis", 0, "PQ"),
        certificate("a2", "a1", 1, "PQ"),
        certificate("b2", "a1", 1, "R"),
        certificate("b3", "b2", 2, "RS"),
    )
    assert known.common_ancestor(MODULE, "a2", "b3") == "a1"
    assert known.common_ancestor(MODULE, "a1", "b3") == "a1"
    assert known.contributors_since(MODULE, "a2", "a1") == {"P", "Q"}
    assert known.contributors_since(MODULE, "b3", "a1") == {"R", "S"}
    assert known.common_ancestor(MODULE, "a2", "unknown") is None


def test_work_is_found_by_name_and_round() -> None:
    known = book(certificate("a1", "genesis", 3, "PQ"), certificate("a2", "a1", 4, "P"))
    assert known.contains(MODULE, "a2", "Q", 3)
    assert not known.contains(MODULE, "a2", "Q", 4)
    assert known.recent_contributors(MODULE, "a2", 4) == {"P"}
    assert known.recent_contributors(MODULE, "a2", 3) == {"P", "Q"}


def test_only_members_of_the_group_sign() -> None:
    assert certificate("a1", "genesis", 0, "PQ", signers="PX").signers == {"P"}


@pytest.mark.parametrize("seed", range(20))
def test_merging_does_not_depend_on_the_order(seed: int) -> None:
    parts = [certificate("a1", "genesis", 0, "PQRS", signers=s) for s in ("P", "QR", "S", "PQ")]
    random.Random(seed).shuffle(parts)
    known = book(*parts, *parts)
    merged = known.get(MODULE, "a1")
    assert merged is not None
    assert merged.signers == set("PQRS")
    assert not known.add(parts[0])


def parent_of(known: CertificateBook, digest: str) -> str:
    return known.chain(MODULE, digest)[0].statement.parent


def test_of_two_statements_of_a_digest_the_one_with_more_signers_is_kept() -> None:
    made_up, true = certificate("a1", "elsewhere", 5, "X"), certificate("a1", "genesis", 0, "PQ")
    known = book(made_up)
    assert known.add(true)
    assert parent_of(known, "a1") == "genesis"
    assert not known.add(made_up)
    assert known.all() == (true,)


def test_of_two_statements_with_as_many_signers_the_first_is_kept() -> None:
    known = book(certificate("a1", "genesis", 0, "PQ"))
    assert not known.add(certificate("a1", "elsewhere", 5, "XY"))
    assert not known.add(certificate("a1", "elsewhere", 5, "VWXYZ", signers="XY"))
    assert parent_of(known, "a1") == "genesis"


def test_signatures_count_for_the_statement_that_they_are_under() -> None:
    known = book(certificate("a1", "elsewhere", 5, "XY"))
    assert known.add(certificate("a1", "genesis", 0, "PQRS", signers="PQR"))
    assert known.add(certificate("a1", "genesis", 0, "PQRS", signers="S"))
    assert known.chain(MODULE, "a1")[0].signers == set("PQRS")


def test_what_this_peer_stands_on_keeps_its_statements() -> None:
    known = book(certificate("a1", "genesis", 0, "PQ"), certificate("a2", "a1", 1, "PQ"))
    known.keep(MODULE, "a2")
    for digest in ("a1", "a2"):
        assert not known.add(certificate(digest, "elsewhere", 5, "VWXYZ"))
    assert [c.statement.digest for c in known.chain(MODULE, "a2")] == ["a2", "a1"]


def test_statements_that_are_replaced_by_larger_ones_do_not_make_a_book_large() -> None:
    known = book(*(certificate(f"{n + 1}", f"{n}", n, "X") for n in range(40)))
    names = [f"{n:04d}" for n in range(1024)]
    rows = tuple(Contribution(0, name, 1) for name in names)
    for n in range(40):
        made = CommitStatement("run", MODULE, n + 1, f"{n}", f"{n + 1}", n, rows)
        known.add(Certificate(made, dict.fromkeys(names[:2], b"")))
    assert sum(len(c.statement.table) for c in known.all()) <= KEPT_ROWS_PER_MODULE


def test_invented_chains_do_not_push_out_the_one_that_this_peer_stands_on() -> None:
    """Anybody can sign chains of newer rounds, as many as he likes."""
    known = book(*(certificate(f"own{n + 1}", f"own{n}", n, "PQ") for n in range(LONGEST_CHAIN)))
    newest = f"own{LONGEST_CHAIN}"
    known.keep(MODULE, newest)
    for liar in range(10):
        known.add_all(
            certificate(f"{liar}-{n + 1}", f"{liar}-{n}", n, "XYZ") for n in range(50, 150)
        )
    assert len(known.all()) == KEPT_PER_MODULE
    assert len(known.chain(MODULE, newest)) == LONGEST_CHAIN
    assert known.contains(MODULE, newest, "Q", 0)


def test_large_groups_do_not_make_a_book_large() -> None:
    known = CertificateBook()
    rows = tuple(Contribution(0, f"{n:04d}", 1) for n in range(1024))
    for version in range(1, 60):
        names = f"{version - 1}", f"{version}"
        made = CommitStatement("run", MODULE, version, *names, version, rows)
        known.add(Certificate(made, {"0000": b""}))
    held = sum(len(c.statement.table) for c in known.all())
    assert KEPT_ROWS_PER_MODULE - 1024 < held <= KEPT_ROWS_PER_MODULE
    assert len(known.chain(MODULE, "59")) == KEPT_ROWS_PER_MODULE // 1024


@given(st.data())
def test_a_book_is_the_same_whatever_came_first_and_how_often(data: st.DataObject) -> None:
    """A tree of states, of which each certificate comes in parts with some of the signatures."""
    size = data.draw(st.integers(1, 12))
    parts = []
    for number in range(size):
        parent = data.draw(st.integers(-1, number - 1))
        peers = data.draw(st.sets(st.sampled_from("PQRST"), min_size=1))
        for _ in range(data.draw(st.integers(1, 3))):
            signers = data.draw(st.sets(st.sampled_from("PQRSTX")))
            parts.append(
                certificate(
                    f"s{number}", f"s{parent}", number, "".join(peers), signers="".join(signers)
                )
            )
    shuffled = data.draw(st.permutations(parts))
    one, other = book(*parts), book(*shuffled, *parts)
    assert {c.statement: c.signers for c in one.all()} == {
        c.statement: c.signers for c in other.all()
    }
    assert not other.add_all(parts)
    for first in range(size):
        chain = one.chain(MODULE, f"s{first}")
        assert [c.statement.digest for c in chain] == [
            c.statement.digest for c in other.chain(MODULE, f"s{first}")
        ]
        assert one.contributors_since(MODULE, f"s{first}", None) == {
            signer for c in chain for signer in c.signers
        }
        for second in range(size):
            ancestor = one.common_ancestor(MODULE, f"s{first}", f"s{second}")
            assert ancestor == one.common_ancestor(MODULE, f"s{second}", f"s{first}")
            assert ancestor is not None, "all descend from genesis"


def test_a_book_is_bounded_and_a_circle_ends() -> None:
    known = book(*(certificate(f"{n + 1}", f"{n}", n, "P") for n in range(3 * KEPT_PER_MODULE)))
    assert len(known.all()) == KEPT_PER_MODULE
    assert len(known.chain(MODULE, f"{3 * KEPT_PER_MODULE}")) == LONGEST_CHAIN
    circle = book(certificate("x", "y", 0, "P"), certificate("y", "x", 1, "P"))
    assert len(circle.chain(MODULE, "x")) == 2


def test_asking_for_invented_digests_does_not_make_a_book_large() -> None:
    known = book(certificate("a1", "genesis", 0, "PQ"))
    for number in range(2 * FOLLOWED):
        assert known.common_ancestor(MODULE, "a1", f"{number}") is None
        assert known.contributors_since(MODULE, f"{number}", None) == frozenset()
    followed = known._of(MODULE)
    assert len(followed.chains) + len(followed.common) + len(followed.contributors) <= FOLLOWED + 4
    assert known.contributors_since(MODULE, "a1", None) == {"P", "Q"}
