import json
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from dipaco.base.errors import ConfigurationError, IntegrityError
from dipaco.modules.canonical_file import MAX_HEADER_BYTES
from dipaco.routing.routers.balancing import balance_biases, squared_distances
from dipaco.routing.routers.kinds import Prefixes, RouterConfig, RouterSample, fit_router, load_router
from dipaco.routing.routers.simple_routers import LabelRouter


def _blobs(counts, width=6, seed=0):
    generator = np.random.default_rng(seed)
    centres = generator.normal(size=(len(counts), width)) * 60
    labels = np.repeat(np.arange(len(counts)), counts)
    points = centres[labels] + generator.normal(size=(len(labels), width))
    return points.astype(np.float32), labels


def fitted(points, paths, *, seed=0, balanced=False, weights=None):
    weights = np.ones(len(points)) if weights is None else weights
    return fit_router(RouterConfig(balanced=balanced), RouterSample(weights, points), (paths,), seed)


def test_finds_separated_clusters():
    points, labels = _blobs([50, 400, 20, 100])
    routes = fitted(points, 4, seed=3).route(Prefixes(points))
    assert len({(int(a), int(b)) for a, b in zip(labels, routes, strict=True)}) == 4


def test_scale_of_a_feature_does_not_matter():
    points, _ = _blobs([50, 40, 60])
    stretched = points * np.float32([1e4, 1, 1, 1, 1e-3, 1]) + np.float32(5)
    first = fitted(points, 3, seed=0).route(Prefixes(points))
    second = fitted(stretched, 3, seed=0).route(Prefixes(stretched))
    assert len(set(zip(first.tolist(), second.tolist(), strict=True))) == 3


@pytest.mark.parametrize("paths", [2, 4, 8, 16])
def test_balanced_loads(paths):
    generator = np.random.default_rng(paths)
    points = generator.normal(size=(4000, 12)) ** 3  # skewed, as hidden states are
    weights = generator.integers(20, 400, 4000)
    train, unseen = np.arange(4000) < 3000, np.arange(4000) >= 3000
    router = fitted(points[train], paths, seed=0, balanced=True, weights=weights[train])
    loads = np.bincount(router.route(Prefixes(points[train])), weights=weights[train], minlength=paths)
    assert np.abs(loads / loads.mean() - 1).max() < 0.05
    held = np.bincount(router.route(Prefixes(points[unseen])), weights=weights[unseen], minlength=paths)
    assert held.min() > 0.4 * held.mean()
    plain = fitted(points[train], paths, seed=0)
    uneven = np.bincount(plain.route(Prefixes(points[train])), weights=weights[train], minlength=paths)
    assert np.abs(uneven / uneven.mean() - 1).max() > np.abs(loads / loads.mean() - 1).max()


def test_balance_keeps_the_structure():
    points, labels = _blobs([300, 300, 300, 300])
    routes = fitted(points, 4, seed=0, balanced=True).route(Prefixes(points))
    assert len({(int(a), int(b)) for a, b in zip(labels, routes, strict=True)}) == 4


@given(st.integers(0, 1000), st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_biases_never_make_loads_worse(seed, columns):
    generator = np.random.default_rng(seed)
    distances = generator.exponential(size=(60, columns)) * generator.exponential(size=columns)
    weights = generator.integers(1, 50, 60).astype(float)

    def excess(biases):
        nearest = np.argmin(distances + biases, axis=1)
        loads = np.bincount(nearest, weights=weights, minlength=columns)
        return float(np.abs(loads - weights.sum() / columns).max())

    biases = balance_biases(distances, weights)
    assert abs(biases.sum()) < 1e-6 * max(1.0, np.abs(biases).max())
    assert excess(biases) <= excess(np.zeros(columns))
    assert excess(biases) <= 50  # one heavy point at most


def test_distances():
    points, _ = _blobs([10, 10])
    expected = ((points[:, None, :] - points[None, :3, :]) ** 2).sum(-1)
    np.testing.assert_allclose(squared_distances(points, points[:3]), expected, atol=1e-2)


def test_without_scikit_learn_it_is_said_what_to_install(monkeypatch):
    points, _ = _blobs([20, 20])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'dipaco\[prepare\]'"):
        fitted(points, 2)


def test_a_router_is_used_without_scikit_learn():
    """Peers and readers route, and need not have it."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys, dipaco.routing.run_folder; assert 'sklearn' not in sys.modules"],
        check=False,
    )
    assert done.returncode == 0


def test_too_few_documents():
    with pytest.raises(ConfigurationError, match="at least 5 different beginnings"):
        fitted(np.ones((30, 4), np.float32), 5)


def test_wrong_features():
    points, _ = _blobs([20, 20])
    router = fitted(points, 2)
    with pytest.raises(IntegrityError, match="width 6"):
        router.route(Prefixes(points[:, :5]))
    with pytest.raises(IntegrityError, match="finite"):
        router.route(Prefixes(np.full((1, 6), np.nan, np.float32)))


def test_broken_files():
    points, _ = _blobs([20, 20])
    router = fitted(points, 2)
    data = router.to_bytes()
    arrays = router.arrays()

    def file(header, **changes):
        return safetensors.numpy.save({**arrays, **changes}, {"router": json.dumps(header)})

    good = {"format": "dipaco-router/1", "kind": "kmeans"}
    assert load_router(file(good)).path_count == 2
    for broken in [
        b"", b"\xff" * 7, b"\xff" * 100, data[:-5], data[:40],
        safetensors.numpy.save(arrays), file([]), file({"format": "other"}),
        file(good, centroids=arrays["centroids"][:, :3]),
        file(good, centroids=arrays["centroids"] * np.nan),
        file(good, biases=np.zeros(5)), file(good, scale=-arrays["scale"]),
        file(good, centroids=np.zeros(3)), file({**good, "settings": {"x": "x" * MAX_HEADER_BYTES}}),
        file(good, centroids=np.zeros((0, 6)), biases=np.zeros(0)),
    ]:  # fmt: skip
        with pytest.raises(IntegrityError):
            load_router(broken)
    with pytest.raises(IntegrityError, match=r"kind 'oracle'.*knows.* kmeans"):
        load_router(file({"format": "dipaco-router/1", "kind": "oracle"}))


def test_a_router_that_nobody_could_read_is_not_written():
    most = LabelRouter(2, 0, {f"{n:030}": 0 for n in range(50_000)})
    assert load_router(most.to_bytes()).to_bytes() == most.to_bytes()
    with pytest.raises(ConfigurationError, match="fewer labels"):
        LabelRouter(2, 0, {f"{n:030}": 0 for n in range(100_000)}).to_bytes()
