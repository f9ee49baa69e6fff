"""The run folders that the cells are trained in: prepared once for each way of sharding.

runs/one-path           tokenizer, tokens, base; one shard of everything
runs/kmeans-2x4         the same tokenizer, tokens and base; the shards of this router
trained/<cell>          the run of a cell: blobs of the above, its own manifest and states
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from dipaco.base.files import atomic_write
from dipaco.bootstrap.display import Display
from dipaco.bootstrap.prepare import prepare
from dipaco.dht.manifest import load_or_create_operator_key, sign_manifest
from dipaco.modules.config import GridConfig
from dipaco.modules.plan import RunPlan
from dipaco.routing.run_folder import RunFolder

from parts.common import CORPUS_TOML
from parts.paper_table_cells import LEARNING_RATES, PRIVATE_BLOCKS, SHAPES, Cell, Size

RUN_TOML = (
    'name = "paper-table"\n'
    "outer = {{ learning_rate = 0.7, momentum = 0.9, "
    "private_learning_rate = 0.7, private_momentum = 0.9 }}\n"
    + CORPUS_TOML
    + """\
{train_limit}
[tokenizer]
training_characters = 10_000_000
[model]
vocabulary_size = {size.vocabulary_size}
block_count = {model[block_count]}
hidden_size = {model[hidden_size]}
head_count = {model[head_count]}
sequence_length = {size.sequence_length}
[grid]
modules_per_level = {levels}
[base]
steps = {size.base_steps}
learning_rate = {learning_rate}
warmup_steps = 20
batch_sequences = {size.batch_sequences}
[router]
kind = "{kind}"
balanced = true
prefix_tokens = {size.prefix_tokens}
training_documents = 8000
{train_paths}
[inner]
optimizer = "adamw"
learning_rate = {learning_rate}
decay_steps = {size.steps}
floor_ratio = 0.1
batch_sequences = {size.batch_sequences}
[rounds]
inner_steps = {size.round_steps}
"""
)


class Runs:
    """Makes and finds the run folders under a work folder."""

    def __init__(self, data: Path, work: Path, size: Size) -> None:
        self._data = data.resolve()
        self._work = work
        self._size = size

    def folder(self, routing: str) -> Path:
        """Return where the shards of this name are prepared."""
        return self._work / "runs" / routing

    def trained(self, cell: Cell | str) -> Path:
        """Return where a cell keeps its states."""
        return self._work / "trained" / (cell if isinstance(cell, str) else cell.name)

    def half(self, cell: Cell | str) -> Path:
        """Return where a cell keeps the states of half of its steps."""
        return self._work / "half" / (cell if isinstance(cell, str) else cell.name)

    def prepared(self, cell: Cell) -> RunFolder:
        """Prepare the shards of a cell, if no cell before it has, and return their run."""
        folder = self.folder(cell.routing)
        if RunFolder(folder).manifest_path.exists():
            return RunFolder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        toml = folder / "RUN.toml"
        toml.write_text(self._toml(cell))
        base = self.folder(f"one-{cell.model}")
        if cell.kind != "base":
            _share_stages(base, folder)
        options: dict[str, Any] = {"device": torch.device("cpu"), "display": Display()}
        if cell.half_of:
            from dipaco.bootstrap.predecessor import open_predecessor

            options["predecessor"] = open_predecessor(self.half(cell.half_of))
            options["operator_key"] = self._work / "operator.pem"
        elif base != folder and cell.model == "path":
            options["operator_key"] = base / "operator.pem"
        prepare(toml, folder, **options)
        return RunFolder(folder)

    def derived(self, cell: Cell) -> RunFolder:
        """Return the run of a cell: the prepared shards with the cell's grid, batch and seed."""
        prepared = self.prepared(cell)
        plan, size = prepared.plan(), self._size
        inner = {
            "batch_sequences": size.batch_sequences * cell.batch_factor,
            "decay_steps": cell.path_steps(size),
        }
        grid: dict[str, Any] = {"modules_per_level": cell.levels}
        if cell.private:
            grid |= {"private_blocks": PRIVATE_BLOCKS, "private_embedding": True}
        # As in the paper, all modules take their outer step at the end of a round.
        offsets = (1.0,) * (len(cell.levels) + cell.private)
        own = plan.model_copy(
            update={
                "name": cell.name,
                "seed": cell.seed,
                "start_s": 0.0,
                "grid": GridConfig(**grid),
                "rounds": plan.rounds.model_copy(update={"level_offsets": offsets}),
                "inner": plan.inner.model_copy(update=inner),
                "outer": plan.outer.model_copy(update=dict(cell.outer)),
            }
        )
        if cell.half_of:
            # Its genesis is of this grid already, and a plan cannot change under its states.
            own = plan
        return self._written(prepared, own, self.trained(cell))

    def _written(self, source: RunFolder, plan: RunPlan, folder: Path) -> RunFolder:
        """Make a run folder with the blobs of `source` and another plan."""
        run = RunFolder(folder)
        if not run.manifest_path.exists():
            shutil.copytree(
                source.path / "blobs", folder / "blobs", copy_function=_link, dirs_exist_ok=True
            )
            key = load_or_create_operator_key(self._work / "operator.pem")
            atomic_write(run.manifest_path, sign_manifest(plan, key))
        return run

    def _toml(self, cell: Cell) -> str:
        limit = self._size.train_documents
        text = RUN_TOML.format(
            data=self._data,
            size=self._size,
            model=SHAPES[self._size.shape][cell.model],
            learning_rate=LEARNING_RATES[self._size.shape][cell.model],
            levels=list(cell.shards_of or cell.levels),
            kind=cell.router,
            train_limit=f"train_limit = {limit}" if limit else "",
            train_paths=f"train_paths = {cell.train_paths}" if cell.train_paths > 1 else "",
        )
        if cell.half_of:
            private = f"private_blocks = {list(PRIVATE_BLOCKS)}\nprivate_embedding = true\n"
            text = text.replace("[base]", private + "[base]", 1)
            first_step = f"first_step = {self._size.steps // 2}\n"
            text = text.replace("[rounds]", first_step + "[rounds]", 1)
            text += f"level_offsets = {[1.0] * (len(cell.levels) + cell.private)}\n"
        return text


def _share_stages(source: Path, target: Path) -> None:
    """Give a preparation the tokenizer, the tokens and the base of another, unless it has them."""
    if source == target or (target / "work" / "base.json").exists():
        return
    for part in ("work/tokens", "blobs"):
        if (source / part).is_dir():
            shutil.copytree(source / part, target / part, copy_function=_link, dirs_exist_ok=True)
    for stage in ("tokenizer", "tokens", "base"):
        marker = source / "work" / f"{stage}.json"
        if marker.exists():
            shutil.copy2(marker, target / "work" / marker.name)


def _link(source: str, target: str) -> str:
    if not os.path.exists(target):
        os.link(source, target)
    return target
