"""Requests a second and time to the first token: the service under load, beside `dipaco-generate`
(which starts anew for each prompt) and transformers' `generate` on the same exported path.

    python benchmarks/model/serving.py [--json] [--clients 1,4,8] [--tokens 48] [--rounds 3]

A run of random parameters is made for it; all three compute the same greedy tokens of one path, on
the same threads. The service and transformers take turns: as many prompts as there are clients by
the one, then the same prompts by the other. Look at the ratios, of all turns: the least, the
quarters and the greatest. A disturbed turn is far off; the median is not.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from dipaco.inference import export_cli
from support.tiny_run import make_tiny_run, tiny_documents

SHAPE = {"block_count": 8, "hidden_size": 256, "head_count": 4, "feed_forward_size": 704}


@contextmanager
def serving(run: Path, threads: int) -> Iterator[int]:
    """Start `dipaco-serve` and yield its port."""
    command = [sys.executable, "-m", "dipaco.inference.serve_cli", "--state-dir", str(run)]
    options = ["--allow-genesis", "--port", "0", "--threads", str(threads)]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "serving at" in line:
                yield int(line.split("127.0.0.1:")[1].split()[0])
                break
        else:
            raise RuntimeError("dipaco-serve did not start")
    finally:
        process.terminate()
        process.wait(30)


def request(port: int, prompt: str, tokens: int) -> tuple[float, float]:
    """Stream one answer; return the seconds to its first piece and to its end."""
    body = {
        "model": "path-1", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
    }  # fmt: skip
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    first = 0.0
    for line in answer:
        if line.startswith(b"data: ") and not first:
            first = time.monotonic() - began
    connection.close()
    return first, time.monotonic() - began


def load(port: int, prompts: list[str], tokens: int, clients: int) -> dict[str, float]:
    """Ask all prompts by so many clients at the same time."""
    waiting = list(prompts)
    firsts: list[float] = []
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                prompt = waiting.pop()
            first, _ = request(port, prompt, tokens)
            with lock:
                firsts.append(first)

    threads = [threading.Thread(target=work) for _ in range(clients)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(firsts) == len(prompts)
    return _figures(firsts, time.monotonic() - began)


def _figures(firsts: list[float], wall_s: float) -> dict[str, float]:
    return {
        "requests_per_s": len(firsts) / wall_s,
        "first_token_median_s": statistics.median(firsts),
        "first_token_worst_s": max(firsts),
    }


def by_generate(run: Path, prompts: list[str], tokens: int, threads: int) -> dict[str, float]:
    """Start `dipaco-generate` for each prompt."""
    command = [sys.executable, "-m", "dipaco.inference.generate_cli", "--state-dir", str(run)]
    options = ["--allow-genesis", "--path", "1", "--temperature", "0", "--threads", str(threads)]
    firsts, start = [], time.monotonic()
    for prompt in prompts:
        began = time.monotonic()
        words = [*command, *options, "--max-tokens", str(tokens), prompt]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        process.stdout.read(len(prompt.encode()) + 1)
        firsts.append(time.monotonic() - began)
        process.stdout.read()
        assert process.wait(300) == 0
    return _figures(firsts, time.monotonic() - start)


class Transformers:
    """The exported path in transformers, in this process: one prompt after the other."""

    def __init__(self, exported: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(exported)

    def measured(self, prompts: list[str], tokens: int) -> dict[str, float]:
        """Continue all prompts; the first token is timed by answers of one token."""
        firsts = [self._generate(prompt, 1) for prompt in prompts]
        began = time.monotonic()
        for prompt in prompts:
            self._generate(prompt, tokens)
        return _figures(firsts, time.monotonic() - began)

    def _generate(self, prompt: str, count: int) -> float:
        began = time.monotonic()
        rows = self._tokenizer(prompt, return_tensors="pt")
        options: dict[str, Any] = {"max_new_tokens": count, "min_new_tokens": count}
        self._model.generate(**rows, **options, do_sample=False)
        return time.monotonic() - began


Turn = dict[str, dict[str, float]]
"""What the service, transformers and `dipaco-generate` needed for the same prompts."""


def spread(values: list[float]) -> dict[str, float]:
    """Return the least, the quarters and the greatest of some values."""
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    quarters = {"lower": lower, "median": middle, "upper": upper}
    return {"least": min(values), **quarters, "greatest": max(values)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--clients", default="1,4,8")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--starts", type=int, default=3, help="starts of dipaco-generate")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    prompts = [text[:40] for text in tiny_documents(4, -(-options.requests // 4), 5)]
    prompts = prompts[: options.requests]
    with tempfile.TemporaryDirectory() as name:
        run, exported = Path(name) / "run", Path(name) / "exported"
        make_tiny_run(run, sequence_length=128, **SHAPE)
        words = ["--state-dir", str(run), "--allow-genesis", "--path", "1", "--out", str(exported)]
        assert export_cli.main(words) == 0
        model = Transformers(exported)
        model.measured(prompts[:2], 2)
        turns: dict[int, list[Turn]] = {int(count): [] for count in options.clients.split(",")}
        for _ in range(options.rounds):
            generate = by_generate(run, prompts[: options.starts], options.tokens, options.threads)
            with serving(run, options.threads) as port:
                request(port, prompts[0], 2)
                for clients, found in turns.items():
                    for first in range(0, len(prompts), clients):
                        asked = prompts[first : first + clients]
                        served = load(port, asked, options.tokens, clients)
                        theirs = model.measured(asked, options.tokens)
                        found.append(
                            {"service": served, "transformers": theirs, "generate": generate}
                        )
    ratios = {
        f"service, {clients} clients": {
            other: {
                key: spread([turn["service"][key] / turn[other][key] for turn in found])
                for key in ("requests_per_s", "first_token_median_s")
            }
            for other in ("transformers", "generate")
        }
        for clients, found in turns.items()
    }
    report = {"turns": turns, "ratios": ratios, "tokens": options.tokens}
    print(json.dumps(report) if options.json else json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
