"""The chains that a peer tells: over restarts, damaged, forked, and with a full disk."""

import contextlib
import errno
import resource
from pathlib import Path

import pytest

from dipaco.base.errors import StorageError
from dipaco.peer.exchange import chain_store
from dipaco.peer.exchange.chain_store import KEPT_HEADS, ChainStore
from dipaco.protocol.chain import Head
from dipaco.protocol.round_rows import REMEMBERED_PEERS
from support.wire.exchanges import GENESIS, GRID, MODULE, admission, chain_of, row_of, rows_in
from support.wire.peers import RUN, peer


def opened(folder):
    return ChainStore(RUN, GRID.modules(), folder)


def head_of(step, version, weight):
    return Head(MODULE, step.name, version, weight, step.round_index, f"{version:064x}", 100)


def filled(folder, length=5):
    """Return chains of which the first `length` steps were served, one after the other."""
    chains, steps = opened(folder), chain_of(length, (0, 1))
    chains.note_admissions({peer(n): admission(n) for n in (0, 1)})
    for version, step in enumerate(steps, 1):
        chains.serve(MODULE, step.name, [step], head_of(step, version, 2 * version))
    return chains, steps


def test_what_is_served_is_there_after_a_restart(tmp_path):
    chains, steps = filled(tmp_path)
    again = opened(tmp_path)
    head = head_of(steps[-1], 5, 10)
    assert again.served(MODULE) == chains.served(MODULE) == (steps[-1].name, head)
    assert again.chain(MODULE) == tuple(steps)
    assert [row.signature for row in again.chain(MODULE)[0].rows] == [row.signature for row in steps[0].rows]
    assert again.admissions_of([peer(0), peer(7)]) == {peer(0): admission(0)}
    assert again.head_of(MODULE, f"{3:064x}") == head_of(steps[2], 3, 6)
    # A head of before can be served again, which needs no steps that are here.
    again.serve(MODULE, steps[2].name, head=head_of(steps[2], 3, 6))
    assert opened(tmp_path).chain(MODULE) == tuple(steps[:3])
    assert again.served("L0.E0") == (opened(None).served("L0.E0"))


def test_a_log_is_cut_at_its_last_whole_entry_wherever_it_ends_or_is_damaged(tmp_path):
    _, steps = filled(tmp_path)
    log = tmp_path / f"{MODULE}.log"
    whole = log.read_bytes()
    names = [GENESIS, *(step.name for step in steps)]
    seen = set()
    for cut in range(0, len(whole), 97):
        log.write_bytes(whole[:cut])
        found = opened(tmp_path)
        assert found.served(MODULE)[0] in names
        assert log.stat().st_size <= cut
        seen.add(found.served(MODULE)[0])
        # What is left can be gone on with.
        found.serve(MODULE, steps[-1].name, steps)
        assert opened(tmp_path).served(MODULE)[0] == steps[-1].name
    assert seen >= set(names[:-1])
    for at in range(0, len(whole), 211):
        log.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        assert opened(tmp_path).served(MODULE)[0] in names
    log.write_bytes(b"\xff" * 5000)
    assert opened(tmp_path).served(MODULE) == (GENESIS, None)
    assert log.stat().st_size == 0


def test_an_entry_of_which_the_disk_took_a_part_hides_no_later_ones(tmp_path):
    """A disk that becomes full takes the first bytes of what is appended."""
    _, steps = filled(tmp_path / "whole")
    whole = (tmp_path / "whole" / f"{MODULE}.log").stat().st_size
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most in range(1, whole, 311):
        folder = tmp_path / str(most)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, usual[1]))
            chains = opened(folder)
            for step in steps[:-1]:
                with contextlib.suppress(StorageError):
                    chains.serve(MODULE, step.name, [step])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        chains.serve(MODULE, steps[-1].name, steps[-1:])
        assert opened(folder).chain(MODULE) == tuple(steps)


