"""Preparing a large corpus: memory, speed, and what a SIGKILL costs.

    python benchmarks/large_corpus.py --gigabytes 1 [--json]

A corpus of that size is made by repeating the given JSON lines with variation. It is prepared and
sharded twice by `dipaco-bootstrap prepare`: once undisturbed, once killed with SIGKILL at several
moments of every stage and started again. `memory` is the greatest proportional size of the process
tree in a stage, pages of mapped files included, which the system takes back when it needs them;
`anonymous` is without those. Both preparations must end with the same plan and the same blobs, and
no resumed one may begin a stage, tokenize a document or route one that was done before.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dipaco.modules.blobs import BlobStore
from dipaco.routing.run_folder import RunFolder
from parts.common import HERE, Report, build_parser, process_tree, scratch_folder
from parts.varied_corpus import VariedCorpus, write_varied_corpus

TINY_CORPUS = HERE.parent / "examples" / "tiny" / "data" / "train-00000.jsonl.gz"
SAMPLE_PERIOD_S = 0.5
KILL_PERIOD_S = 0.02
RUN_TOML = """\
name = "large-corpus"
[data]
train = "corpus/*.jsonl"
label_field = "domain"
[tokenizer]
training_characters = 10_000_000
[model]
vocabulary_size = 4096
block_count = 4
hidden_size = 96
head_count = 4
sequence_length = 256
[grid]
modules_per_level = [2, 4]
[base]
steps = 20
[router]
training_documents = 10_000
"""


@dataclass
class Progress:
    """How far a preparation is, read from outside."""

    stages_begun: list[str]
    stage_age_s: float
    token_documents: int
    shard_documents: int


@dataclass(frozen=True)
class KillPoint:
    """A moment at which a preparation is killed; `reached` gets the documents of the corpus."""

    name: str
    reached: Callable[[Progress, int], bool]


def in_stage(stage: str, age_s: float) -> KillPoint:
    """Return the moment when `stage` has run for `age_s`."""

    def reached(progress: Progress, documents: int) -> bool:
        return progress.stages_begun[-1:] == [stage] and progress.stage_age_s >= age_s

    return KillPoint(f"{stage}, {age_s:g} s", reached)


def tokens_at(part: float) -> KillPoint:
    """Return the moment when that part of the documents is tokenized."""
    return KillPoint(f"tokens, {part:.0%}", lambda p, n: p.token_documents >= part * n)


def shards_at(part: float) -> KillPoint:
    """Return the moment when that part of the documents is routed."""
    return KillPoint(f"shards, {part:.0%}", lambda p, n: p.shard_documents >= part * n)


KILL_POINTS = (
    in_stage("tokenizer", 0.5),
    tokens_at(0.02),
    tokens_at(0.4),
    tokens_at(0.8),
    in_stage("base model", 1.0),
    in_stage("router", 0.5),
    shards_at(0.1),
    shards_at(0.6),
    # The files are being moved into the blob store.
    shards_at(1.0),
)


@dataclass
class Stage:
    """What was seen of a stage."""

    seconds: float = 0.0
    memory_mib: float = 0.0
    anonymous_mib: float = 0.0


@dataclass
class Attempt:
    """One start of `dipaco-bootstrap prepare`, to its end or to its SIGKILL."""

    out: Path
    stages: dict[str, Stage] = field(default_factory=dict)
    seconds: float = 0.0
    cpu_s: float = 0.0
    greatest_rss_mib: float = 0.0
    killed: bool = False
    returncode: int = 0
    output: list[str] = field(default_factory=list)
    first_seen: Progress | None = None
    last_seen: Progress = field(default_factory=lambda: Progress([], 0.0, 0, 0))
    _stage: str = "start"

    def run(self, run_toml: Path, threads: int, kill: KillPoint | None, documents: int) -> None:
        """Start it, watch it, and kill it when `kill` is reached."""
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        began_s = time.monotonic()
        process = subprocess.Popen(
            [
                *(str(Path(sys.executable).parent / "dipaco-bootstrap"), "prepare", str(run_toml)),
                *("--out", str(self.out), "--threads", str(threads), "--device", "cpu"),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        begun: list[tuple[str, float]] = []
        reader = threading.Thread(target=self._read, args=(process, begun), daemon=True)
        reader.start()
        while not self._ended(process):
            self._sample(begun)
            if kill is None:
                # Not while a moment is waited for: looking takes longer than some moments.
                self._sample_memory(process.pid)
            elif (
                not self.killed
                and self.last_seen.stages_begun
                and kill.reached(self.last_seen, documents)
            ):
                process.send_signal(signal.SIGKILL)
                self.killed = True
            time.sleep(SAMPLE_PERIOD_S if kill is None else KILL_PERIOD_S)
        reader.join(10)
        self.seconds = time.monotonic() - began_s
        ends = [*(at for _, at in begun), time.monotonic()][1:]
        for (name, at), end in zip(begun, ends, strict=False):
            self.stages.setdefault(name, Stage()).seconds = end - at

    def _read(self, process: subprocess.Popen[str], begun: list[tuple[str, float]]) -> None:
        for line in process.stdout or ():
            self.output.append(line)
            if line.endswith(" ...\n"):
                begun.append((line.removesuffix(" ...\n"), time.monotonic()))
            elif ": done in " in line:
                begun.append(("between", time.monotonic()))

    def _ended(self, process: subprocess.Popen[str]) -> bool:
        """Collect the process, with what the system counted of it, if it has ended."""
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid == 0:
            return False
        self.returncode = process.returncode = os.waitstatus_to_exitcode(status)
        self.cpu_s = usage.ru_utime + usage.ru_stime
        self.greatest_rss_mib = usage.ru_maxrss / 1024
        return True

    def _sample(self, begun: Sequence[tuple[str, float]]) -> None:
        """Note the progress."""
        self._stage, since_s = begun[-1] if begun else ("start", time.monotonic())
        self.last_seen = Progress(
            [stage for stage, _ in begun if stage != "between"],
            time.monotonic() - since_s,
            *progress_of(self.out / "work"),
        )
        if self.last_seen.stages_begun and self.first_seen is None:
            self.first_seen = self.last_seen

    def _sample_memory(self, pid: int) -> None:
        """Note the memory of the process tree."""
        tree = process_tree(pid)
        stage = self.stages.setdefault(self._stage, Stage())
        stage.memory_mib = max(stage.memory_mib, sum(p.proportional_mib for p in tree))
        stage.anonymous_mib = max(stage.anonymous_mib, sum(p.anonymous_mib for p in tree))


def progress_of(work: Path) -> tuple[int, int]:
    """Return the documents that are tokenized and that are routed, as the files say."""
    counts = []
    for names in (("tokens/train", "tokens/validation"), ("shards",)):
        count = 0
        for name in names:
            try:
                values = json.loads((work / name / "progress.json").read_bytes())
            except (OSError, ValueError):
                continue
            done = values.get("done")
            count += sum(done.values()) if done else values.get("documents", 0)
        counts.append(count)
    return counts[0], counts[1]


def markers_of(out: Path) -> dict[str, int]:
    """Return the stages that are marked as done, with the time of the mark."""
    return {file.stem: file.stat().st_mtime_ns for file in (out / "work").glob("*.json")}


def blobs_of(out: Path) -> set[str]:
    """Return the names of all blobs."""
    return {file.name for file in (out / "blobs").glob("??/*")}


def killed_preparation(
    run_toml: Path, out: Path, threads: int, documents: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Prepare with a SIGKILL at every kill point; return the attempts and what was repeated."""
    attempts: list[dict[str, Any]] = []
    repeated: list[str] = []
    names = {"tokenizer": "tokenizer", "tokens": "tokens", "base": "base model"}
    for kill in (*KILL_POINTS, None):
        markers, (tokens, shards) = markers_of(out), progress_of(out / "work")
        attempt = Attempt(out)
        attempt.run(run_toml, threads, kill, documents)
        if attempt.returncode not in (0, -signal.SIGKILL):
            raise RuntimeError("".join(attempt.output[-20:]))
        name = kill.name if kill else "to the end"
        seen, later = attempt.last_seen, markers_of(out)
        for stage, marked in markers.items():
            if later.get(stage) != marked or names.get(stage, stage) in seen.stages_begun:
                repeated.append(f"{name}: the stage {stage}")
        first = attempt.first_seen or seen
        if first.token_documents < tokens or first.shard_documents < shards:
            repeated.append(f"{name}: documents, {tokens} and {shards} before, now {first}")
        attempts.append(
            {
                "killed_at": name,
                "killed": attempt.killed,
                "seconds": round(attempt.seconds, 2),
                "cpu_s": round(attempt.cpu_s, 2),
                "greatest_rss_mib": round(attempt.greatest_rss_mib, 1),
                "stages": seen.stages_begun,
                "token_documents": progress_of(out / "work")[0],
                "shard_documents": progress_of(out / "work")[1],
            }
        )
    return attempts, repeated


