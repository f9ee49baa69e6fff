"""The main job on the shipped corpus, with real processes on loopback: `make demo`.

Prepares a 2x2 run, starts a bootstrap node and four peers, kills one peer halfway and starts
another, stops the bootstrap node and goes on without it, and ends with the swarm's perplexity
beside the genesis model's and a dense model's. `--quick` does the same with fewer rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
PROMPTS = (
    "def __init__(self, reactor):\n",
    "Ein Antrag nach Absatz 1 ist schriftlich",
    "The captain looked out over the sea, and",
)


@dataclass(frozen=True)
class Scale:
    """How long the demo takes."""

    base_steps: int
    join_s: float
    """From the end of preparation to round 0, for the first peers to join."""
    rounds: int


FULL = Scale(base_steps=150, join_s=40.0, rounds=12)
QUICK = Scale(base_steps=40, join_s=25.0, rounds=6)
# Inner steps of every peer, so that what comes out does not depend on the machine.
ROUND_STEPS = 30
# The best peak rate of those tried (1.5, 3 and 6e-3) for the dense model.
DENSE_RATE = "6e-3"
# What a process may take until others can call it. Peers are nice: other programs come first.
START_LIMIT_S = 600.0
# So long the peers may log nothing, on a machine however busy.
SILENCE_LIMIT_S = 600.0


@dataclass
class Process:
    """A started command and the events it has logged."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path
    offset: int = 0
    path: int | None = None
    last: dict[str, dict[str, Any]] = field(default_factory=dict)
    note: str = ""

    def read_events(self) -> list[dict[str, Any]]:
        """Return the events that were logged since the last call."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as file:
            file.seek(self.offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self.offset += len(complete)
        events = [json.loads(line) for line in complete.splitlines()]
        for event in events:
            self.last[event["event"]] = event
            self.path = event.get("path", self.path)
        return events


class Demo:
    """Starts the processes, watches them, and ends every one of them."""

    def __init__(self, folder: Path, scale: Scale, console: Console) -> None:
        self.folder = folder
        self.scale = scale
        self.console = console
        self.processes: list[Process] = []
        self.asked: list[subprocess.Popen[bytes]] = []
        # Round, path and held-out loss; the rounds in which something was done to the swarm.
        self.validation: list[tuple[int, int, float]] = []
        self.accidents: dict[int, str] = {}
        self.digests: dict[str, str] = {}
        self.started_s = time.time()
        # Told to end, it takes what it has started with it.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        self._numbers = iter(range(1, 100))
        # Four peers share the machine: one thread each.
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"

    def command(self, name: str, *arguments: str) -> None:
        """Run one of our commands in the foreground, or end the demo with its error."""
        self.console.print(f"[bold]$ {name} {' '.join(arguments)}[/bold]", soft_wrap=True)
        finished = subprocess.run([str(BIN / name), *arguments], env=self.environment)
        if finished.returncode:
            raise SystemExit(finished.returncode)

    def ask(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start one of our commands whose output is wanted; others may be asked meanwhile."""
        shown = " ".join(argument.replace("\n", "\\n") for argument in arguments)
        self.console.print(f"$ {name} {shown}", style="bold", markup=False, soft_wrap=True)
        asked = subprocess.Popen(
            [str(BIN / name), *arguments], env=self.environment, stdout=subprocess.PIPE
        )
        self.asked.append(asked)
        return asked

    def json_of(self, asked: subprocess.Popen[bytes]) -> dict[str, Any]:
        """Wait for a command and return the JSON it prints last."""
        text = asked.communicate()[0].decode()
        if not text.strip():
            raise SystemExit(asked.returncode or 1)
        try:
            value: dict[str, Any] = json.loads(text)
        except ValueError:
            value = json.loads(text.strip().splitlines()[-1])
        return value

    def ask_sample(self, address: str, prompt: str) -> subprocess.Popen[bytes]:
        """Let the swarm continue `prompt`."""
        return self.ask(
            "dipaco-generate", "--initial-peers", address, "--max-tokens", "48", "--seed", "1",
            "--choose", "2", prompt,
        )  # fmt: skip

    def start(self, name: str, program: str, *arguments: str) -> Process:
        """Start a command in the background, with its output in a file."""
        log = self.folder / f"{name}.jsonl"
        output = (self.folder / f"{name}.out").open("wb")
        popen = subprocess.Popen(
            # What trains gives way to the commands of a person who watches it.
            ["nice", "-n", "5", str(BIN / program), *arguments, "--log-json", str(log)],
            env=self.environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        process = Process(name, popen, log)
        self.processes.append(process)
        return process

    def start_peer(self, address: str, *arguments: str) -> Process:
        """Start a training peer."""
        name = f"peer-{next(self._numbers)}"
        return self.start(
            name,
            "dipaco-peer",
            "--initial-peers", address,
            "--host-maddrs", LOOPBACK,
            "--cache-dir", str(self.folder / name),
            "--address-file", str(self.folder / f"{name}.address"),
            "--threads", "1",
            *arguments,
        )  # fmt: skip

    def address_of(self, process: Process) -> str:
        """Wait until a process has written its address: on a busy machine some minutes."""
        file = self.folder / f"{process.name}.address"
        deadline = time.monotonic() + START_LIMIT_S
        while not file.exists():
            has_ended = process.popen.poll() is not None
            if has_ended or time.monotonic() > deadline:
                what = "ended" if has_ended else f"has no address after {START_LIMIT_S:.0f} s"
                output = (self.folder / f"{process.name}.out").read_text()
                raise SystemExit(f"{process.name} {what}:\n{output}")
            time.sleep(0.1)
        return file.read_text().split()[0]

    def end_all(self) -> None:
        """Stop every process by its id; none outlives the demo."""
        for asked in self.asked:
            if asked.poll() is None:
                asked.kill()
                asked.wait()
        for process in self.processes:
            if process.popen.poll() is None:
                process.popen.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 20
        for process in self.processes:
            try:
                process.popen.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.popen.kill()
                process.popen.wait()

    # -- watching

    def watch(
        self, live: Live | None, until: Callable[[], bool], plain_period_s: float = 20.0
    ) -> None:
        """Redraw the table until `until` is true; plain lines when not on a terminal."""
        printed_s = moved_s = time.monotonic()
        is_printed = True
        while not until():
            now_s = time.monotonic()
            if self.read():
                moved_s, is_printed = now_s, False
            if now_s - moved_s > SILENCE_LIMIT_S:
                raise SystemExit(
                    f"no peer has logged anything for {SILENCE_LIMIT_S:.0f} s, in round "
                    f"{self.round_now()}; what they say is in {self.folder}"
                )
            if live is not None:
                live.update(self.table())
            elif now_s - printed_s > plain_period_s and not is_printed:
                printed_s, is_printed = now_s, True
                self.console.print(self.table())
            time.sleep(0.5)

    def read(self) -> bool:
        """Take in what the processes logged; tell whether there was anything."""
        count = 0
        for process in self.processes:
            for event in process.read_events():
                count += 1
                if event["event"] == "validation":
                    self.validation.append((event["round"], event["path"], event["loss"]))
                elif event["event"] in ("outer_step", "adopt"):
                    self.digests[event["module"]] = f"v{event['version']} {event['digest'][:10]}"
        return count > 0

    def round_now(self) -> int:
        """Return the greatest round that a peer has ended."""
        ended = [p.last["round"]["round"] for p in self.processes if "round" in p.last]
        return max(ended, default=-1)

    def table(self) -> Group:
        """Draw the swarm."""
        peers = Table(title=f"after {time.time() - self.started_s:.0f} s", title_justify="left")
        for column in ("process", "path", "round", "step", "loss", "held-out", "tokens/s", "state"):
            peers.add_column(column)
        for process in self.processes:
            last = process.last
            inner, ended = last.get("inner", {}), last.get("round", {})
            alive = process.popen.poll() is None
            peers.add_row(
                process.name,
                str(process.path if process.path is not None else "-"),
                str(ended.get("round", "-")),
                str(inner.get("path_step", "-")),
                f"{inner['loss']:.3f}" if inner else "-",
                f"{last['validation']['loss']:.3f}" if "validation" in last else "-",
                f"{inner['tokens_per_s']:,.0f}" if inner else "-",
                process.note or ("running" if alive else f"ended ({process.popen.returncode})"),
            )
        modules = Table(box=None)
        for name in sorted(self.digests):
            modules.add_column(name)
        if self.digests:
            modules.add_row(*(self.digests[name] for name in sorted(self.digests)))
        return Group(peers, modules)


def prepare(demo: Demo) -> None:
    """Make the run of the demo: the shipped RUN.toml with the demo's lengths."""
    text = (HERE / "tiny" / "RUN.toml").read_text()
    lines = []
    for line in text.splitlines():
        key = line.split("=")[0].strip()
        if key == "steps":
            line = f"steps = {demo.scale.base_steps}"
        elif key == "duration_s":
            line += f"\ninner_steps = {ROUND_STEPS}"
        elif key in ("train", "validation"):
            name = line.split('"')[1]
            line = f'{key} = "{HERE / "tiny" / name}"'
        lines.append(line)
    run_toml = demo.folder / "RUN.toml"
    run_toml.write_text("\n".join(lines) + "\n")
    demo.command(
        "dipaco-bootstrap", "prepare", str(run_toml), "--out", str(demo.run_folder),
        "--start-in-s", str(demo.scale.join_s),
    )  # fmt: skip


def train(demo: Demo, live: Live | None) -> Process:
    """Run the swarm through its accidents; return a peer that is still alive."""
    bootstrap = demo.start(
        "bootstrap", "dipaco-bootstrap", "serve", str(demo.run_folder),
        "--host-maddrs", LOOPBACK, "--address-file", str(demo.folder / "bootstrap.address"),
    )  # fmt: skip
    address = demo.address_of(bootstrap)
    bootstrap.note = "serving"
    peers = [demo.start_peer(address) for _ in range(4)]
    survivor = demo.address_of(peers[0])
    demo.watch(live, lambda: demo.round_now() >= demo.scale.rounds // 2)
    demo.console.print(f"[yellow]SIGKILL to {peers[-1].name}[/yellow], and a new peer starts")
    peers[-1].popen.kill()
    peers[-1].note = "killed"
    newcomer = demo.start_peer(survivor)
    killed_in = demo.round_now()
    demo.accidents[killed_in] = "a peer is killed, another one joins"
    demo.watch(live, lambda: demo.round_now() > killed_in)
    demo.console.print("[yellow]the bootstrap node stops[/yellow]; the swarm goes on without it")
    bootstrap.popen.send_signal(signal.SIGINT)
    bootstrap.note = "stopped"
    demo.accidents[demo.round_now()] = "the bootstrap node stops"
    last = demo.scale.rounds - 1
    demo.watch(live, lambda: demo.round_now() >= last and "outer_step" in newcomer.last)
    return peers[0]


def plot(demo: Demo, scores: dict[str, float], file: Path) -> None:
    """Draw the held-out loss of each path by rounds, what happened, and the final perplexities."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), width_ratios=(3, 2))
    for path in sorted({p for _, p, _ in demo.validation}):
        points = sorted((number + 1, loss) for number, p, loss in demo.validation if p == path)
        left.plot(*zip(*points, strict=True), marker=".", label=f"path {path}")
    for style, (number, accident) in zip(("--", ":"), demo.accidents.items(), strict=True):
        left.axvline(
            number + 1, ymax=0.74, color="0.5", linewidth=1, linestyle=style, label=accident
        )
    low, high = left.get_ylim()
    left.set_ylim(low, high + 0.35 * (high - low))  # room for the legend
    left.set_xlabel("rounds")
    left.set_ylabel("held-out loss, nats a token")
    left.set_title("a swarm of four peers", fontsize=10)
    left.legend(fontsize=7, loc="upper right", ncols=2, frameon=False)
    colors = ["0.75", "0.55", *["tab:blue"] * (len(scores) - 2)]
    bars = right.barh(list(scores), list(scores.values()), color=colors)
    right.invert_yaxis()
    right.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    right.margins(x=0.15)
    right.set_xlabel("validation perplexity")
    right.spines[["top", "right"]].set_visible(False)
    left.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=100)


def report(demo: Demo, survivor: Process) -> None:
    """Evaluate the swarm over the network, train the dense baseline, print and draw."""
    address = demo.address_of(survivor)
    data = str(HERE / "tiny" / "data" / "validation.jsonl.gz")
    # All at once, while the peers are there to serve what they need.
    status = demo.ask("dipaco-status", "--initial-peers", address, "--json")
    evaluation = demo.ask(
        "dipaco-eval", "--initial-peers", address, "--data", data, "--label-field", "domain",
        "--mix", "2", "--cache-dir", str(demo.folder / "reader"), "--json",
    )  # fmt: skip
    asked = [demo.ask_sample(address, prompt) for prompt in PROMPTS]
    demo.json_of(status)
    swarm = demo.json_of(evaluation)
    samples = [sample.communicate()[0].decode() for sample in asked]
    demo.read()
    # What a peer that was there all the time has trained, until now.
    steps = (demo.round_now() + 1) * ROUND_STEPS
    demo.end_all()
    dense_folder = demo.folder / "dense"
    demo.command(
        "dipaco-simulate", str(demo.run_folder), "--rounds", "0", "--dense-steps", str(steps),
        "--dense-rate", DENSE_RATE, "--out", str(dense_folder), "--validation-sequences", "0",
    )  # fmt: skip
    dense = demo.json_of(
        demo.ask(
            "dipaco-eval", "--state-dir", str(dense_folder), "--allow-genesis", "--data", data,
            "--json", "--baseline", str(dense_folder / "dense.safetensors"),
        )
    )  # fmt: skip
    scores = {
        "genesis": swarm["base_perplexity"],
        "one machine": dense["baseline_perplexity"],
        "swarm": swarm["perplexity"],
        "better of two paths": swarm["chosen_perplexity"],
        "two paths mixed": swarm["mixed_perplexity"],
    }
    table = Table(title=f"validation perplexity, {swarm['tokens']:,} tokens", title_justify="left")
    table.add_column("model")
    table.add_column("perplexity", justify="right")
    table.add_row("genesis (dense, before the swarm)", f"{scores['genesis']:.2f}")
    table.add_row(f"dense, one path's size, {steps} more steps", f"{scores['one machine']:.2f}")
    table.add_row(f"swarm, at most {steps} more steps of a peer", f"{scores['swarm']:.2f}")
    table.add_row(
        "swarm, the better of two paths by 32 tokens", f"{scores['better of two paths']:.2f}"
    )
    table.add_row("swarm, two paths mixed, twice the work", f"{scores['two paths mixed']:.2f}")
    demo.console.print(table)
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        demo.console.print("[dim]--- sample ---[/dim]")
        text = sample if sample.startswith(prompt) else prompt + sample
        demo.console.print(text, markup=False, highlight=False)
    file = demo.folder / "demo.png"
    plot(demo, scores, file)
    demo.console.print(f"plot: {file}; everything else: {demo.folder}")
    (demo.folder / "result.json").write_text(json.dumps(scores) + "\n")


def main() -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--out", type=Path, default=HERE.parent / "demo-run")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    console = Console()
    demo = Demo(options.out, QUICK if options.quick else FULL, console)
    try:
        prepare(demo)
        if console.is_terminal:
            with Live(demo.table(), console=console) as live:
                survivor = train(demo, live)
        else:
            survivor = train(demo, None)
        report(demo, survivor)
    finally:
        demo.end_all()
    console.print(f"the demo took {time.time() - demo.started_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
