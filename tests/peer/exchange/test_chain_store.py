"""The chains that a peer tells: over restarts, damaged, forked, and with a full disk."""

import contextlib
import random
import resource
import shutil
import threading

import pytest

from dipaco.base.errors import StorageError
from dipaco.base.index import INDEX_FILE, Index
from dipaco.peer.exchange import chain_store
from dipaco.peer.exchange.chain_store import ChainStore
from dipaco.protocol.chain.round_rows import REMEMBERED_PEERS
from dipaco.protocol.chain.steps import Head, Step, genesis_name
from support.wire.exchanges import GENESIS, GRID, MODULE, admission, chain_of, row_of, rows_in
from support.wire.peers import RUN, peer


def opened(folder):
    return ChainStore(RUN, GRID.modules(), Index(folder / INDEX_FILE))


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
    assert chains.served(MODULE) == (steps[-1].name, head)
    assert again.served(MODULE) == (steps[-1].name, None)
    assert again.chain(MODULE) == tuple(steps)
    assert [row.signature for row in again.chain(MODULE)[0].rows] == [row.signature for row in steps[0].rows]
    assert again.admissions_of([peer(0), peer(7)]) == {peer(0): admission(0)}
    # A chain of before can be told again, which needs no steps that are here.
    again.serve(MODULE, steps[2].name, head=head_of(steps[2], 3, 6))
    assert opened(tmp_path).chain(MODULE) == tuple(steps[:3])
    assert again.served("L0.E0") == (genesis_name(RUN, "L0.E0"), None)


def test_what_rows_say_of_own_texts_is_there_after_a_restart(tmp_path):
    step = Step.of([row_of(0, has_own_texts=True), row_of(1)])
    opened(tmp_path).serve(MODULE, step.name, [step])
    assert opened(tmp_path).chain(MODULE) == (step,)


@pytest.mark.parametrize("newest", [0, 3, 40, 50])
def test_a_member_is_told_the_newest_steps_and_the_names_of_the_others(tmp_path, monkeypatch, newest):
    monkeypatch.setattr(chain_store, "PAGE_NAMES", 7)
    _, steps = filled(tmp_path, 40)
    trunk, told = opened(tmp_path).remembered(MODULE, newest)
    assert told == (tuple(steps[-newest:]) if newest else ())
    assert len(trunk) + len(told) == 40
    for version, step in enumerate(steps[: len(trunk)], 1):
        found = (trunk.name(version), trunk.round_index(version), trunk.peers(version), trunk.weight(version))
        assert found == (step.name, step.round_index, step.peers, 2 * version)
        assert trunk.version(step.name) == version


def damages(whole):
    """Yield what a disk may make of a file: cut anywhere, with a page or a byte of something else,
    or no such file."""
    for cut in range(0, len(whole), 1511):
        yield whole[:cut]
    for begin in range(0, len(whole), 4096):
        yield whole[:begin] + bytes(4096) + whole[begin + 4096 :]
    for at in range(0, len(whole), 1999):
        yield whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :]
    yield b"\xff" * 5000


def test_a_damaged_index_tells_the_chain_or_nothing_and_can_be_gone_on_with(tmp_path, caplog):
    chains, steps = filled(tmp_path / "made", 40)
    chains._index.close()
    told = set()
    for number, content in enumerate(damages((tmp_path / "made" / INDEX_FILE).read_bytes())):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / INDEX_FILE).write_bytes(content)
        with contextlib.suppress(StorageError):  # What reading alone shows the next start mends.
            started(folder).chain(MODULE)
        with contextlib.suppress(StorageError):
            trunk, _ = started(folder).remembered(MODULE, 10)
            assert [trunk.name(n) for n in range(1, len(trunk) + 1)] == [step.name for step in steps[: len(trunk)]]
        found = started(folder)
        told.add(len(found.chain(MODULE)))
        found.serve(MODULE, steps[-1].name, steps)
        found._index.close()
        assert opened(folder).chain(MODULE) == tuple(steps)
        shutil.rmtree(folder)
    assert told == {0, 40}


