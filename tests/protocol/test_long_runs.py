"""What a peer remembers of a module does not grow with the run, beside the names of the chain."""

import random
from collections import deque
from collections.abc import Mapping

from dipaco.protocol.chain.chain_book import ChainBook
from dipaco.protocol.chain.steps import Head, Row, Step
from dipaco.protocol.chain.trunk import Trunk
from dipaco.protocol.member import actions as a
from dipaco.protocol.member import events as e
from dipaco.protocol.member.situation import REMEMBERED_STEPS
from support.runs.trainer import BOUNDARY_S, DURATION_S, MODULE, Trainer, name


def entries(found, seen):
    """Count the entries of all containers in an object of ours, but for those of the chain."""
    if id(found) in seen or isinstance(found, str | bytes | ChainBook):
        return 0
    seen.add(id(found))
    if isinstance(found, Mapping | set | frozenset | list | tuple | deque):
        values = [*found.values()] if isinstance(found, Mapping) else [*found]
        return len(values) + sum(entries(value, seen) for value in values)
    if type(found).__module__.startswith("dipaco."):
        return sum(entries(value, seen) for value in getattr(found, "__dict__", {}).values())
    return 0


def test_what_is_remembered_of_a_module_does_not_grow_with_its_rounds():
    trainer = Trainer("A", "ABCD")
    counts = []
    for round_index in range(400):
        trainer.known.now_s = BOUNDARY_S + round_index * DURATION_S
        trainer.module.publishing.begin(round_index, trainer.known.now_s)
        rows = [trainer.row(peer, round_index=round_index, file=name(f"{peer}{round_index}")) for peer in "BCD"]
        for teller in "BCD":
            trainer.module.hear_steps([Step.of(rows)], teller)
        trainer.gathered(*rows)
        trainer.wait(DURATION_S / 2)
        trainer.module.handle(e.StateHere(MODULE, trainer.head(Step.of(rows))))
        trainer.take(e.Event)
        assert trainer.module.stand == Step.of(rows).name
        counts.append(entries(trainer.module, set()))
    assert max(counts[200:]) <= max(counts[100:200])


def rows_in(book):
    """Count the rows that a book holds."""
    return sum(len(link.step.rows) for link in book.back_from(book.tips(MODULE)[0].name) if link.step)


def test_of_old_steps_a_peer_keeps_names_alone_and_tells_others_where_its_chain_is():
    trainer, steps = Trainer("A", "ABCD"), []
    for round_index in range(300):
        parent = steps[-1].name if steps else trainer.module.stand
        steps.append(Step.of([trainer.row(p, round_index=round_index, parent=parent) for p in "BCD"]))
        trainer.stand_on(steps[-1])
    book = trainer.module.book
    assert rows_in(book) <= 3 * (REMEMBERED_STEPS + 1)
    assert len(book) == 301
    link = book.link(steps[10].name)
    assert (link.version, link.weight, link.round_index, link.peers) == (11, 33, 10, frozenset("BCD"))
    assert book.locator(steps[-1].name)[-1] == book.genesis(MODULE)
    # One that parted long ago and is heavier now is taken, and all its steps are told on.
    others, parent = [], steps[99]
    for round_index in range(100, 170):
        rows = [trainer.row(p, round_index=round_index, parent=parent.name) for p in map(str, range(20))]
        others.append(parent := Step.of(rows))
    for one in others:
        assert book.add(one, "1")
    assert trainer.module.voters(steps[99].name) == frozenset("BCD"), "who counted where they parted is known"
    trainer.take(a.Serve)
    trainer.module.serve(others[-1].name)
    assert [serve.steps for serve in trainer.take(a.Serve)] == [tuple(others)]
    trainer.stand_on(others[-1])
    assert steps[150].name not in book
    assert steps[50].name in book
    assert rows_in(book) <= 20 * (REMEMBERED_STEPS + 1)


def test_a_restart_knows_the_same_of_the_chain():
    trainer, steps = Trainer("A", "ABCD"), []
    for round_index in range(200):
        parent = steps[-1].name if steps else trainer.module.stand
        steps.append(Step.of([trainer.row(p, round_index=round_index, parent=parent) for p in "BC"]))
    trainer.stand_on(*steps)
    again, trunk = Trainer("A", "ABCD"), Trunk()
    for one in steps[:-REMEMBERED_STEPS]:
        trunk.append(one.name, one.round_index, sorted(one.peers))
    newest = steps[-REMEMBERED_STEPS:]
    fresh = type(again.module)(again.known, MODULE)
    fresh.restore(Head(MODULE, steps[-1].name, 200, 400, 199, "0" * 64, 10**6), trunk, newest)
    before, after = trainer.module.book, fresh.book
    assert after.locator(steps[-1].name) == before.locator(steps[-1].name)
    assert after.link(fresh.stand) == before.link(trainer.module.stand)
    assert [link.name for link in after.back_from(fresh.stand)] == [link.name for link in before.back_from(fresh.stand)]


def test_a_book_that_forgets_rows_answers_like_one_that_does_not():
    """Random chains, with branches from anywhere; one of both books is pruned to three steps."""
    for seed in range(150):
        draw, whole, pruned = random.Random(seed), ChainBook("0" * 16, (MODULE,)), ChainBook("0" * 16, (MODULE,))
        genesis = whole.genesis(MODULE)
        known = [genesis]
        for number in range(60):
            parent = draw.choice(known[-3:]) if draw.random() < 0.9 else draw.choice(known)
            peers = draw.sample("ABCDEFG", draw.randint(1, 4))
            place = MODULE, whole.link(parent).round_index + draw.randint(1, 2), parent, "0" * 64
            made = Step.of([Row(*place, 0, peer, 10, f"{number:064x}", 100) for peer in peers])
            assert whole.add(made)
            if parent not in pruned:
                continue  # It was forgotten, and would be asked for.
            assert pruned.add(made)
            known.append(made.name)
            if draw.random() < 0.4:
                pruned.prune(draw.choice(pruned.tips(MODULE)).name, 3)
            known = [step for step in known if step in pruned]
            for one in known:
                link, true = pruned.link(one), whole.link(one)
                assert (link.parent, link.rank, link.version) == (true.parent, true.rank, true.version)
                assert (link.round_index, link.peers) == (true.round_index, true.peers)
                assert [found.name for found in pruned.back_from(one)] == [f.name for f in whole.back_from(one)]
                assert pruned.contributors(one) == whole.contributors(one)
                assert pruned.locator(one) == whole.locator(one)
                other = draw.choice(known)
                assert pruned.ancestor(one, other).name == whole.ancestor(one, other).name
                assert pruned.stands_on(one, other) == whole.stands_on(one, other)
            assert {tip.name for tip in pruned.tips(MODULE)} <= set(known)
            assert not any(pruned.on_top_of(tip.name) for tip in pruned.tips(MODULE))
