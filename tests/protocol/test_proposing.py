"""A proposal: whose rows it waits for, when others outbid it, and when it is taken."""

from dataclasses import replace

import pytest

from dipaco.protocol.chain.steps import Step
from dipaco.protocol.member import actions as a
from dipaco.protocol.member import events as e
from dipaco.protocol.member.situation import Role
from support.runs.trainer import (
    BOUNDARY_S,
    COUNTED,
    DURATION_S,
    GATHER_S,
    GRACE_S,
    MODULE,
    PLAN,
    Trainer,
    first_and_second,
    name,
    view_of,
)


def test_a_peer_whose_file_came_too_late_is_awaited_again():
    member = Trainer("A", "ABC")
    late = member.row("C")
    member.stand_on(Step.of([member.row(peer) for peer in "AB"]))
    member.known.view = replace(view_of("ABC"), now_s=BOUNDARY_S + 3 * DURATION_S)
    assert member.module.waits_for().endswith("of 2")
    member.module.hear_rows([late], "C")
    assert member.module.waits_for().endswith("of 2")
    member.gathered(late)
    assert member.module.waits_for().endswith("of 3")


def test_of_those_who_kept_a_file_back_nobody_is_needed_for_a_step():
    first, _ = first_and_second("ABCD")
    member = Trainer(first, "ABCD")
    member.publish()
    here, slow, silent = sorted(set("ABCD") - {first})
    member.hear(here)
    member.hear(slow, silent, gathered=False)
    member.wait(0.1)
    member.module.hear_steps([Step.of(map(member.row, (first, here, silent)))], silent)
    member.wait(GATHER_S - 0.05)
    assert member.proposed() == []
    member.wait(0.1)
    # Its file has not come within G: of the three others two are most.
    member.wait(GATHER_S)
    member.nobody_answers()
    assert {step.peers for step in member.proposed()} == {frozenset((first, here))}


def test_shortly_before_g_more_rows_than_were_proposed_are_proposed_by_anybody():
    first, second = first_and_second()
    member = Trainer(second, "ABC")
    member.publish()
    (third,) = set("ABC") - {first, second}
    member.hear(third)
    member.hear(first, gathered=False)
    member.module.hear_steps([Step.of(map(member.row, (first, third)))], first)
    member.wait(GATHER_S - 0.5 * GRACE_S)
    # As many are not more.
    assert member.proposed() == []
    member.gathered(member.row(first))
    (step,) = member.proposed()
    assert step.peers == set("ABC")


def test_a_step_that_cannot_be_taken_here_is_told_once():
    first, _ = first_and_second()
    member = Trainer(first, "ABC")
    member.publish()
    member.hear(*(set("ABC") - {first}))
    computes = [action for action in member.known.actions if isinstance(action, a.Compute)]
    (step,) = member.proposed()
    for compute in computes:
        member.module.handle(e.Failed(compute, "what was gathered is gone"))
    for fetch in member.take(a.FetchState):
        member.module.handle(e.Failed(fetch, "nobody gave it"))
    for _ in range(3):
        member.module.hear_steps([step], "B")
        member.wait(0.1)
    assert member.proposed() == []


def test_what_a_first_proposer_left_out_is_proposed_no_earlier():
    first, second = first_and_second()
    member = Trainer(second, "ABC")
    member.publish()
    (third,) = set("ABC") - {first, second}
    member.module.hear_steps([Step.of(map(member.row, (first, third)))], first)
    member.hear(first, third)
    member.wait(GATHER_S - 1.5 * GRACE_S)
    assert member.proposed() == []
    member.wait(GRACE_S)
    (step,) = member.proposed()
    assert step.peers == set("ABC")


def test_a_bare_step_that_was_told_first_keeps_the_first_mailbox_from_nothing():
    first, second = first_and_second()
    member = Trainer(first, "ABC")
    member.publish()
    member.module.hear_steps([Step.of([member.row(second)])], second)
    others = sorted(set("ABC") - {first})
    member.hear(others[0])
    assert member.proposed() == []
    member.hear(others[1])
    (step,) = member.proposed()
    assert step.peers == set("ABC")


