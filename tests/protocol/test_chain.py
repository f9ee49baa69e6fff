"""Rows, steps and chains: what is signed, what is refused, and which chain wins."""

import dataclasses
import hashlib
import itertools

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dipaco.protocol.chain.chain_book import BRANCHES_OF_A_TELLER, ChainBook
from dipaco.protocol.chain.steps import (
    MARK_BYTES,
    MAX_ROWS,
    Row,
    Step,
    genesis_name,
    pack_row,
    pack_step,
    sign_row,
    unpack_row,
    unpack_step,
    verify_row,
)
from dipaco.protocol.grid import Grid
from dipaco.protocol.record_errors import MAX_COUNT, RecordError
from support.runs.make_plan import make_plan
from support.wire.peers import RUN, key, peer

PLAN = make_plan()
GRID = Grid(PLAN.model, PLAN.grid)
MODULE, OTHER = "L0.E0", "L0.E1"
PATHS = GRID.paths_of_module(MODULE)
GENESIS = genesis_name(RUN, MODULE)
MAX_BYTES = 1000


def row(number=0, round_index=0, parent=GENESIS, **fields):
    said = {
        "module": MODULE,
        "round_index": round_index,
        "parent": parent,
        "state": hashlib.sha256(parent.encode()).hexdigest(),
        "path": PATHS[number % len(PATHS)],
        "peer": peer(number),
        "tokens": 100,
        "file": f"{number:064x}",
        "bytes": 50,
        **fields,
    }
    return sign_row(Row(**said), key(number))


def step(*numbers, on=None, round_index=None):
    """Return a step with the rows of these peers on top of another one or of the genesis."""
    parent = GENESIS if on is None else on.name
    after = (0 if on is None else on.round_index + 1) if round_index is None else round_index
    return Step.of(row(number, after, parent) for number in numbers)


def chain(length, *numbers, on=None):
    steps = []
    for _ in range(length):
        steps.append(step(*numbers, on=steps[-1] if steps else on))
    return steps


def book(*steps):
    made = ChainBook(RUN, (MODULE, OTHER))
    assert all(made.add(one) for one in steps)
    return made


# -- rows


def verify(one):
    verify_row(one, GRID, max_bytes=MAX_BYTES)


def test_a_signed_row_is_good_and_only_its_owner_signs_it():
    verify(row())
    with pytest.raises(ValueError, match="the key is not"):
        sign_row(row(0), key(1))


CHANGES = {
    "module": "L1.E0",
    "round_index": 1,
    "parent": "0" * 64,
    "state": "0" * 64,
    "path": PATHS[1],
    "peer": peer(1),
    "tokens": 101,
    "file": "f" * 64,
    "bytes": 51,
    "has_own_texts": True,
    "signature": bytes(64),
}


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_is_signed(field):
    assert CHANGES.keys() == {field.name for field in dataclasses.fields(Row)}
    with pytest.raises(RecordError, match="has not signed"):
        verify(dataclasses.replace(row(), **{field: CHANGES[field]}))


@pytest.mark.parametrize("tokens", [100, 40_000, 294_912, MAX_COUNT])
def test_a_row_says_that_own_texts_are_among_its_tokens_in_about_as_many_bytes(tokens):
    plain, own = row(tokens=tokens), row(tokens=tokens, has_own_texts=True)
    verify(own)
    assert unpack_row(pack_row(own)) == own
    assert not unpack_row(pack_row(plain)).has_own_texts
    assert own.outer_row == plain.outer_row
    assert own.mark == plain.mark
    assert 0 <= len(msgpack.packb(pack_row(own))) - len(msgpack.packb(pack_row(plain))) <= 2


def test_every_bit_of_a_signature_counts():
    good = row()
    for position in range(64):
        forged = bytearray(good.signature)
        forged[position] ^= 1 << position % 8
        with pytest.raises(RecordError, match="has not signed"):
            verify(dataclasses.replace(good, signature=bytes(forged)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"module": "L7.E0"}, "no module"),
        ({"path": next(p for p in range(4) if p not in PATHS)}, "does not go through"),
        ({"path": -1}, "does not go through"),
        ({"round_index": -1}, "of round -1"),
        ({"round_index": 2**31}, "of round"),
        ({"tokens": 0}, "of 0 tokens"),
        ({"tokens": MAX_COUNT + 1}, "tokens"),
        ({"bytes": MARK_BYTES}, "of 32 bytes"),
        ({"bytes": MAX_BYTES + 1}, "at most 1000 are possible"),
    ],
)
def test_what_cannot_be_is_refused_though_it_is_signed(fields, message):
    with pytest.raises(RecordError, match=message):
        verify(row(**fields))


