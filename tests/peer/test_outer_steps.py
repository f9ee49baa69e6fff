"""An outer round from boundary to adoption: real files, chains and states, and no network."""

import gc
import hashlib
import logging
import os
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dipaco.base.index import Index
from dipaco.base.kept_files import KeptFiles
from dipaco.peer.exchange.chain_store import ChainStore
from dipaco.peer.exchange.files.contribution_files import ContributionFiles
from dipaco.peer.node.states import Named, States, head_of
from dipaco.protocol.chain.steps import MARK_BYTES, Head, Step
from dipaco.protocol.member import actions as a
from dipaco.protocol.member import events as e
from dipaco.routing.run_folder import RunFolder
from support.runs.tiny_run import make_tiny_run
from support.wire.outer_peer import MODULE, Peer

OTHER = "L1.E0"


@pytest.fixture(params=["float32", "int4", "sign"])
def swarm(request, tmp_path):
    """Return trainers of paths 0 and 1, which share a module, and a keeper."""
    run = make_tiny_run(tmp_path / "run", codec=request.param)
    peers = [Peer(run, tmp_path / name, path) for name, path in zip("abk", (0, 1, None), strict=True)]
    for peer in peers:
        peer.node.exchange.others = [p.node.contributions for p in peers if p is not peer]
    yield peers[0], peers[1], peers[2]
    for peer in peers:
        peer.outer.stop()


def lost(peer, row, trained):
    """Return what the encoding of a first contribution lost."""
    anchor = peer.genesis[MODULE].parameters
    data = peer.node.contributions.find(row.file).read_bytes()[MARK_BYTES:]
    told = anchor - peer.node.rule.codec.decode(data, anchor.numel())
    return trained - told


def test_all_who_gather_the_files_compute_one_state(swarm):
    one, other, keeper = swarm
    rows = (one.publish(), other.publish())
    trained = one.local()
    assert rows[0].tokens == 2 * one.trainer.tokens_per_step
    step = Step.of(rows)
    heads = []
    for peer in swarm:
        found = peer.gather(*rows)
        assert all(isinstance(event, e.Gathered) for event in found)
        heads.append(peer.compute(peer.head0(MODULE), step))
    assert len(set(heads)) == 1
    assert (heads[0].version, heads[0].weight, heads[0].round_index) == (1, 2, 0)
    files = [one.node.contributions.find(r.file).read_bytes()[MARK_BYTES:] for r in step.rows]
    paths = one.grid.paths_of_module(MODULE)
    expected = one.node.rule.step(one.genesis[MODULE], files, step.outer_rows, 0, paths)
    assert heads[0].digest == expected.digest

    one.adopt(heads[0], step, save=True)
    assert torch.equal(one.local(), lost(one, rows[0], trained) + expected.parameters)
    assert one.node.held.get(MODULE) == heads[0]
    assert one.node.chains.served(MODULE) == (step.name, heads[0])
    (taken,) = one.events.of("outer_step")
    assert set(taken["group"]) == {one.me, other.me}
    assert taken["own_tokens"] == rows[0].tokens

    assert keeper.begin(a.Adopt(heads[0], step, False, 0, False)) is None
    content = keeper.node.held.lookup(heads[0].digest)
    data = content.read_bytes() if isinstance(content, Path) else b"".join(content)
    assert hashlib.sha256(data).hexdigest() == heads[0].digest
    # A step that names another state than comes out of its files is not followed.
    liar = Step.of([replace(one.publish(1), state="0" * 64)])
    keeper.gather(*liar.rows)
    failed = keeper.do(a.Compute(MODULE, heads[0], (liar,)))
    assert isinstance(failed, e.Failed)
    # The next step stands on what is kept, in memory or on disk.
    second = Step.of([one.publish(1)])
    keeper.gather(*second.rows)
    assert keeper.compute(heads[0], second).version == 2