@pytest.mark.parametrize("plan", [PLAN, COUNTED])
def test_a_step_of_a_round_to_come_hides_no_step_that_is_due(plan):
    first, second = first_and_second()
    member = Trainer(first, "ABC", plan=plan)
    member.publish()
    due = Step.of([member.row(peer) for peer in "ABC"])
    to_come = Step.of([member.row(second, parent=due.name, round_index=1, file=name("empty"))])
    member.gathered(*due.rows, *to_come.rows)
    member.module.hear_steps([due, to_come], second)
    assert [compute.steps for compute in member.take(a.Compute)] == [(due,)]


def test_with_fixed_steps_a_round_ends_here_or_with_a_step_of_most_who_contributed_before():
    first, second = first_and_second()
    member = Trainer(first, "ABC", plan=COUNTED)
    before = Step.of([member.row(peer) for peer in "ABC"])
    member.stand_on(before)
    few, most = (Step.of([member.row(p, round_index=1) for p in peers]) for peers in ({second}, {first, second}))
    member.module.hear_steps([few], second)
    assert member.module.best().name == before.name
    member.module.hear_steps([most], second)
    assert member.module.best().name == most.name
    # The boundary of its round comes here.
    later = Step.of([member.row(second, parent=most.name, round_index=2)])
    member.stand_on(most)
    member.module.hear_steps([later], second)
    assert member.module.best().name == most.name
    member.module.publishing.begin(2, member.known.now_s)
    assert member.module.best().name == later.name


@pytest.mark.parametrize(("graces", "is_taken"), [(2.0, True), (4.0, False)])
def test_long_after_g_a_heavier_step_of_the_round_does_not_replace_the_own(graces, is_taken):
    first, second = first_and_second()
    member = Trainer(second, "ABC")
    few, all_of_them = (Step.of(map(member.row, p)) for p in ({first, second}, "ABC"))
    member.stand_on(few)
    member.gathered(*all_of_them.rows)
    member.known.now_s += GATHER_S + graces * GRACE_S
    member.module.hear_steps([all_of_them], first)
    taken = [compute.steps for compute in member.take(a.Compute)]
    assert taken == ([(all_of_them,)] if is_taken else [])


def test_a_late_step_is_taken_once_a_round_was_in_vain():
    """Those who would make the rounds stand on it, and the only other trainer has crashed."""
    first, second = first_and_second()
    member = Trainer(second, "ABC")
    few, all_of_them = (Step.of(map(member.row, p)) for p in ({first, second}, "ABC"))
    member.stand_on(few)
    member.gathered(*all_of_them.rows)
    member.known.now_s += GATHER_S + 4 * GRACE_S
    member.module.hear_steps([all_of_them], first)
    for round_index in (1, 2):
        assert member.take(a.Compute) == []
        member.known.now_s = BOUNDARY_S + round_index * DURATION_S
        member.module.publishing.carry_on("no step came")
        member.module.publishing.begin(round_index, member.known.now_s)
        member.module.on_time()
    assert [compute.steps for compute in member.take(a.Compute)] == [(all_of_them,)]


def test_a_newcomer_that_computed_another_state_than_rows_name_computes_it_again():
    member = Trainer("D", "ABC")
    module = member.module
    module.follow(Role.ONLY_MAILBOX)
    module.want()
    first = Step.of([member.row(peer) for peer in "ABC"])
    member.gathered(*first.rows)
    module.hear_steps([first], "A")
    member.known.now_s += GATHER_S
    module.on_time()
    for fetch in member.take(a.FetchState):
        module.handle(e.StateHere(MODULE, replace(fetch.head, digest=name(fetch.head.step))))
    module.handle(e.StateHere(MODULE, replace(member.head(first), digest=name("another"))))
    assert module.head.digest == name("another")
    member.take(a.Compute)
    rows = [member.row(p, parent=first.name, round_index=1, file=name(f"{p} 1")) for p in "ABC"]
    member.gathered(*rows)
    member.known.now_s += DURATION_S
    module.hear_steps([Step.of(rows)], "A")
    assert [compute.steps for compute in member.done + member.known.actions if isinstance(compute, a.Compute)] == [
        (first,)
    ]
    assert member.take(a.FetchState) == []


