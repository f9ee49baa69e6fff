import hashlib
import json
from collections import Counter

import numpy as np
import pytest
import safetensors.numpy
from pydantic import ValidationError

from dipaco.base.errors import ConfigurationError, IntegrityError
from dipaco.inference.options import CorpusSettings
from dipaco.protocol.config import GridConfig, ModelConfig
from dipaco.protocol.grid import Grid
from dipaco.protocol.plan import RoutingPlan
from dipaco.routing.routers.balancing import balance_biases
from dipaco.routing.routers.discriminative import label_targets, preferred_paths
from dipaco.routing.routers.fitting import fit_classes
from dipaco.routing.routers.kinds import ROUTER_KINDS, Prefixes, RouterConfig, RouterSample, fit_router, load_router
from dipaco.routing.routers.simple_routers import LabelRouter, RandomRouter
from support.runs.make_plan import make_plan

DOCUMENTS, WIDTH = 600, 9


def _features(seed=0, documents=DOCUMENTS):
    return (np.random.default_rng(seed).normal(size=(documents, WIDTH)) ** 3).astype(np.float32)


def _tokens(documents=DOCUMENTS, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.integers(4, 300, generator.integers(1, 9)) for _ in range(documents)]


def _labels(documents=DOCUMENTS):
    names = ["law", "law", "law", "code", "code", "prose", "tables", "letters", None]
    return [names[index % len(names)] for index in range(documents)]


def _sample():
    features = _features()
    generator = np.random.default_rng(1)
    nll = 50 + features @ generator.normal(size=(WIDTH, 4)) + generator.normal(size=(DOCUMENTS, 4))
    weights = generator.integers(20, 400, DOCUMENTS)
    return RouterSample(weights=weights, features=features, labels=_labels(), nll=nll)


def _prefixes():
    return Prefixes(_features(), _tokens(), _labels())


def _loads(paths, weights, count):
    loads = np.bincount(paths, weights=weights, minlength=count)
    return loads / loads.mean()


@pytest.mark.parametrize("kind", ROUTER_KINDS)
def test_every_kind_is_a_file_and_has_no_chance_in_it(kind):
    config = RouterConfig(kind=kind)
    first, second = (fit_router(config, _sample(), (2, 2), seed=5) for _ in range(2))
    assert first.to_bytes() == second.to_bytes()
    loaded = load_router(first.to_bytes())
    assert type(loaded) is ROUTER_KINDS[kind]
    assert loaded.to_bytes() == first.to_bytes()
    assert loaded.path_count == 4
    paths, costs = loaded.route(_prefixes()), loaded.costs(_prefixes())
    assert paths.dtype == np.int64
    assert np.array_equal(paths, first.route(_prefixes()))
    assert np.array_equal(paths, np.argmin(costs, axis=1))
    assert set(paths.tolist()) == {0, 1, 2, 3}
    two = loaded.nearest(_prefixes(), 2)
    assert np.array_equal(two[:, 0], paths)
    assert (two[:, 0] != two[:, 1]).all()
    assert np.array_equal(np.sort(loaded.nearest(_prefixes(), 4)), np.tile(np.arange(4), (600, 1)))
    whole, parts = (_features(), _tokens(), _labels()), []
    for start in range(0, 600, 7):
        parts.append(loaded.route(Prefixes(*(known[start : start + 7] for known in whole))))
    assert np.array_equal(np.concatenate(parts), paths)
    with pytest.raises(ValueError, match="5 of 4 paths"):
        loaded.nearest(_prefixes(), 5)
    with pytest.raises(ValueError, match="needs the"):
        loaded.route(Prefixes(labels=[None]))


# -- product k-means


def test_product_paths_are_those_of_the_grid():
    router = fit_router(
        RouterConfig(kind="product_kmeans", balanced=False), RouterSample(np.ones(DOCUMENTS), _features()), (2, 3, 2), 0
    )
    model = ModelConfig(block_count=3, hidden_size=16, head_count=2, sequence_length=8)
    grid = Grid(model, GridConfig(modules_per_level=(2, 3, 2)))
    arrays = router.arrays()
    points = (_features() - arrays["mean"]) / arrays["scale"]
    parts = [points[:, :3], points[:, 3:6], points[:, 6:]]  # nine features, three levels
    for index, path in enumerate(router.route(Prefixes(_features())).tolist()):
        nearest = tuple(
            int(np.argmin(((part[index] - arrays[f"codebook_{level}"]) ** 2).sum(axis=1)))
            for level, part in enumerate(parts)
        )
        assert grid.digits(path) == nearest


