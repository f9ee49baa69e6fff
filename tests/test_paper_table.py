"""The paper's table at the smallest size: cells, resuming, report."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from dipaco.modules.config import ModelConfig  # noqa: E402
from dipaco.modules.grid import parameter_shapes  # noqa: E402
from parts import paper_table_cells as cells  # noqa: E402
from parts import paper_table_report as report  # noqa: E402

SIZE = cells.Size(steps=80, round_steps=8, base_steps=160)


def test_every_cell_has_what_it_needs_before_it() -> None:
    names = [cell.name for cell in cells.CELLS]
    assert len(set(names)) == len(names)
    for index, cell in enumerate(cells.CELLS):
        assert set(cell.needs) <= set(names[:index]), cell.name


def test_cells_of_one_sharding_share_it() -> None:
    by_name = cells.CELLS_BY_NAME
    shared = {by_name[n].routing for n in ("dipaco-2x4", "dipaco-2x4-private", "flat-8")}
    assert shared == {"kmeans-2x4"}
    assert by_name["diloco-8"].routing == by_name["dense"].routing == "one-path"
    assert by_name["dense-large"].routing == "one-large"


def test_the_learning_rate_of_replicas_falls_as_that_of_one_model() -> None:
    by_name = cells.CELLS_BY_NAME
    assert by_name["dense"].path_steps(SIZE) == SIZE.steps
    assert by_name["diloco-8"].path_steps(SIZE) == 8 * SIZE.steps


@pytest.mark.parametrize("shape", cells.SHAPES)
def test_the_matrices_of_a_model_are_counted(shape: str) -> None:
    size = replace(SIZE, shape=shape)
    counts = []
    for model, blocks in cells.SHAPES[shape].items():
        config = ModelConfig(vocabulary_size=size.vocabulary_size, **blocks)
        found = parameter_shapes(config).values()
        matrices = sum(rows[0] * rows[1] for rows in found if len(rows) == 2)
        assert cells.matrix_parameters(model, size) == matrices
        counts.append(matrices)
    assert counts[1] / counts[0] == pytest.approx(8.7, abs=0.3)


def _figures(cell: cells.Cell, perplexity: float) -> dict:
    return {
        "cell": {"title": cell.title, "seed": cell.seed, "kind": cell.kind},
        "size": {"steps": SIZE.steps},
        "perplexity": perplexity,
        "tokens_scored": 1000,
        "parameters_path": 10**6,
        "parameters_total": 10**7,
        "tokens_path": 10**6,
        "tokens_total": 10**7,
        "tokens_per_parameter": 1.0,
        "training_flops": 1e12,
        "cpu_seconds": 1.0,
        "seconds": 2.0,
        "train_losses": [[8, 5.0], [16, 4.0]],
    }


def test_the_report_names_the_target_the_orderings_and_what_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "cells"
    folder.mkdir()
    values = {
        "dense": 200.0,
        "dense-seed1": 202.0,
        "dipaco-2x4": 170.0,
        "dipaco-2x4-private": 120.0,
    }
    for name, perplexity in values.items():
        figures = _figures(cells.CELLS_BY_NAME[name], perplexity)
        (folder / f"{name}.json").write_text(json.dumps(figures))
    report.write_report(folder, tmp_path / "results", replace(SIZE, validation_documents=5))
    summary = json.loads((tmp_path / "results" / "paper_table.json").read_text())
    assert summary["target"]["best"] == "dipaco-2x4-private"
    assert summary["target"]["against_dense"] == pytest.approx(-0.4)
    assert [entry["holds"] for entry in summary["orderings"]] == [True]
    assert summary["seeds"] == {"dense": [200.0, 202.0]}
    assert "diloco-8" in summary["missing"]
    text = (tmp_path / "results" / "paper_table.md").read_text()
    assert "| DiPaCo 2x4, path-specific | 0 | 120.00 | -40.0% |" in text
    assert "not finished: base-path" in text
    for plot in ("perplexity", "cost", "training_loss"):
        assert (tmp_path / "results" / f"{plot}.png").stat().st_size > 1000
    assert (tmp_path / "results" / "cells" / "dense.json").exists()
