"""An outer round as one member decides it: who proposes when, what is taken, and what is not."""

import math
from dataclasses import replace

import pytest

from dipaco.protocol.chain.steps import Head, Step
from dipaco.protocol.member import actions as a
from dipaco.protocol.member import events as e
from dipaco.protocol.member.copies import Copies
from dipaco.protocol.member.knowledge import mailbox_order
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


def test_the_first_mailbox_proposes_as_soon_as_everybody_s_file_is_here():
    first, _ = first_and_second()
    member = Trainer(first, "ABC")
    member.publish()
    others = sorted(set("ABC") - {first})
    member.hear(others[0])
    member.hear(others[1], gathered=False)
    assert member.proposed() == []
    member.gathered(member.row(others[1]))
    (step,) = member.proposed()
    assert step.peers == set("ABC")


def test_it_waits_no_longer_than_for_the_time_to_gather():
    first, _ = first_and_second()
    member = Trainer(first, "ABC")
    member.publish()
    member.hear(sorted(set("ABC") - {first})[0])
    member.wait(GATHER_S - 0.1)
    assert member.proposed() == []
    member.wait(0.2)
    (step,) = member.proposed()
    assert len(step.rows) == 2


def test_the_next_mailbox_proposes_when_it_hears_nothing():
    _, second = first_and_second()
    member = Trainer(second, "ABC")
    member.publish()
    member.hear(*sorted(set("ABC") - {second}))
    member.wait(GATHER_S + GRACE_S - 0.1)
    assert member.proposed() == []
    member.wait(0.2)
    member.nobody_answers()
    assert len(member.proposed()) == 1


def test_a_peer_that_cannot_be_called_puts_its_file_and_never_proposes_beside_mailboxes():
    member = Trainer("C", "ABC", closed="C")
    member.publish()
    (put,) = member.take(a.Put)
    assert (set(put.peers), put.copies) == ({"A", "B"}, 2)
    member.hear("A", "B")
    member.wait(GATHER_S + 4 * GRACE_S + 1)
    assert member.proposed() == []
    member.wait(GATHER_S)
    assert {ask.peer for ask in member.take(a.Ask)} <= {"A", "B"}


def test_a_file_goes_to_two_of_four_mailboxes_as_some_may_have_died():
    member = Trainer("F", "ABCDEF", closed="F")
    member.publish()
    order = tuple(mailbox_order(MODULE, 0, set("ABCDE")))
    spread = member.take(a.Action)
    (put,) = (action for action in spread if isinstance(action, a.Put))
    (tell,) = (action for action in spread if isinstance(action, a.Tell))
    assert (put.peers, put.copies) == (order[:4], 2)
    # The first two hear of the row with the file, which they would fetch twice otherwise.
    assert set(tell.peers) == set(order[2:])


def test_a_peer_alone_steps_at_once():
    member = Trainer("A", "A")
    member.publish()
    (compute,) = member.take(a.Compute)
    assert [step.peers for step in compute.steps] == [{"A"}]


def test_the_step_is_computed_once_all_files_are_here_and_then_adopted():
    first, second = first_and_second()
    member = Trainer(second, "ABC")
    member.publish()
    genesis = member.module.stand
    step = Step.of([member.row(peer) for peer in "ABC"])
    member.module.hear_steps([step], first)
    gathers = member.take(a.Gather)
    assert {row.peer for gather in gathers for row in gather.rows} == set("ABC") - {second}
    for peer in "ABC":
        member.gathered(member.row(peer))
    (compute,) = member.take(a.Compute)
    assert (compute.base.step, compute.steps) == (genesis, (step,))
    head = Head(MODULE, step.name, 1, 3, 0, name("state"), 10**6)
    member.module.handle(e.StateHere(MODULE, head))
    (adopt,) = member.take(a.Adopt)
    assert (adopt.head, adopt.is_own_in, adopt.is_round) == (head, True, True)
    # One that is as heavy, with a greater name, changes nothing.
    assert member.module.stand == step.name


