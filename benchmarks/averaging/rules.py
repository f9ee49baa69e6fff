"""What a rule of averaging costs beside the plain mean, for groups of 2, 8 and 32 members.

    python benchmarks/averaging/rules.py [--members 2,8,32] [--json]

All members of a group run in this process, with the real all-reduce and no network; messages are
made and read as on the wire. Each row is the CPU time of a whole reduce, of all members together,
as a multiple of that of the plain mean, the least of some repetitions of both in turns. What a
member commits to is made before a reduce, and counted. For the checks each keeps, where all reduce
equal shares, one more encoded vector; `shown` is what a member is sent for 8 pieces, as a share of
the bytes of a reduce.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from dipaco.modules.codecs import CODECS as WIRE
from dipaco.peer.averaging.codec import PIECE_VALUES
from parts.common import Report, build_parser
from support.allreduce_harness import Group

RULES: dict[str, dict[str, Any]] = {
    "plain mean": {},
    "trimmed mean": {"mean": "trimmed_mean"},
    "centered clipping": {"mean": "centered_clipping"},
    "plain mean, 8 pieces checked": {"check_pieces": 8},
    "plain mean, 64 pieces checked": {"check_pieces": 64},
}
CODECS = ("float16", "blockwise8bit")
PART_BYTES = 2**19
# The hashes of a part of 64 pieces and of a vector of 256 parts.
PROOF_BYTES = (6 + 8) * 34 + 20


def seconds(members: int, numbers: int, codec: str, changes: dict[str, Any]) -> float:
    """Run one reduce and return its CPU seconds."""
    paths = list(range(members))
    group = Group.random(members, numbers, paths=paths, codec=codec, part_bytes=PART_BYTES)
    group.silence_s = group.timeout_s = 1000.0
    for name, value in changes.items():
        setattr(group, name, value)
    started = time.process_time()
    results = asyncio.run(group.run())
    used = time.process_time() - started
    if not all(isinstance(result, torch.Tensor) for result in results):
        raise RuntimeError(f"a reduce failed: {str(results)[:300]}")
    return used


def main() -> int:
    parser = build_parser(__doc__)
    parser.add_argument("--members", default="2,8,32", help="sizes of groups (2,8,32)")
    parser.add_argument("--numbers", type=int, default=2_000_000, help="averaged (2000000)")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of each (3)")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    counts = [int(count) for count in chosen.members.split(",")]
    report = Report("rules of averaging", ("", *(f"{count} members" for count in counts)))
    for codec in CODECS:
        least: dict[tuple[str, int], float] = {}
        for count in counts:
            for _ in range(chosen.repeat):
                for name, changes in RULES.items():
                    used = seconds(count, chosen.numbers, codec, changes)
                    least[name, count] = min(used, least.get((name, count), used))
        for name in RULES:
            ratios = [least[name, count] / least["plain mean", count] for count in counts]
            report.row(f"{codec}, {name}", *(f"{ratio:.2f}" for ratio in ratios))
            report.figures[f"{codec}, {name}"] = {
                str(count): {"cpu_s": least[name, count], "ratio": ratio}
                for count, ratio in zip(counts, ratios, strict=True)
            }
        wire = WIRE[codec]
        moved = 2 * wire.encoded_bytes(chosen.numbers)
        shown = [8 * count * (wire.encoded_bytes(PIECE_VALUES) + PROOF_BYTES) for count in counts]
        report.row(f"{codec}, shown", *(f"{bytes_ / moved:.3f}" for bytes_ in shown))
        report.figures[f"{codec}, shown"] = {
            str(count): bytes_ / moved for count, bytes_ in zip(counts, shown, strict=True)
        }
    report.notes.append(f"{chosen.numbers / 1e6:.1f} M numbers, parts of {PART_BYTES // 1024} KiB")
    report.print(chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
