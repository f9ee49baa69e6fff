"""lm-evaluation-harness three ways: our model, `hf` on an exported path, and
`local-completions` on the service. Log-likelihoods and figures of one task are compared.

    pip install '.[eval,serve]' transformers
    python benchmarks/model/harness_agreement.py [--json]

A tiny run is trained for it, and the task is made of its held-out documents: nothing is fetched.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("OPENAI_API_KEY", "none")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from dipaco.dht.http_server import listen, server_of
from dipaco.inference import export_cli, harness
from dipaco.inference.service.app import Service
from dipaco.inference.service.engine import Engine, EngineLimits
from dipaco.inference.sources import DiskSource
from support.service import trained_run
from support.tiny_run import tiny_documents

TASK = """\
task: made_up_languages
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
    higher_is_better: true
  - metric: acc_norm
    higher_is_better: true
"""


def write_task(folder: Path) -> None:
    """Write a task: which of four words of the languages goes on with a text?"""
    texts = tiny_documents(4, 6, 11)
    lines = []
    for number, text in enumerate(texts):
        words = text.split()
        choices = [" " + texts[(number + 6 * other) % 24].split()[5] for other in range(4)]
        label = number % 4
        choices[label] = " " + words[3]
        lines.append({"text": " ".join(words[:3]), "choices": choices, "label": label})
    file = folder / "made_up.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "made_up.yaml").write_text(TASK.format(file=file))


def evaluated(model: Any, folder: Path, arguments: str | None = None) -> tuple[Any, list[float]]:
    """Return the figures of a model and the log-likelihoods of all choices."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found = simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=["made_up_languages"],
        task_manager=TaskManager(include_path=str(folder)),
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = sorted(found["samples"]["made_up_languages"], key=lambda one: one["doc_id"])
    scores = [float(answer[0][0]) for sample in samples for answer in sample["resps"]]
    values = found["results"]["made_up_languages"]
    return {name: values[f"{name},none"] for name in ("acc", "acc_norm")}, scores


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--path", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tasks = folder / "tasks"
        tasks.mkdir()
        write_task(tasks)
        out = trained_run(folder)
        exported = folder / "exported"
        path = str(options.path)
        arguments = ["--state-dir", str(out), "--path", path, "--out", str(exported)]
        assert export_cli.main(arguments) == 0
        ours = harness.HarnessModel(DiskSource(out), torch.device("cpu"))
        dipaco = harness.register()
        found = {
            "dipaco": evaluated(dipaco(model=ours, path=path), tasks),
            "hf": evaluated(
                "hf", tasks, f"pretrained={exported},add_bos_token=True,device=cpu,dtype=float32"
            ),
        }
        limits = EngineLimits(memory_bytes=10**9, slots=4, queue=400, refresh_s=0)
        engine = Engine(DiskSource(out), torch.device("cpu"), limits)
        engine.start()
        listening = listen("127.0.0.1", 0)
        server = server_of(Service(engine).application())
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1/completions"
            found["local-completions"] = evaluated(
                "local-completions",
                tasks,
                f"model=path-{path},base_url={url},tokenizer={exported},"
                "tokenizer_backend=huggingface,add_bos_token=True,num_concurrent=1,max_retries=1",
            )
        finally:
            server.should_exit = True
            thread.join(30)
            engine.close()
            listening.close()
        words = ["--state-dir", str(out), "--tasks", "made_up_languages", "--json"]
        assert harness.main([*words, "--include-path", str(tasks)]) == 0
    figures = {name: values for name, (values, _) in found.items()}
    reference = found["dipaco"][1]
    furthest = {
        name: max(abs(a - b) for a, b in zip(scores, reference, strict=True))
        for name, (_, scores) in found.items()
    }
    report = {"figures": figures, "furthest_loglikelihood": furthest, "choices": len(reference)}
    print(json.dumps(report) if options.json else json.dumps(report, indent=2))
    return 0 if max(furthest.values()) < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