def test_who_hears_of_the_whole_chain_asks_for_no_files_that_are_gone():
    """Files are kept for three rounds: who comes later would ask everybody for the first ones."""
    member = Trainer("A", "ABC")
    steps = []
    for number in range(6):
        parent = steps[-1].name if steps else member.module.stand
        fields = {"parent": parent, "round_index": number}
        rows = [member.row(peer, file=name(f"{peer} {number}"), **fields) for peer in "BC"]
        steps.append(Step.of(rows))
    member.known.now_s += 6 * DURATION_S
    member.module.hear_steps(steps, "B")
    wanted = {row.round_index for gather in member.take(a.Gather) for row in gather.rows}
    assert wanted == {5}


def test_what_a_peer_trained_before_it_left_is_in_the_step_of_its_round():
    """It contributes before the boundary; those who stay wait for theirs, and make one step."""
    boxes = mailbox_order(MODULE, 1, set("AB"))
    member = Trainer(boxes[0], "ABC")
    module = member.module
    first = Step.of([member.row(peer) for peer in "ABC"])
    member.module.book.add(first)
    member.stand_on(first)
    module.round.is_open = False
    member.known.view = view_of("AB")

    def row(peer):
        return member.row(peer, round_index=1, file=name(f"file {peer} 1"))

    member.known.now_s += 0.5 * DURATION_S
    module.hear_rows([row("C")], "C")
    member.gathered(row("C"))
    assert member.proposed() == []
    member.known.now_s = BOUNDARY_S + DURATION_S
    module.publishing.begin(1, member.known.now_s)
    member.module.handle(e.Published(MODULE, row(boxes[0])))
    module.hear_rows([row(boxes[1])], boxes[1])
    member.gathered(row(boxes[1]))
    (step,) = member.proposed()
    assert step.peers == set("ABC")


def test_the_heavier_chain_wins_and_then_the_smaller_name():
    first, second = first_and_second()
    member = Trainer(second, "ABC")
    light = Step.of([member.row(peer) for peer in "AB"])
    heavy = Step.of([member.row(peer) for peer in "ABC"])
    also = Step.of([member.row(peer, tokens=11) for peer in "ABC"])
    for step in (light, heavy, also):
        member.module.hear_steps([step], first)
        member.gathered(*step.rows)
    assert member.module.best().name == min(heavy.name, also.name)


def test_of_a_peer_one_row_counts_in_a_round():
    first, _ = first_and_second()
    member = Trainer(first, "ABC")
    member.publish()
    other, last = sorted(set("ABC") - {first})
    member.hear(other)
    second = member.row(other, tokens=10**6, file=name("second"))
    member.module.hear_rows([second], other)
    member.gathered(second)
    member.hear(last)
    (step,) = member.proposed()
    assert next(row.tokens for row in step.rows if row.peer == other) == 10


def test_a_file_that_is_no_contribution_is_in_no_step():
    first, second = first_and_second()
    member = Trainer(second, "ABC")
    member.publish()
    step = Step.of([member.row(peer) for peer in "ABC"])
    member.module.hear_steps([step], first)
    member.refuse(first)
    member.wait(GATHER_S)
    assert member.take(a.Compute) == []
    assert member.module.best().name == member.module.book.genesis(MODULE)


def test_a_first_mailbox_whose_file_nobody_gets_stops_nobody():
    """Its step is no step after G; it is passed over, and in the next round not awaited."""
    first, second = first_and_second()
    member = Trainer(second, "ABC")
    member.publish()
    member.hear(*sorted(set("ABC") - {first, second}))
    silent = Step.of([member.row(peer) for peer in "ABC"])
    member.module.hear_steps([silent], first)
    proposed = []
    while not proposed and member.known.now_s < BOUNDARY_S + DURATION_S:
        member.wait(1.0)
        actions, member.known.actions = member.known.actions, []
        for ask in (action for action in actions if isinstance(action, a.Ask)):
            member.module.handle(e.Failed(ask, "it is silent"))
        proposed = [s for tell in actions if isinstance(tell, a.Tell) for s in tell.steps]
    assert member.known.now_s <= BOUNDARY_S + 2 * GATHER_S
    assert proposed[0].peers == set("ABC") - {first}
    member.module.handle(e.StateHere(MODULE, member.head(proposed[0])))
    assert member.module.stand == proposed[0].name
    assert member.module.waits_for().endswith("of 2")
    # What others have built on it is another matter: then rows name its state.
    others = [p for p in "ABC" if p != second]
    rows = [member.row(p, parent=silent.name, round_index=1, file=name(f"{p} 1")) for p in others]
    member.known.now_s = BOUNDARY_S + DURATION_S + GATHER_S
    member.module.hear_steps([Step.of(rows)], first)
    (fetch,) = member.take(a.FetchState)
    assert (fetch.head.step, fetch.head.digest) == (silent.name, name(silent.name))


