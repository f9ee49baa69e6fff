"""Which step is next: the rules of `dipaco.protocol.member.next_step`, row by row."""

import math
import random

import pytest

from dipaco.protocol.chain.chain_book import ChainBook
from dipaco.protocol.chain.steps import Row, Step
from dipaco.protocol.member.next_step import Notes, candidates

RUN, MODULE, NOW_S = "0" * 16, "L0.E0", 100.0
GENESIS = ChainBook(RUN, (MODULE,)).genesis(MODULE)


def step(peers, parent=GENESIS, round_index=0):
    rows = [Row(MODULE, round_index, parent, "0" * 64, 0, peer, 10, f"{ord(peer):064x}", 100) for peer in peers]
    return Step.of(rows)


def chain(*groups, parent=GENESIS, first_round=0):
    steps = []
    for number, peers in enumerate(groups):
        steps.append(step(peers, steps[-1].name if steps else parent, first_round + number))
    return steps


def boundary_s(link):
    """Rounds 0 to 9 are over at `NOW_S`."""
    return 10.0 * (link.round_index + 1)


def found(steps, notes=None, now_s=NOW_S):
    book = ChainBook(RUN, (MODULE,))
    for one in steps:
        assert book.add(one)
    return candidates(MODULE, book, notes or Notes(), now_s, boundary_s)


def heads(steps, notes=None, now_s=NOW_S):
    return [link.name for link in found(steps, notes, now_s).heads]


LONG, SHORT = chain("A", "A", "A"), chain("BCDE", "B")


def test_more_rows_win_over_more_steps_and_then_the_smaller_name():
    assert heads([]) == [GENESIS]
    assert heads([*LONG, *SHORT]) == [SHORT[-1].name, LONG[-1].name]
    alike = step("AB", LONG[-1].name, 3)
    assert heads([*LONG, alike, *SHORT])[0] == min(alike.name, SHORT[-1].name)


@pytest.mark.parametrize(
    ("noted", "then"),
    [
        (lambda notes: notes.refuse(SHORT[0].name), [LONG[-1].name, GENESIS]),
        (lambda notes: notes.refuse(SHORT[1].name), [SHORT[0].name, LONG[-1].name]),
        (lambda notes: notes.doubt(SHORT[0].name), [LONG[-1].name, GENESIS]),
        (lambda notes: [notes.refuse(SHORT[0].name), notes.doubt(LONG[1].name)], [LONG[0].name, GENESIS]),
        # What others have built on an absent step may be had.
        (lambda notes: notes.leave(SHORT[0].name), [SHORT[1].name, LONG[-1].name]),
        (lambda notes: notes.leave(SHORT[1].name), [SHORT[0].name, LONG[-1].name]),
        (lambda notes: notes.leave(SHORT[1].name, NOW_S), [SHORT[1].name, LONG[-1].name]),
        (lambda notes: [notes.leave(one.name) for one in SHORT], [LONG[-1].name, GENESIS]),
    ],
)
def test_what_is_passed_over(noted, then):
    notes = Notes()
    noted(notes)
    assert heads([*LONG, *SHORT], notes) == then


def test_a_step_does_not_count_before_the_boundary_of_its_round():
    future = step("FGHIJ", LONG[-1].name, 10)
    assert heads([*LONG, future]) == [LONG[-1].name]
    assert heads([*LONG, future], now_s=109.9) == [LONG[-1].name]
    assert heads([*LONG, future], now_s=110.0) == [future.name]
    # What was made here counts at once.
    notes = Notes()
    notes.make(future.name)
    assert heads([*LONG, future], notes) == [future.name]


def test_it_is_known_when_time_alone_changes_the_answer():
    notes = Notes()
    future = step("FGHIJ", LONG[-1].name, 10)
    assert found(LONG).until_s == math.inf
    assert found([*LONG, future]).until_s == 110.0
    notes.leave(LONG[-1].name, 105.0)
    assert found([*LONG, future], notes).until_s == 105.0


def test_the_answer_depends_on_no_order_and_changes_nothing():
    trunk = chain("AB", "AB")
    steps = [*trunk, *chain("A", "AB", parent=trunk[0].name, first_round=1)]
    steps += [*chain("C", "C", "C", parent=trunk[1].name, first_round=2), *chain("DE", "DE")]
    answers = set()
    for seed in range(20):
        waiting, book, notes = list(steps), ChainBook(RUN, (MODULE,)), Notes()
        random.Random(seed).shuffle(waiting)
        while waiting:
            waiting = [one for one in waiting if not book.add(one)]
        notes.refuse(steps[5].name)
        before = book.edition, notes.edition
        answers.add(candidates(MODULE, book, notes, NOW_S, boundary_s).heads)
        assert (book.edition, notes.edition) == before
    assert len(answers) == 1
