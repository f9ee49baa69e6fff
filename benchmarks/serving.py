"""One client and eight ask for text: `dipaco-serve` beside llama.cpp's own server, over one file.

    python benchmarks/serving.py [--sizes small,large] [--dtypes float32,q8_0] [--turns 6]

A run of random parameters is made. A path of it is served by `dipaco-serve`, and the GGUF file that
`dipaco-export` writes of it by llama.cpp alone, with as many threads (one, as several wait for each
other where other programs run) and its usual settings. They take turns on the same prompts, which
neither has read before; all texts are greedy and streamed. A ratio is ours to theirs, turn by turn:
the median, with the quarters.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from parts.common import Report, build_parser
from support.runs.tiny_run import make_tiny_run, tiny_documents

from dipaco.inference import export_command

CLIENTS = (1, 8)
TOKENS, LENGTH, PATH = 48, 128, 1
LIMIT_S = 300.0
SIZES: dict[str, dict[str, Any]] = {
    "small": {"block_count": 8, "hidden_size": 256, "head_count": 4, "feed_forward_size": 704},
    # The blocks of examples/paper; the tokenizer stays a tiny one.
    "large": {"block_count": 12, "hidden_size": 896, "head_count": 14, "feed_forward_size": 2560},
}
Turn = dict[str, float]


def compare(report: Report, size: str, dtype: str, turns: int) -> None:
    """Add the speed of both for each number of clients."""
    texts = tiny_documents(4, 16 + turns * sum(CLIENTS) // 4, 5)
    prompts = iter([text[:40] for text in texts])
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        make_tiny_run(run, sequence_length=LENGTH, **SIZES[size])
        file = exported(run, dtype)
        with dipaco_serve(run, dtype) as ours, llama_cpp(file) as theirs:
            for port in (ours, theirs):
                load(port, [next(prompts) for _ in range(max(CLIENTS))])
            for clients in CLIENTS:
                pairs: list[tuple[Turn, Turn]] = []
                for number in range(turns):
                    asked = [next(prompts) for _ in range(clients)]
                    if number % 2:
                        after = load(theirs, asked)
                        pairs.append((load(ours, asked), after))
                    else:
                        pairs.append((load(ours, asked), load(theirs, asked)))
                add(report, f"{size}, {dtype}, {clients} at once", pairs)


def add(report: Report, of: str, pairs: list[tuple[Turn, Turn]]) -> None:
    """Add what both did, and ours to theirs."""
    for figure in ("tokens a second", "ms to the first token"):
        ratios = [ours[figure] / theirs[figure] for ours, theirs in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        row = {"of": of, "figure": f"{figure}, ours to theirs", "value": round(middle, 3)}
        report.rows.append({**row, "low": round(low, 3), "high": round(high, 3)})
        for side, who in enumerate(("dipaco-serve", "llama.cpp alone")):
            median = statistics.median(pair[side][figure] for pair in pairs)
            report.add(of, {f"{figure}, {who}": round(median, 1)})


def exported(run: Path, dtype: str) -> Path:
    """Write a path as llama.cpp's file, and return it."""
    file = run.parent / "path.gguf"
    words = ["--state-dir", str(run), "--allow-genesis", "--path", str(PATH), "--format", "gguf"]
    with redirect_stdout(sys.stderr):
        code = export_command.main([*words, "--dtype", dtype, "--out", str(file)])
    if code:
        raise RuntimeError(f"dipaco-export ended with {code}")
    return file


@contextmanager
def dipaco_serve(run: Path, dtype: str) -> Iterator[int]:
    """Start `dipaco-serve`, and yield its port."""
    words = ["--state-dir", str(run), "--allow-genesis", "--port", "0", "--threads", "1"]
    command = ["-m", "dipaco.inference.serve_command", *words, "--dtype", dtype]
    with started(command, "serving at http://127.0.0.1:") as port:
        yield port


@contextmanager
def llama_cpp(file: Path) -> Iterator[int]:
    """Start llama.cpp alone, and yield its port."""
    with started([__file__, "--alone", str(file)], "alone at http://127.0.0.1:") as port:
        yield port


@contextmanager
def started(words: list[str], says: str) -> Iterator[int]:
    """Start a program with this Python, and yield the number behind what it says."""
    process = subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        begun = next((line for line in lines if says in line), None)
        if begun is None:
            raise RuntimeError(f"{' '.join(words)} did not start")
        yield int(begun.split(says)[1].split()[0])
    finally:
        process.terminate()
        process.wait(30)


def serve_alone(file: str) -> None:
    """Be llama.cpp's server, until this process is ended."""
    import xllamacpp

    given = xllamacpp.CommonParams()
    given.model.path = file
    given.cpuparams.n_threads = given.cpuparams_batch.n_threads = 1
    given.n_parallel, given.n_ctx = max(CLIENTS), max(CLIENTS) * LENGTH
    given.port, given.verbosity = 0, -1
    server = xllamacpp.Server(given)
    print(f"alone at {server.listening_address}", file=sys.stderr, flush=True)
    threading.Event().wait()


def load(port: int, prompts: list[str]) -> Turn:
    """Ask all prompts at the same time, by a client each."""
    answers: list[tuple[float, int]] = []
    threads = [
        threading.Thread(target=lambda text: answers.append(ask(port, text)), args=(prompt,))
        for prompt in prompts
    ]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    if [count for _, count in answers] != [TOKENS] * len(prompts):
        raise RuntimeError(f"{TOKENS} tokens were asked for {len(prompts)} times, came: {answers}")
    first_s = statistics.median(first for first, _ in answers)
    return {
        "tokens a second": TOKENS * len(prompts) / seconds,
        "ms to the first token": 1000 * first_s,
    }


def ask(port: int, prompt: str) -> tuple[float, int]:
    """Have a prompt continued; return the seconds to the first token, and how many came."""
    body: dict[str, Any] = {
        "model": f"path-{PATH}", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"port {port} answered {answer.status}: {answer.read()[:300]!r}")
    first_s, count = 0.0, 0
    for line in answer:
        if line.startswith(b"data: {"):
            first_s = first_s or time.perf_counter() - began
            usage = json.loads(line[6:]).get("usage")
            count = usage["completion_tokens"] if usage else count
    connection.close()
    return first_s, count


def main() -> int:
    parser = build_parser(__doc__)
    parser.add_argument("--sizes", default="small,large", help=f"of {', '.join(SIZES)} (all)")
    parser.add_argument("--dtypes", default="float32,q8_0", help="of --dtype of dipaco-serve")
    parser.add_argument("--turns", type=int, default=6, help="of each (6)")
    parser.add_argument("--alone", metavar="FILE", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.alone:
        serve_alone(chosen.alone)
        return 0
    report = Report("dipaco-serve beside llama.cpp's own server", brackets="quarters of the turns")
    for size in chosen.sizes.split(","):
        for dtype in chosen.dtypes.split(","):
            compare(report, size, dtype, chosen.turns)
    return report.conclude(chosen)


if __name__ == "__main__":
    sys.exit(main())
