"""One client and eight ask for text: `dipaco-serve` beside llama.cpp's own server, by HTTP."""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from model.serving_speed import PAPER, SHAPE, serving
from parts.common import Report
from support.runs.tiny_run import make_tiny_run, tiny_documents

from dipaco.inference import export_command
from rivals.packages import installed
from rivals.turns import Figures, Pair, Turns, Worker, add_speed, told

CLIENTS = (1, 8)
TOKENS, LENGTH, PATH = 48, 128, 1
REQUEST_LIMIT_S = 300.0
SIZES = {"small": SHAPE, "large": PAPER}
ENGINES = {"torch": ("float32",), "llama.cpp": ("float32", "q8_0")}
"""What computes the paths of `dipaco-serve`, and its formats."""
SLOTS = 8
"""Answers at a time: what `dipaco-serve` has, and what llama.cpp is told."""


class Server(NamedTuple):
    """Where one listens, and its process."""

    port: int
    pid: int

    def cpu_s(self) -> float:
        """Return the processor seconds that it has taken, all threads together."""
        tasks = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def compare(report: Report, engine: str, size: str, rivals: Path, turns: int) -> None:
    """Add tokens a second for each number of clients and each format that an engine has."""
    formats, packages = ENGINES[engine], installed("llama.cpp", rivals)
    pool = tiny_documents(4, SLOTS + len(formats) * turns * sum(CLIENTS) // 4, 5)
    prompts = iter([text[:40] for text in pool])
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        make_tiny_run(run, sequence_length=LENGTH, **SIZES[size])
        for each in formats:
            words = ("--engine", engine, "--dtype", each)
            with (
                serving(run, 1, "cpu", *words) as (port, pid),
                llama_cpp(exported(run, each), packages) as theirs,
            ):
                ours = Server(port, pid)
                for server in (ours, theirs):
                    load(server, [next(prompts) for _ in range(SLOTS)])
                for clients in CLIENTS:
                    pairs: list[Pair] = []
                    for number in range(turns):
                        # Nobody has read a prompt before: llama.cpp keeps those that it knows.
                        asked = [next(prompts) for _ in range(clients)]
                        if number % 2:
                            after = load(theirs, asked)
                            pairs.append((load(ours, asked), after))
                        else:
                            pairs.append((load(ours, asked), load(theirs, asked)))
                    title = f"serving {size} by {engine}, {clients} clients, {each}"
                    add_speed(report, title, pairs, "tokens")
                    report.figures[title] = pairs


def profile(report: Report, rivals: Path, turns: int) -> None:
    """Add where the time of one client goes, processor microseconds a token."""
    packages = installed("llama.cpp", rivals)
    prompts = iter([text[:40] for text in tiny_documents(4, 1 + turns, 6)])
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        run = Path(name) / "run"
        make_tiny_run(run, sequence_length=LENGTH, **SHAPE)
        theirs = stack.enter_context(llama_cpp(exported(run, "float32"), packages))
        words = ("--engine", "torch")
        ours = Server(*stack.enter_context(serving(run, 1, "cpu", *words)))
        worker = Worker("rivals.decode_profile", str(run), str(PATH))
        stack.enter_context(worker)
        for server in (ours, theirs):
            load(server, [next(prompts)])
        plain: list[Figures] = []
        for _ in range(turns):
            by_http = {
                "by HTTP": 1 / load(ours, [next(prompts)])["tokens_per_cpu_s"],
                "llama.cpp by HTTP": 1 / load(theirs, [next(prompts)])["tokens_per_cpu_s"],
            }
            plain.append({**worker.turn(), **by_http})
        timed = [worker.turn("timed") for _ in range(turns)]
    for several in (plain, timed):
        for part in several[0]:
            found[part] = [1e6 * one[part] for one in several]
            report.row("one client", part, "", told(found[part]), "")
    report.figures["one client, microseconds a token"] = found


def exported(run: Path, number_format: str) -> Path:
    """Write a path as llama.cpp's file, and return it."""
    file = run.parent / f"{number_format}.gguf"
    words = ["--state-dir", str(run), "--allow-genesis", "--path", str(PATH), "--format", "gguf"]
    with redirect_stdout(sys.stderr):
        code = export_command.main([*words, "--dtype", number_format, "--out", str(file)])
    if code:
        raise RuntimeError(f"dipaco-export ended with {code}")
    return file


@contextmanager
def llama_cpp(file: Path, packages: Path) -> Iterator[Server]:
    """Start llama.cpp's server with one thread."""
    with Worker("rivals.serving", str(file), packages=[packages]) as worker:
        yield Server(worker.turn()["port"], worker.pid)


def load(server: Server, prompts: list[str]) -> Figures:
    """Ask all prompts at the same time, by a client each."""
    counts: list[int] = []
    threads = [
        threading.Thread(target=lambda text: counts.append(ask(server.port, text)), args=(prompt,))
        for prompt in prompts
    ]
    began, cpu_began_s = time.perf_counter(), server.cpu_s()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, cpu_s = time.perf_counter() - began, server.cpu_s() - cpu_began_s
    if counts != [TOKENS] * len(prompts):
        raise RuntimeError(f"{TOKENS} tokens were asked for {len(prompts)} times, {counts} came")
    return {"tokens_per_s": sum(counts) / seconds, "tokens_per_cpu_s": sum(counts) / cpu_s}


def ask(port: int, prompt: str) -> int:
    """Have a prompt continued, greedily and streamed; return how many tokens came."""
    body: dict[str, Any] = {
        "model": f"path-{PATH}", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_LIMIT_S)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"port {port} answered {answer.status}: {answer.read()[:300]!r}")
    count = 0
    for line in answer:
        if line.startswith(b"data: {"):
            usage = json.loads(line[6:]).get("usage")
            count = usage["completion_tokens"] if usage else count
    connection.close()
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", help="a GGUF file, which llama.cpp serves until its input ends")
    file = parser.parse_args().file
    turns = Turns()
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = file
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.n_parallel, parameters.n_ctx = SLOTS, SLOTS * LENGTH
    parameters.port, parameters.verbosity = 0, -1
    server = xllamacpp.Server(parameters)
    turns.next()
    port = int(server.listening_address.rsplit(":", 1)[1])
    turns.answer({"port": port})
    turns.next()


if __name__ == "__main__":
    main()
