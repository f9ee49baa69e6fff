"""Tokens a second and time to the first token: the service under load, beside llama.cpp and
transformers on the same exported path: in fp32 on a CPU, in the number format of a GPU.

    pip install llama-cpp-python
    python benchmarks/model/serving_speed.py [--json] [--clients 1,8] [--tokens 48] [--threads 1]
    python benchmarks/model/serving_speed.py --device cuda --paper --beside transformers

A run of random parameters is made for it; all compute greedy tokens of one path, on as many
threads: one, as several wait for each other where other programs run. They take turns: as many
prompts as there are clients by the service, then the same prompts by the others, one after the
other, for about --seconds. Look at the ratios, of all turns: the least, the quarters and the
greatest. A disturbed turn is far off; the median is not.
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
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from support.runs.tiny_run import make_tiny_run, tiny_documents

from dipaco.inference import export_command
from dipaco.modules.device import number_format

SHAPE = {"block_count": 8, "hidden_size": 256, "head_count": 4, "feed_forward_size": 704}
# The blocks of examples/paper; the tokenizer stays a tiny one.
PAPER = {"block_count": 12, "hidden_size": 896, "head_count": 14, "feed_forward_size": 2560}
LEAST_TURNS = 2


@contextmanager
def serving(run: Path, threads: int, device: str, *words: str) -> Iterator[tuple[int, int]]:
    """Start `dipaco-serve`, told so by more words, and yield its port and its process."""
    command = [sys.executable, "-m", "dipaco.inference.service.cli", "--state-dir", str(run)]
    options = ["--allow-genesis", "--port", "0", "--threads", str(threads), "--device", device]
    process = subprocess.Popen([*command, *options, *words], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "serving at" in line:
                yield int(line.split("127.0.0.1:")[1].split()[0]), process.pid
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
    return _figures(firsts, tokens, time.monotonic() - began)


def _figures(firsts: list[float], tokens: int, wall_s: float) -> dict[str, float]:
    return {
        "tokens_per_s": len(firsts) * tokens / wall_s,
        "first_token_median_s": statistics.median(firsts),
    }


class Transformers:
    """The exported path in transformers, in this process: one prompt after the other."""

    def __init__(self, exported: Path, device: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        dtype = number_format(torch.device(device))
        model = AutoModelForCausalLM.from_pretrained(exported, dtype=dtype)
        self._model = model.eval().to(device)
        self._tokenizer = AutoTokenizer.from_pretrained(exported)

    def generate(self, prompt: str, count: int) -> float:
        """Continue a prompt; return the seconds to the first token."""
        rows = self._tokenizer(prompt, return_tensors="pt").to(self._model.device)
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
        began = time.monotonic()
        self._model.generate(**rows, **options, max_new_tokens=1, min_new_tokens=1)
        first_s = time.monotonic() - began
        self._model.generate(**rows, **options, max_new_tokens=count - 1, min_new_tokens=count - 1)
        return first_s


class LlamaCpp:
    """The exported path in llama.cpp, in this process: one prompt after the other."""

    def __init__(self, file: Path, threads: int) -> None:
        from llama_cpp import Llama

        options: dict[str, Any] = {"n_threads": threads, "n_threads_batch": threads}
        self._model = Llama(str(file), n_ctx=0, verbose=False, **options)

    def generate(self, prompt: str, count: int) -> float:
        """Continue a prompt; return the seconds to the first token."""
        tokens = self._model.tokenize(prompt.encode(), add_bos=True)
        began, first_s = time.monotonic(), 0.0
        self._model.reset()
        for number, _ in enumerate(self._model.generate(tokens, temp=0.0), 1):
            first_s = first_s or time.monotonic() - began
            if number == count:
                break
        return first_s


def alone(model: Transformers | LlamaCpp, prompts: list[str], tokens: int) -> dict[str, float]:
    """Continue all prompts by another program."""
    began = time.monotonic()
    firsts = [model.generate(prompt, tokens) for prompt in prompts]
    return _figures(firsts, tokens, time.monotonic() - began)


Turn = dict[str, dict[str, float]]
"""What each program needed for the same prompts."""


def spread(values: list[float]) -> dict[str, float]:
    """Return the least, the quarters and the greatest of some values."""
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    quarters = {"lower": lower, "median": middle, "upper": upper}
    return {"least": min(values), **quarters, "greatest": max(values)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--clients", default="1,8")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--beside", default="llama.cpp,transformers")
    parser.add_argument("--device", default="cpu", help="of the service and transformers (cpu)")
    parser.add_argument("--paper", action="store_true", help="a path of examples/paper's blocks")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    prompts = [text[:40] for text in tiny_documents(4, -(-options.requests // 4), 5)]
    prompts = prompts[: options.requests]
    with tempfile.TemporaryDirectory() as name:
        run, exported, file = (Path(name) / part for part in ("run", "exported", "it.gguf"))
        make_tiny_run(run, sequence_length=128, **(PAPER if options.paper else SHAPE))
        words = ["--state-dir", str(run), "--allow-genesis", "--path", "1", "--out"]
        with redirect_stdout(sys.stderr):
            assert export_command.main([*words, str(exported)]) == 0
            if "llama.cpp" in options.beside:
                assert export_command.main([*words, str(file), "--format", "gguf"]) == 0
        others: dict[str, Transformers | LlamaCpp] = {}
        if "transformers" in options.beside:
            others["transformers"] = Transformers(exported, options.device)
        if "llama.cpp" in options.beside:
            others["llama.cpp"] = LlamaCpp(file, options.threads)
        for model in others.values():
            alone(model, prompts[:2], 4)
        turns: dict[int, list[Turn]] = {int(count): [] for count in options.clients.split(",")}
        with serving(run, options.threads, options.device) as (port, _):
            load(port, prompts[:8], 4, 8)
            end_s = time.monotonic() + options.seconds
            for clients, found in list(turns.items()) * options.rounds:
                for first in range(0, len(prompts), clients):
                    if time.monotonic() > end_s and len(found) >= LEAST_TURNS:
                        break
                    asked = prompts[first : first + clients]
                    turn = {n: alone(m, asked, options.tokens) for n, m in others.items()}
                    found.append({"service": load(port, asked, options.tokens, clients), **turn})
    ratios = {
        f"service / {other}, {clients} clients": {
            key: spread([turn["service"][key] / turn[other][key] for turn in found])
            for key in ("tokens_per_s", "first_token_median_s")
        }
        for clients, found in turns.items()
        for other in others
    }
    report = {"turns": turns, "ratios": ratios, "tokens": options.tokens}
    print(json.dumps(report) if options.json else json.dumps(ratios, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