def test_a_first_mailbox_that_is_late_asks_others_before_it_proposes():
    first, second = first_and_second()
    member = Trainer(first, "ABC")
    member.publish()
    member.wait(GATHER_S + 2 * GRACE_S)
    member.hear(second)
    assert member.proposed() == []
    member.hear(second)
    member.nobody_answers()
    for ask in member.take(a.Ask):
        member.module.handle(e.Failed(ask, "it is silent"))
    member.wait(GATHER_S)
    (step,) = member.proposed()
    assert step.peers == {first, second}


def test_a_step_that_could_not_be_had_is_computed_from_the_own_state_later():
    first, second = first_and_second()
    member = Trainer(second, "ABC")
    base = Step.of(map(member.row, "ABC"))
    member.stand_on(base)
    rows = [member.row(p, round_index=1, file=name(f"{p} 1")) for p in "ABC"]
    member.gathered(*base.rows, *rows)
    member.known.now_s += DURATION_S + GATHER_S
    member.module.hear_steps([Step.of(rows)], first)
    (compute,) = member.take(a.Compute)
    member.module.handle(e.Failed(compute, "a file is gone"))
    while fetches := member.take(a.FetchState):
        member.module.handle(e.Failed(fetches[0], "nobody gave it"))
    assert member.module.best().name == base.name
    member.wait(DURATION_S + 1.0)
    assert [again.base for again in member.take(a.Compute)] == [compute.base]


def test_a_clock_that_is_set_back_delays_no_question_and_no_round():
    member = Trainer("A", "ABC")
    member.module.publishing.begin(60, BOUNDARY_S + 60 * DURATION_S)
    member.known.now_s += 60 * DURATION_S
    member.module._asking.ask("B")
    member.module.publishing.carry_on("no step came")
    assert member.take(a.Ask)
    member.known.now_s = BOUNDARY_S + DURATION_S
    member.module._asking.ask("B")
    assert [ask.peer for ask in member.take(a.Ask)] == ["B"]
    member.module.publishing.begin(1, member.known.now_s)
    assert member.module.round.index == 1


def test_a_row_for_a_path_that_its_signer_does_not_claim_is_left_out():
    """It would move the schedule of that path. A peer that has moved is believed for its old path."""
    first, second = first_and_second()
    (liar,) = set("ABC") - {first, second}
    member = Trainer(first, "ABC")
    member.publish()
    member.hear(second)
    row = member.row(liar, path=7)
    member.module.hear_rows([row], liar)
    member.gathered(row)
    member.wait(0.1)
    (step,) = member.proposed()
    assert step.peers == {first, second}


def test_the_first_row_of_a_newcomer_counts_before_its_claim_is_seen_and_its_next_does_not():
    first, second = first_and_second()
    (newcomer,) = set("ABC") - {first, second}
    for rounds, counting in (((0,), {first, second, newcomer}), ((1, 0), {first, second})):
        member = Trainer(first, first + second)
        member.publish()
        rows = [member.row(newcomer, round_index=index) for index in rounds]
        member.module.hear_rows(rows, newcomer)
        member.gathered(*rows)
        member.hear(second)
        (step,) = member.proposed()
        assert step.peers == counting


def test_a_peer_that_is_no_mailbox_proposes_after_two_rounds_in_vain():
    """All mailboxes may stand on a chain that it has refused: that of the only other trainer, who poisons it."""
    member = Trainer("A", "ABC", closed="A")
    base = Step.of([member.row(peer) for peer in "ABC"])
    member.stand_on(base)
    proposed = []
    for round_index in (1, 2, 3):
        member.known.now_s = BOUNDARY_S + round_index * DURATION_S
        member.module.publishing.begin(round_index, member.known.now_s)
        row = member.row("A", round_index=round_index, file=name(f"A {round_index}"))
        member.module.handle(e.Published(MODULE, row))
        member.gathered(row)
        member.wait(GATHER_S + 5 * GRACE_S)
        member.nobody_answers()
        proposed.append([step.round_index for step in member.proposed()])
        member.module.publishing.carry_on("no step came")
    assert proposed == [[], [], [3]]
