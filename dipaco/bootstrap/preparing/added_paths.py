"""More paths for a finished run: `prepare --from RUN --add-path NEW.jsonl`.

See design 4.9, successor. The new run has the old one's tokenizer, base model, paths and shards,
each with the same bytes. A new path has modules of its own in every level. They begin as those of
the old path that predicts the beginnings of the new documents best. The router gets one centroid
more: the mean of their features. All new documents go to the new path, and no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dipaco.base.errors import ConfigurationError
from dipaco.bootstrap.run_config import IN_PLANS, RunConfig, changed
from dipaco.protocol.config import parse_config
from dipaco.routing.documents.corpus import CorpusConfig
from dipaco.routing.routers.kinds import ROUTER_KINDS, RouterConfig

from .predecessor import Predecessor

# What `--set` may change: how the run is trained, and how the new documents are read.
_FREE_TABLES = ("name", "seed", "inner", "outer", "rounds", "contributions", "mirrors", "data")
_GIVEN_KEYS = ("data.train", "data.validation", "data.hub")


def config_with_paths(
    old: Predecessor, files: Sequence[str], changes: Sequence[str] = ()
) -> RunConfig:
    """Return the configuration of the run in `old`, with a path more for each of `files`, each a
    name or a pattern.

    The learning rate's schedule goes on, and batches are drawn with another seed, so that no path
    reads its shard in the same order again. Raises ConfigurationError for a run whose router has no
    centroids, and for changes of what stays as it is.
    """
    plan = old.plan
    router = ROUTER_KINDS.get(plan.routing.kind)
    kind = router.kind_with_path if router else None
    if kind is None:
        raise ConfigurationError(
            f"--add-path: the router of {old.path} is of kind '{plan.routing.kind}', and only "
            f"k-means has a centroid for each path to add one to; make a successor with kind = "
            f"'kmeans' under [router] first, and add the path to that"
        )
    for file in files:
        if not any(mark in file for mark in "*?[") and not Path(file).exists():
            raise ConfigurationError(f"--add-path {file}: there is no such file")
        if files.count(file) > 1:
            raise ConfigurationError(
                f"--add-path {file} is given twice; each path needs documents of its own"
            )
    for change in changes:
        key = change.partition("=")[0].strip()
        if key.partition(".")[0] not in _FREE_TABLES or key in _GIVEN_KEYS:
            raise ConfigurationError(
                f"--set '{change}': with --add-path this is as in the run before, whose paths stay "
                f"what they are; {', '.join(_FREE_TABLES[:-1])} may change, and how the files of "
                f"--add-path are read: data.text_field, data.held_out_fraction"
            )
    grown = {name: getattr(plan, name) for name in IN_PLANS} | {
        "seed": (plan.seed + 1) % 2**32,
        "data": CorpusConfig(train=tuple(files), **old.how_rows_were_read),
        "grid": plan.grid.model_copy(
            update={"added_paths": plan.grid.added_paths + len(files)},
        ),
        "router": RouterConfig(
            kind=kind,
            prefix_tokens=plan.routing.prefix_tokens,
            train_paths=plan.routing.train_paths,
        ),
        "inner": plan.inner.model_copy(update={"first_step": old.path_steps()}),
    }
    values = changed(RunConfig(**grown).model_dump(mode="json"), changes)
    config = parse_config(RunConfig, values, "--add-path")
    return config.model_copy(update={"data": config.data.relative_to(Path.cwd())})
