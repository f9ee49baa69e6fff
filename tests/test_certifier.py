"""Members of a group complete each other's certificates; chains are fetched, checked and kept."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from dipaco.dht.certificate_check import encode_certificate, sign_statement
from dipaco.dht.certificates import KEPT_PER_MODULE, LONGEST_CHAIN, Certificate
from dipaco.modules.state import StateReference
from dipaco.peer.background import Background
from dipaco.peer.exchange.certifier import FIRST_COUNT, PAUSES_S, Certifier
from dipaco.peer.exchange.messages import MAX_CERTIFICATES
from support.certificates import (
    MODULE,
    Line,
    certificate,
    digest_of,
    key,
    peer,
    reference,
    statement,
    table,
)

LOGGER = "dipaco.peer.exchange.certifier"


class Hours:
    """A time that a test moves."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def commit(certifier: Certifier, version: int, members: tuple[int, ...]) -> Certificate:
    state = StateReference(MODULE, version, digest_of(f"s{version}"), 100, version, 1)
    return certifier.committed(state, digest_of(f"s{version - 1}"), table(members))


@pytest.mark.parametrize("size", [2, 3, 8, 32])
def test_every_member_gets_all_signatures_with_few_questions(tmp_path: Path, size: int) -> None:
    line, hours, members = Line(), Hours(), tuple(range(size))
    peers = [line.certifier(n, tmp_path, monotonic=hours) for n in members]
    for certifier in peers:
        commit(certifier, 1, members)
    # One after the other is the worst order: who asks first finds no answer that is complete.
    for pause_s in PAUSES_S:
        hours.now_s += pause_s
        for certifier in peers:
            certifier.gather_due()
    for certifier in peers:
        found = certifier.get(MODULE, digest_of("s1"))
        assert found is not None
        assert found.signers == {peer(n) for n in members}
    assert len(line.asked) / size <= {2: 1, 3: 2, 8: 3, 32: 5}[size]
    before = len(line.asked)
    hours.now_s += sum(PAUSES_S)
    for certifier in peers:
        certifier.gather_due()
    assert len(line.asked) == before, "nobody asks for what is complete"


def test_a_member_that_is_late_is_asked_again_and_one_that_died_is_given_up(
    tmp_path: Path,
) -> None:
    line, hours, members = Line(), Hours(), (0, 1, 2)
    first, late = (line.certifier(n, tmp_path, monotonic=hours) for n in (0, 1))
    heard: list[frozenset[str]] = []
    first.listen(lambda known: heard.append(known.signers))
    commit(first, 1, members)
    hours.now_s += PAUSES_S[0]
    first.gather_due()
    assert heard == []
    commit(late, 1, members)
    for pause_s in PAUSES_S:
        hours.now_s += pause_s
        first.gather_due()
    assert heard == [{peer(0), peer(1)}]
    before = len(line.asked)
    hours.now_s += 1000 * sum(PAUSES_S)
    first.gather_due()
    assert len(line.asked) == before


def test_one_that_is_alone_asks_nobody(tmp_path: Path) -> None:
    line, hours = Line(), Hours()
    alone = line.certifier(0, tmp_path, monotonic=hours)
    made = commit(alone, 1, (0,))
    hours.now_s += 100.0
    alone.gather_due()
    assert line.asked == []
    assert alone.chain(MODULE, digest_of("s1")) == (made,)


def test_a_member_that_sends_something_else_is_named_and_nothing_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    members = (0, 1)
    own = certificate(1, members, (0,))
    elsewhere = dataclasses.replace(own.statement, parent=digest_of("elsewhere"))
    forged = Certificate(own.statement, {peer(1): b"x" * 64})
    answers = {
        "another statement": encode_certificate(sign_statement(elsewhere, key(1))),
        "not of 12D3KooW": encode_certificate(forged),
        "cannot be read": b"\xc1",
        "at most": b"x" * 200_000,
    }
    for number, (complaint, answer) in enumerate(answers.items()):
        line, hours = Line(), Hours()
        asking = line.certifier(0, tmp_path / str(number), monotonic=hours)
        line.answers[peer(1)] = [answer]
        commit(asking, 1, members)
        caplog.clear()
        with caplog.at_level(logging.WARNING, LOGGER):
            for pause_s in PAUSES_S:
                hours.now_s += pause_s
                asking.gather_due()
        assert len(caplog.messages) == 1
        assert f"refused certificates of {MODULE} from {peer(1)}" in caplog.messages[0]
        assert complaint in caplog.messages[0]
        assert asking.chain(MODULE, own.statement.digest) == (own,)


def chain_of(length: int, members: tuple[int, ...] = (1, 2)) -> list[Certificate]:
    """A chain of certificates, the oldest first."""
    return [certificate(version, members) for version in range(1, length + 1)]


def digests(certificates: Iterable[Certificate]) -> set[str]:
    return {known.statement.digest for known in certificates}


def knowing(line: Line, number: int, folder: Path, certificates: list[Certificate]) -> Certifier:
    made = line.certifier(number, folder)
    made._take(certificates)
    return made


@pytest.mark.parametrize("length", [1, 3, 4, 5, 30, LONGEST_CHAIN, LONGEST_CHAIN + 20])
def test_the_chain_of_a_foreign_state_comes_in_few_answers(tmp_path: Path, length: int) -> None:
    line = Line()
    chain = chain_of(length)
    knowing(line, 1, tmp_path, chain)
    asking = line.certifier(5, tmp_path)
    newest = list(reversed(chain))[:LONGEST_CHAIN]
    assert list(asking.fetch_chain(reference(chain[-1]), (peer(5), peer(1)))) == newest
    rest = max(0, min(length, LONGEST_CHAIN) - FIRST_COUNT)
    assert len(line.asked) == 1 + math.ceil(rest / MAX_CERTIFICATES)
    assert list(asking.fetch_chain(reference(chain[-1]), (peer(1),))) == newest
    rest = max(0, min(length, LONGEST_CHAIN) - FIRST_COUNT)
    assert len(line.asked) == 1 + math.ceil(rest / MAX_CERTIFICATES), (
        "what is known is not asked for"
    )