def test_a_row_of_nobody_is_refused():
    for nobody in ("", "x" * 52, "Qm" + "1" * 44, peer(0) + "1"):
        with pytest.raises(RecordError, match="not a peer id"):
            verify(dataclasses.replace(row(), peer=nobody))


# -- steps


def test_a_step_has_one_name_however_its_rows_came():
    rows = [row(number) for number in range(5)]
    names = {Step.of(order).name for order in itertools.permutations(rows)}
    assert len(names) == 1
    # Anybody may have made a signature anew; what is agreed on is what was signed.
    unsigned = [dataclasses.replace(one, signature=bytes(64)) for one in rows]
    assert names == {Step.of(unsigned).name}


def test_a_name_covers_everything_before_it_and_the_run():
    first = step(0, 1)
    names = [first, step(0), step(0, 2), step(0, 1, round_index=1), step(0, 1, on=first)]
    assert len({one.name for one in names}) == len(names)
    for field in ("tokens", "bytes"):
        assert Step.of([row(0, **{field: 99}), row(1)]).name != first.name
    assert len({genesis_name(r, m) for r in (RUN, "f" * 16) for m in (MODULE, OTHER)}) == 4


def test_rows_that_do_not_belong_together_are_no_step():
    for other in (row(1, 1), row(1, parent="0" * 64), row(1, module="L1.E0")):
        with pytest.raises(ValueError, match="another module, round, parent or state"):
            Step.of([row(0), other])
    with pytest.raises(ValueError, match="a peer has two"):
        Step.of([row(0), row(0, path=PATHS[1])])
    with pytest.raises(ValueError, match="1 to 64 rows"):
        Step.of(row(number) for number in range(MAX_ROWS + 1))


# -- the wire


def test_the_largest_step_comes_back_as_it_was():
    made = Step.of(row(number, 2**31 - 1, tokens=MAX_COUNT) for number in range(MAX_ROWS))
    packed = msgpack.packb(pack_step(made))
    assert len(packed) <= 2**15
    found = unpack_step(msgpack.unpackb(packed))
    assert (found, found.name) == (made, made.name)
    # Equality does not look at signatures.
    assert [one.signature for one in found.rows] == [one.signature for one in made.rows]


def test_a_step_has_one_spelling():
    packed = pack_step(step(0, 1, 2))
    for wrong in (packed[::-1], packed[:1] * 2, [], packed * 30, [*packed, pack_row(row(3, 1))]):
        with pytest.raises(RecordError):
            unpack_step(wrong)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=10) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=30,
)


@given(values)
def test_junk_is_refused_in_one_way(junk):
    for unpack in (unpack_row, unpack_step):
        with pytest.raises(RecordError):
            unpack(junk)


@given(st.integers(0, 8), values)
def test_a_row_with_a_field_of_junk_is_refused_or_is_not_signed(place, junk):
    good = row()
    packed = pack_row(good)
    packed[place] = junk
    try:
        found = unpack_row(packed)
        verify(found)
    except RecordError:
        return
    assert (found, found.signature) == (good, good.signature)


# -- the book


def test_a_step_follows_its_parent_in_a_later_round():
    first, second = chain(2, 0)
    empty = book()
    assert not empty.add(second)
    assert second.name not in empty
    assert empty.add(first)
    assert empty.add(second)
    assert empty.add(second)
    link = empty.link(second.name)
    assert (link.version, link.weight, link.round_index) == (2, 2, 1)
    with pytest.raises(ValueError, match="round 1 on top of round 1"):
        empty.add(step(0, on=second, round_index=1))
    with pytest.raises(ValueError, match=r"a step of L0\.E1 on top of one of L0\.E0"):
        empty.add(Step.of([row(0, 5, second.name, module=OTHER)]))