def test_balanced_product_loads():
    weights = np.random.default_rng(2).integers(20, 400, 3000)
    features = _features(3, documents=3000)
    loads = [
        _loads(
            fit_router(
                RouterConfig(kind="product_kmeans", balanced=balanced), RouterSample(weights, features), (4, 4), 0
            ).route(Prefixes(features)),
            weights,
            16,
        )
        for balanced in (False, True)
    ]
    assert np.abs(loads[1] - 1).max() < 0.06 < np.abs(loads[0] - 1).max()


def test_many_columns_are_balanced():
    generator = np.random.default_rng(0)
    points = generator.normal(size=(2500, 8)) ** 3
    distances = ((points[:, None] - points[None, :50]) ** 2).sum(-1)
    weights = generator.integers(20, 60, 2500).astype(float)
    targets = generator.uniform(0.5, 2.0, 50)
    biases = balance_biases(distances, weights, targets=targets)
    loads = np.bincount(np.argmin(distances + biases, axis=1), weights=weights, minlength=50)
    shares = targets / targets.sum() * weights.sum()
    assert np.abs(loads / shares - 1).max() < 0.1
    with pytest.raises(ValueError, match="positive"):
        balance_biases(distances, weights, targets=np.zeros(50))


# -- discriminative


def fit_discriminative(features, nll, **config):
    sample = RouterSample(np.ones(len(features)), features, nll=nll)
    return fit_router(RouterConfig(kind="discriminative", **config), sample, (nll.shape[1],), 0)


def _separable(documents=800):
    """Documents of three classes of unequal size, for which a path of their own is likeliest; the
    fourth path is never the best."""
    generator = np.random.default_rng(7)
    labels = generator.choice(3, size=documents, p=[0.6, 0.3, 0.1])
    features = generator.normal(size=(documents, WIDTH))
    features[:, :3] += 6 * np.eye(3)[labels]
    nll = 100 + generator.normal(size=(documents, 4))
    nll[np.arange(documents), labels] -= 20
    return features.astype(np.float32) * 3 + 1, nll, labels


def test_discriminative_learns_the_best_path():
    features, nll, labels = _separable()
    router = fit_discriminative(features[:600], nll[:600], least_share=0.01)
    routes = router.route(Prefixes(features[600:]))
    assert (routes == labels[600:]).mean() > 0.95


def test_the_papers_calibration_matches_the_labels_and_leaves_no_path_empty():
    features, nll, labels = _separable()
    router = fit_discriminative(features, nll, least_share=0.2)
    shares = np.bincount(router.route(Prefixes(features)), minlength=4) / len(labels)
    expected = label_targets(labels, 4, 0.2)
    assert expected[3] == pytest.approx(0.05)
    assert expected.sum() == pytest.approx(1)
    np.testing.assert_allclose(shares, expected, rtol=0.05)


def test_paths_that_no_document_prefers_and_that_score_alike_get_documents():
    features, nll, _ = _separable()
    nll[:, 2] = nll[:, 3] = nll.max(axis=1) + 5  # two untrained paths: the same scores, the worst
    router = fit_discriminative(features[:120], nll[:120])
    again = fit_discriminative(features[:120], nll[:120])
    assert router.to_bytes() == again.to_bytes()
    counts = np.bincount(router.route(Prefixes(features)), minlength=4)
    assert (counts > 0.03 * len(features)).all(), counts


@pytest.mark.parametrize("documents", [12, 16, 24, 40])
def test_every_path_is_the_best_for_a_document_however_few_there_are(documents):
    nll = np.random.default_rng(0).normal(size=(documents, 12))
    nll[:, 0] -= 50
    targets = label_targets(np.argmin(nll, axis=1), 12, 0.1)
    counts = np.bincount(preferred_paths(nll, targets, seed=0), minlength=12)
    assert (counts >= 1).all(), counts


def test_with_too_few_documents_no_path_asks_for_more_than_half_of_its_share():
    shares = label_targets(np.zeros(16, dtype=np.int64), 4, 0.1)
    np.testing.assert_allclose(shares, [0.625, 0.125, 0.125, 0.125])


