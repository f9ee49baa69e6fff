"""What a peer that is admitted and lies cannot do to the outer rounds of the others."""

from dataclasses import replace

import pytest

from dipaco.protocol.chain.chain_book import BRANCHES_OF_A_TELLER
from dipaco.protocol.chain.steps import Head, Step
from dipaco.protocol.member import actions as a
from dipaco.protocol.member import events as e
from dipaco.protocol.member.situation import Role
from dipaco.protocol.records import Holding
from support.runs.trainer import (
    BOUNDARY_S,
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


def test_rows_that_one_peer_invents_crowd_out_nobody():
    first, _ = first_and_second()
    member = Trainer(first, "ABC")
    others = sorted(set("ABC") - {first})
    for number in range(40):
        row = member.row(others[0], parent=name(f"{number}"), file=name(f"invented {number}"))
        member.module.hear_rows([row], others[0])
    member.publish()
    member.hear(others[1])
    member.wait(GATHER_S + 0.1)
    (step,) = member.proposed()
    assert step.peers == {first, others[1]}


def test_one_peer_makes_others_fetch_a_few_of_its_files_alone():
    """It signs row after row, on every step that is known, and step after step of them."""
    first, second = first_and_second()
    member = Trainer(second, "ABC")
    module, genesis, liar = member.module, member.module.stand, first
    parents, gathered = [genesis], set()
    for number in range(100):
        row = member.row(liar, tokens=number + 1, parent=genesis, file=name(f"{number}"))
        step = Step.of([row])
        parents.append(step.name)
        module.hear_steps([step], liar)
        later = [
            member.row(liar, round_index=index, parent=parent, file=name(f"{number} {index}"))
            for parent in parents[-2:]
            for index in (1, 2)
        ]
        module.hear_rows(later, liar)
        gathered |= {row.name for gather in member.take(a.Gather) for row in gather.rows}
    assert len(gathered) < 20
    member.publish()
    member.hear(*set("ABC") - {first, second})
    member.wait(GATHER_S - GRACE_S / 2)
    assert any(len(step.peers) == 2 for step in member.proposed())


def test_a_mailbox_fetches_a_few_files_of_one_peer_who_tells_steps_without_end():
    member = Trainer("N", "ABC", closed="ABC")
    member.module.follow(Role.ONLY_MAILBOX)
    member.known.path = None
    steps = [Step.of([member.row("A", tokens=n, file=name(f"{n}"))]) for n in range(1, 100)]
    for step in sorted(steps, key=lambda step: step.name, reverse=True):
        member.module.hear_steps([step], "A")
    asked = [row.name for gather in member.take(a.Gather) for row in gather.rows]
    assert len(set(asked)) < 10
    member.hear("B", "C")
    member.wait(GATHER_S + 0.1)
    assert [step.peers for step in member.proposed()] == [{"B", "C"}]


def test_branches_that_one_peer_invents_are_forgotten():
    first, second = first_and_second()
    member = Trainer(second, "ABC")
    module, genesis = member.module, member.module.stand
    invented = [Step.of([member.row(first, tokens=n, parent=genesis)]) for n in range(1, 3000)]
    for one in invented:
        module.hear_steps([one], first)
    assert sum(one.name in member.module.book for one in invented) < 1500
    step = Step.of([member.row(peer) for peer in "ABC"])
    module.hear_steps([step], "C")
    member.take(a.Gather)
    for peer in "ABC":
        member.gathered(member.row(peer))
    assert [compute.steps for compute in member.take(a.Compute)][-1] == (step,)


def test_of_chains_that_were_passed_over_nothing_is_remembered_once_they_are_forgotten():
    member = Trainer("A", "ABC")
    chain = member.module
    for number in range(300):
        step = Step.of([member.row("B", tokens=number + 1)])
        member.module.hear_steps([step], "B")
        for note in (chain.notes.doubt, chain.notes.refuse, chain.notes.leave):
            note(step.name)
    assert max(map(len, (chain.notes.doubted, chain.notes.refused, chain.notes.absent))) < 50


def test_a_mailbox_that_trains_nothing_is_not_led_into_the_next_round():
    """Nobody who trains can be called, and one row is of the round that is under way."""
    member = Trainer("N", "ABC", closed="ABC")
    module, known = member.module, member.known
    module.follow(Role.ONLY_MAILBOX)
    known.path = None
    module.hear_rows([member.row("A", round_index=1)], "A")
    module.hear_rows([member.row(peer) for peer in "BC"], "B")
    module.hear_rows([member.row("A", round_index=1, tokens=11)], "A")
    for peer in "BC":
        member.gathered(member.row(peer))
    member.wait(GATHER_S + 0.1)
    (step,) = member.proposed()
    assert (step.round_index, step.peers) == (0, {"B", "C"})


def test_a_row_of_the_round_after_the_next_takes_no_round_from_the_others():
    """It is told once the last round has its step, and before the next one's boundary comes."""
    member = Trainer("N", "ABC", closed="ABC")
    module, known = member.module, member.known
    module.follow(Role.ONLY_MAILBOX)
    known.path = None
    member.hear("A", "B", "C")
    member.wait(GATHER_S + 0.1)
    assert [step.round_index for step in member.proposed()] == [0]
    member.wait(DURATION_S / 2)
    module.hear_rows([member.row("A", round_index=2)], "A")
    member.gathered(member.row("A", round_index=2))
    member.wait(BOUNDARY_S + DURATION_S + 0.1 - known.now_s)
    rows = [member.row(peer, round_index=1) for peer in "BC"]
    for row in rows:
        module.hear_rows([row], row.peer)
        member.gathered(row)
    member.wait(GATHER_S)
    assert [(step.round_index, step.peers) for step in member.proposed()] == [(1, {"B", "C"})]


def test_a_mailbox_stands_on_no_step_with_a_file_that_is_no_contribution():
    """Nobody who trains can be called: it alone makes steps, from rows that stand where it does."""
    member = Trainer("N", "ABC", closed="ABC")
    member.module.follow(Role.ONLY_MAILBOX)
    member.known.path = None
    member.hear("B", "C")
    member.hear("A", gathered=False)
    member.refuse("A")
    honest = Step.of([member.row(peer) for peer in "BC"])
    bad = Step.of([member.row(peer) for peer in "ABC"])
    member.module.hear_steps([honest], "M")
    member.module.hear_steps([bad], "A")
    assert member.module.stand == honest.name


def test_it_is_remembered_of_so_many_peers_that_they_were_asked():
    """An open run gives places to one key after the other."""
    member = Trainer("A", "ABC")
    for number in range(3000):
        row = member.row(f"{number}", parent=name(f"invented {number}"))
        member.module.hear_rows([row], row.peer)
        member.module.handle(e.Failed(a.Ask(row.peer, MODULE, ()), "it is silent"))
    assert len(member.module._asking._asked_s) < 1500


def test_who_tells_a_step_of_its_own_row_alone_shuts_nobody_out():
    """Of two trainers, one keeps its row back, and so the other may propose no step."""
    member = Trainer("A", "AB")
    member.publish()
    member.take(a.Tell)
    alone = Step.of([member.row("B")])
    member.module.hear_steps([alone], "B")
    member.gathered(*alone.rows)
    member.wait(GATHER_S - GRACE_S / 2)
    (step,) = member.proposed()
    assert step.peers == {"A", "B"}


def test_those_who_only_say_that_their_chain_is_heavier_hide_nobody_s():
    member = Trainer("A", "ABCDE")
    heads = [Head(MODULE, name(p), 9, weight, 8, name(p), 9) for p, weight in zip("BCDE", (4, 4, 4, 3), strict=True)]
    heads.append(replace(heads[0], weight=5))
    # Nobody calls F.
    member.known.view = view_of("ABCDEF", closed="F", held=map(Holding, "BCDEF", heads))
    asked = []
    for _ in range(2):
        member.known.now_s += DURATION_S
        member.module.on_view()
        asked += [ask.peer for ask in member.take(a.Ask)]
    assert sorted(asked) == ["B", "C", "D", "E"]


def test_a_mailbox_that_always_has_more_to_say_keeps_nobody_from_proposing():
    first, second = first_and_second()
    member = Trainer(second, "ABC")
    member.publish()
    member.hear(*sorted(set("ABC") - {first, second}))
    member.wait(GATHER_S + GRACE_S + 0.1)
    told = member.module.stand
    for number in range(20):
        for ask in member.take(a.Ask):
            row = member.row(first, parent=told, round_index=number)
            step = Step.of([row])
            told = step.name
            member.module.handle(e.Answered(ask.peer, MODULE, steps=(step,), has_more=True))
        member.wait(2.0)
        if member.proposed():
            return
    raise AssertionError("no step was proposed")


def test_a_copy_that_was_behind_for_long_hears_of_the_present_round():
    """Rows of rounds that it could not begin have not filled its memory."""
    member = Trainer("N", "ABC", closed="ABC")
    module, known = member.module, member.known
    module.follow(Role.KEEPER)
    known.path, parent = None, name("unknown")
    for index in range(20):
        known.now_s = BOUNDARY_S + index * DURATION_S
        module.hear_rows([member.row(p, round_index=index, parent=parent) for p in "ABC"], "")
    rows = [member.row(p, round_index=20) for p in "ABC"]
    known.now_s = BOUNDARY_S + 20 * DURATION_S
    module.hear_rows(rows, "")
    assert [set(gather.rows) for gather in member.take(a.Gather)] == [set(rows)]
    assert module.round.index == 20


def live_round(member, index, *, liar):
    """B and C make a step, which lacks D, who is awaited; D puts a step of a later round on it."""
    module, known = member.module, member.known
    known.now_s = PLAN.start_s + (index + 1) * DURATION_S
    module.publishing.begin(index, known.now_s)
    publish = member.take(a.Publish)
    parent = module.stand
    if publish:
        module.handle(e.Published(MODULE, member.row("A", round_index=index, file=name(f"A {index}"))))
    earlier = member.row("D", round_index=index, file=name(f"D {index}"))
    module.hear_rows([earlier], "D")
    member.gathered(earlier)
    rows = [member.row(p, round_index=index, file=name(f"{p} {index}")) for p in "BC"]
    member.gathered(*rows)
    step = Step.of([*rows, member.row("A", round_index=index, file=name(f"A {index}"))])
    module.hear_steps([step], "B")
    if liar:
        future = member.row("D", round_index=index + 2, parent=step.name, file=name(f"future {index}"))
        module.hear_steps([Step.of([future])], "D")
    for _ in range(60):
        member.wait(1.0)
        for compute in member.take(a.Compute):
            module.handle(e.StateHere(MODULE, member.head(compute.steps[-1])))
    return module.stand != parent


@pytest.mark.parametrize("liar", [False, True])
def test_a_step_of_a_round_to_come_hides_no_step_that_is_due(liar):
    member = Trainer("A", "ABCD")
    assert all(live_round(member, index, liar=liar) for index in range(6))
    assert member.module.link.version == 6


@pytest.mark.parametrize("liar", [False, True])
def test_a_peer_that_slept_catches_up_although_a_step_of_a_round_to_come_is_on_top(liar):
    member, parent, steps = Trainer("A", "ABCD"), "", []
    for index in range(8):
        on = {"parent": parent} if parent else {}
        steps.append(Step.of([member.row(p, round_index=index, **on, file=name(f"{p} {index}")) for p in "BC"]))
        parent = steps[-1].name
    told = list(steps)
    if liar:
        told.append(Step.of([member.row("D", round_index=10, parent=parent)]))
    member.known.now_s = PLAN.start_s + 8.6 * DURATION_S
    member.module.hear_steps(told, "B")
    for fetch in member.take(a.FetchState):
        member.module.handle(e.StateHere(MODULE, replace(fetch.head, digest=name(fetch.head.step))))
    member.gathered(*steps[-1].rows)
    for compute in member.take(a.Compute):
        member.module.handle(e.StateHere(MODULE, member.head(compute.steps[-1])))
    # It was fetched, so held-out texts are asked.
    (check,) = member.take(a.Check)
    member.module.handle(e.Checked(MODULE, check.step, 2.0, 2.1, 4.0))
    assert member.module.stand == steps[-1].name


def test_a_lone_trainer_makes_its_step_although_one_of_a_round_to_come_stands_where_it_does():
    member = Trainer("A", "A")
    for number in range(40):
        member.module.hear_steps([Step.of([member.row("D", round_index=2, tokens=number + 1)])], "D")
    member.publish()
    member.wait(1.0)
    member.wait(GATHER_S)
    assert {step.peers for compute in member.take(a.Compute) for step in compute.steps} == {frozenset("A")}


@pytest.mark.parametrize("last", ["of the same round", "on an unknown parent"])
def test_steps_that_one_peer_invents_are_bounded_however_its_message_ends(last):
    """Also where an honest step was taken meanwhile, which forgets branches of long ago alone."""
    member = Trainer("A", "ABC")
    module, book = member.module, member.module.book
    for number in range(500):
        invented = [Step.of([member.row("B", tokens=4 * number + k + 1)]) for k in range(3)]
        parent = invented[-1].name if last == "of the same round" else name("unknown")
        bad = Step.of([member.row("B", parent=parent, tokens=1)])
        module.hear_steps([*invented, bad], "B")
        if number % 100 == 50:
            honest = Step.of([member.row(p, round_index=module.link.round_index + 1) for p in "ABC"])
            member.stand_on(honest)
    assert len(book.tips(MODULE)) < 20
    assert len(book) < 60


def test_a_message_of_more_branches_than_a_teller_may_have_is_survived():
    """Attack: the last of them are forgotten as they come, and their files were asked for."""
    member = Trainer("A", "ABC")
    steps = [Step.of([member.row("B", file=name(f"file {number}"))]) for number in range(40)]
    for part in (steps, steps[::-1]):
        member.module.hear_steps(part, "B")
    assert len(member.module.book.tips(MODULE)) <= BRANCHES_OF_A_TELLER
    member.publish()
    member.hear("B", "C")
    assert member.module.book.link(member.module.stand).version == 0
