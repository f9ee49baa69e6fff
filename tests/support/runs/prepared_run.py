"""A small corpus and its RUN.toml, for tests that prepare a run."""

import io
import json
import random

import torch
from rich.console import Console

from dipaco.bootstrap.prepare_output import Display
from dipaco.bootstrap.preparing import prepare as prepare_module
from dipaco.bootstrap.preparing.stages import Job
from dipaco.bootstrap.run_config import load_run_config

CPU = torch.device("cpu")


RUN_TOML = """
name = "test"
seed = 3
[data]
train = "train.jsonl"
label_field = "domain"
held_out_fraction = 0.1
[tokenizer]
training_characters = 100_000
[model]
vocabulary_size = 320
block_count = 2
hidden_size = 16
head_count = 2
sequence_length = 32
[grid]
modules_per_level = [2, 2]
[base]
steps = 12
learning_rate = 3e-3
warmup_steps = 2
batch_sequences = 4
[router]
prefix_tokens = 8
"""


def write_run(folder, toml=RUN_TOML):
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(0)
    domains = {"numbers": "12 34 56 78 90 11", "words": "the ship and sea a wind", "code": "if x:"}
    rows = []
    for number in range(240):
        domain = list(domains)[number % 3]
        words = generator.choices(domains[domain].split(" "), k=generator.randint(5, 50))
        rows.append(json.dumps({"text": " ".join(words) + f"\n{number}", "domain": domain}))
    corpus = folder / "train.jsonl"
    if not corpus.exists():
        corpus.write_text("\n".join(rows) + "\n")
    (folder / "RUN.toml").write_text(toml)
    return folder / "RUN.toml"


def quiet_display():
    return Display(Console(file=io.StringIO(), width=120))


def on_cpu(display=None, **options):
    return {"device": CPU, "display": display or quiet_display(), **options}


def prepare(run_toml, out, options, *, predecessor=None, changes=()):
    """Prepare the run of a RUN.toml, or its successor of another one."""
    trained = predecessor.plan.model if predecessor else None
    config = load_run_config(run_toml, trained, changes)
    return prepare_module.prepare(Job(config=config, out=out, before=predecessor, **options))
