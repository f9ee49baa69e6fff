"""Which rows and steps of others are believed."""

import dataclasses
import hashlib

import pytest

from dipaco.peer.exchange import verify
from dipaco.peer.exchange.verify import RowCheck
from dipaco.protocol.admission import AWAY_S, Gate
from dipaco.protocol.chain.steps import Step
from dipaco.protocol.identity import SIGNATURE_BYTES, raw_public_key
from dipaco.protocol.invitations import Terms, make_invitation
from dipaco.protocol.revocations import sign_revocations
from support.wire.exchanges import (
    GRID,
    INVITATION,
    MODULE,
    NOW_S,
    OPERATOR,
    PLAN,
    admission,
    chain_of,
    new_check,
    new_gate,
    row_of,
)
from support.wire.peers import RUN, key, peer


def test_rows_that_are_good_and_all_that_are_not():
    check = new_check(max_bytes=100)
    known = {peer(0): admission(0), peer(1): admission(1)}
    good = row_of(0)
    latest = int((NOW_S - PLAN.start_s) / PLAN.rounds.duration_s)
    bad = [
        dataclasses.replace(good, tokens=101),  # not signed
        dataclasses.replace(row_of(1), signature=good.signature),
        row_of(1, module="L0.E0"),  # of another module than was asked for
        row_of(1, path=0),  # which does not go through it
        row_of(1, latest + 5),  # of the future
        row_of(1, tokens=2**60),
        row_of(1, tokens=0),
        row_of(1, data=bytes(101)),
        row_of(2),  # not admitted
    ]
    for _ in range(2):
        assert check.good_rows(MODULE, [*bad, good], known) == (good,)
    # Somebody else's admission is none.
    assert check.good_rows(MODULE, [row_of(2)], {peer(2): admission(0)}) == ()
    assert not check.admit(peer(2), admission(0))
    assert not check.admit(peer(2), b"")


def test_admissions_that_were_read_elsewhere_count_too():
    gate = new_gate()
    check = new_check(gate)
    assert check.good_rows(MODULE, [row_of(0)], {}) == ()
    gate.check(peer(0), admission(0))
    assert check.good_rows(MODULE, [row_of(0)], {}) == (row_of(0),)
    assert check.is_in(peer(0))


def test_steps_are_good_up_to_the_first_that_is_not():
    check = new_check()
    known = {peer(n): admission(n) for n in range(3)}
    steps = chain_of(4, (0, 1, 2))
    assert check.good_steps(MODULE, steps, known) == tuple(steps)
    forged = Step.of([dataclasses.replace(row_of(0, 2, steps[1].name), signature=bytes(64))])
    assert check.good_steps(MODULE, [*steps[:2], forged, steps[2]], known) == tuple(steps[:2])
    stranger = Step.of([row_of(0, 2, steps[1].name), row_of(8, 2, steps[1].name)])
    assert check.good_steps(MODULE, [*steps[:2], stranger], known) == tuple(steps[:2])


def test_an_invitation_counts_for_its_places_however_many_keys_were_made_with_it():
    narrow = make_invitation(Terms(RUN, 2, 0), OPERATOR)
    known = {peer(n): admission(n, narrow) for n in range(6)}
    check = new_check()
    rows = [row_of(n) for n in range(6)]
    assert check.good_rows(MODULE, rows, known) == tuple(rows[:2])
    # It is the same two when they are told again, and in other rounds.
    assert check.good_rows(MODULE, rows[::-1], known) == (rows[1], rows[0])
    assert check.good_rows(MODULE, [row_of(n, 1) for n in (4, 1, 5)], known) == (row_of(1, 1),)
    assert check.good_steps(MODULE, chain_of(1, (0, 1)), known)
    assert check.good_steps(MODULE, chain_of(1, (0, 1, 2)), known) == ()


def test_of_one_round_no_third_row_of_two_places_is_let_through_when_a_place_changes_hands():
    """Attack: a step with a row more than the invitation has places is refused by everybody."""
    now = [PLAN.start_s + 10 * PLAN.rounds.duration_s]
    gate = Gate(RUN, raw_public_key(OPERATOR), now=lambda: now[0])
    check = RowCheck(PLAN, GRID, gate, max_bytes=lambda module: 1000, now=lambda: now[0])
    narrow = make_invitation(Terms(RUN, 2, 0), OPERATOR)
    known = {peer(n): admission(n, narrow) for n in range(4)}
    old, new = 9, 19
    for number in (0, 1):
        assert check.good_rows(MODULE, [row_of(number, old)], known) == (row_of(number, old),)
    now[0] += 901.0
    assert check.good_rows(MODULE, [row_of(2, new)], known) == (row_of(2, new),), "its place is free"
    assert check.good_rows(MODULE, [row_of(2, old)], known) == ()