def test_who_kept_a_file_back_is_waited_for_once():
    """Another step with that file counts only once it is here; any other step counts at once."""
    first, second = first_and_second()
    member = Trainer(second, "ABCD")
    silent = Step.of([member.row(peer) for peer in "ABCD"])
    member.module.hear_steps([silent], first)
    member.gathered(*[row for row in silent.rows if row.peer != first])
    assert member.module.best().name == silent.name
    for _ in range(9):
        member.wait(GATHER_S / 4)
    without = member.module.best()
    assert without.step.peers == set("ABCD") - {first}, "what it makes itself of the other rows"
    again = Step.of([member.row(peer) for peer in "ABC"])
    assert first in again.peers
    member.module.hear_steps([again], first)
    assert member.module.best() == without
    member.gathered(member.row(first))
    assert member.module.best().name == silent.name


def test_slow_files_are_no_reason_to_step_without_most_others():
    """A slow machine is the first mailbox and holds its own file alone when the time is up."""
    first, second = first_and_second()
    member = Trainer(first, "ABC")
    member.publish()
    others = sorted(set("ABC") - {first})
    member.hear(*others, gathered=False)
    member.wait(GATHER_S + 0.1)
    assert member.proposed() == []
    member.gathered(member.row(second))
    (step,) = member.proposed()
    assert step.peers == {first, second}


def test_a_file_is_asked_for_at_a_few_mailboxes_however_many_train_the_module():
    peers = [f"peer {number}" for number in range(40)]
    member = Trainer("peer 0", peers)
    member.hear("peer 1", gathered=False)
    (gather,) = member.take(a.Gather)
    assert len(gather.others) <= 5


def test_a_peer_whose_file_is_refused_is_not_waited_for():
    first, _ = first_and_second()
    member = Trainer(first, "ABC")
    member.publish()
    other, bad = sorted(set("ABC") - {first})
    member.hear(other)
    member.hear(bad, gathered=False)
    member.refuse(bad)
    member.wait(0.1)
    (step,) = member.proposed()
    assert step.peers == {first, other}


def test_what_stands_on_an_unknown_parent_is_asked_for():
    first, second = first_and_second()
    member = Trainer(second, "ABC")
    strange = Step.of([member.row("A", parent=name("unknown"), round_index=3)])
    member.module.hear_steps([strange], first)
    (ask,) = member.take(a.Ask)
    assert ask.peer == first
    assert ask.locator[-1] == member.module.book.genesis(MODULE)


@pytest.mark.parametrize("loss", [9.0, math.nan])
def test_a_fork_that_wrecks_the_held_out_loss_is_refused(loss):
    first, second = first_and_second()
    member = Trainer(second, "ABC")
    module = member.module
    base = Step.of([member.row(peer) for peer in "ABC"])
    mine = Step.of([member.row(second, parent=base.name, round_index=1)])
    member.stand_on(base, mine)
    foreign = Step.of([member.row(p, parent=base.name, round_index=1) for p in "XYZ"])
    member.known.now_s += DURATION_S + GATHER_S
    module.hear_steps([foreign], first)
    member.gathered(*foreign.rows)
    module.handle(e.StateHere(MODULE, member.head(foreign)))
    (check,) = member.take(a.Check)
    module.handle(e.Checked(MODULE, check.step, 2.0, loss))
    assert member.take(a.Adopt) == []
    assert member.module.best().name == module.stand == mine.name
    # It is believed when most of those who counted at the fork have gone on with it.
    others = sorted(set("ABC") - {second})
    joined = Step.of([member.row(p, parent=foreign.name, round_index=2) for p in others])
    member.known.now_s += DURATION_S
    module.hear_steps([joined], first)
    member.gathered(*joined.rows)
    module.handle(e.StateHere(MODULE, member.head(joined)))
    module.handle(e.Checked(MODULE, joined.name, 2.0, 9.0))
    assert [adopt.head.step for adopt in member.take(a.Adopt)] == [joined.name]
    assert member.module.best().name == joined.name


