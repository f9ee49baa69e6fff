"""Which rows of a module are remembered, and when their files are asked for."""

from dipaco.protocol.chain.round_rows import REMEMBERED_PEERS, ROWS_OF_A_PEER, RoundRows
from dipaco.protocol.chain.steps import Row
from support.runs.trainer import MODULE, name


def row(peer, round_index=0, parent="parent"):
    file = name(f"{peer} {round_index} {parent}")
    return Row(MODULE, round_index, name(parent), name("state"), 0, peer, 10, file, 100)


def note(rows, one):
    """Take a row in where A and B have room before others."""
    return rows.note(one, {"A", "B"}.__contains__)


def test_strangers_do_not_push_each_other_out_and_known_peers_do():
    rows = RoundRows()
    strangers = [row(f"stranger {number}") for number in range(REMEMBERED_PEERS + 1)]
    assert [note(rows, one) for one in strangers].count(True) == REMEMBERED_PEERS
    assert note(rows, row("A"))
    assert note(rows, row("B"))
    behind = rows.on_top_of(0, name("parent"))
    assert len(behind) == REMEMBERED_PEERS
    assert behind.keys() >= {"A", "B", strangers[-4].peer}
    assert behind.keys().isdisjoint({one.peer for one in strangers[-3:]})


def test_of_a_peer_a_few_rows_are_remembered_and_the_oldest_goes():
    rows = RoundRows()
    made = [row("A", number) for number in range(ROWS_OF_A_PEER + 1)]
    assert all(note(rows, one) for one in made)
    assert rows.newest(99) == tuple(made[1:])
    assert not note(rows, made[-1])


def test_of_a_round_a_peer_has_a_few_rows_also_where_others_made_room_meanwhile():
    rows = RoundRows()
    made = [row("A", number % 3, f"parent {number}") for number in range(60)]
    assert [note(rows, one) for one in made].count(True) == 3 * ROWS_OF_A_PEER
    assert note(rows, row("B", 0, "parent 0"))
    rows.forget_before(3)
    assert note(rows, row("A", 3))


def test_three_rounds_are_remembered():
    rows = RoundRows()
    made = [row("A", number) for number in range(4)]
    for one in made:
        note(rows, one)
        rows.came(one)
    rows.forget_before(3)
    assert rows.newest(99) == tuple(made[1:])
    assert rows.here == {one.name for one in made[1:]}


def test_a_file_is_asked_for_again_after_a_while_and_at_once_when_nobody_gave_it():
    rows, one = RoundRows(), row("A")
    note(rows, one)
    assert rows.to_gather([one], 100.0, 20.0) == (one,)
    assert rows.to_gather([one], 119.0, 20.0) == ()
    assert rows.to_gather([one], 121.0, 20.0) == (one,)
    rows.gather_failed(one, is_refused=False)
    assert rows.to_gather([one], 122.0, 20.0) == (one,)
    rows.gather_failed(one, is_refused=True)
    assert rows.to_gather([one], 200.0, 20.0) == ()
