"""An export through transformers against the same path through dipaco: logits and perplexity.

    python benchmarks/model/export_agreement.py [--json]
    python benchmarks/model/export_agreement.py --state-dir DIR --data FILE --dtype float32

Without --state-dir the run of examples/tiny is prepared and simulated for a few rounds first, and
its own held-out text is scored. Documents are routed, every path is exported with `dipaco-export`,
and both score the same windows; transformers reads the text with the exported tokenizer, and its
ids must be ours. Needs `transformers` (`pip install '.[dev]'`).
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from dipaco.inference.sources import DiskSource, StateSource, assemble_path
from dipaco.modules.transformer import PathModel, target_mask, token_losses
from dipaco.routing.corpus import CorpusConfig, iterate_documents
from dipaco.routing.token_files import scoring_windows
from parts.common import HERE, Report, build_parser, scratch_folder

BIN = Path(sys.executable).parent
EXAMPLE = HERE.parent / "examples" / "tiny"
BATCH_SEQUENCES = 8


def run(program: str, *arguments: object) -> None:
    """Run one of our commands; what it prints is for people."""
    command = [str(BIN / program), *map(str, arguments)]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        raise SystemExit(f"{program} ended with {done.returncode}")


def example_run(folder: Path, rounds: int, steps: int) -> Path:
    """Prepare and simulate the run of examples/tiny and return its folder."""
    run("dipaco-bootstrap", "prepare", EXAMPLE / "RUN.toml", "--out", folder / "run")
    simulated = folder / "simulated"
    run(
        "dipaco-simulate", folder / "run", "--out", simulated, "--rounds", rounds,
        "--steps-per-round", steps, "--json",
    )  # fmt: skip
    return simulated


def routed_texts(source: StateSource, data: str) -> dict[int, list[str]]:
    """Return the texts of the documents by the path that each is routed to."""
    router = source.document_router(torch.device("cpu"))
    texts = [document.text for document in iterate_documents(CorpusConfig(train=data), "train")]
    by_path: dict[int, list[str]] = defaultdict(list)
    for text, path in zip(texts, router.route_texts(texts), strict=True):
        by_path[int(path)].append(text)
    return by_path


def windows_of(source: StateSource, texts: list[str], folder: Path) -> tuple[torch.Tensor, int]:
    """Return the windows of the texts [N, T], read by both tokenizers, and how many differ."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    ours = source.document_router(torch.device("cpu")).tokenizer
    length, prefix = source.plan.model.sequence_length, source.plan.routing.prefix_tokens
    rows, differ = [np.empty((0, length), dtype=np.int64)], 0
    for text in texts:
        ids = [*theirs(text).input_ids, theirs.eos_token_id]
        differ += ids != ours.document_tokens(text)
        rows.append(scoring_windows(ids, length, prefix))
    return torch.from_numpy(np.concatenate(rows)), differ


@torch.no_grad()
def compare(ours: PathModel, theirs: Any, windows: torch.Tensor, prefix: int) -> dict[str, float]:
    """Return both summed losses, the tokens scored, and the greatest difference of a logit."""
    found = {"nll": 0.0, "nll_transformers": 0.0, "tokens": 0, "difference": 0.0, "logit": 0.0}
    for batch in windows.split(BATCH_SEQUENCES):
        mask = target_mask(batch, prefix)
        one, other = ours(batch), theirs(batch).logits.float()
        found["nll"] += float((token_losses(one, batch).double() * mask).sum())
        found["nll_transformers"] += float((token_losses(other, batch).double() * mask).sum())
        found["tokens"] += int(mask.sum())
        found["difference"] = max(found["difference"], float((one - other).abs().max()))
        found["logit"] = max(found["logit"], float(one.abs().max()))
    return found


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = build_parser(__doc__)
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="a run on disk")
    parser.add_argument(
        "--data",
        default=str(EXAMPLE / "data" / "validation.jsonl.gz"),
        help="held-out documents (default: those of examples/tiny)",
    )
    parser.add_argument("--dtype", default="float32", help="of the export (default float32)")
    parser.add_argument("--rounds", type=int, default=4, help="of the example run (default 4)")
    parser.add_argument("--steps", type=int, default=20, help="a round of it (default 20)")
    return parser.parse_args()


def main() -> None:
    """Export, score, report."""
    options = parse()
    from transformers import AutoModelForCausalLM

    report = Report(
        "an export through transformers",
        ("path", "tokens", "ours", "transformers", "logit difference", "greatest logit"),
    )
    totals: dict[str, float] = defaultdict(float)
    differ = documents = 0
    with scratch_folder() as scratch:
        folder = options.state_dir or example_run(scratch, options.rounds, options.steps)
        with DiskSource(folder) as source:
            prefix = source.plan.routing.prefix_tokens
            for path, texts in sorted(routed_texts(source, options.data).items()):
                out = folder / f"path-{path}"
                run("dipaco-export", "--state-dir", folder, "--path", path, "--out", out,
                    "--dtype", options.dtype)  # fmt: skip
                windows, differing = windows_of(source, texts, out)
                model = AutoModelForCausalLM.from_pretrained(out).float().eval()
                found = compare(assemble_path(source, path), model, windows, prefix)
                differ, documents = differ + differing, documents + len(texts)
                for key in ("nll", "nll_transformers", "tokens"):
                    totals[key] += found[key]
                for key in ("difference", "logit"):
                    totals[key] = max(totals[key], found[key])
                add_row(report, str(path), found)
    add_row(report, "all", totals)
    report.figures = {
        "dtype": options.dtype,
        "documents": documents,
        "documents_with_other_ids": differ,
        "tokens": int(totals["tokens"]),
        "perplexity": perplexity(totals["nll"], totals["tokens"]),
        "perplexity_transformers": perplexity(totals["nll_transformers"], totals["tokens"]),
        "greatest_logit_difference": totals["difference"],
        "greatest_logit": totals["logit"],
    }
    report.notes.append(f"{documents} documents, of {differ} the two tokenizers' ids differ")
    report.print(options.json)


def add_row(report: Report, name: str, found: dict[str, float]) -> None:
    """Add a row of the table, with as many digits as the comparison needs."""
    report.row(
        name,
        int(found["tokens"]),
        f"{perplexity(found['nll'], found['tokens']):.6f}",
        f"{perplexity(found['nll_transformers'], found['tokens']):.6f}",
        f"{found['difference']:.2e}",
        found["logit"],
    )


def perplexity(nll: float, tokens: float) -> float:
    """Return the perplexity; not a number without tokens."""
    return math.exp(nll / tokens) if tokens else float("nan")


if __name__ == "__main__":
    main()
