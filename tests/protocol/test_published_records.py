"""What a peer publishes of itself, in a run of 128 paths, so of two buckets: even paths, and odd ones."""

import pytest

from dipaco.protocol.config import GridConfig
from dipaco.protocol.grid import Grid
from dipaco.protocol.published_records import PublishedRecords
from dipaco.protocol.records import MAX_ENTRIES, ProgressEntry
from support.runs.make_plan import make_plan
from support.swarms.fake_swarm import ME, head, peer_record

LIFE_S = 900.0


@pytest.fixture
def records():
    plan = make_plan(grid=GridConfig(modules_per_level=(8, 16)))
    return PublishedRecords(Grid(plan.model, plan.grid), LIFE_S)


def on_path(path, state="joining"):
    return peer_record(ME, state).model_copy(update={"path": path})


def published(records, record, held=(), progress=()):
    return {(found.kind, found.item): found.record for found in records.publish(record, held, progress)}


def test_a_peer_speaks_under_the_keys_of_its_modules_and_of_its_bucket(records):
    said = published(records, on_path(17), [head("L0.E0")])
    assert set(said) == {("peers", "1"), ("modules", "L0.E1"), ("modules", "L1.E1"), ("modules", "L0.E0")}
    assert {(record.path, record.state) for record in said.values()} == {(17, "joining")}
    assert [item for (_, item), record in said.items() if getattr(record, "held", None)] == ["L0.E0"]


def test_a_peer_that_moves_says_goodbye_where_it_was(records):
    published(records, on_path(17))
    said = published(records, on_path(18))
    for place in (("peers", "1"), ("modules", "L1.E1")):
        assert (said[place].path, said[place].state) == (17, "leaving")
    for place in (("peers", "0"), ("modules", "L0.E1"), ("modules", "L1.E2")):
        assert (said[place].path, said[place].state) == (18, "joining")
    assert ("peers", "1") not in published(records, on_path(18)), "a goodbye is said once"
    leaving = {(found.kind, found.item): found.record for found in records.goodbyes()}
    assert set(leaving) == {("peers", "0"), ("modules", "L0.E1"), ("modules", "L1.E2")}
    assert {(record.path, record.state, record.reachable) for record in leaving.values()} == {
        (18, "leaving", "outgoing")
    }


def test_what_was_only_held_is_withdrawn(records):
    serving = on_path(None, "serving")
    published(records, serving, [head("L0.E0")])
    assert published(records, serving)["modules", "L0.E0"] is None


def test_progress_stands_in_the_bucket_of_its_path_and_the_newest_first(records):
    def entry(path):
        return ProgressEntry(
            path=path, last_round=path, tokens=1, validation_nll=1.0, validation_tokens=1, train_loss=1.0
        )

    said = published(records, on_path(17), progress=map(entry, (3, 4, 5)))
    found = {item: [e.path for e in record.entries] for (kind, item), record in said.items() if kind == "progress"}
    assert found == {"0": [4], "1": [5, 3]}
    many = published(records, on_path(17), progress=map(entry, range(100)))
    assert sum(len(record.entries) for (kind, _), record in many.items() if kind == "progress") == MAX_ENTRIES
