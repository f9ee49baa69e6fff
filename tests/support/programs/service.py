"""Trained tiny runs, the service over them, and waiting for what happens beside a test."""

import dataclasses
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch

from dipaco.bootstrap.import_base import ImportedBase
from dipaco.inference.generate import generate_tokens, stream_text
from dipaco.inference.options import SamplingSettings
from dipaco.inference.serve_command import ServeSettings, service_of
from dipaco.inference.sources import DiskSource, StateSource, assemble_path
from dipaco.modules.layout import layout_of
from dipaco.modules.transformer import EMBEDDING, HEAD
from dipaco.routing.run_folder import RunFolder
from dipaco.simulator import simulate_command as simulator_cli
from support.runs.foreign_base import make_foreign_base
from support.runs.tiny_run import make_tiny_run

# In a SentencePiece model, behind the special ones.
BYTE_PIECES = slice(4, 4 + 256)


def trained_run(folder, *words, rounds=2, **config):
    """Train a tiny run of 2x2 paths and return its folder; `words` are more of the simulator's."""
    make_tiny_run(folder / "run", **(config or {"private_embedding": True, "sequence_length": 48}))
    arguments = [str(folder / "run"), "--rounds", str(rounds), "--out", str(folder / "out"), "--json"]
    assert simulator_cli.main([*arguments, *(words or ("--validation-sequences", "0"))]) == 0
    return folder / "out"


def run_with_adapters(folder, adapters, family="smollm2", **config):
    """Train adapters of 2x2 paths over a base, `base`, for two rounds; return the run's folder."""
    make_foreign_base(folder / "base", family, **config)
    imported = ImportedBase(folder / "base")
    return trained_run(folder, imported=imported, adapters=adapters, inner={"learning_rate": 0.02})


def lively(folder):
    """Give each module of a run on disk a newer state whose texts do not repeat one letter."""
    run = RunFolder(folder)
    grid = run.grid(run.plan())
    for module in grid.modules():
        run.states.save(changed(run.states.load_latest(module, layout_of(grid, module))))
    return folder


def changed(state):
    """Return a newer state that says something else, in whole characters."""
    drawn = torch.Generator().manual_seed(state.version)
    parameters = torch.randn(state.layout.size, generator=drawn)
    for name, values in state.layout.views(parameters).items():
        if name in (EMBEDDING, HEAD):
            values[BYTE_PIECES] = 0.0
    return dataclasses.replace(state, version=state.version + 1, parameters=parameters)


@contextmanager
def service(source, **options):
    """Give the service over a source, or over a run on disk, as `dipaco-serve` makes it; an
    application serves it."""
    if not isinstance(source, StateSource):
        source = DiskSource(source)
    settings = ServeSettings(**{"threads": 1, "refresh_s": 0, "parallel": 3, **options})
    # Short, because the name of a socket is.
    with source, tempfile.TemporaryDirectory(prefix="serve-", dir="/tmp") as folder:
        yield service_of(settings, source, torch.device("cpu"), Path(folder))


def greedy_text(source, path, tokens, count):
    """Return what `dipaco-generate` says after the tokens of a run."""
    sampling = SamplingSettings(max_tokens=count, temperature=0)
    tokenizer = source.tokenizer()
    model, never = assemble_path(source, path), tokenizer.never_chosen
    made = generate_tokens(model, tokens, sampling, ends=tokenizer.ends, never=never)
    return "".join(stream_text(tokenizer, made))