def test_targets_of_labels():
    assert label_targets(np.array([0, 0, 1, 1]), 2, 0.5).tolist() == [0.5, 0.5]
    targets = label_targets(np.repeat([0, 1, 2], [950, 40, 10]), 4, 0.2)
    np.testing.assert_allclose(targets[1:], 0.05)
    assert targets.sum() == pytest.approx(1)
    np.testing.assert_allclose(label_targets(np.zeros(9, np.int64), 3, 1.0), 1 / 3)


def test_discriminative_needs_scores_of_the_grid():
    config, sample = RouterConfig(kind="discriminative"), _sample()
    with pytest.raises(ConfigurationError, match="--from RUN"):
        fit_router(config, RouterSample(sample.weights, sample.features), (2, 2), 0)
    with pytest.raises(ConfigurationError, match=r"grid 2 x 4 has 8 paths"):
        fit_router(config, sample, (2, 4), 0)
    with pytest.raises(ConfigurationError, match="at least 4 documents"):
        fit_discriminative(_features(documents=3), np.ones((3, 4)))
    for nll in (np.ones((3, 4)), np.full((DOCUMENTS, 4), np.nan)):
        with pytest.raises(ValueError, match="do not fit"):
            fit_discriminative(_features(), nll)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_classes_are_those_of_the_least_penalised_cross_entropy(classes):
    features, _, labels = _separable()
    points, labels = features - features.mean(axis=0), labels % classes
    weight, bias = fit_classes(points, labels, classes)
    logits = points @ weight.T + bias
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    errors = shares / shares.sum(axis=1, keepdims=True) - np.eye(classes)[labels]
    slope = errors.T @ points / len(points) + 1e-3 * weight
    assert np.abs(slope).max() < 1e-4
    assert np.abs(errors.mean(axis=0)).max() < 1e-4


# -- label and random


def test_labels_are_shared_out_by_size():
    labels = ["a"] * 5 + ["b"] * 4 + ["c"] * 3 + ["d", "e"] + [None] * 50
    router = fit_router(RouterConfig(kind="label"), RouterSample(np.ones(len(labels)), labels=labels), (3,), 0)
    assert router.settings()["labels"] == {"a": 0, "b": 1, "c": 2, "d": 2, "e": 1}
    routes = router.route(Prefixes(tokens=_tokens(3), labels=["c", "a", "e"]))
    assert routes.tolist() == [2, 0, 1]
    with pytest.raises(ConfigurationError, match=r"at least 6 labels.*have 5 \(a, b, c, d, e\)"):
        fit_router(RouterConfig(kind="label"), RouterSample(np.ones(len(labels)), labels=labels), (6,), 0)


def test_documents_without_a_known_label_go_by_their_hash():
    router = LabelRouter(4, 0, {"": 2, "a": 1})
    tokens = _tokens(400)
    routes = router.route(Prefixes(tokens=tokens, labels=[None, "new"] * 200))
    expected = RandomRouter(4, 0).route(Prefixes(tokens=tokens))
    assert np.array_equal(routes, expected)
    assert router.route(Prefixes(tokens=tokens[:1], labels=[""])).tolist() == [2]


def test_random_paths_are_even_and_depend_on_the_prefix_alone():
    generator = np.random.default_rng(0)
    tokens = [generator.integers(4, 60000, 32).astype("<u2") for _ in range(4000)]
    router = RandomRouter(8, 3)
    routes = router.route(Prefixes(tokens=tokens))
    assert np.abs(np.bincount(routes, minlength=8) / 500 - 1).max() < 0.15
    as_lists = [row.tolist() for row in tokens]
    assert np.array_equal(routes, router.route(Prefixes(tokens=as_lists)))
    other = RandomRouter(8, 4).route(Prefixes(tokens=tokens))
    assert 0.08 < (routes == other).mean() < 0.18
    pairs = Counter(map(tuple, router.nearest(Prefixes(tokens=tokens), 2).tolist()))
    assert len(pairs) == 56
    assert max(pairs.values()) < 2 * min(pairs.values()) + 40


def test_random_paths_are_those_of_the_protocol():
    """Documents of running runs must keep their paths, and other programs must find them."""
    router = RandomRouter(256, 7)
    prefixes = [[1], [1, 2], [1, 2, 70000]]
    for prefix, path in zip(prefixes, router.route(Prefixes(tokens=prefixes)), strict=True):
        data = b"".join(token.to_bytes(4, "little") for token in prefix)
        digest = hashlib.blake2b(data, digest_size=8, key=(7).to_bytes(8, "little")).digest()
        word = int.from_bytes(digest, "little")
        assert path == min(range(256), key=lambda p: _mix(word + (p + 1) * 0x9E3779B97F4A7C15))
    assert router.route(Prefixes(tokens=[[1], [1, 2], [1, 2, 3]])).tolist() == [33, 129, 21]


