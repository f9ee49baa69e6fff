"""Which public models can be the base of a run, found with a small random checkpoint of each.

python tests/project/base_families.py

prints the figures of docs/export.md. Weights and tokenizers are made here, of the same parts as those
of the models; `transformers` and PEFT are what each is compared with.
"""

from __future__ import annotations

import argparse
import math
import operator
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import peft
import torch
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))

from dipaco.base.errors import DipacoError  # noqa: E402
from dipaco.base.files import sha256_of_file  # noqa: E402
from dipaco.bootstrap.import_base import ImportedBase  # noqa: E402
from dipaco.inference.export.adapter_peft import write_peft  # noqa: E402
from dipaco.inference.export.path_gguf import check_gguf  # noqa: E402
from dipaco.modules.adapters import initial_adapters  # noqa: E402
from dipaco.modules.foreign_model import new_path  # noqa: E402
from dipaco.modules.frozen_file import open_base, write_base  # noqa: E402
from dipaco.modules.transformer import PathModel  # noqa: E402
from dipaco.protocol.config import AdaptersConfig, ModelFields  # noqa: E402
from dipaco.routing.tokens.kinds import read_tokenizer  # noqa: E402
from support.runs.foreign_base import FOREIGN, HARD_TEXTS, SPACED, make_foreign_base  # noqa: E402

FAMILIES = ("llama", *SPACED, "smollm2", "qwen2", "qwen3", *sorted(FOREIGN))
ADAPTERS = AdaptersConfig(rank=8, alpha=8, base_format="float32")
# Wide enough that a step is more than the calls that it consists of.
SHAPE = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 16, "num_hidden_layers": 4}
STEPS = 20
COLUMNS = (
    "family",
    "logits differ by",
    "same ids",
    "adapter in PEFT differs by",
    "GGUF",
    "CPU time of a step / PEFT's",
)
Step = tuple[torch.nn.Module, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]


def adapted_path(folder: Path, imported: ImportedBase) -> PathModel:
    """Return a path with adapters that matter, over the base in `folder`."""
    model = imported.agreed_model(ModelFields(), "it").model_copy(update={"adapters": ADAPTERS})
    file = folder / "frozen"
    write_base(folder, ADAPTERS.base_format, file)
    path = new_path(model, open_base(file, sha256_of_file(file), model))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, value in initial_adapters(model, 0).items():
            path.get_parameter(name).copy_(value + 0.02 * torch.randn_like(value))
    return path


def step_ratio(ours: Step, theirs: Step) -> float:
    """Return how long a forward and a backward pass of ours takes beside theirs: the least CPU
    times of some, a step of each in turn."""
    least = [math.inf, math.inf]
    for _ in range(STEPS):
        for number, (model, tokens, logits) in enumerate((ours, theirs)):
            started_s = time.process_time()
            torch.nn.functional.cross_entropy(logits(tokens)[0, :-1], tokens[0, 1:]).backward()
            least[number] = min(least[number], time.process_time() - started_s)
            model.zero_grad()
    return least[0] / least[1]


def row_of(family: str, folder: Path) -> list[str]:
    """Return the cells of a family."""
    theirs = make_foreign_base(folder, family, **SHAPE).eval()
    imported = ImportedBase(folder)
    path = adapted_path(folder, imported)
    tokenizer, reference = read_tokenizer(imported.tokenizer), AutoTokenizer.from_pretrained(folder)
    # What a vocabulary lacks (SmolLM2's some control characters) is left out of texts.
    texts = [tokenizer.writable(text) for text in HARD_TEXTS]
    plain = {"add_special_tokens": False, "split_special_tokens": True}
    ids = [reference.encode(text, **plain) for text in texts]
    ours = [tokenizer.encode(text) for text in texts]
    same = sum(map(operator.eq, ours, ids))
    rows = theirs.config.vocab_size
    tokens = torch.randint(4, rows, (1, 60), generator=torch.Generator().manual_seed(0))

    def difference(other: torch.nn.Module, model: PathModel) -> float:
        with torch.no_grad():
            return float((model(tokens)[..., :rows] - other(tokens).logits).abs().max())

    base = new_path(path.config.without_adapters, path.base)
    cells = [f"{difference(theirs, base):.0e}", f"{same} of {len(ids)}"]
    tensors = {name: value.detach() for name, value in path.named_parameters()}
    (folder / "adapter").mkdir()
    alpha = ADAPTERS.scale * ADAPTERS.rank
    write_peft(tensors, alpha, str(folder), folder / "adapter", torch.float32)
    adapted = peft.PeftModel.from_pretrained(theirs, folder / "adapter", is_trainable=True)
    cells.append(f"{difference(adapted, path):.0e}")
    try:
        check_gguf(path.config, imported.tokenizer)
        cells.append("yes")
    except DipacoError as error:
        cells.append("llama.cpp's scripts" if "scripts" in str(error) else "no")
    by_peft: Step = adapted, tokens, lambda given: adapted(given).logits
    return [*cells, f"{step_ratio((path, tokens, path), by_peft):.2f}"]


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    print(f"| {' | '.join(COLUMNS)} |")
    print("|---|---:|---:|---:|---|---:|")
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            print(f"| {family} | {' | '.join(row_of(family, Path(folder) / 'base'))} |", flush=True)


if __name__ == "__main__":
    main()
