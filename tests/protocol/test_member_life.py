"""The life of a member around its outer rounds: to begin, to rest, to leave, and to keep copies."""

import hashlib
from dataclasses import replace

import pytest

from dipaco.protocol.chain.chain_book import ChainBook
from dipaco.protocol.chain.steps import Head, Row, Step
from dipaco.protocol.chain.trunk import Trunk
from dipaco.protocol.config import GridConfig
from dipaco.protocol.coverage import bucket_count as bucket_count_of
from dipaco.protocol.grid import Grid
from dipaco.protocol.keeping import keepers
from dipaco.protocol.member import actions as a
from dipaco.protocol.member import events as e
from dipaco.protocol.member.knowledge import MemberSettings
from dipaco.protocol.member.member import Member
from dipaco.protocol.member.taking import ruined_by
from dipaco.protocol.records import Claim, Holding, PeerRecord, refresh_period_s
from dipaco.protocol.view import SwarmView
from support.runs.make_plan import make_plan

MODULE, DURATION_S = "L0.E0", 1000.0


def name(text):
    return hashlib.sha256(text.encode()).hexdigest()


class Life:
    """A member of a run of paths with a module each, and what it wanted."""

    def __init__(self, me="A", paths=2, *, holds=False, **settings):
        plan = make_plan(duration_s=DURATION_S, grid=GridConfig(modules_per_level=(paths,)))
        self.plan, self.grid, self.me = plan, Grid(plan.model, plan.grid), me
        genesis = ChainBook(plan.run_id, [MODULE]).genesis(MODULE)
        row = Row(MODULE, 5, genesis, name(genesis), 0, "A", 10, name("file"), 100)
        self.step = Step.of([row])
        self.head = Head(MODULE, self.step.name, 1, 1, 5, name(self.step.name), 10)
        given = {"chains": {MODULE: (Trunk(), [self.step])}, "held": [self.head]} if holds else {}
        self.member = Member(MemberSettings(me, **settings), plan, self.grid, **given)
        self.now_s = plan.start_s + 6.3 * DURATION_S
        self.wanted = []
        self.silent = set()
        """What is not answered."""
        self.others = {}
        """Peers in sight, each with the path that it trains, or None."""
        self.holdings = []
        self.said = a.Say("serving", None, 0.0, "", False)
        self.ruined = set()
        """Digests of states that read held-out texts badly."""

    def score(self, action):
        """Answer with what each state is worth."""
        is_ruined = {head.module: head.digest in self.ruined for head in action.heads}
        without = {m: 9.0 if any(is_ruined[o] for o in is_ruined if o != m) else 3.0 for m in action.modules}
        return e.Scored(action.heads, 9.0 if any(is_ruined.values()) else 2.5, without)

    def see(self, *, is_answer=False):
        """Let it read the swarm."""
        claims, peers = {}, {}
        known = {p: (n, "training", self.plan.start_s) for p, n in self.others.items()}
        mine = {self.me: (self.said.path, self.said.state, self.said.since_s)}
        for peer, (path, state, since_s) in {**known, **mine}.items():
            said = {"peer_id": peer, "path": path, "state": state, "reachable": "direct"}
            peers[peer] = PeerRecord.model_construct(**said)
            if path is not None:
                more = {"since_s": since_s, "round": 0, "pinned": False}
                claims[peer] = Claim.model_construct(**said, **more)
        view = SwarmView(
            now_s=self.now_s, claims=claims, peers=peers, holdings={MODULE: tuple(self.holdings)}, duration_s=DURATION_S
        )
        self.tell(e.Viewed(view, is_answer))

    def tell(self, event):
        """Hand an event over, and answer what is wanted; returns all that was."""
        found = self.member.handle(event, self.now_s)
        self.wanted += found
        for action in found:
            if type(action) not in self.silent:
                match action:
                    case a.Look():
                        self.see(is_answer=True)
                    case a.Watch(scope=scope):
                        self.watched = scope
                    case a.Say():
                        self.said = action
                    case a.Ask():
                        self.tell(e.Failed(action, "it is silent"))
                    case a.FetchPath():
                        self.tell(e.PathReady(action.path))
                    case a.Score():
                        self.tell(self.score(action))
                    case a.FetchState(head=head):
                        here = replace(head, digest=name(head.step), bytes=100)
                        self.tell(e.StateHere(head.module, here))
                    case a.Publish():
                        self.tell(e.Failed(action, "nothing was trained", is_final=True))
        return found

    def live(self, seconds, step_s=0.5):
        """Let time pass, turn by turn."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += step_s
            self.tell(e.Turn())

    def take(self, kind):
        """Return what was wanted of this kind since the last time, and forget all."""
        found, self.wanted = [w for w in self.wanted if isinstance(w, kind)], []
        return found

    def has(self, kind):
        """Tell whether something of this kind was wanted since."""
        return any(isinstance(action, kind) for action in self.wanted)

    def begun(self):
        """Let it begin to train."""
        self.live(5.0)
        assert self.take(a.StartPath)
        return self


def test_a_newcomer_gives_way_to_a_peer_that_was_on_the_path_before():
    life = Life()
    life.tell(e.Turn())
    first = life.said.path
    life.others = {"B": first}
    life.live(5.0)
    assert [start.path != first for start in life.take(a.StartPath)] == [True]


def test_a_shard_that_nobody_gives_is_asked_for_again_and_then_left_to_others():
    life = Life()
    life.silent = {a.FetchPath}
    life.live(3.0)
    (first,) = life.take(a.FetchPath)
    life.tell(e.Failed(first, "nobody has it"))
    life.live(4.0)
    assert life.take(a.FetchPath) == [first]
    life.live(200.0)
    assert life.take(a.FetchPath)[0].path != first.path
    life.live(4000.0)
    assert life.take(a.Left), "no wait is endless"


def test_a_state_on_its_way_is_waited_for_longer():
    life = Life()
    life.silent = {a.FetchState}
    life.live(200.0)
    assert life.take(a.Warn) == []
    life.silent = set()
    life.live(5.0)
    assert life.take(a.Left) == []


def test_it_leaves_after_as_many_rounds_as_its_owner_wants():
    life = Life(max_rounds=1).begun()
    life.live(0.9 * DURATION_S, 5.0)
    assert life.take(a.Left)
    assert life.member.rounds_done == 1


def test_a_pause_is_one_whatever_more_reasons_come():
    life = Life().begun()
    for reason in ("battery", "disk"):
        life.tell(e.PauseWanted(reason))
        life.live(5.0)
    assert len(life.take(a.Pause)) == 1
    life.tell(e.PauseWanted(""))
    life.live(5.0)
    assert life.take(a.StartPath)


@pytest.mark.parametrize("follows", [True, False])
def test_a_peer_goes_on_in_a_successor_unless_its_owner_wants_otherwise(follows):
    life = Life(holds=True, pinned=0, follows=follows).begun()
    life.others = {"B": None}
    life.tell(e.SuccessorReady())
    life.see()
    life.take(a.Tell)
    life.live(DURATION_S, 5.0)
    assert not any(getattr(action, "keep", False) for action in life.wanted)
    assert [left.to_successor for left in life.take(a.Left)] == [True] * follows


def test_others_have_time_to_take_over_what_a_peer_alone_holds():
    life = Life(holds=True, pinned=0).begun()
    life.others = {"B": None}
    life.see()
    life.tell(e.LeaveWanted())
    life.live(3.5)
    assert life.take(a.Left) == []
    life.live(4.0)
    assert life.take(a.Left)


def test_no_more_modules_are_followed_for_others_than_a_bound_and_silent_ones_are_forgotten():
    life = Life(paths=300, trains=False)
    for module in life.grid.modules():
        life.tell(e.Told("B", module))
    assert len(life.member.modules) == 256
    life.now_s += 6 * DURATION_S
    life.see()
    assert life.member.modules == {}


@pytest.mark.parametrize(("left", "contributes"), [(0.7, True), (0.98, False)])
def test_a_peer_that_leaves_contributes_what_it_trained_in_the_round(left, contributes):
    life = Life()
    life.now_s = life.plan.start_s + (7.0 - left) * DURATION_S
    life.begun()
    life.tell(e.LeaveWanted())
    assert bool(life.take(a.Publish)) is contributes


def test_a_peer_with_few_neighbours_reads_more_of_a_large_run_and_looks_after_its_dwell():
    life = Life(paths=130, pinned=None).begun()
    bucket_count = bucket_count_of(130)
    home = (life.said.path or 0) % bucket_count
    life.others = {f"peer {n}": home + n * bucket_count for n in range(10)}
    seen = []
    for others in ({}, life.others):
        life.others = dict(others)
        life.see()
        life.see()
        seen.append(len(life.watched.buckets))
    assert seen == [bucket_count, 1]
    life.take(a.Look)
    life.live(DURATION_S, 5.0)
    assert life.take(a.Look) == []
    life.live(DURATION_S, 5.0)
    assert life.take(a.Look)


def test_a_peer_that_moves_gives_others_time_although_its_step_takes_longer():
    life = Life(paths=130).begun()
    own = life.said.path
    # Another has its path too, so it may go to one that nobody trains.
    life.others = {f"peer {n}": own for n in range(2)}
    life.silent = {a.Look}
    life.live(2 * DURATION_S, 5.0)
    assert life.has(a.TakeStep)
    assert life.take(a.Look)
    life.see(is_answer=True)  # in the middle of a step
    life.now_s += 10.0
    life.tell(e.Stepped())
    life.tell(e.Turn())
    assert life.has(a.Publish)
    assert life.take(a.Move) == []
    life.live(3.5)
    assert life.take(a.Move)


# -- copies


def test_as_many_are_asked_to_keep_a_copy_as_are_missing():
    life = Life(holds=True, pinned=0).begun()
    life.others = dict.fromkeys("BCDEFG")

    def asked():
        life.see()
        return tuple(peer for tell in life.take(a.Tell) if tell.keep for peer in tell.peers)

    first = asked()
    assert len(first) == 2, "of three copies one is here"
    assert asked() == (), "they may be fetching it"
    stale = replace(life.head, round_index=2, step=name("old"))
    wrong = replace(life.head, digest=name("wrong"))
    for other in (stale, wrong):
        life.holdings = [Holding(first[0], life.head), Holding(first[1], other)]
        life.now_s += 4 * refresh_period_s(life.plan.rounds)
        (again,) = asked()
        assert other is stale or again != first[1], "it computed another state"
    life.holdings = [Holding(peer, life.head) for peer in first]
    life.now_s += 4 * refresh_period_s(life.plan.rounds)
    assert asked() == ()


def test_who_says_that_it_is_the_oldest_and_does_nothing_keeps_nobody_from_copying():
    life = Life(holds=True, pinned=0).begun()
    life.others = {"B": 0, **dict.fromkeys("CDEFG")}
    life.see()
    assert not [tell for tell in life.take(a.Tell) if tell.keep], "it is the turn of B"
    life.now_s += 1.1 * DURATION_S
    life.see()
    assert [len(tell.peers) for tell in life.take(a.Tell) if tell.keep] == [2]


def test_a_peer_keeps_so_many_copies_for_others_and_no_more():
    life = Life(paths=70, trains=False)
    life.silent, life.others = {a.FetchState}, {"B": None}
    life.see()
    for module in life.grid.modules():
        life.tell(e.Told("B", module, keep=True))
    assert len(life.take(a.FetchState)) == 64


PEERS = [f"peer {number}" for number in range(30)]
NEAREST, *_, FARTHEST = keepers(MODULE, PEERS, len(PEERS))


@pytest.mark.parametrize(("me", "keeps"), [(NEAREST, True), (FARTHEST, False)])
def test_the_next_peers_in_rendezvous_order_keep_what_they_are_asked_to(me, keeps):
    life = Life(me, trains=False)
    life.others, life.holdings = dict.fromkeys(PEERS), [Holding("B", life.head)]
    life.see()
    life.tell(e.Told("B", MODULE, steps=(life.step,), keep=True))
    assert bool(life.take(a.FetchState)) is keeps


@pytest.mark.parametrize("others", [2, 3])
def test_a_copy_that_is_not_a_peer_s_to_keep_is_dropped_once_enough_others_have_one(others):
    life = Life(FARTHEST, holds=True, trains=False)
    life.others = dict.fromkeys(PEERS)
    life.holdings = [Holding(peer, life.head) for peer in PEERS if peer != FARTHEST][:others]
    life.see()
    assert bool(life.take(a.Drop)) is (others == 3)


def chain_on(parent, *rounds):
    """Steps of B alone, one on the other."""
    found = [parent]
    for index in rounds:
        file = name(f"B {index}")
        found.append(Step.of([Row(MODULE, index, found[-1].name, name(found[-1].name), 0, "B", 10, file, 40)]))
    return found


def row_of(peer, parent, state, round_index):
    file = name(f"{peer} {round_index} {state}")
    return Row(MODULE, round_index, parent, state, 0, peer, 10, file, 40)


def head_of(steps):
    number = len(steps)
    return Head(MODULE, steps[-1].name, number, number, steps[-1].round_index, name(steps[-1].name), 10)


def test_a_genesis_is_begun_with_only_after_a_chain_was_waited_for():
    """There is a chain, and nobody gives anything of it; a path that only its holders could begin
    would stay untrained for ever."""
    life = Life(pinned=0)
    life.silent, life.others = {a.Ask, a.Gather}, {"B": 0}
    life.see()
    steps = chain_on(life.step, 6)
    life.tell(e.Told("B", MODULE, steps=(life.step, *steps[1:]), keep=True))
    gather_s = life.plan.rounds.gather_limit_s
    life.live(1.5 * gather_s)
    assert not life.has(a.StartPath)
    life.live(2.0 * gather_s)
    assert [start.heads[0].version for start in life.take(a.StartPath)] == [0]


def test_a_newcomer_fetches_the_state_that_rows_name_and_computes_the_steps_on_top():
    life = Life(pinned=0)
    life.silent, life.others = {a.Ask, a.Gather}, {"B": 0, "C": None}
    life.now_s += 4 * DURATION_S
    steps = chain_on(life.step, 6, 7, 8, 9)
    wrong = replace(head_of(steps), digest=name("of C's choice"))
    life.holdings = [Holding("C", wrong)]
    life.live(3.0)
    life.tell(e.Told("B", MODULE, steps=tuple(steps)))
    for ask in life.take(a.Ask):
        life.tell(e.Answered(ask.peer, MODULE, held=wrong))
    life.live(1.0)
    wanted = [w for w in life.wanted if isinstance(w, a.FetchState) and w.head.version]
    assert {(fetch.head.step, fetch.head.digest) for fetch in wanted} == {(steps[-2].name, name(steps[-2].name))}
    assert {row for gather in life.take(a.Gather) for row in gather.rows} >= {*steps[-1].rows}


def newcomer_to(*steps):
    """Return the life of a newcomer that has heard of a chain, and has its files."""
    life = Life("Z", pinned=0)
    life.silent, life.others = {a.Ask, a.FetchPath}, {"B": 0}
    life.now_s += 4 * DURATION_S
    life.live(3.0)
    life.tell(e.Answered("B", MODULE, tuple(steps)))
    for step in steps[-3:]:
        for row in step.rows:
            life.tell(e.Gathered(MODULE, row))
    life.tell(e.PathReady(0))
    return life


def compute_all(life, seconds):
    """Let time pass; files come, and what is to be computed comes out."""
    done = set()
    for _ in range(int(seconds)):
        life.live(1.0)
        for row in [row for w in life.wanted if isinstance(w, a.Gather) for row in w.rows if row not in done]:
            done.add(row)
            life.tell(e.Gathered(MODULE, row))
        for action in [w for w in life.wanted if isinstance(w, a.Compute) and w not in done]:
            done.add(action)
            last, base = action.steps[-1], action.base
            version, weight = base.version + len(action.steps), base.weight + len(action.steps)
            head = Head(MODULE, last.name, version, weight, last.round_index, name(last.name), 10)
            life.tell(e.StateHere(MODULE, head))


def test_a_newcomer_refuses_a_state_that_reads_held_out_texts_much_worse_than_the_genesis():
    """However many vouch for it, it begins with the state before, and stays with that."""
    steps = chain_on(Life().step, 6, 7, 8)
    life = newcomer_to(*steps)
    life.ruined = {name(steps[-1].name)}
    compute_all(life, 20.0)
    (start,) = [action for action in life.wanted if isinstance(action, a.StartPath)]
    assert start.heads[0].step == steps[-2].name
    assert any("with the genesis" in warn.text for warn in life.wanted if isinstance(warn, a.Warn))
    # Not even when more stand on it.
    life.tell(e.Told("B", MODULE, steps=(*steps, *chain_on(steps[-1], 9)[1:])))
    life.live(30.0)
    assert life.member.modules[MODULE].head.step == steps[-2].name


NAN = float("nan")


@pytest.mark.parametrize(
    ("loss", "with_genesis", "blamed"),
    [
        (9.0, {"L0.E0": 3.0, "L1.E0": 2.5}, "L1.E0"),
        (2.9, {"L0.E0": 2.6, "L1.E0": 2.5}, ""),
        (NAN, {"L0.E0": NAN, "L1.E0": 2.5}, "L1.E0"),
        (NAN, {"L0.E0": float("inf"), "L1.E0": 9.0}, "L1.E0"),
        (NAN, {"L0.E0": NAN, "L1.E0": NAN}, "L0.E0"),
        (None, {}, ""),
    ],
)
def test_a_state_with_which_no_loss_is_a_number_is_not_blamed_on_another(loss, with_genesis, blamed):
    """The trainer of one module could have newcomers refuse, for good, what everybody trained in another."""
    assert ruined_by(loss, with_genesis) == blamed


def test_a_newcomer_begins_with_a_state_that_reads_held_out_texts_well_and_scores_it_once():
    steps = chain_on(Life().step, 6, 7, 8)
    life = newcomer_to(*steps)
    compute_all(life, 20.0)
    (start,) = [action for action in life.wanted if isinstance(action, a.StartPath)]
    assert start.heads[0].step == steps[-1].name
    assert [score.modules for score in life.take(a.Score)] == [(MODULE,)]


def test_a_path_without_a_row_in_the_newest_step_of_a_module_is_not_scored():
    """Modules that were apart may fit each other worse than at their genesis. One of two volunteers, who came back
    after minutes, refused what the other had trained, and they stayed apart for good."""
    steps = [Life().step]
    for round_index in (6, 7):
        row = row_of("B", steps[-1].name, name(steps[-1].name), round_index)
        steps.append(Step.of([replace(row, path=1)]))
    life = newcomer_to(*steps)
    life.ruined = {name(steps[-1].name)}
    compute_all(life, 20.0)
    (start,) = [action for action in life.wanted if isinstance(action, a.StartPath)]
    assert start.heads[0].step == steps[-1].name
    assert not life.has(a.Score)


def test_a_path_without_rows_in_one_of_its_chains_is_not_scored():
    """Modules that never were together may fit each other worse than at their genesis."""
    first = Step.of([replace(row, path=1) for row in Life().step.rows])
    life = newcomer_to(first, Step.of([replace(row_of("B", first.name, name(first.name), 6), path=1)]))
    compute_all(life, 20.0)
    assert life.has(a.StartPath)
    assert not life.has(a.Score)


def test_a_copy_of_a_chain_that_has_hardly_begun_is_computed_and_nobody_is_believed():
    life = Life(NEAREST, trains=False)
    life.others, life.holdings = dict.fromkeys(PEERS), [Holding("B", life.head)]
    life.see()
    life.tell(e.Told("B", MODULE, steps=(life.step,), keep=True))
    assert life.has(a.Gather)
    assert [fetch.head.version for fetch in life.take(a.FetchState)] == [0]


def test_a_state_that_takes_rounds_to_fetch_is_not_given_up_for_the_steps_on_top_of_it():
    life = Life(pinned=0)
    life.silent, life.others = {a.Ask, a.FetchState}, {"B": 0}
    life.now_s += 4 * DURATION_S
    life.live(3.0)
    steps = chain_on(life.step, 6, 7, 8, 9)
    life.tell(e.Answered("B", MODULE, tuple(steps[:4])))
    for ask in [wanted for wanted in life.wanted if isinstance(wanted, a.Ask)]:
        life.tell(e.Failed(ask, "it is silent"))
    for row in steps[3].rows:
        life.tell(e.Gathered(MODULE, row))
    life.live(30.0)
    life.tell(e.Told("B", MODULE, steps=steps[4:]))
    life.see()
    life.live(30.0)
    (fetch,) = [fetch for fetch in life.take(a.FetchState) if fetch.head.version]
    life.tell(e.StateHere(MODULE, replace(fetch.head, bytes=100)))
    assert life.has(a.Compute)


# -- what is taken


def contradicted(others):
    """Return a life that has computed a step, and hears another step that names another state than it has."""
    life = Life(pinned=0).begun()
    life.silent, life.others = {a.FetchState}, dict.fromkeys("BCD", 0)
    life.see()
    first = Step.of([row_of(p, life.step.parent, name(life.step.parent), 6) for p in "ABCD"])
    life.now_s += 2 * DURATION_S
    hear_step(life, first)
    life.tell(e.StateHere(MODULE, head_of([first])))
    assert life.member.modules[MODULE].head == head_of([first])
    life.now_s += DURATION_S
    life.wanted = []
    second = Step.of([row_of(p, first.name, name("another"), 7) for p in others])
    hear_step(life, second)
    return life, first, second


def hear_step(life, step):
    life.tell(e.Told("B", MODULE, steps=(step,)))
    for row in step.rows:
        life.tell(e.Gathered(MODULE, row))


@pytest.mark.parametrize("others", ["B", "BCD"])
def test_nobody_takes_a_state_over_its_own_computation(others):
    """Arithmetic is exact: it is computed once more, and with the same digest it stays."""
    life, first, _ = contradicted(others)
    (again,) = [compute for compute in life.wanted if isinstance(compute, a.Compute)]
    assert (again.base.version, again.steps) == (0, (first,))
    assert not life.has(a.FetchState)
    life.tell(e.StateHere(MODULE, head_of([first])))
    life.live(1.0)
    assert life.has(a.Warn)
    assert not life.has(a.FetchState)
    assert life.member.modules[MODULE].head == head_of([first])


def test_a_machine_that_erred_once_takes_what_it_computes_the_second_time():
    life, first, _ = contradicted("BCD")
    right = replace(head_of([first]), digest=name("another"))
    life.tell(e.StateHere(MODULE, right))
    assert [adopt.head for adopt in life.wanted if isinstance(adopt, a.Adopt)] == [right]
    assert life.has(a.Warn)


@pytest.mark.parametrize(("others", "ends"), [("B", False), ("BCD", True)])
def test_a_peer_that_is_alone_with_its_state_for_three_rounds_says_so_and_ends(others, ends):
    life, first, last = contradicted(others)
    life.tell(e.StateHere(MODULE, head_of([first])))
    for number in range(8, 11):
        last = Step.of([row_of(p, last.name, name(last.name), number) for p in others])
        life.live(DURATION_S, step_s=10.0)
        hear_step(life, last)
    life.live(DURATION_S, step_s=10.0)
    left = life.take(a.Left)
    assert [(end.is_machine, "memory" in end.error) for end in left] == ([(True, True)] if ends else [])


def test_a_peer_with_texts_of_its_owner_trains_only_paths_that_these_are_for():
    """It takes the path of most of them, although others are there and nobody trains the next one, says that nobody
    should wait for it to move, and moves after its dwell."""
    life = Life("Z", paths=3, own_texts={1: 60, 2: 30})
    life.others = {"A": 1, "B": 1}
    life.begun()
    assert (life.said.path, life.said.pinned) == (1, True)
    assert life.said.reason == "67% of your texts are for it"
    life.live(12 * DURATION_S)
    moves = [move.path for move in life.take(a.Move)]
    assert len(moves) >= 2
    assert moves == [2, 1] * (len(moves) // 2) + [2] * (len(moves) % 2)


def test_a_peer_whose_texts_are_all_for_one_path_stays():
    life = Life("Z", paths=3, own_texts={1: 60})
    life.others = {"A": 1, "B": 1}
    life.begun()
    life.live(8 * DURATION_S)
    assert not life.has(a.Move)
    assert life.said.path == 1
