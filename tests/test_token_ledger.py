"""The ledger: what a certificate is worth, and that nobody makes it worth more."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import random
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from dipaco.dht.certificate_check import encode_certificate, sign_statement
from dipaco.dht.certificates import Certificate, CommitStatement
from dipaco.dht.ledger import Credit, Said, counted_chain, exported, ledger_of
from dipaco.dht.ledger_file import LedgerFile
from dipaco.dht.manifest import SignedManifest, sign_manifest, verify_manifest
from dipaco.dht.records import NAME_PATTERN, RecordError
from dipaco.dht.view import SwarmView
from dipaco.modules.errors import ConfigurationError, NetworkError, StorageError
from dipaco.modules.grid import Grid
from dipaco.modules.outer import Contribution, canonical_table
from dipaco.modules.state import StateReference
from dipaco.peer.exchange.ledger_keeper import LedgerKeeper
from dipaco.peer.ledger_cli import LedgerSettings, run
from dipaco.peer.settings import PeerSettings
from hypothesis import given, settings
from hypothesis import strategies as st
from support.certificates import digest_of, key, peer
from support.make_plan import make_plan

GENESIS = digest_of("genesis")
SHARED, OTHER, PRIVATE = "L0.E0", "L1.E0", "P0"
Rows = Mapping[str, tuple[int, int]]
"""Peer to (path, tokens)."""


def step(
    parent: Certificate | None,
    rows: Rows,
    signers: Iterable[str] | None = None,
    *,
    module: str = SHARED,
    version: int | None = None,
    name: str = "",
) -> Certificate:
    """Return the certificate of a step; signatures are not made, only who has signed."""
    table = canonical_table(Contribution(path, who, n) for who, (path, n) in rows.items())
    before = parent.statement.digest if parent else GENESIS
    number = version or (parent.statement.version + 1 if parent else 1)
    digest = hashlib.sha256(f"{before}{table}{number}{name}".encode()).hexdigest()
    said = CommitStatement("run", module, number, before, digest, number, table)
    return Certificate(said, dict.fromkeys(rows if signers is None else signers, b"s"))


def chain(
    groups: Sequence[Rows], parent: Certificate | None = None, module: str = SHARED, name: str = ""
) -> list[Certificate]:
    made: list[Certificate] = []
    for rows in groups:
        parent = step(parent, rows, module=module, name=name)
        made.append(parent)
    return made


def tokens(credits: Mapping[str, Credit]) -> dict[str, int]:
    return {who: credit.tokens for who, credit in credits.items()}


BOTH: Rows = {"A": (0, 10), "B": (1, 20)}


def test_what_others_signed_counts() -> None:
    credits = ledger_of(chain([BOTH, BOTH]))
    assert tokens(credits) == {"A": 20, "B": 40}
    a = credits["A"]
    assert (a.alone, a.commits, a.paths, a.first_round, a.last_round) == (0, 2, {0: 20}, 1, 2)


def test_the_same_work_in_several_modules_counts_once() -> None:
    both = [*chain([BOTH, BOTH]), *chain([BOTH], module=OTHER)]
    assert tokens(ledger_of(both)) == {"A": 20, "B": 40}
    # The private module of a path has one trainer; its work stands in the shared ones as well.
    private = chain([{"A": (0, 10)}, {"A": (0, 10)}], module=PRIVATE)
    assert ledger_of([*both, *private])["A"] == Credit("A", 20, 0, {0: 20}, 3, 1, 2)


def test_who_signs_alone_is_credited_apart() -> None:
    lone = ledger_of(chain([{"A": (0, 10**12)}], module=PRIVATE))["A"]
    assert (lone.tokens, lone.alone, lone.commits) == (0, 10**12, 0)
    # With what others saw, only the rest is its own word.
    found = ledger_of([*chain([BOTH]), *chain([{"A": (0, 25)}], module=PRIVATE)])["A"]
    assert (found.tokens, found.alone) == (10, 15)


def test_a_table_that_names_others_is_worth_nothing_without_them() -> None:
    rows = dict.fromkeys("ABCDE", (0, 1000))
    one = ledger_of([step(None, rows, "A")])
    assert {who: (c.tokens, c.alone) for who, c in one.items()} == {"A": (0, 1000)}
    # Two identities of one owner are no more than half of five.
    assert tokens(ledger_of([step(None, rows, "AB")])) == {"A": 0, "B": 0}
    assert tokens(ledger_of([step(None, rows, "ABC")])) == dict.fromkeys("ABCDE", 1000)


def test_signatures_of_others_than_members_are_nothing() -> None:
    assert tokens(ledger_of([step(None, {"A": (0, 5)}, "ABC")])) == {"A": 0}


def test_the_losing_side_of_a_fork_does_not_count() -> None:
    root = step(None, BOTH)
    winner = chain([{"A": (0, 1), "B": (1, 1), "C": (1, 1)}], root)
    loser = chain([{"A": (0, 500), "B": (1, 500)}] * 5, root, name="fork")
    assert tokens(ledger_of([root, *winner, *loser])) == {"A": 11, "B": 21, "C": 1}


def test_of_two_statements_of_one_state_that_with_more_signers_counts() -> None:
    honest = step(None, BOTH)
    said = dataclasses.replace(honest.statement, table=(Contribution(0, "A", 10**9),))
    lie = Certificate(said, {"A": b"s"})
    assert tokens(ledger_of([lie, honest])) == {"A": 10, "B": 20}


def test_pieces_between_which_the_keeper_was_away_all_count() -> None:
    whole = chain([BOTH] * 10)
    seen = [*whole[:3], *whole[7:]]
    assert tokens(ledger_of(seen)) == {"A": 60, "B": 120}
    # What overlaps counts once, on the side with more signers from there on.
    three: Rows = {"A": (0, 1), "B": (1, 1), "C": (1, 1)}
    stray = step(None, three, version=3, name="stray")
    kept = [c.statement.version for c in counted_chain([*whole[:3], stray])]
    assert kept == [1, 2, 3]
    assert stray in counted_chain([*whole[:3], stray])


def test_versions_that_do_not_follow_are_no_chain() -> None:
    first = step(None, BOTH)
    leap = step(first, BOTH, version=9)
    back = step(leap, {"A": (0, 7), "B": (1, 7)}, version=1)
    assert [c.statement.version for c in counted_chain([first, leap, back])] == [1, 9]


# -- properties


@st.composite
def families(draw: st.DrawFn) -> list[Certificate]:
    """Return certificates of a tree with forks and gaps, with any signers."""
    made: list[Certificate] = []
    for number in range(draw(st.integers(1, 14))):
        parent = draw(st.sampled_from([None, *made]))
        members = draw(st.sets(st.sampled_from("ABCDE"), min_size=1))
        rows = {who: (draw(st.integers(0, 1)), draw(st.integers(1, 99))) for who in members}
        signers = draw(st.sets(st.sampled_from(sorted(members)), min_size=1))
        module = parent.statement.module if parent else draw(st.sampled_from([SHARED, OTHER]))
        version = None if parent else draw(st.integers(1, 6))
        made.append(step(parent, rows, signers, module=module, version=version, name=str(number)))
    return [c for c in made if draw(st.booleans())] or made[:1]


@settings(max_examples=150, deadline=None)
@given(families(), st.randoms(use_true_random=False), st.data())
def test_order_replay_and_merging_change_nothing(
    found: list[Certificate], chance: random.Random, data: st.DataObject
) -> None:
    expected = ledger_of(found)
    shuffled = [*found, *chance.choices(found, k=5)]
    chance.shuffle(shuffled)
    assert ledger_of(shuffled) == expected
    # Two keepers who each saw some signatures of some certificates.
    parts: list[list[Certificate]] = [[], []]
    for certificate in found:
        who = sorted(certificate.signers)
        some = data.draw(st.sets(st.sampled_from(who)))
        for part, names in zip(parts, (some, set(who) - some), strict=True):
            if names:
                part.append(Certificate(certificate.statement, dict.fromkeys(names, b"s")))
    assert ledger_of([*parts[0], *parts[1]]) == ledger_of([*parts[1], *parts[0]]) == expected


@settings(max_examples=150, deadline=None)
@given(families(), st.integers(1, 10**9), st.data())
def test_a_peer_alone_adds_no_tokens(
    found: list[Certificate], lie: int, data: st.DataObject
) -> None:
    before = ledger_of(found)
    parent = data.draw(st.sampled_from([None, *found]))
    rows: Rows = dict.fromkeys(data.draw(st.sampled_from(["X", "XA", "XABC"])), (0, lie))
    mine = step(parent, rows, "X", module=parent.statement.module if parent else SHARED)
    after = ledger_of([*found, mine, step(mine, rows, "X", module=mine.statement.module)])
    assert after.get("X", Credit("X", 0, 0)).tokens == 0
    assert all(credit.tokens <= tokens(before).get(who, 0) for who, credit in after.items())


@settings(max_examples=100, deadline=None)
@given(families())
def test_a_version_of_a_module_counts_once(found: list[Certificate]) -> None:
    for module in (SHARED, OTHER):
        counted = counted_chain(c for c in found if c.statement.module == module)
        versions = [c.statement.version for c in counted]
        assert versions == sorted(set(versions))
        for who, credit in ledger_of(counted).items():
            said = sum(r.tokens for c in counted for r in c.statement.table if r.peer == who)
            assert credit.tokens + credit.alone <= said


# -- the file


def operator() -> Ed25519PrivateKey:
    return key(99)


def manifest() -> SignedManifest:
    return verify_manifest(sign_manifest(make_plan(), operator()))


def signed(
    numbers: Sequence[int],
    version: int = 1,
    signers: Sequence[int] | None = None,
    *,
    count: int = 10,
    run_id: str = "",
) -> Certificate:
    """Return a certificate of the run with real signatures."""
    said = CommitStatement(
        run_id or manifest().plan.run_id,
        SHARED,
        version,
        digest_of(f"s{version - 1}"),
        digest_of(f"s{version}"),
        version,
        canonical_table(Contribution(n % 2, peer(n), count + n) for n in numbers),
    )
    who = numbers if signers is None else signers
    made = [sign_statement(said, key(n)).signatures for n in who]
    return Certificate(said, {name: one for signatures in made for name, one in signatures.items()})


def opened(path: Path) -> LedgerFile:
    return LedgerFile(path, manifest())


def test_a_ledger_is_there_after_a_restart_and_adding_again_changes_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.ledger"
    with closing(opened(path)) as file:
        assert file.add([signed([0, 1]), signed([0, 1], 2, [0])], [Said(peer(0), 3, "a", "t")]) == 2
    with closing(LedgerFile(path)) as file:
        assert tokens(file.credits()) == {peer(0): 10, peer(1): 11}
        assert file.add([signed([0, 1]), signed([0, 1], 2, [0])]) == 0
        # The missing signature comes later.
        assert file.add([signed([0, 1], 2, [1])]) == 1
        assert tokens(file.credits()) == {peer(0): 20, peer(1): 22}
        file.add([], [Said(peer(0), 2, "older", ""), Said(peer(1), 1, "\x1b[2J", "\u202e")])
        assert file.sayings() == {peer(0): Said(peer(0), 3, "a", "t")}


def _add_for_ever(path: Path, started: object) -> None:
    with closing(opened(path)) as file:
        for version in range(1, 10**6):
            file.add([signed([0, 1], version)])
            if version == 3:
                started.set()  # type: ignore[attr-defined]


def test_a_kill_in_the_middle_leaves_what_was_added(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    context = multiprocessing.get_context("fork")
    started = context.Event()
    process = context.Process(target=_add_for_ever, args=(path, started), daemon=True)
    process.start()
    assert started.wait(120)
    process.kill()
    process.join(30)
    with closing(LedgerFile(path)) as file:
        versions = [c.statement.version for c in counted_chain(file.certificates(SHARED))]
        assert versions == list(range(1, len(versions) + 1))
        assert len(versions) >= 3
        assert file.add([signed([0, 1], len(versions) + 1)]) == 1


def test_another_run_and_another_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.ledger"
    opened(path).close()
    other = verify_manifest(sign_manifest(make_plan(name="another"), operator()))
    with pytest.raises(StorageError, match=r"is the ledger of run"):
        LedgerFile(path, other)
    with pytest.raises(StorageError, match=r"is no ledger"):
        LedgerFile(tmp_path / "none")
    (tmp_path / "text").write_text("not a database, and rather longer than a hundred bytes" * 9)
    with pytest.raises(StorageError, match=r"cannot be used"):
        LedgerFile(tmp_path / "text")


def test_merging_checks_what_the_other_keeper_has(tmp_path: Path) -> None:
    now_s = make_plan().start_s + 1000 * make_plan().rounds.duration_s
    forged = signed([0, 1], 3)
    forged = Certificate(forged.statement, {peer(0): b"0" * 64, peer(1): b"0" * 64})
    said = dataclasses.replace(signed([0, 1], 9).statement, round_index=10**6)
    late = sign_statement(said, key(0))
    rich = signed([0, 1], 8, count=2**52)
    with (
        closing(opened(tmp_path / "one")) as one,
        closing(opened(tmp_path / "other")) as other,
        closing(opened(tmp_path / "third")) as third,
    ):
        one.add([signed([0, 1], 1), signed([0, 1], 2, [0])], [Said(peer(0), 1, "a")])
        other.add([signed([0, 1], 2, [1]), forged, late, rich], [Said(peer(0), 2, "b", "t")])
        refused: list[RecordError] = []
        assert one.merge(other, now_s, refused.append) == 1
        assert len(refused) == 3
        assert any("has not begun" in str(error) for error in refused)
        assert any("at most" in str(error) for error in refused)
        assert tokens(one.credits()) == {peer(0): 20, peer(1): 22}
        assert one.sayings() == {peer(0): Said(peer(0), 2, "b", "t")}
        third.merge(other, now_s, lambda error: None)
        third.merge(one, now_s, lambda error: None)
        assert third.credits() == one.credits()


def test_two_processes_may_add_to_one_file(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "l")) as one, closing(opened(tmp_path / "l")) as other:
        assert one.add([signed([0, 1], 1)]) == 1
        assert other.add([signed([0, 1], 1), signed([0, 1], 2)]) == 1
        assert one.credits() == other.credits()


# -- what is exported


def test_names_and_teams_are_sums_of_peers() -> None:
    credits = ledger_of(chain([{"A": (0, 10), "B": (1, 20), "C": (1, 5)}]))
    said = {"A": Said("A", 1, "ann", "school"), "B": Said("B", 1, "bob", "school")}
    values = exported("run", credits, said)
    assert values["format"] == "dipaco-ledger/1"
    assert [p["peer_id"] for p in values["peers"]] == ["B", "A", "C"]
    assert values["teams"] == [
        {"team": "school", "tokens": 30, "tokens_alone": 0, "peers": ["B", "A"]}
    ]
    assert [n["name"] for n in values["names"]] == ["bob", "ann"]
    assert values["tokens"] == 35
    json.dumps(values)


def test_the_command_prints_and_merges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, other = tmp_path / "run.ledger", tmp_path / "other"
    for file, version in ((path, 1), (other, 2)):
        with closing(opened(file)) as made:
            made.add([signed([0, 1], version)], [Said(peer(0), 1, "<b>ann", "school")])
    assert run(LedgerSettings(file=path, json=True)) == 0
    values = json.loads(capsys.readouterr().out)
    assert [p["tokens"] for p in values["peers"]] == [11, 10]
    assert run(LedgerSettings(file=path, merge=other)) == 0
    shown = capsys.readouterr()
    assert "<b>ann" in shown.out
    assert "school" in shown.out
    assert "1 certificates more" in shown.err
    with pytest.raises(ConfigurationError, match=r"--once"):
        LedgerSettings(file=path, once=True)


def test_names_from_a_file_that_no_record_can_say_are_not_shown(tmp_path: Path) -> None:
    opened(tmp_path / "l").close()
    with closing(sqlite3.connect(tmp_path / "l")) as base:
        base.execute("INSERT INTO said VALUES (?, 1, ?, ?)", (peer(0), "\x1b[31m", "\u202eevil"))
        base.commit()
    with closing(LedgerFile(tmp_path / "l")) as file:
        assert file.sayings() == {}


def test_teams_are_short_and_plain() -> None:
    address = ("/ip4/127.0.0.1/tcp/1/p2p/12D3KooW",)
    assert PeerSettings(initial_peers=address, team="our school").team
    for team in ("x" * 33, "[red]", "a\u202eb", "a\nb"):
        with pytest.raises(ConfigurationError, match=r"--team"):
            PeerSettings(initial_peers=address, team=team)
    assert NAME_PATTERN


# -- the keeper


class Swarm:
    """A swarm of one module, whose holders know some signatures each."""

    def __init__(self) -> None:
        self.chain: list[Certificate] = []
        self.answers: dict[str, list[Certificate]] = {}
        self.asked: list[str] = []

    def winning_chain(
        self, module: str, view: SwarmView
    ) -> tuple[StateReference | None, tuple[Certificate, ...]]:
        if module != SHARED or not self.chain:
            return None, ()
        return self.chain[0].reference, tuple(self.chain)

    def certificates(self, holder: str, module: str, digest: str, count: int) -> list[bytes]:
        self.asked.append(holder)
        if holder not in self.answers:
            raise NetworkError(f"peer {holder} does not answer")
        return [encode_certificate(c) for c in self.answers[holder][:count]]


class View(SwarmView):
    def holders(self, state: object) -> tuple[str, ...]:
        return (peer(0), peer(1), peer(2))


def test_a_keeper_asks_again_for_signatures_and_takes_nothing_else(tmp_path: Path) -> None:
    swarm, plan = Swarm(), make_plan()
    grid = Grid(plan.model, plan.grid)
    now_s = plan.start_s + 10 * plan.rounds.duration_s
    with closing(opened(tmp_path / "l")) as file:
        keeper = LedgerKeeper(
            file,
            grid,
            swarm,
            swarm,
            lambda: View(now_s),
            lambda: now_s,  # type: ignore[arg-type]
        )
        assert keeper.look() == 0
        swarm.chain = [signed([0, 1], 2, [0]), signed([0, 1], 1)]
        swarm.answers = {peer(1): [signed([0, 1], 2, [1]), signed([0, 1, 2], 5)]}
        assert keeper.look() == 2
        assert tokens(file.credits()) == {peer(0): 20, peer(1): 22}
        assert swarm.asked == [peer(0), peer(1)]
        # Nothing is missing, so nobody is asked; the holders may have forgotten what is here.
        swarm.chain = swarm.chain[:1]
        assert keeper.look() == 0
        assert len(swarm.asked) == 2
        swarm.chain = [signed([0, 1], 3, count=2**52)]
        assert keeper.look() == 0
    assert os.path.getsize(tmp_path / "l") < 2**20