def test_what_is_missing_or_bad_is_reported(swarm):
    one, other, _ = swarm
    row = other.publish()
    other.node.exchange.others = one.node.exchange.others = []
    (found,) = one.gather(row)
    assert isinstance(found, e.Failed)
    assert not found.is_final
    failed = one.do(a.Compute(MODULE, one.head0(MODULE), (Step.of([row]),)))
    assert isinstance(failed, e.Failed)
    assert isinstance(one.reported.get(timeout=60), e.Failed)

    bad = ContributionFiles(KeptFiles(one.node.contributions.kept.folder / "bad"))
    bad.add(row, (b"\xff" * row.bytes,))
    one.node.exchange.others = [bad]
    (found,) = one.gather(row)
    assert isinstance(found, e.Failed)
    assert found.is_final
    one.node.exchange.others = [other.node.contributions]
    (found,) = one.gather(row)
    assert isinstance(found, e.Gathered)


def test_a_file_that_is_gone_from_the_disk_is_told_of_and_fetched_again(swarm):
    one, other, _ = swarm
    step = Step.of([one.publish(), other.publish()])
    [row] = (row for row in step.rows if row.peer == other.me)
    one.gather(row)
    one.node.contributions.find(row.file).unlink()
    found = one.do(a.Compute(MODULE, one.head0(MODULE), (step,)))
    assert (type(found), found.action) == (e.Failed, a.Gather(MODULE, (row,)))
    assert isinstance(one.reported.get(timeout=60).action, a.Compute)
    assert one.gather(row) == [e.Gathered(MODULE, row)]
    assert one.compute(one.head0(MODULE), step).weight == 2


def test_nothing_is_told_of_work_on_another_state_than_the_row_would_name(swarm, caplog):
    """The member stands on a state that the trainer could not take up: it was gone when it should."""
    one, _, _ = swarm
    step = Step.of([one.publish()])
    head = one.compute(one.head0(MODULE), step)
    one.node.held.forget(MODULE, step.name)
    one.adopt(head, step)
    one.trainer.inner_step()
    failed = one.do(a.Publish(MODULE, 1, step.name, head.digest, 0.0))
    assert isinstance(failed, e.Failed)
    assert not failed.is_final
    assert "the anchor is not the state" in caplog.text
    # The next step that is taken ends it.
    one.adopt(one.compute(one.head0(MODULE), step), step)
    one.trainer.inner_step()
    assert isinstance(one.do(a.Publish(MODULE, 2, step.name, head.digest, 0.0)), e.Published)


def test_a_state_that_is_fetched_is_checked_and_goes_under_the_work(swarm):
    one, other, _ = swarm
    step = Step.of([other.publish()])
    head = other.compute(other.head0(MODULE), step)
    missing = one.do(a.FetchState(head, (other.me,)))
    assert isinstance(missing, e.Failed)
    one.fetched[head.digest] = other.node.held.waiting(MODULE, step.name)
    row, trained = one.publish(), one.local()
    fetched = one.do(a.FetchState(head, (other.me,)))
    assert fetched == e.StateHere(MODULE, head)
    scored = one.do(a.Check(MODULE, step.name))
    assert isinstance(scored, e.Checked)
    assert scored.loss_before is not None
    assert scored.loss_after is not None
    one.adopt(head, step)
    # What was trained before the boundary is not in it, and is lost, but for what was not told.
    state = one.node.held.find(MODULE, step.name)
    assert torch.equal(one.local(), lost(one, row, trained) + state.parameters)
    assert isinstance(one.do(a.Publish(MODULE, 1, step.name, state.digest, 0.0)), e.Failed)


def test_what_a_path_begins_with_is_scored_beside_the_genesis_of_each_module(swarm):
    """A state that others made up reads worse with everything than its genesis does."""
    one, _, _ = swarm
    modules = one.grid.modules_of_path(0)
    heads = tuple(one.node.held.get(module) for module in modules)
    one.outer._files.held_out_of = lambda path: one.outer._files.validation
    scored = one.do(a.Score(0, heads, modules))
    assert scored.heads == heads
    assert scored.with_genesis == dict.fromkeys(modules, scored.loss)
    genesis = one.genesis[MODULE]
    made_up = 10.0 * torch.randn(genesis.layout.size, generator=torch.Generator().manual_seed(0))
    noise = replace(genesis, version=1, parameters=made_up)
    one.node.held.put("5" * 64, noise)
    named = Head(MODULE, "5" * 64, 1, 1, 0, noise.digest, noise.byte_size)
    scored = one.do(a.Score(0, tuple(named if h.module == MODULE else h for h in heads), modules))
    assert scored.loss > scored.with_genesis[MODULE] + 0.5
    # What is not here, or has no texts, is not scored.
    one.outer._files.held_out_of = lambda path: torch.empty((0, 0))
    assert one.do(a.Score(0, heads, modules)) == e.Scored(heads, None, {})


