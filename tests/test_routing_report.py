from __future__ import annotations

import math

import pytest
from dipaco.routing.report import label_agreement, routing_report, shard_balance


def test_balance() -> None:
    assert shard_balance([10, 10, 10]) == pytest.approx((1, 1, 1))
    largest, smallest, entropy = shard_balance([30, 10, 0, 0])
    assert (largest, smallest) == (3, 0)
    shares = (0.75, 0.25)
    assert entropy == pytest.approx(-sum(s * math.log(s) for s in shares) / math.log(4))
    assert shard_balance([7]) == (1, 1, 1)
    assert shard_balance([0, 0])[2] == 0


def test_agreement_with_labels() -> None:
    assert label_agreement([{}, {}]) is None
    same = label_agreement([{"a": 5}, {"b": 9}])
    none = label_agreement([{"a": 4, "b": 8}, {"a": 5, "b": 10}])
    assert same is not None
    assert none is not None
    assert same.normalised_mutual_information == pytest.approx(1)
    assert same.purity == 1
    assert none.normalised_mutual_information == pytest.approx(0, abs=1e-12)
    assert none.purity == pytest.approx(2 / 3)
    one = label_agreement([{"a": 5}])
    assert one is not None
    assert one.normalised_mutual_information == 1
    # Paths 3:1 of "a", all of "b": by hand.
    mixed = label_agreement([{"a": 3}, {"a": 1, "b": 4}])
    assert mixed is not None
    of_paths = -(3 / 8 * math.log(3 / 8) + 5 / 8 * math.log(5 / 8))
    of_labels = math.log(2)
    both = -(3 / 8 * math.log(3 / 8) + 1 / 8 * math.log(1 / 8) + 1 / 2 * math.log(1 / 2))
    expected = (of_paths + of_labels - both) / ((of_paths + of_labels) / 2)
    assert mixed.normalised_mutual_information == pytest.approx(expected)
    assert mixed.purity == pytest.approx(7 / 8)


def test_report() -> None:
    report = routing_report(
        kind="kmeans",
        train_paths=2,
        batch_sequences=4,
        documents=[3, 5],
        tokens=[100, 300],
        sequences=[4, 10],
        held_out_documents=[1, 0],
        held_out_sequences=[2, 0],
        label_tokens=[{"b": 10, "a": 20}, {"c": 3}],
    )
    assert report.expected_tokens == 200
    assert [path.load for path in report.paths] == [0.5, 1.5]
    assert [path.share for path in report.paths] == [0.25, 0.75]
    assert [path.steps_per_epoch for path in report.paths] == [1.0, 2.5]
    assert list(report.paths[0].labels) == ["a", "b"]
    assert type(report).model_validate_json(report.model_dump_json()) == report