def started(folder):
    """Return the chains as a peer that starts finds them: it writes."""
    index = Index(folder / INDEX_FILE)
    with index.transaction():
        pass
    return ChainStore(RUN, GRID.modules(), index)


def test_a_transaction_of_which_the_disk_took_a_part_hides_no_later_ones(tmp_path):
    """A disk that becomes full takes the first bytes of what is written."""
    steps, refused = chain_of(40, (0, 1)), 0
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most in range(90_000, 200_000, 9_000):
        folder = tmp_path / str(most)
        chains = opened(folder)
        chains.serve(MODULE, steps[0].name, steps[:1])
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, usual[1]))
            for step in steps[1:-1]:
                try:
                    chains.serve(MODULE, step.name, [step])
                except StorageError:
                    refused += 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        assert chains.chain(MODULE) == tuple(steps[:-1])
        chains.serve(MODULE, steps[-1].name, steps[-1:])
        assert opened(folder).chain(MODULE) == tuple(steps)
    assert refused


@pytest.mark.parametrize("refused", [0.0, 0.05, 0.25])
def test_whatever_the_disk_refuses_the_next_life_tells_what_was_written_last(tmp_path, monkeypatch, refused):
    """Branches, heads and restarts as they come. One write that a full disk refused once let the next
    start cut off good parts of the chain."""
    usual = ChainStore._write
    for seed in range(5):
        rng, steps, rounds = random.Random(seed), {}, {GENESIS: -1}

        def write(chains, kept, rng=rng):
            if rng.random() < refused:
                raise StorageError("disk full")
            usual(chains, kept)

        def chain_to(name, steps=steps):
            found = []
            while name != GENESIS:
                found.append(steps[name])
                name = found[-1].parent
            return tuple(reversed(found))

        monkeypatch.setattr(ChainStore, "_write", write)
        folder = tmp_path / str(seed)
        chains, written = opened(folder), ()
        for number in range(40):
            base = rng.choice(list(rounds)[-6:])
            [step] = chain_of(1, (number % 8,), base, begin=rounds[base] + 1)
            steps[step.name], rounds[step.name] = step, step.round_index
            target = chain_to(rng.choice(list(rounds)[-4:]))
            told = chains.chain(MODULE)
            apart = next((n for n, pair in enumerate(zip(told, target, strict=False)) if pair[0] != pair[1]), len(told))
            name = target[-1].name if target else GENESIS
            try:
                chains.serve(MODULE, name, target[apart:])
                written = target
            except StorageError:
                pass
            assert chains.chain(MODULE) == target
            if rng.random() < 0.2:
                chains._index.close()
                chains = opened(folder)
                assert chains.chain(MODULE) == written


def test_who_asks_waits_for_nothing_that_is_being_written(tmp_path):
    chains, steps = filled(tmp_path)
    found = []

    def ask():
        for module in GRID.modules():
            found.append(chains.answer(module, [GENESIS]).steps)
        chains.note_rows([row_of(3, 6, steps[-1].name)])
        found.append(chains.served(MODULE)[0])
        found.append(chains.admissions_of([peer(0)]))

    asking = threading.Thread(target=ask, daemon=True)
    with contextlib.suppress(KeyError), chains._index.transaction() as writer:
        writer.execute("DELETE FROM told")
        asking.start()
        asking.join(30.0)
        assert not asking.is_alive()
        raise KeyError
    assert tuple(steps) in found
    assert found[-2:] == [steps[-1].name, {peer(0): admission(0)}]


def test_a_chain_that_takes_the_place_of_another_is_told_from_where_they_part(tmp_path):
    chains, steps = filled(tmp_path)
    branch = chain_of(3, (2, 3, 4), steps[1].name, begin=2)
    chains.serve(MODULE, branch[-1].name, branch)
    told = chains.answer(MODULE, [step.name for step in reversed(steps)])
    assert (told.steps, told.has_more, told.held) == (tuple(branch), False, None)
    assert opened(tmp_path).chain(MODULE) == (*steps[:2], *branch)
    [orphan] = chain_of(1, (5,), "f" * 64, begin=9)
    with pytest.raises(KeyError):
        chains.serve(MODULE, "f" * 64)
    with pytest.raises(KeyError):
        chains.serve("L0.E0", steps[0].name, steps[:1])
    with pytest.raises(KeyError):
        chains.serve(MODULE, orphan.name, [orphan])