@pytest.mark.parametrize(("peers", "is_taken"), [("ABC", True), ("AB", True), ("BC", False)])
def test_a_fuller_step_of_the_own_round_is_taken_whatever_its_loss(peers, is_taken):
    """With this peer's row, it would have been taken at once if it had come in time. In the first
    round nobody counted before, who could be most: each would stay alone."""
    member = Trainer("A", "ABC")
    module = member.module
    mine = Step.of([member.row("A")])
    fuller = Step.of([member.row(peer, tokens=9) for peer in peers])
    member.stand_on(mine)
    member.known.now_s += GATHER_S
    module.hear_steps([fuller], "B")
    member.gathered(*fuller.rows)
    module.handle(e.StateHere(MODULE, member.head(fuller)))
    for check in member.take(a.Check):
        module.handle(e.Checked(MODULE, check.step, 2.0, 9.0))
    assert module.stand == (fuller if is_taken else mine).name


def test_honest_rows_in_a_step_that_their_peers_never_took_vouch_for_nothing():
    """An insider has put a step of everybody's rows under a step of its own, and serves a state of
    its choice; only its own row names that."""
    _, second = first_and_second()
    member = Trainer(second, "AB")
    module = member.module
    base = Step.of([member.row(peer) for peer in "ABX"])
    mine = Step.of([member.row(second, parent=base.name, round_index=1)])
    member.stand_on(base, mine)
    shared = Step.of([member.row(p, parent=base.name, round_index=1, tokens=9) for p in "ABX"])
    own = Step.of([member.row("X", parent=shared.name, state=name("forged"), round_index=2)])
    member.known.now_s += 2 * DURATION_S + GATHER_S
    module.hear_steps([shared, own], "X")
    for fetch in member.take(a.FetchState):
        module.handle(e.StateHere(MODULE, fetch.head))
    member.gathered(*shared.rows, *own.rows)
    forged = member.module.book.link(own.name).head(name("forged too"), 10**6)
    module.handle(e.StateHere(MODULE, forged))
    module.handle(e.Checked(MODULE, own.name, 2.0, 9.0))
    assert member.take(a.Adopt) == []
    assert module.stand == mine.name


def test_a_step_of_few_is_taken_once_there_was_time_for_a_better_one():
    """Nobody who is always first puts a state under the others; and a copy follows a lone trainer,
    whose rows are told inside its steps alone."""
    member = Trainer("D", "ABC")
    module, known = member.module, member.known
    module.follow(Role.KEEPER)
    known.path, known.now_s = None, BOUNDARY_S + 5 * DURATION_S
    row = member.row("A", round_index=5)
    step = Step.of([row])
    module.hear_steps([step], "A")
    assert [gather.rows for gather in member.take(a.Gather)] == [(row,)]
    member.gathered(row)
    assert member.take(a.Compute) == []
    member.wait(GATHER_S)
    assert [compute.steps for compute in member.take(a.Compute)] == [(step,)]


def heal(peers, sides, loss_of_genesis=None, path=0):
    """Return whether a peer leaves its chain of one side for a heavier one that wrecks its held-out loss."""
    mine, theirs = sides
    member = Trainer(mine[0], peers)
    module, rounds = member.module, 5
    base = Step.of([member.row(peer) for peer in peers])
    chains = {mine: [base], theirs: [base]}
    for side, chain in chains.items():
        # The rows of the one go on for a round more.
        for index in range(1, rounds + (side == theirs)):
            fields = {"parent": chain[-1].name, "round_index": index, "path": path if side == theirs else 0}
            chain.append(Step.of([member.row(p, file=name(f"{p} {index}"), **fields) for p in side]))
    member.stand_on(*chains[mine])
    member.known.now_s += rounds * DURATION_S + GATHER_S
    module.hear_steps(chains[theirs][1:], theirs[0])
    member.gathered(*(row for step in chains[theirs] for row in step.rows))
    for fetch in member.take(a.FetchState):
        module.handle(e.StateHere(MODULE, fetch.head))
    last = chains[theirs][-1]
    module.handle(e.StateHere(MODULE, member.head(last)))
    module.handle(e.Checked(MODULE, last.name, 2.0, 9.0, loss_of_genesis))
    return module.stand == last.name


