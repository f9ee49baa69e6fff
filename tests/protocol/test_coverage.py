"""Which part of a run a peer reads."""

from collections import Counter

import pytest

from dipaco.protocol.coverage import (
    BUCKET_PATHS,
    SAMPLED_AT_ONCE,
    bucket_count,
    home_bucket,
    next_buckets,
    sampled_buckets,
    scope_of,
    whole_scope,
)
from dipaco.protocol.view import SwarmView
from support.swarms.swarm_views import peer_name, plan_of

MANY = 64


@pytest.mark.parametrize(("paths", "count"), [(1, 1), (64, 1), (65, 2), (128, 2), (129, 3), (4096, 64)])
def test_paths_are_dealt_out_evenly(paths, count):
    assert bucket_count(paths) == count
    sizes = Counter(home_bucket("anybody", path, count) for path in range(paths))
    assert set(sizes) == set(range(count))
    assert max(sizes.values()) <= BUCKET_PATHS
    assert max(sizes.values()) - min(sizes.values()) <= 1


def test_peers_without_a_path_are_spread():
    homes = Counter(home_bucket(peer_name(n), None, MANY) for n in range(100 * MANY))
    assert set(homes) == set(range(MANY))
    assert max(homes.values()) < 200


def test_a_run_of_few_paths_has_nothing_to_sample():
    assert next_buckets(0, 1) == ()
    assert sampled_buckets("anybody", 0, 0, 1) == ()


def test_next_buckets_are_a_ring():
    assert next_buckets(0, 3) == (1, 2)
    assert next_buckets(62, MANY) == (63, 0, 1, 2)


def test_samples_differ_by_peer_and_attempt_and_reach_everything():
    home = 7
    samples = [sampled_buckets(peer_name(n), 0, home, MANY) for n in range(200)]
    assert all(len(set(sample) - {home}) == SAMPLED_AT_ONCE for sample in samples)
    assert set().union(*samples) == set(range(MANY)) - {home}
    own = [sampled_buckets(peer_name(0), attempt, home, MANY) for attempt in range(200)]
    assert set().union(*own) == set(range(MANY)) - {home}


def test_a_view_says_what_it_covers():
    _, grid = plan_of(10, 20)
    view = SwarmView(0.0, scope=scope_of(("L0.E3", "L0.E3"), (1,), grid))
    assert view.covers_module("L0.E3")
    assert not view.covers_module("L0.E4")
    assert [path for path in range(8) if view.covers_path(path)] == [1, 5]
    for whole in (SwarmView(0.0), SwarmView(0.0, scope=whole_scope(grid))):
        assert all(map(whole.covers_module, grid.modules()))
        assert all(map(whole.covers_path, range(grid.path_count)))