def test_many_forks_leave_little_behind_and_a_forgotten_branch_can_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(chain_store, "KEPT_SIDE_STEPS", 8)
    chains, steps = filled(tmp_path)
    branches = [chain_of(2, (number, number + 1), steps[-1].name, begin=5) for number in range(2, 12)]
    for branch in (*branches, branches[0]):
        chains.serve(MODULE, branch[-1].name, branch, head_of(branch[-1], 7, 14))
    with pytest.raises(KeyError):
        chains.serve(MODULE, branches[1][-1].name)
    again = opened(tmp_path)
    for found in (chains, again):
        assert found.chain(MODULE) == (*steps, *branches[0])
        assert found.answer(MODULE, [steps[-1].name]).steps == tuple(branches[0])
        assert found.answer(MODULE, []).steps == (*steps, *branches[0])


def test_admissions_without_end_push_out_none_of_the_chain(monkeypatch, tmp_path):
    """With one invitation somebody can admit as many keys as there are, and make steps of them."""
    monkeypatch.setattr(chain_store, "MAX_KEPT_ADMISSIONS", 20)
    chains, steps = opened(tmp_path), chain_of(5, range(3))
    peers = {peer for step in steps for peer in step.peers}
    chains.note_admissions(dict.fromkeys(peers, b"honest"))
    chains.serve(MODULE, steps[-1].name, steps)
    row = row_of(9, 50)
    chains.note_admissions({row.peer: b"honest"})
    chains.note_rows([row])
    for number in range(500):
        chains.note_admissions({f"invented {number}": b"junk"})
    assert chains.admissions_of({*peers, row.peer}).keys() == {*peers, row.peer}
    # The older ones go.
    assert chains.admissions_of(["invented 0", "invented 499"]).keys() == {"invented 499"}
    assert len(chains.admissions_of(f"invented {number}" for number in range(500))) < 30


def test_an_answer_has_no_more_than_fits_and_says_so(tmp_path):
    chains, steps = opened(tmp_path), chain_of(40, range(20))
    chains.serve(MODULE, steps[-1].name, steps)
    found = []
    while True:
        told = chains.answer(MODULE, [found[-1].name if found else GENESIS])
        assert 1 <= sum(len(step.rows) for step in told.steps) <= chain_store.ANSWERED_STEP_ROWS
        found += told.steps
        if not told.has_more:
            break
    assert found == steps


def test_of_a_peers_rows_of_a_round_the_first_counts_and_few_are_remembered(tmp_path):
    contributed = set()
    index = Index(tmp_path / INDEX_FILE)
    chains = ChainStore(RUN, GRID.modules(), index, has_contributed=contributed.__contains__)
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
    contributed.add(late.peer)
    chains.note_rows([late])
    assert late in rows_in(chains, MODULE)
    assert len(chains.answer(MODULE, [GENESIS]).rows) == chain_store.ANSWERED_ROWS


def test_with_a_full_disk_a_chain_is_told_from_memory_and_written_once_there_is_room(tmp_path, monkeypatch):
    chains, steps = filled(tmp_path)
    more = chain_of(2, (0, 1), steps[-1].name, begin=5)

    @contextlib.contextmanager
    def full(index):
        raise StorageError("disk full")
        yield

    with monkeypatch.context() as patched:
        patched.setattr(Index, "transaction", full)
        with pytest.raises(StorageError):
            chains.serve(MODULE, more[0].name, more[:1])
    assert chains.chain(MODULE) == (*steps, more[0])
    chains.serve(MODULE, more[1].name, more[1:])
    assert opened(tmp_path).chain(MODULE) == (*steps, *more)