def compare(whole: Path, killed: Path) -> dict[str, bool]:
    """Tell whether two run folders are the same run."""
    plans = [RunFolder(out).plan().model_copy(update={"start_s": 0.0}) for out in (whole, killed)]
    blobs = BlobStore(killed / "blobs")
    return {
        "same_plan": plans[0] == plans[1],
        "same_blobs": blobs_of(whole) == blobs_of(killed),
        "blobs_have_their_hashes": all(blobs.verify(sha256) for sha256 in blobs_of(killed)),
    }


def made_corpus(sources: Sequence[Path], work: Path, gigabytes: float) -> VariedCorpus:
    """Make the corpus, or take the one that `work` holds of these sources and this size."""
    note = work / "corpus.json"
    key = [[str(source), source.stat().st_size] for source in sources], gigabytes
    wanted = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    if note.exists() and (found := json.loads(note.read_text()))["key"] == wanted:
        files = tuple(sorted((work / "corpus").glob("*.jsonl")))
        return VariedCorpus(files, found["documents"], found["text_bytes"])
    corpus = write_varied_corpus(sources, work / "corpus", int(gigabytes * 1e9))
    values = {"key": wanted, "documents": corpus.documents, "text_bytes": corpus.text_bytes}
    note.write_text(json.dumps(values))
    return corpus