def test_a_state_that_is_on_its_way_is_not_fetched_beside_itself(swarm):
    """The first of two downloads of one state would remove what the second is about to read."""
    one, other, _ = swarm
    step = Step.of([other.publish()])
    head = other.compute(other.head0(MODULE), step)
    state, go, asked = other.node.held.waiting(MODULE, step.name), threading.Event(), []

    def slow(wanted, holders):
        asked.append(wanted)
        assert go.wait(60)
        return state

    one.node.fetcher = SimpleNamespace(state=slow)
    for _ in range(3):
        one.begin(a.FetchState(head, (other.me,)))
    go.set()
    assert one.reported.get(timeout=60) == e.StateHere(MODULE, head)
    assert asked == [head]


def test_what_decides_waits_for_no_disk(swarm, monkeypatch):
    one, waited, usual = swarm[0], set(), Index.transaction

    def transaction(index):
        waited.add(threading.current_thread().name)
        return usual(index)

    monkeypatch.setattr(Index, "transaction", transaction)
    monkeypatch.setattr(os, "fsync", lambda descriptor: waited.add(threading.current_thread().name))
    step = Step.of([one.publish()])
    one.adopt(one.compute(one.head0(MODULE), step), step, save=True)
    for action in (a.SaveAll(), a.Drop(MODULE)):
        assert one.begin(action) is None
    one.wait_until_saved()
    assert not one.node.held.lookup(one.trainer.anchor(MODULE).digest)
    assert {name.split("_")[0] for name in waited} == {"outer", "saving", "telling"}


def test_numbers_that_are_none_are_not_published(swarm):
    one, _, _ = swarm
    one.trainer.inner_step()
    with torch.no_grad():
        next(iter(one.trainer.model.parameters())).fill_(float("nan"))
    module = next(m for m in (MODULE, OTHER) if not bool(torch.isfinite(one.local(m)).all()))
    held = one.node.held.get(module)
    failed = one.do(a.Publish(module, 0, held.step, held.digest, 0.0))
    assert isinstance(failed, e.Failed)
    assert failed.is_final


def test_a_step_for_which_there_is_no_memory_is_left_out_and_told_once(swarm, monkeypatch, caplog):
    one, _, _ = swarm
    step = Step.of([one.publish()])

    def no_room(*given):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(type(one.node.rule), "step", no_room)
        for _ in range(3):
            failed = one.do(a.Compute(MODULE, one.head0(MODULE), (step,)))
            assert isinstance(failed, e.Failed)
    told = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 1
    assert "give this peer more" in told[0].message
    assert one.compute(one.head0(MODULE), step).version == 1


def test_a_state_is_one_object_that_lies_in_its_file_once_it_was_saved(swarm):
    one, _, _ = swarm
    held = one.node.held
    step = Step.of([one.publish()])
    head = one.compute(one.head0(MODULE), step)
    one.adopt(head, step)
    state = one.trainer.anchor(MODULE)
    assert held.find(MODULE, step.name) is state
    numbers, place = state.parameters.clone(), state.parameters.data_ptr()
    parts = held.lookup(head.digest)
    assert not isinstance(parts, Path)
    held.save_all()
    assert one.trainer.anchor(MODULE) is held.find(MODULE, step.name) is state
    assert state.parameters.data_ptr() != place
    assert torch.equal(state.parameters, numbers)
    assert held.lookup(head.digest).read_bytes() == b"".join(parts)
    # A state that was not saved before the next one came is served a while, if it is small.
    for index in (1, 2):
        step = Step.of([one.publish(index)])
        newer = one.compute(head, step)
        one.adopt(newer, step)
        assert held.lookup(head.digest) is not None
        head = newer


