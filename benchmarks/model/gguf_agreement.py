"""Ids and greedy text of an exported path in llama.cpp itself, beside ours.

    pip install xllamacpp                      # llama.cpp as a wheel, about 100 MB
    python benchmarks/model/gguf_agreement.py STATE_DIR --path 3 --dtype q8_0

For each prompt: are the ids those of the run, and does llama.cpp go on with the same tokens?
With q8_0 the parameters differ, so a token may; ids may not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from dipaco.inference.export import DTYPES, Exporter
from dipaco.inference.export_gguf import GGUF_TYPES
from dipaco.inference.generate import generate_tokens, prompt_tokens
from dipaco.inference.sampling import Sampling
from dipaco.inference.sources import DiskSource, assemble_path
from dipaco.routing.tokenizer import is_json
from dipaco.routing.tokenizer_json import JsonPieces
from parts.common import build_parser

PROMPTS = (
    "The city lies",
    "  two  spaces\n\n\tand a tab",
    "def f(x):\n    return {'a': [1, 23, 456]}",
    "don't WE'LL 1789",
    "naïve café",
)


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("state_dir", type=Path, help="a run on disk, as for dipaco-export")
    parser.add_argument("--path", type=int, default=0)
    parser.add_argument("--dtype", choices=sorted(GGUF_TYPES), default="float32")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate for each prompt")
    parser.add_argument("--prompt", nargs="+", default=PROMPTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(arguments, Path(folder))
    same_ids = sum(row["ids"] for row in rows)
    same_tokens = sum(row["tokens"] for row in rows)
    if arguments.json:
        print(json.dumps({"prompts": rows, "same_ids": same_ids, "same_tokens": same_tokens}))
        return
    for row in rows:
        print(f"ids {row['ids']}  greedy tokens {row['tokens']}  {row['prompt']!r} {row['text']!r}")
    print(f"of {len(rows)} prompts: {same_ids} with the same ids, {same_tokens} with the same text")


def compare(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Export the path, open it in llama.cpp, and return what is the same for each prompt."""
    import xllamacpp

    source = DiskSource(arguments.state_dir)
    stored = GGUF_TYPES[arguments.dtype]
    dtype = DTYPES["float16" if arguments.dtype == "q8_0" else arguments.dtype]
    Exporter(source, dtype, gguf=stored).write_path(arguments.path, folder / "path")
    model = assemble_path(source, arguments.path)
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(next((folder / "path").glob("*.gguf")))
    parameters.n_ctx, parameters.warmup, parameters.verbosity = 512, False, 0
    server = xllamacpp.Server(parameters)
    data = source.blob(source.plan.blobs.tokenizer)
    rows_of_file = range(source.plan.model.vocabulary_size)
    order = JsonPieces(data, "it").file_order(len(rows_of_file)) if is_json(data) else rows_of_file
    tokenizer, found = source.tokenizer(), []
    for prompt in arguments.prompt:
        ids = prompt_tokens(tokenizer, prompt)
        # llama.cpp goes no further than the context that the model was trained with.
        count = max(1, min(arguments.tokens, source.plan.model.sequence_length - len(ids) - 1))
        sampling = Sampling(max_tokens=count, temperature=0.0)
        with torch.no_grad():
            ours = [int(order[t]) for t in generate_tokens(model, ids, sampling)]
        numbers = [int(order[token]) for token in ids]
        asked = {"content": prompt, "add_special": True, "parse_special": False}
        theirs = post(server.listening_address + "/tokenize", asked)["tokens"]
        request = {"prompt": numbers, "n_predict": count, "temperature": 0.0}
        answer = post(
            server.listening_address + "/completion",
            {**request, "return_tokens": True, "cache_prompt": False},
        )
        tokens = answer["tokens"][: len(ours)]
        row = {"prompt": prompt, "ids": theirs == numbers, "tokens": tokens == ours}
        found.append({**row, "text": answer["content"]})
    return found


def post(address: str, body: dict[str, Any]) -> dict[str, Any]:
    """Ask the server in this process."""
    request = urllib.request.Request(
        address, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return dict(json.load(answer))


if __name__ == "__main__":
    main()