@pytest.mark.parametrize(
    ("sides", "is_left"), [(("A", "BC"), True), (("AB", "CD"), True), (("A", "B"), False), (("ABC", "DE"), False)]
)
def test_even_parts_of_a_swarm_come_together_and_one_of_two_overrules_nobody(sides, is_left):
    assert heal("".join(sides), sides) is is_left


@pytest.mark.parametrize(("path", "is_left"), [(0, False), (1, True)])
def test_a_state_that_the_path_was_not_trained_in_may_fit_worse_than_its_genesis(path, is_left):
    """No matter who made it: nobody is believed about a state in whose last step the path has a row."""
    assert heal("ABC", ("A", "BC"), loss_of_genesis=5.0, path=path) is is_left


@pytest.mark.parametrize(("there", "is_most"), [("ABC", True), ("ABCDE", False)])
def test_those_who_have_gone_do_not_keep_a_peer_on_its_own_chain(there, is_most):
    member = Trainer("A", there)
    module = member.module
    base = Step.of([member.row(peer) for peer in "ABCDE"])
    mine = Step.of([member.row("A", parent=base.name, round_index=1)])
    theirs = Step.of([member.row(p, parent=base.name, round_index=1) for p in "BC"])
    member.stand_on(base, mine)
    member.known.now_s += DURATION_S + GATHER_S
    module.hear_steps([theirs], "B")
    member.gathered(*theirs.rows)
    module.handle(e.StateHere(MODULE, member.head(theirs)))
    module.handle(e.Checked(MODULE, theirs.name, 2.0, 9.0))
    assert (member.take(a.Adopt) != []) is is_most


def test_a_peer_that_moves_believes_what_most_put_on_its_own_chain():
    """Held-out documents of the new path say little: its other modules are another's."""
    member = Trainer("A", "ABC")
    module = member.module
    own = Step.of([member.row(peer) for peer in "ABC"])
    member.module.book.add(own)
    member.stand_on(own)
    module.want()
    member.known.now_s += DURATION_S + GATHER_S
    step = Step.of([member.row(peer, parent=own.name, round_index=1) for peer in "BC"])
    module.hear_steps([step], "B")
    for ask in member.take(a.Ask):
        module.handle(e.Failed(ask, "it is silent"))
    member.gathered(*step.rows)
    member.take(a.Compute)
    head = member.head(step)
    module.handle(e.StateHere(MODULE, head))
    assert member.take(a.Check) == []
    assert module.head == head


def test_a_peer_that_leaves_hands_over_what_it_alone_holds():
    member = Trainer("A", "A")
    module, known = member.module, member.known
    step = Step.of([member.row("A")])
    member.module.book.add(step)
    member.stand_on(step)
    records = {p: view_of(p).peers[p].model_copy(update={"path": None}) for p in "BC"}
    for held, told in ((), True), ((Holding("B", module.head),), False):
        known.view = replace(view_of("A", held=held), peers={**view_of("A").peers, **records})
        copies = Copies(known, {MODULE: module})
        assert copies.hand_over() is told
        tells = member.take(a.Tell)
        assert [(set(t.peers), t.steps, t.keep) for t in tells] == ([({"B", "C"}, (step,), True)] if told else [])


def test_half_are_no_quorum_until_two_rounds_brought_no_step():
    member = Trainer("A", "ABCD")
    module = member.module
    base = Step.of([member.row(peer) for peer in "ABCD"])
    member.module.book.add(base)
    member.stand_on(base)
    made = []
    for round_index in (1, 2, 3):
        module.publishing.carry_on("no step came")
        member.known.now_s = BOUNDARY_S + round_index * DURATION_S
        module.publishing.begin(round_index, member.known.now_s)
        for peer in "AB":
            row = member.row(peer, round_index=round_index, file=name(f"{peer} {round_index}"))
            module.hear_rows([row], peer)
            member.gathered(row)
        for _ in range(10):
            member.wait(GATHER_S / 4)
            for ask in [action for action in member.known.actions if isinstance(action, a.Ask)]:
                module.handle(e.Failed(ask, "it is silent"))
        made.append([step.peers for step in member.proposed()])
    assert made == [[], [], [{"A", "B"}]]