def test_a_restart_finds_what_was_saved(swarm, tmp_path):
    one, _, _ = swarm
    step = Step.of([one.publish()])
    head = one.compute(one.head0(MODULE), step)
    one.adopt(head, step)
    one.node.held.save_all()
    second = Step.of([one.publish(1)])
    one.adopt(one.compute(head, second), second)  # It is not on disk when the peer is killed.
    own = RunFolder(tmp_path / "a" / "run")
    chains = ChainStore(one.plan.run_id, one.grid.modules(), own.states.kept.index)
    again = States(one.grid, own.states, own.blobs, chains)
    found = {head.module: head for head in again.load_from_disk()}
    assert found[MODULE].step == step.name
    assert chains.served(MODULE)[0] == step.name
    state = again.find(MODULE, step.name)
    assert head_of(state, step.name, 1, 0) == found[MODULE]


def test_a_copy_alone_lets_a_newcomer_compute_its_last_step(swarm, tmp_path):
    """A state is believed when rows that stand on it name it, so the one before it is needed."""
    one, _, keeper = swarm
    first = Step.of([one.publish()])
    before = one.compute(one.head0(MODULE), first)
    one.adopt(before, first, save=True)
    second = Step.of([one.publish(1)])
    head = one.compute(before, second)
    one.adopt(head, second, save=True)
    keeper.fetched[before.digest] = one.node.held.find(MODULE, first.name)
    assert isinstance(keeper.do(a.FetchState(before, (one.me,))), e.StateHere)
    assert isinstance(keeper.gather(*second.rows)[0], e.Gathered)
    assert keeper.compute(before, second) == head
    keeper.node.chains.serve(MODULE, second.name, (first, second))
    keeper.adopt(head, second, save=True)
    for sha256 in (before.digest, head.digest, second.rows[0].file):
        assert keeper.node.held.lookup(sha256) or keeper.node.contributions.find(sha256)
    again = RunFolder(tmp_path / "k" / "run").states
    assert set(again.digests(MODULE)) == {before.digest, head.digest}


def test_a_state_that_others_replaced_before_it_was_saved_keeps_no_memory(swarm):
    one = swarm[0]
    held, step_of = one.node.held, one.node.rule.step
    states = [one.genesis[MODULE]]
    paths = one.grid.paths_of_module(MODULE)
    rows = [one.publish(round_index) for round_index in range(4)]
    for round_index, row in enumerate(rows):
        data = one.node.contributions.find(row.file).read_bytes()[MARK_BYTES:]
        rows = Step.of([row]).outer_rows
        states.append(step_of(states[-1], [data], rows, round_index, paths))
    heads = [head_of(state, f"{number:064x}", number, number) for number, state in enumerate(states)]
    for number in (2, 4):
        held.put(heads[number].step, states[number], Named(heads[number - 1], states[number - 1]))
        held.hold(heads[number])
    held.save(states[4])
    replaced = weakref.ref(states[1])
    del states
    gc.collect()
    assert replaced() is None


def test_what_everybody_fails_to_compute_is_said_to_be_so(swarm):
    one, other, _ = swarm
    step = Step.of([one.publish(), other.publish()])
    one.gather(*step.rows)
    rule = one.node.rule
    one.node.rule = replace(rule, shard_sequences={0: 1000, 1: 0})
    failed = one.do(a.Compute(MODULE, one.head0(MODULE), (step,)))
    assert failed.is_final
    one.node.rule = rule
    assert one.compute(one.head0(MODULE), step).weight == 2


def test_what_is_held_again_is_not_removed_by_an_earlier_drop(swarm):
    """The disk is slow, and the module is trained again before the states were removed."""
    one, other, keeper = swarm
    step = Step.of([one.publish(), other.publish()])
    keeper.gather(*step.rows)
    head = keeper.compute(keeper.head0(MODULE), step)
    keeper.adopt(head, step, save=True)
    keeper.node.chains.serve(MODULE, step.name, [step], head)
    is_slow = threading.Event()
    keeper.outer._saving.submit(is_slow.wait, 60)
    keeper.begin(a.Drop(MODULE))
    assert keeper.node.held.get(MODULE) is None
    keeper.outer.hold((head,))
    is_slow.set()
    keeper.outer._saving.submit(lambda: None).result(60)
    keeper.node.held.load_from_disk()
    assert keeper.node.held.get(MODULE) == head
    keeper.begin(a.Drop(MODULE))
    keeper.outer._saving.submit(lambda: None).result(60)
    assert keeper.node.held.find(MODULE, step.name) is None
