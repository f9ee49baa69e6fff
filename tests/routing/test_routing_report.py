import math

import pytest

from dipaco.protocol.plan import RoutingPlan
from dipaco.routing.report import label_agreement, report_routing
from dipaco.routing.shards import PathSummary


def report_of(*tokens):
    paths = [
        PathSummary(path=path, documents=1, tokens=count, held_out_documents=0) for path, count in enumerate(tokens)
    ]
    return report_routing(RoutingPlan(kind="kmeans", train_paths=2), paths)


def test_balance():
    even = report_of(10, 10, 10)
    assert (even.max_over_mean, even.min_over_mean, even.entropy_ratio) == pytest.approx((1, 1, 1))
    uneven = report_of(30, 10, 0, 0)
    assert (uneven.max_over_mean, uneven.min_over_mean, uneven.expected_tokens) == (3, 0, 10)
    shares = (0.75, 0.25)
    assert uneven.entropy_ratio == pytest.approx(-sum(s * math.log(s) for s in shares) / math.log(4))
    assert report_of(7).entropy_ratio == 1
    assert type(uneven).model_validate_json(uneven.model_dump_json()) == uneven


def test_agreement_with_labels():
    assert label_agreement([{}, {}]) is None
    same = label_agreement([{"a": 5}, {"b": 9}])
    none = label_agreement([{"a": 4, "b": 8}, {"a": 5, "b": 10}])
    assert same.normalised_mutual_information == pytest.approx(1)
    assert same.purity == 1
    assert none.normalised_mutual_information == pytest.approx(0, abs=1e-12)
    assert none.purity == pytest.approx(2 / 3)
    one = label_agreement([{"a": 5}])
    assert one.normalised_mutual_information == 1
    # Paths 3:1 of "a", all of "b": by hand.
    mixed = label_agreement([{"a": 3}, {"a": 1, "b": 4}])
    of_paths = -(3 / 8 * math.log(3 / 8) + 5 / 8 * math.log(5 / 8))
    of_labels = math.log(2)
    both = -(3 / 8 * math.log(3 / 8) + 1 / 8 * math.log(1 / 8) + 1 / 2 * math.log(1 / 2))
    expected = (of_paths + of_labels - both) / ((of_paths + of_labels) / 2)
    assert mixed.normalised_mutual_information == pytest.approx(expected)
    assert mixed.purity == pytest.approx(7 / 8)