def test_a_round_can_have_a_step_of_who_left_before_its_end_and_another_one(
    tmp_path: Path,
) -> None:
    line = Line()
    early = certificate(1, (1,))
    said = dataclasses.replace(statement(2, (1, 2)), round_index=early.statement.round_index)
    both = {peer(n): sign_statement(said, key(n)).signatures[peer(n)] for n in (1, 2)}
    chain = [early, Certificate(said, both)]
    knowing(line, 1, tmp_path, chain)
    asking = line.certifier(5, tmp_path)
    assert list(asking.fetch_chain(reference(chain[-1]), (peer(1),))) == chain[::-1]


def test_only_what_is_missing_of_a_chain_is_asked_for(tmp_path: Path) -> None:
    line = Line()
    chain = chain_of(9)
    knowing(line, 1, tmp_path, chain)
    asking = knowing(line, 5, tmp_path, chain[:7])
    assert len(asking.fetch_chain(reference(chain[-1]), (peer(1),))) == 9
    assert line.asked == [(peer(1), chain[-1].statement.digest, 4)]
    # And of one whose end is known, what lies before.
    other = knowing(line, 6, tmp_path, chain[7:])
    assert len(other.fetch_chain(reference(chain[-1]), (peer(1),))) == 9


def test_a_genesis_state_has_no_chain(tmp_path: Path) -> None:
    line = Line()
    asking = line.certifier(5, tmp_path)
    assert asking.fetch_chain(StateReference.untrained(MODULE), (peer(1),)) == ()
    assert line.asked == []


def test_a_chain_that_is_wrong_anywhere_is_refused_and_the_next_holder_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain = chain_of(3)
    wanted = reference(chain[-1])
    good = [encode_certificate(c) for c in reversed(chain)]
    bad = Certificate(chain[0].statement, {peer(1): b"x" * 64})
    branch = certificate(2, (1, 2), name="t")
    answers = {
        "forged at the end": [*good[:2], encode_certificate(bad)],
        "another branch": [good[0], encode_certificate(branch), good[2]],
        "in another order": [good[1], good[0], good[2]],
        "with a gap": [good[0], good[2]],
        "another state": good[1:],
        "cut off": [good[0], good[1][:-1]],
    }
    for number, (what, answer) in enumerate(answers.items()):
        line = Line()
        line.answers[peer(1)] = answer
        asking = line.certifier(5, tmp_path / str(number))
        caplog.clear()
        with caplog.at_level(logging.WARNING, LOGGER):
            assert asking.fetch_chain(wanted, (peer(1),)) == (), what
        assert len(caplog.messages) == 1, what
        assert f"from {peer(1)}" in caplog.messages[0]
        assert asking.all() == (), what
        knowing(line, 2, tmp_path / str(number), chain)
        found = asking.fetch_chain(wanted, (peer(1), peer(9), peer(2)))
        assert list(found) == list(reversed(chain)), what


def test_a_holder_that_never_comes_to_an_end_is_left(tmp_path: Path) -> None:
    """It sends one certificate at a time, whatever it is asked for."""
    line = Line()
    chain = chain_of(LONGEST_CHAIN)
    source = knowing(line, 1, tmp_path, chain)

    class Drip(Line):
        def certificates(self, peer: str, module: str, digest: str, count: int) -> list[bytes]:
            self.asked.append((peer, digest, count))
            return [encode_certificate(c) for c in source.chain(module, digest)[:1]]

    drip = Drip()
    asking = drip.certifier(5, tmp_path)
    found = asking.fetch_chain(reference(chain[-1]), (peer(1),))
    assert len(found) == len(drip.asked) <= 16


def test_a_peer_that_comes_back_knows_its_certificates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = Line()
    chain = chain_of(KEPT_PER_MODULE)
    first = knowing(line, 1, tmp_path, chain)
    first.stop()
    again = line.certifier(1, tmp_path)
    assert digests(again.all()) == digests(chain)
    (file,) = (tmp_path / "1").iterdir()
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    assert line.certifier(1, tmp_path).all() == ()
    assert "damaged" in caplog.text
    file.write_bytes(b"")
    assert line.certifier(1, tmp_path).all() == ()
    file.write_bytes(b"x" * 2**21)
    assert line.certifier(1, tmp_path).all() == ()
    assert "too large" in caplog.text


def test_the_file_of_a_module_is_bounded(tmp_path: Path) -> None:
    line = Line()
    members = tuple(range(150))
    chain = [certificate(version, members) for version in range(1, 71)]
    first = knowing(line, 1, tmp_path, chain)
    first.stop()
    (file,) = (tmp_path / "1").iterdir()
    assert file.stat().st_size <= 2**20
    kept = line.certifier(1, tmp_path).all()
    assert digests(chain[-50:]) <= digests(kept) < digests(chain)


def test_the_background_gathers_and_writes(tmp_path: Path) -> None:
    line, members = Line(), (0, 1)
    background = Background()
    first, second = (line.certifier(n, tmp_path, pauses_s=(0.01,) * 9) for n in members)
    complete = threading.Event()
    first.listen(lambda known: complete.set())
    first.start(background.thread)
    commit(second, 1, members)
    commit(first, 1, members)
    assert complete.wait(30)
    first.stop()
    background.check()
    (kept,) = line.certifier(0, tmp_path).all()
    assert kept.signers == {peer(0), peer(1)}