def test_a_boundary_that_was_slept_through_does_not_come():
    member = Trainer("A", "AB")
    member.known.now_s = BOUNDARY_S + DURATION_S + GATHER_S + 1.0
    member.module.publishing.begin(1, BOUNDARY_S + DURATION_S)
    assert member.take(a.Publish) == []


def test_more_trainers_than_a_step_has_room_for_take_turns():
    peers = [f"peer {number}" for number in range(70)]
    member = Trainer(mailbox_order(MODULE, 1, set(peers[:64]))[0], peers)
    module = member.module
    base = Step.of([member.row(peer) for peer in peers[:64]])
    member.module.book.add(base)
    member.stand_on(base)
    module.publishing.carry_on("no step came")
    member.known.now_s += DURATION_S
    module.publishing.begin(1, member.known.now_s)
    for peer in peers:
        row = member.row(peer, round_index=1, file=name(f"{peer} 1"))
        module.hear_rows([row], peer)
        member.gathered(row)
    (step,) = member.proposed()
    assert len(step.rows) == 64
    assert set(peers[64:]) <= step.peers


def test_after_a_move_that_failed_each_step_is_computed_once_from_the_one_before():
    member = Trainer("A", "ABC")
    module = member.module
    for index in range(4):
        rows = [member.row(p, round_index=index, file=name(f"{p} {index}")) for p in "ABC"]
        member.known.now_s = PLAN.start_s + (index + 1) * DURATION_S + GATHER_S
        member.gathered(*rows)
        module.hear_steps([Step.of(rows)], "B")
        (compute,) = member.take(a.Compute)
        assert (len(compute.steps), compute.base.version) == (1, index)
        module.handle(e.StateHere(MODULE, member.head(compute.steps[-1])))
        if index == 1:
            module.want()
            module.consider()
            module.stop_wanting()


def gone(member, row):
    """The file of a row is not on the disk any more, as whoever computes with it finds out."""
    member.module.handle(e.Failed(a.Gather(MODULE, (row,)), "the file is not here any more"))


def test_a_file_that_is_gone_from_the_disk_is_fetched_again():
    first, second = first_and_second()
    member = Trainer(second, "ABC")
    member.publish()
    member.hear(*sorted(set("ABC") - {second}))
    step, lost = Step.of([member.row(peer) for peer in "ABC"]), member.row(first)
    member.module.hear_steps([step], first)
    (compute,) = member.take(a.Compute)
    gone(member, lost)
    member.module.handle(e.Failed(compute, "a file is not here any more"))
    assert [(type(action), action.rows) for action in member.known.actions] == [(a.Gather, (lost,))]
    member.take(a.Gather)
    member.gathered(lost)
    assert member.take(a.Compute) == [compute]


def test_a_step_whose_files_the_disk_does_not_keep_is_left_for_a_round():
    first, second = first_and_second()
    member = Trainer(second, "ABC")
    member.publish()
    member.hear(*sorted(set("ABC") - {second}))
    lost = member.row(first)
    member.module.hear_steps([Step.of([member.row(peer) for peer in "ABC"])], first)
    times = 0
    while computes := member.take(a.Compute):
        times += 1
        gone(member, lost)
        member.module.handle(e.Failed(computes[-1], "a file is not here any more"))
        for fetch in [action for action in member.known.actions if isinstance(action, a.FetchState)]:
            member.module.handle(e.StateHere(MODULE, replace(fetch.head, digest=name(fetch.head.step))))
        if any(isinstance(action, a.Gather) for action in member.known.actions):
            member.gathered(lost)
        member.wait(1.0)
    assert 2 <= times <= 3


def test_a_step_that_nobody_can_compute_is_refused_and_all_go_on_from_its_parent():
    member = Trainer("A", "ABC")
    member.publish()
    member.hear("B", "C")
    bad, good = (Step.of([member.row(p) for p in peers]) for peers in ("ABC", "AB"))
    member.module.hear_steps([bad], "B")
    (compute,) = member.take(a.Compute)
    member.module.handle(e.Failed(compute, "its files give no state", is_final=True))
    assert member.module.best().version == 0
    member.wait(DURATION_S)
    assert not member.take(a.Compute), "it is not tried again"
    member.module.hear_steps([good], "B")
    assert [c.steps for c in member.take(a.Compute)] == [(good,)]