def test_a_chain_that_takes_the_place_of_another_is_told_from_where_they_part(tmp_path):
    chains, steps = filled(tmp_path)
    branch = chain_of(3, (2, 3, 4), steps[1].name, begin=2)
    chains.serve(MODULE, branch[-1].name, branch)
    told = chains.answer(MODULE, [step.name for step in reversed(steps)])
    assert (told.steps, told.has_more, told.held) == (tuple(branch), False, None)
    assert opened(tmp_path).chain(MODULE) == (*steps[:2], *branch)
    with pytest.raises(KeyError):
        chains.serve(MODULE, "f" * 64)
    with pytest.raises(KeyError):
        chains.serve("L0.E0", steps[0].name, steps[:1])
    with pytest.raises(KeyError):
        chains.serve(MODULE, branch[-1].name, chain_of(1, (5,), "f" * 64, begin=9))


def test_many_forks_leave_little_behind_and_a_forgotten_branch_can_come_back(tmp_path):
    chains, steps = filled(tmp_path)
    branches = [chain_of(2, (number, number + 1), steps[-1].name, begin=5) for number in range(2, 2 + 3 * KEPT_HEADS)]
    for branch in (*branches, branches[0]):
        chains.serve(MODULE, branch[-1].name, branch, head_of(branch[-1], 7, 14))
    with pytest.raises(KeyError):
        chains.serve(MODULE, branches[1][-1].name)
    again = opened(tmp_path)
    for found in (chains, again):
        assert found.chain(MODULE) == (*steps, *branches[0])
        assert found.answer(MODULE, [steps[-1].name]).steps == tuple(branches[0])
        assert found.answer(MODULE, []).steps == (*steps, *branches[0])


def test_admissions_without_end_push_out_none_of_the_chain(monkeypatch):
    """With one invitation somebody can admit as many keys as there are, and make steps of them."""
    monkeypatch.setattr(chain_store, "MAX_KEPT_ADMISSIONS", 20)
    chains, steps = opened(None), chain_of(5, range(3))
    peers = {peer for step in steps for peer in step.peers}
    chains.note_admissions(dict.fromkeys(peers, b"honest"))
    chains.serve(MODULE, steps[-1].name, steps)
    row = row_of(9, 50)
    chains.note_admissions({row.peer: b"honest"})
    chains.note_rows([row])
    for number in range(500):
        chains.note_admissions({f"invented {number}": b"junk"})
    assert chains.admissions_of({*peers, row.peer}).keys() == {*peers, row.peer}
    assert chains.admissions_of(["invented 499"])
    assert len(chains.admissions_of(f"invented {number}" for number in range(500))) < 30


def test_an_answer_has_no_more_than_fits_and_says_so():
    chains, steps = opened(None), chain_of(40, range(20))
    chains.serve(MODULE, steps[-1].name, steps)
    found = []
    while True:
        told = chains.answer(MODULE, [found[-1].name if found else GENESIS])
        assert 1 <= sum(len(step.rows) for step in told.steps) <= chain_store.ANSWERED_STEP_ROWS
        found += told.steps
        if not told.has_more:
            break
    assert found == steps


def test_of_a_peers_rows_of_a_round_the_first_counts_and_few_are_remembered():
    chains = opened(None)
    first = row_of(0)
    chains.note_rows([first, row_of(0, tokens=999)])
    assert rows_in(chains, MODULE) == (first,)
    chains.note_rows(row_of(0, round_index) for round_index in range(1, 50))
    assert [row.round_index for row in rows_in(chains, MODULE)] == [46, 47, 48, 49]
    chains.note_rows(row_of(number, 50) for number in range(1, 600))
    many = [row for row in rows_in(chains, MODULE) if row.round_index == 50]
    assert len(many) == REMEMBERED_PEERS
    # Rows of those who contributed lately have room before others.
    late = row_of(700, 50)
    chains.note_rows([late])
    assert late not in rows_in(chains, MODULE)
    chains.has_contributed = lambda who: who == late.peer
    chains.note_rows([late])
    assert late in rows_in(chains, MODULE)
    assert len(chains.answer(MODULE, [GENESIS]).rows) == chain_store.ANSWERED_ROWS


def test_with_a_full_disk_a_chain_is_told_from_memory_and_written_once_there_is_room(tmp_path, monkeypatch):
    chains, steps = filled(tmp_path)
    more = chain_of(2, (0, 1), steps[-1].name, begin=5)

    def full(path, *_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        with pytest.raises(StorageError):
            chains.serve(MODULE, more[0].name, more[:1])
    assert chains.chain(MODULE) == (*steps, more[0])
    chains.serve(MODULE, more[1].name, more[1:])
    assert opened(tmp_path).chain(MODULE) == (*steps, *more)