def _mix(word):
    word %= 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


def test_evaluation_of_a_run_by_label_needs_the_field():
    plan = make_plan()
    by_label = plan.model_copy(update={"routing": RoutingPlan(kind="label")})
    without = CorpusSettings(data=("documents.jsonl",))
    named = CorpusSettings(data=("documents.jsonl",), label_field="domain")
    without.check_labels(plan)
    named.check_labels(by_label)
    with pytest.raises(ConfigurationError, match="--label-field F"):
        without.check_labels(by_label)


# -- files and configuration


def test_broken_files_of_every_kind():
    def file(kind, settings, **arrays):
        header = {"format": "dipaco-router/1", "kind": kind, "settings": settings}
        return safetensors.numpy.save(arrays, {"router": json.dumps(header)})

    flat = {"mean": np.zeros(4), "scale": np.ones(4)}
    one = {**flat, "biases": np.zeros(1)}
    for broken in [
        file("random", {}), file("random", {"paths": 0, "seed": 0}), file("random", []),
        file("random", {"paths": 2, "seed": -1}), file("random", {"paths": "2", "seed": 1}),
        file("label", {"paths": 2, "seed": 1}), file("label", {"paths": 2, "seed": 1, "labels": 3}),
        file("label", {"paths": 2, "seed": 1, "labels": {"a": 2}}),
        file("product_kmeans", {}, **one),
        file("product_kmeans", {}, **one, codebook_0=np.zeros((1, 3))),
        file("product_kmeans", {}, **one, codebook_1=np.zeros((1, 4))),
        file("product_kmeans", {}, **one, codebook_0=np.zeros((2, 4))),
        file("product_kmeans", {}, **one, codebook_0=np.zeros(4)),
        file("discriminative", {}, **flat, weight=np.zeros((2, 4)), bias=np.zeros(1)),
        file("discriminative", {}, **flat, weight=np.zeros((2, 3)), bias=np.zeros(2)),
        file("discriminative", {}, **flat, weight=np.full((1, 4), np.nan), bias=np.zeros(1)),
        file("discriminative", {}, **{**flat, "scale": np.zeros(4)}, weight=np.zeros((1, 4)),
             bias=np.zeros(1)),
    ]:  # fmt: skip
        with pytest.raises(IntegrityError, match="broken"):
            load_router(broken)
    assert load_router(file("product_kmeans", {}, **one, codebook_0=np.zeros((1, 4)))).path_count


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "label", "train_paths": 2}, "no second best"),
        ({"kind": "oracle"}, "known: kmeans, product_kmeans"),
        ({"train_paths": 0}, "greater than or equal to 1"),
    ],
)
def test_impossible_routers(values, message):
    with pytest.raises(ValidationError, match=message):
        RouterConfig.model_validate(values)


@pytest.mark.parametrize("kind", sorted(ROUTER_KINDS))
def test_one_centroid_more_changes_nobody_elses_costs(kind):
    router = fit_router(RouterConfig(kind=kind), _sample(), (2, 2), seed=0)
    new = _features(seed=5) * np.float32(0.1) + np.float32(40)
    if router.kind_with_path is None:
        with pytest.raises(ValueError, match=f"a router of kind '{kind}'"):
            router.with_path(new)
        return
    grown = router.with_path(new).with_path(_features(seed=6))
    assert (grown.kind, grown.path_count) == (router.kind_with_path, 6)
    before, after = router.costs(_prefixes()), grown.costs(_prefixes())
    assert after[:, :4] == pytest.approx(before, rel=1e-9, abs=1e-9)
    assert grown.route(Prefixes(new)).tolist() == [4] * DOCUMENTS
    again = load_router(grown.to_bytes())
    assert np.array_equal(again.costs(_prefixes()), after)
    # The centroid is the mean of the standardised features, and nothing is added to its distance.
    mean = Prefixes(new.mean(axis=0, keepdims=True))
    assert grown.costs(mean)[0, 4] == pytest.approx(0, abs=1e-6)
