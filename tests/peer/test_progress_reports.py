"""What a trainer tells of its path: how often it is scored."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from dipaco.peer.presence.own_status import PeerStatus
from dipaco.peer.shell import progress_reports
from dipaco.peer.shell.progress_reports import ProgressReports, ScoringBudget
from dipaco.protocol.records import MAX_NLL
from dipaco.training.scoring import LossSum


@pytest.mark.parametrize(("takes_s", "scored"), [(0.5, 20), (1.0, 20), (2.5, 7), (60.0, 1)])
def test_a_slow_peer_spends_no_more_than_its_share_on_scoring(takes_s, scored):
    now_s, times = 0.0, 0

    def score():
        nonlocal now_s
        now_s += takes_s
        return LossSum(1.0, 1)

    budget = ScoringBudget(0.1, lambda: now_s)
    for round_index in range(20):
        now_s = max(now_s, 10.0 * round_index)
        if budget.is_due():
            assert budget.spend(score) == LossSum(1.0, 1)
            times += 1
    assert times == scored


def test_without_a_bound_every_round_is_scored():
    budget = ScoringBudget(float("inf"), lambda: 0.0)
    budget.spend(LossSum)
    assert budget.is_due()


@pytest.mark.parametrize(("fixed_steps", "scored"), [(0, [0, 4, 8]), (20, list(range(12)))])
def test_a_slow_scorer_leaves_rounds_out_unless_others_wait_for_it(monkeypatch, fixed_steps, scored):
    """Rounds of 10 s, the scoring takes 4 s."""
    now_s, scored_in = 0.0, []
    monkeypatch.setattr(progress_reports.time, "monotonic", lambda: now_s)
    rounds = SimpleNamespace(validation_every_rounds=1)
    plan = SimpleNamespace(rounds=rounds, routing=SimpleNamespace(prefix_tokens=4))
    node = SimpleNamespace(plan=plan, schedule=SimpleNamespace(fixed_steps=fixed_steps))
    trainer = MagicMock(path=0)
    trainer.anchors.return_value = {}

    def score(path, states, rows):
        nonlocal now_s
        now_s += 4.0
        return LossSum(2.0, 1)

    trainer.loss_of = score
    status, refresher = PeerStatus(), MagicMock()
    # Another peer's figure, which this one does not repeat.
    refresher.view.progress = {0: SimpleNamespace(validation_nll=9.0, validation_tokens=9)}
    node.load_shard_index = lambda: SimpleNamespace(paths=[SimpleNamespace(train_sequences=7)])
    files = MagicMock()
    running = SimpleNamespace(node=node, refresher=refresher, status=status, events=MagicMock())
    reports = ProgressReports(running, trainer, files)
    rounds.validation_every_rounds = 2
    reports.end_round(0, 1.0)
    assert status.progress[0].validation_tokens == 0
    rounds.validation_every_rounds = 1
    for round_index in range(12):
        began_s = now_s = max(now_s, 10.0 * round_index)
        reports.end_round(round_index, 1.0)
        if now_s > began_s:
            scored_in.append(round_index)
        assert status.progress[0].last_round == round_index, "told also where nothing is scored"
        known = status.progress[0].validation_nll, status.progress[0].shard_sequences
        assert known == (2.0, 7), "the last score stands for the path until there is another"
    assert scored_in == scored
    assert status.validation_loss == 2.0
    assert refresher.announce.call_count == 13


def test_a_loss_that_is_finite_and_great_ends_no_peer():
    """A path that has diverged: what no record can hold is told as the greatest that one can."""
    node = SimpleNamespace(
        plan=SimpleNamespace(rounds=SimpleNamespace(validation_every_rounds=1)),
        schedule=SimpleNamespace(fixed_steps=0),
        load_shard_index=lambda: SimpleNamespace(paths=[SimpleNamespace(train_sequences=7)]),
    )
    trainer = MagicMock(path=0)
    trainer.anchors.return_value = {}
    trainer.loss_of = lambda path, states, rows: LossSum(2e15, 10**6)
    status = PeerStatus()
    running = SimpleNamespace(node=node, refresher=MagicMock(), status=status, events=MagicMock())
    reports = ProgressReports(running, trainer, MagicMock())
    for round_index in range(2):
        reports.end_round(round_index, 2e15)
        assert status.progress[0].validation_nll == MAX_NLL
        assert status.progress[0].train_loss == progress_reports.MAX_LOSS


def test_others_are_told_the_loss_on_own_texts_with_one_digit():
    """With more of them, a guess at a held-out text could be tried until the loss is the same."""
    plan = SimpleNamespace(rounds=SimpleNamespace(validation_every_rounds=1))
    shards = SimpleNamespace(paths=[SimpleNamespace(train_sequences=7)])
    node = SimpleNamespace(plan=plan, schedule=SimpleNamespace(fixed_steps=0), load_shard_index=lambda: shards)
    trainer, files, status, events = MagicMock(path=0), MagicMock(own_held_out=[1]), PeerStatus(), MagicMock()
    trainer.anchors.return_value = {}
    trainer.loss_of.return_value = LossSum(2.0, 3)
    running = SimpleNamespace(node=node, refresher=MagicMock(), status=status, events=events)
    ProgressReports(running, trainer, files).end_round(0, 1.0)
    assert status.own_texts_loss == 0.7
    told = {call.args[0]: call.kwargs["loss"] for call in events.emit.call_args_list}
    assert told["own_texts_validation"] == 0.666667, "the owner sees all of it"
