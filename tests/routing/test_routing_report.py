import math

import pytest

from dipaco.protocol.config import GridConfig, InnerConfig
from dipaco.protocol.plan import PathShard, RoutingPlan, ShardIndex
from dipaco.routing.report import label_agreement, report_routing, shard_balance
from dipaco.routing.shards import PathSummary
from support.runs.make_plan import make_plan


def test_balance():
    assert shard_balance([10, 10, 10]) == pytest.approx((1, 1, 1))
    largest, smallest, entropy = shard_balance([30, 10, 0, 0])
    assert (largest, smallest) == (3, 0)
    shares = (0.75, 0.25)
    assert entropy == pytest.approx(-sum(s * math.log(s) for s in shares) / math.log(4))
    assert shard_balance([7]) == (1, 1, 1)
    assert shard_balance([0, 0])[2] == 0


def test_agreement_with_labels():
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


def test_report():
    shards = [
        PathShard(
            path=path, train_sha256="0" * 64, train_sequences=rows, train_documents=documents,
            validation_sha256="1" * 64, validation_sequences=2 - 2 * path,
        )
        for path, rows, documents in ((0, 4, 3), (1, 10, 5))
    ]  # fmt: skip
    summaries = [PathSummary(0, 3, 100, 1, (), {"b": 10, "a": 20}), PathSummary(1, 5, 300, 0, (), {"c": 3})]
    plan = make_plan(
        inner=InnerConfig(batch_sequences=4),
        routing=RoutingPlan(kind="kmeans", train_paths=2),
        grid=GridConfig(modules_per_level=(2, 1)),
    )
    index = ShardIndex(sequence_length=16, paths=tuple(shards))
    report = report_routing(plan, index, summaries)
    assert report.expected_tokens == 200
    assert [path.load for path in report.paths] == [0.5, 1.5]
    assert [path.share for path in report.paths] == [0.25, 0.75]
    assert [path.steps_per_epoch for path in report.paths] == [1.0, 2.5]
    assert [path.held_out_sequences for path in report.paths] == [2, 0]
    assert list(report.paths[0].labels) == ["a", "b"]
    assert type(report).model_validate_json(report.model_dump_json()) == report