def measure(work: Path, sources: Sequence[Path], gigabytes: float, threads: int) -> Report:
    """Make the corpus, prepare it both ways, and compare."""
    report = Report(
        f"preparing {gigabytes:g} GB with {threads} threads",
        ("stage", "seconds", "MB/s", "memory MiB", "anonymous MiB"),
    )
    work.mkdir(parents=True, exist_ok=True)
    corpus = made_corpus(sources, work, gigabytes)
    megabytes = corpus.text_bytes / 1e6
    run_toml = work / "RUN.toml"
    run_toml.write_text(RUN_TOML)
    for earlier in (work / "whole", work / "killed"):
        shutil.rmtree(earlier, ignore_errors=True)
    whole = Attempt(work / "whole")
    whole.run(run_toml, threads, None, corpus.documents)
    if whole.returncode:
        raise RuntimeError("".join(whole.output[-20:]))
    for name, stage in whole.stages.items():
        if name != "between":
            speed = megabytes / stage.seconds if name in ("tokens", "shards") else ""
            report.row(name, stage.seconds, speed, int(stage.memory_mib), int(stage.anonymous_mib))
    memory = max(stage.memory_mib for stage in whole.stages.values())
    anonymous = max(stage.anonymous_mib for stage in whole.stages.values())
    report.row("all", whole.seconds, megabytes / whole.seconds, int(memory), int(anonymous))
    attempts, repeated = killed_preparation(run_toml, work / "killed", threads, corpus.documents)
    checks = {**compare(work / "whole", work / "killed"), "nothing_repeated": not repeated}
    for attempt in attempts:
        report.row(f"killed at {attempt['killed_at']}", attempt["seconds"], "", "", "")
    killed_s = sum(attempt["seconds"] for attempt in attempts)
    report.notes += [
        f"{corpus.documents:,} documents, {megabytes:,.1f} MB of text, {len(corpus.files)} files; "
        f"{whole.cpu_s:.0f} s of processor time, {whole.greatest_rss_mib:.0f} MiB resident at most",
        f"with {len(KILL_POINTS)} kills {killed_s:.0f} s, "
        f"{sum(attempt['cpu_s'] for attempt in attempts):.0f} s of processor time",
        ", ".join(f"{name}: {'yes' if value else 'NO'}" for name, value in checks.items()),
        *repeated,
    ]
    report.figures = {
        "corpus": {
            "text_bytes": corpus.text_bytes,
            "documents": corpus.documents,
            "files": len(corpus.files),
            "threads": threads,
        },
        "whole": {
            "seconds": round(whole.seconds, 2),
            "cpu_s": round(whole.cpu_s, 2),
            "greatest_rss_mib": round(whole.greatest_rss_mib, 1),
            "memory_mib": round(memory, 1),
            "anonymous_mib": round(anonymous, 1),
            "tokens_mb_per_s": round(megabytes / whole.stages["tokens"].seconds, 3),
            "shards_mb_per_s": round(megabytes / whole.stages["shards"].seconds, 3),
            "stages": {
                name: {key: round(value, 2) for key, value in vars(stage).items()}
                for name, stage in whole.stages.items()
            },
        },
        "killed": attempts,
        "repeated": repeated,
        "checks": checks,
    }
    return report


def options() -> argparse.Namespace:
    parser = build_parser(__doc__)
    parser.add_argument(
        "--gigabytes", type=float, default=1.0, metavar="G", help="text, in 1e9 bytes (1)"
    )
    parser.add_argument(
        "--sources", type=Path, nargs="+", default=[TINY_CORPUS], metavar="FILE",
        help="JSON lines with text and domain, plain or .gz (those of examples/tiny)",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, metavar="N", help="CPU threads (all)"
    )
    parser.add_argument(
        "--work", type=Path, metavar="DIR",
        help="keep corpus, run folders and report.json here, and use the corpus again",
    )  # fmt: skip
    return parser.parse_args()


def main() -> int:
    chosen = options()
    with scratch_folder() if chosen.work is None else nullcontext(chosen.work) as work:
        report = measure(work, chosen.sources, chosen.gigabytes, chosen.threads)
        (work / "report.json").write_text(json.dumps(report.as_json(), indent=2) + "\n")
    report.print(chosen.json)
    return 0 if all(report.figures["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