def test_a_row_of_long_ago_that_is_told_again_keeps_no_place():
    now = [PLAN.start_s + 10 * PLAN.rounds.duration_s]
    gate = Gate(RUN, raw_public_key(OPERATOR), now=lambda: now[0])
    check = RowCheck(PLAN, GRID, gate, max_bytes=lambda module: 1000, now=lambda: now[0])
    single = make_invitation(Terms(RUN, 1, 0), OPERATOR)
    known = {peer(n): admission(n, single) for n in range(2)}
    assert check.good_rows(MODULE, [row_of(0, 9)], known)
    for _ in range(20):
        now[0] += AWAY_S / 4
        assert check.good_rows(MODULE, [row_of(0, 9)], known)
    assert check.admit(peer(1), known[peer(1)])


def test_who_is_revoked_stays_in_chains_up_to_the_round_in_which_it_ended():
    gate = Gate(RUN, raw_public_key(OPERATOR), start_s=PLAN.start_s, round_s=100.0)
    check = new_check(gate)
    other = make_invitation(Terms(RUN, 2, 0), OPERATOR)
    known = {peer(0): admission(0), peer(1): admission(1, other)}
    ended_s = int(PLAN.start_s) + 250
    gate.revoke(sign_revocations(RUN, 1, {INVITATION.id: ended_s}, OPERATOR))
    assert check.good_rows(MODULE, [row_of(0), row_of(1)], known) == (row_of(1),)
    steps = chain_of(5, (0, 1))
    assert check.good_steps(MODULE, steps, known) == tuple(steps[:3]), "round 3 is after its end"
    assert not check.is_in(peer(0))


def test_the_operator_alone_can_admit():
    forged = make_invitation(Terms(RUN, 100, 0), key(1001))
    known = {peer(0): admission(0, forged)}
    assert new_check().good_rows(MODULE, [row_of(0)], known) == ()


def test_parents_that_are_invented_push_no_counts_of_places_out():
    """Attack: one peer signs rows on thousands of parents, and of two places a third row counts."""
    narrow = make_invitation(Terms(RUN, 2, 0), OPERATOR)
    known = {peer(n): admission(n, narrow) for n in range(4)}
    check = new_check()
    rows = [row_of(n, 1) for n in range(4)]
    assert check.good_rows(MODULE, rows[:2], known) == tuple(rows[:2])
    invented = [row_of(0, 1, hashlib.sha256(str(n).encode()).hexdigest()) for n in range(20)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(verify, "REMEMBERED_PLACES", 8)
        assert check.good_rows(MODULE, invented, known) == tuple(invented)
        for round_index in range(20):
            check.good_rows("L0.E0", [row_of(0, round_index, module="L0.E0", path=0)], known)
    assert check.good_rows(MODULE, rows[2:], known) == ()


def test_a_row_of_a_path_that_has_no_sequences_is_refused():
    """Attack: no step with it could be computed, by anybody."""
    check, known = new_check(), {peer(n): admission(n) for n in range(2)}
    row = row_of(0)
    step = chain_of(1, (0,))
    assert check.good_steps(MODULE, step, known)
    check.empty_paths = frozenset({row.path})
    assert check.good_rows(MODULE, [row], known) == ()
    assert check.good_steps(MODULE, step, known) == ()


def test_nobody_can_be_put_under_another_s_invitation():
    """Attack: an insider tells rows and steps of others with admissions by its own invitation, of which the place is
    taken. They would be out, newcomers would refuse the chain, and a revocation of the insider would be theirs."""
    mine, theirs = (make_invitation(Terms(RUN, 1, 0), OPERATOR) for _ in range(2))
    check = new_check()
    known = {peer(0): admission(0, theirs), peer(1): admission(1, mine)}
    steps = chain_of(3, (0, 1))
    assert check.good_rows(MODULE, [row_of(0), row_of(1)], known) == (row_of(0), row_of(1))
    said = mine.admit(key(0), NOW_S)[:-SIGNATURE_BYTES]
    forged = {**known, peer(0): said + admission(1, mine)[-SIGNATURE_BYTES:]}
    assert check.good_rows(MODULE, [row_of(0)], forged) == ()
    assert new_check().good_steps(MODULE, steps, forged) == ()
    assert check.is_in(peer(0))
    assert check.good_steps(MODULE, steps, known) == tuple(steps)


@pytest.mark.parametrize("allowed", ["no", "yes"])
def test_rows_with_own_texts_count_only_in_a_run_that_allows_them(allowed):
    check, row = new_check(plan=PLAN.model_copy(update={"own_texts": allowed})), row_of(0, has_own_texts=True)
    assert bool(check.good_rows(MODULE, [row], {peer(0): admission(0)})) == (allowed == "yes")
