"""Where the main memory of a peer goes in an outer round, phase by phase, in bytes a parameter.

    python benchmarks/outer_memory.py [--millions 20] [--levels 1] [--codec int4] [--members 4]

One process does what a peer does between two boundaries, with the real trainer, states, files and
codec, and no network: the others' contributions lie in a folder. What counts is the memory of the
process that is no file on the disk (anonymous), above the most that the bare training loop has:
the program, the model, its gradients, AdamW's states and the pass, all of which a peer has all the
time. Told for each phase: the most during it, what is left after it, the pages of mapped files that
were in memory, which the machine can take at any time, and the seconds. The first round is of the
genesis state; what counts is the last.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from parts.common import Report, build_parser, scratch_folder
from parts.synthetic_run import make_synthetic_run
from support.wire.outer_peer import Peer

from dipaco.base.kept_files import KeptFiles
from dipaco.modules.contributions import Codec
from dipaco.modules.device import prepare_process, return_freed_memory
from dipaco.modules.layout import layout_of
from dipaco.modules.outer import OuterRule
from dipaco.modules.transformer import PathModel
from dipaco.peer.background import Background
from dipaco.peer.exchange.files.contribution_files import ContributionFiles
from dipaco.peer.keeping.path_files import OptimizerFiles
from dipaco.protocol.chain.steps import Head, Row, Step
from dipaco.protocol.config import ModelConfig
from dipaco.protocol.member import actions as a
from dipaco.training.inner import InnerLoop

SHAPE = {
    "vocabulary_size": 320,
    "hidden_size": 640,
    "feed_forward_size": 1760,
    "head_count": 10,
    "sequence_length": 16,
}
BLOCK_MILLIONS = 5
SAMPLE_S = 0.001
STEPS = 2
# The upper half of 2^-22.
SMALL_SCALE = bytes([0x80, 0x34])


class Watch:
    """Samples the memory of this process."""

    def __init__(self) -> None:
        self._peak = (0, 0)
        self._page = os.sysconf("SC_PAGE_SIZE")
        threading.Thread(target=self._run, daemon=True).start()

    def now(self) -> tuple[int, int]:
        """Return the bytes that are anonymous, and those of files."""
        _, resident, shared = map(int, Path("/proc/self/statm").read_text().split()[:3])
        return (resident - shared) * self._page, shared * self._page

    def _run(self) -> None:
        while True:
            self._peak = tuple(map(max, self._peak, self.now()))  # type: ignore[assignment]
            time.sleep(SAMPLE_S)

    def peak(self) -> tuple[int, int]:
        """Return the most since this was called last."""
        found, self._peak = tuple(map(max, self._peak, self.now())), self.now()
        return found  # type: ignore[return-value]


class OneMember:
    """The peer, and what is measured of it."""

    def __init__(
        self, folder: Path, report: Report, millions: int, levels: int, codec: str, members: int
    ) -> None:
        blocks = max(1, millions // BLOCK_MILLIONS)
        self.run = make_synthetic_run(
            folder / "run",
            ModelConfig(**SHAPE, block_count=blocks),
            modules_per_level=(1,) * levels,
            batch_sequences=1,
            codec=codec,
            train_sequences=64,
            validation_sequences=8,
            inner_steps=2,
        )
        plan = self.run.plan()
        grid = self.run.grid(plan)
        self.modules = grid.modules_of_path(0)
        self.parameters = sum(layout_of(grid, module).size for module in self.modules)
        self.members, self.report = members, report
        self.heads: dict[str, Head] = {}
        self.others = ContributionFiles(KeptFiles(folder / "others"))
        self.rule = OuterRule.of(plan, None)
        self.watch = Watch()
        self.base, self.files = self._bare_loop()
        return_freed_memory()
        self.peer = Peer(self.run, folder / "peer", 0)
        # As a real peer does once training has begun.
        self.peer.genesis.clear()
        return_freed_memory()
        self.peer.node.exchange.others = [self.others]
        self.step_of: dict[str, str] = {}
        self.greatest = 0.0
        self.optimizers = folder / "peer" / "optimizers"

    def _bare_loop(self) -> tuple[int, int]:
        """Return the most memory of a loop that trains the path for itself."""
        plan = self.run.plan()
        model, tokens = PathModel(plan.model), torch.from_numpy(self.run.train_tokens(plan, 0)[:1])
        inner = InnerLoop(model, plan.inner, torch.device("cpu"))
        for step in range(STEPS):
            inner.step(tokens.long(), step)
        return self.watch.peak()

    def train(self) -> None:
        """Take inner steps, and keep as much memory as their gradients had: the next one is under
        way while the outer round goes on."""
        self.gradients: list[torch.Tensor] = []
        for _ in range(STEPS):
            self.peer.trainer.inner_step()
        self.gradients = [torch.ones_like(p) for p in self.peer.trainer.model.parameters()]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.watch.peak()
        began_s = time.perf_counter()
        yield
        seconds = time.perf_counter() - began_s
        time.sleep(2 * SAMPLE_S)
        (most, most_files), (left, _) = self.watch.peak(), self.watch.now()
        a_parameter = [
            (value - base) / self.parameters
            for value, base in ((most, self.base), (left, self.base), (most_files, self.files))
        ]
        self.greatest = max(self.greatest, a_parameter[0])
        told = [round(value, 3) for value in a_parameter]
        self.report.add(name, {"bytes (most, left, files)": told, "seconds": round(seconds, 3)})

    def round_of(self, module: str, index: int) -> None:
        peer, name = self.peer, f"{index} {module} "
        codec = self.rule.codec
        self.greatest = 0.0
        with self.phase(name + "train"):
            self.train()
        with self.phase(name + "publish"):
            row = peer.publish(index, 0, module)
        rows = [row, *(self._other(row, number, codec) for number in range(1, self.members))]
        with self.phase(name + "gather"):
            peer.gather(*rows)
        step = Step.of(rows)
        with self.phase(name + "compute"):
            head = peer.compute(self.heads.get(module) or peer.head0(module), step)
        with self.phase(name + "score"):
            peer.do(a.Check(module, head.step))
        with self.phase(name + "adopt"):
            peer.adopt(head, step, save=True)
        self.heads[module] = head
        with self.phase(name + "serve"):
            found = peer.node.held.lookup(head.digest)
        del found
        with self.phase(name + "save"):
            peer.wait_until_saved()
        with self.phase(name + "optimizer"):
            self._save_optimizer()
        self.report.add(name + "peak", {"bytes, most": round(self.greatest, 3)})

    def _other(self, row: Row, number: int, codec: Codec) -> Row:
        """Make the file of another peer, small numbers, and return its row."""
        values = layout_of(self.peer.grid, row.module).size
        scales = codec.blocks(values)
        data = bytearray(codec.file_bytes(values))
        data[: 2 * scales] = SMALL_SCALE * scales
        data[-1] = number
        return self.peer.foreign_row(self.others, row, bytes(data))

    def _save_optimizer(self) -> None:
        saver = ThreadPoolExecutor(1)
        files = OptimizerFiles(self.optimizers, self.peer.trainer, saver, Background())
        files.save()
        saver.shutdown(wait=True)


def main() -> int:
    """Measure every phase of each level's module; returns the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("--millions", type=int, default=20, help="parameters: 5, 10, ... (20)")
    parser.add_argument("--levels", type=int, default=1, help="of the grid (1)")
    parser.add_argument("--codec", default="int4", help="of the manifest (int4)")
    parser.add_argument("--members", type=int, default=4, help="peers of a module (4)")
    parser.add_argument("--rounds", type=int, default=3, help="the last one counts (3)")
    chosen = parser.parse_args()
    told = ("millions", "levels", "codec", "members", "rounds")
    report = Report("memory of a round", **{name: vars(chosen)[name] for name in told})
    prepare_process(1)
    with scratch_folder() as folder:
        member = OneMember(
            folder, report, chosen.millions, chosen.levels, chosen.codec, chosen.members
        )
        report.add("all", {"parameters": member.parameters})
        with member.phase("first step"):
            member.train()
        for index in range(chosen.rounds):
            for module in member.modules:
                member.round_of(module, index)
        member.peer.outer.stop()
    return report.conclude(chosen)


if __name__ == "__main__":
    sys.exit(main())