def test_where_two_chains_parted():
    trunk = chain(3, 0)
    left, right = chain(2, 1, on=trunk[-1]), chain(4, 2, on=trunk[-1])
    made = book(*trunk, *left, *right)
    for one, other in ((left[-1], right[-1]), (right[-1], left[0]), (trunk[-1], left[-1])):
        assert made.ancestor(one.name, other.name).name == trunk[-1].name
    assert made.ancestor(left[0].name, GENESIS).name == GENESIS
    assert made.stands_on(left[-1].name, trunk[0].name)
    assert made.stands_on(left[-1].name, left[-1].name)
    assert not made.stands_on(left[-1].name, right[0].name)
    assert not made.stands_on(trunk[0].name, left[0].name)
    assert not made.stands_on(left[-1].name, "0" * 64)
    assert made.steps_between(trunk[0].name, left[-1].name) == (*trunk[1:], *left)
    with pytest.raises(ValueError, match="does not stand on"):
        made.steps_between(right[0].name, left[-1].name)
    assert made.contributors(left[-1].name, 2) == {peer(1)}
    assert made.contributors(left[-1].name) == {peer(0), peer(1)}


@pytest.mark.parametrize("length", [0, 1, 9, 10, 11, 60])
@pytest.mark.parametrize("common", [0, 1, 7, 60])
def test_a_locator_finds_where_chains_parted_and_all_after_it_is_told(length, common):
    trunk = chain(min(length, common), 0)
    last = trunk[-1] if trunk else None
    mine = [*trunk, *chain(length - len(trunk), 1, on=last)]
    theirs = [*trunk, *chain(25, 2, on=last)]
    asker, answerer = book(*mine), book(*theirs)
    locator = asker.locator(mine[-1].name if mine else GENESIS)
    assert len(locator) <= 10 + 7
    assert (locator[0], locator[-1]) == (mine[-1].name if mine else GENESIS, GENESIS)
    told, asked = 0, True
    while asked:
        steps, asked = answerer.after(locator, theirs[-1].name, 10)
        assert steps
        told += len(steps)
        assert all(map(asker.add, steps))
        locator = asker.locator(steps[-1].name)
    assert asker.stands_on(theirs[-1].name, theirs[0].name)
    # What is known already is told again only between the names of the locator.
    assert 25 <= told <= 25 + len(trunk)
    assert answerer.after(locator, theirs[-1].name, 10) == ((), False)
    # There is more only behind what was told.
    assert not answerer.after((theirs[-11].name,), theirs[-1].name, 10)[1]
    assert answerer.after((theirs[-12].name,), theirs[-1].name, 10)[1]


def test_a_state_is_had_through_a_step_of_most_or_from_the_genesis():
    first, second = chain(2, 0, 1)
    half = step(0, on=second)
    made = book(first, second, half)
    # The step of half of those before it vouches for nothing while there is one of more.
    ways = made.vouched(half.name)
    assert [way.before.name for way in ways] == [first.name, GENESIS, second.name]
    assert [way.digest for way in ways] == [second.state, "", half.state]
    assert ways[0].steps == (second, half)


def test_branches_that_nobody_went_on_from_are_forgotten():
    trunk = chain(8, 0)
    old, young = chain(2, 1, on=trunk[1]), chain(1, 1, on=trunk[4])
    made = book(*trunk, *old, *chain(1, 2, on=old[0]), *young)
    made.prune(trunk[-1].name, 3)
    assert [one.name in made for one in (*trunk, *young)] == [True] * 9
    assert not any(one.name in made for one in old)
    assert made.tips(MODULE)[0].name == trunk[-1].name
    # They may come again.
    assert all(made.add(one) for one in old)


def test_what_one_peer_invents_displaces_nothing_that_others_told_of():
    """Of the branches of each teller the heaviest stay, and what is used here."""
    used, told = chain(2, 0), chain(2, 7)
    made = book(*used)
    for one in told:
        made.add(one, peer(3))
    for number in range(100):
        heavy = step(*range(1, 2 + number % 5), round_index=number)
        made.add(heavy, peer(4), {used[-1].name})
        made.add(step(9, on=told[-1], round_index=10 + number), peer(4))
        assert len(made.tips(MODULE)) <= 2 + BRANCHES_OF_A_TELLER
    assert all(one.name in made for one in (*used, *told))
    assert made.tips(OTHER)[0].version == 0


def test_a_branch_stays_that_is_told_again_by_another():
    made, one = book(), step(1, round_index=3)
    made.add(one, peer(4))
    made.add(one, peer(3))
    for number in range(100):
        made.add(step(1, 2, round_index=number), peer(4))
    assert one.name in made
    assert set(made.tellers(one.name)) <= {peer(3), peer(4)}
