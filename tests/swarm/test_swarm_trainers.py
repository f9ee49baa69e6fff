"""One command, three trainers: they average with each other, and have one copy of everything.

Their run begins with a checkpoint of another family, and what they made of it goes back to that.
"""

import json
import shutil
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from dipaco.bootstrap.import_base import ImportedBase
from dipaco.inference import export_command
from dipaco.inference.sources import DiskSource, SourceSettings, assemble_path
from dipaco.protocol.identity import load_or_create_identity
from dipaco.routing.run_folder import RunFolder
from support.runs.foreign_base import make_foreign_base
from support.runs.tiny_run import make_tiny_run
from support.swarms.swarm import LIMIT_S, Swarm

pytestmark = pytest.mark.slow

ROUNDS = 3
TRAINERS = 3


@pytest.mark.timeout(900)
def test_three_devices_of_one_machine(tmp_path):
    theirs = make_foreign_base(tmp_path / "base", "qwen3")
    run = make_tiny_run(
        tmp_path / "run",
        imported=ImportedBase(tmp_path / "base"),
        modules_per_level=(1, TRAINERS),
        inner_steps=2,
        duration_s=LIMIT_S,
        start_s=time.time(),
        rounds={"validation_sequences": 4},
    )
    with Swarm(tmp_path, run) as swarm:
        node = swarm.start_peer(
            swarm.start_bootstrap(), "--devices", *["cpu"] * TRAINERS, "--max-rounds", str(ROUNDS),
            name="node",
        )  # fmt: skip
        assert node.popen.wait(LIMIT_S) == 0, swarm.outputs()
        output = node.output.read_text()
        assert all(f"[{number} cpu] " in output for number in range(TRAINERS))
        taken = [
            {
                (event["module"], event["round"]): event["digest"]
                for line in (tmp_path / f"node-{number}.jsonl").read_text().splitlines()
                if (event := json.loads(line))["event"] == "outer_step"
            }
            for number in range(TRAINERS)
        ]
        shared = set.intersection(*(set(one) for one in taken))
        assert shared == {("L0.E0", round_index) for round_index in range(ROUNDS)}
        assert all(len({one[which] for one in taken}) == 1 for which in shared)
    cache = tmp_path / "node-cache"
    folder = cache / run.plan().run_id
    assert not list(cache.glob("trainer-*/*/blobs")), "what they have lies there once"
    keys = [cache / f"trainer-{number}" / "identity.key" for number in range(TRAINERS)]
    digest = taken[0]["L0.E0", ROUNDS - 1]
    for key in keys:
        identity = load_or_create_identity(key)
        identity.release()
        assert RunFolder(folder, identity.peer_id).states.heads("L0.E0")[0].digest == digest
    check_exported(folder, theirs.state_dict(), tmp_path)


@torch.no_grad()
def check_exported(cache, began_with, folder):
    """Check that a trainer's path is exported as the family that the run began with, trained."""
    # A peer fetches what it keeps for others one after the other, and this one left early.
    shutil.copytree(folder / "run" / "blobs", cache / "blobs", dirs_exist_ok=True)
    source = DiskSource(cache, SourceSettings())
    path = next(path for path in range(TRAINERS) if not source.missing_modules(path))
    out = folder / "exported"
    arguments = ["--state-dir", str(cache), "--path", str(path), "--out", str(out)]
    assert export_command.main(arguments) == 0
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    assert isinstance(model, Qwen3ForCausalLM)
    norm = "model.layers.0.self_attn.q_norm.weight"
    assert not torch.equal(model.state_dict()[norm], began_with[norm])
    text = "pehe vape, 日本 \U0001f642"
    ids = AutoTokenizer.from_pretrained(out)(text).input_ids
    assert ids == AutoTokenizer.from_pretrained(folder / "base")(text).input_ids
    tokens = torch.tensor([ids[: source.plan.model.sequence_length]])
    found = model(tokens).logits
    expected = assemble_path(source, path)(tokens)[..., : found.shape[-1]]
    assert float((found - expected).abs().max()) < 1e-4
