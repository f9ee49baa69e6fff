"""The exact averager beside Hivemind's own: seconds, and whether all peers end with equal bits.

    python benchmarks/averaging/reduce.py [--json]

The same processes hold both averagers and use them in turns, on equal numbers, over the same
loopback connections, with the same codec and part size; groups close as soon as everybody is
there. `reduce` is the all-reduce alone, `call` includes meeting the others; both are of the
slowest peer of a round. `digests` counts different results in a round: 1 is what an outer step
needs. `error` is the greatest distance from the true average, which fp16 on the wire causes.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from parts.common import HERE, Report, build_parser, ratio
from support.host_process import HostProcess

KINDS = {"exact": "exact averager", "stock": "Hivemind's averager"}


def main() -> int:
    parser = build_parser(__doc__)
    parser.add_argument("--peers", type=int, default=4, help="members of the group (4)")
    parser.add_argument("--size", type=int, default=4_000_000, help="numbers to average (4000000)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each averager (3)")
    parser.add_argument("--codec", choices=("float16", "none"), default="float16", help="(float16)")
    chosen = parser.parse_args()
    columns = ("", "reduce s", "call s", "digests", "failed calls", "error")
    report = Report("exact averager beside Hivemind's", columns)
    flags = [f"--peers={chosen.peers}", f"--size={chosen.size}", f"--codec={chosen.codec}"]
    hosts: list[HostProcess] = []
    rounds: dict[str, list[list[dict[str, Any]]]] = {kind: [] for kind in KINDS}
    try:
        addresses: list[str] = []
        candidates: list[str] = []
        for number in range(chosen.peers):
            hosts.append(
                HostProcess(HERE / "averaging" / "reduce_host.py", number, addresses, flags)
            )
            # The others start together, once there is somebody to join.
            if number == 0:
                hello = hosts[0].answer()
                addresses, candidates = hello["addresses"], [hello["peer_id"]]
        candidates += [host.answer()["peer_id"] for host in hosts[1:]]
        # The first round of each opens connections and does not count.
        for round_index in range(chosen.rounds + 1):
            for kind in KINDS:
                for host in hosts:
                    host.tell(kind=kind, round=round_index, candidates=candidates)
                answers = [host.answer() for host in hosts]
                if round_index > 0:
                    rounds[kind].append(answers)
    finally:
        for host in hosts:
            host.close()
    found = {kind: summary(answers) for kind, answers in rounds.items()}
    for kind, name in KINDS.items():
        report.row(name, *found[kind].values())
    reduce_ratio = ratio(found["exact"]["reduce_s"], found["stock"]["reduce_s"])
    call_ratio = ratio(found["exact"]["call_s"], found["stock"]["call_s"])
    report.row("exact / Hivemind's", reduce_ratio, call_ratio, "", "", "")
    report.notes.append(
        f"{chosen.peers} peers, {chosen.size / 1e6:.1f} M numbers, {chosen.codec} on the wire, "
        f"{chosen.rounds} rounds of each in turns"
    )
    report.figures = {
        "peers": chosen.peers,
        "size": chosen.size,
        "codec": chosen.codec,
        "reduce_ratio": reduce_ratio,
        "call_ratio": call_ratio,
        **{kind: {**values, "rounds": rounds[kind]} for kind, values in found.items()},
    }
    report.print(chosen.json)
    return 0


def summary(rounds: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Return medians over rounds of the slowest peer, and the most digests of any round."""
    whole = [[answer for answer in answers if "failed" not in answer] for answers in rounds]
    done = [answers for answers in whole if answers]

    def median(key: str) -> float:
        slowest = [max(answer[key] for answer in answers) for answers in done]
        return statistics.median(slowest) if slowest else float("nan")

    return {
        "reduce_s": median("reduce_s"),
        "call_s": median("seconds"),
        "digests": max((len({a["digest"] for a in answers}) for answers in done), default=0),
        "failed_calls": sum(len(answers) for answers in rounds) - sum(len(a) for a in whole),
        "error": f"{max((a['error'] for answers in done for a in answers), default=0.0):.1e}",
    }


if __name__ == "__main__":
    sys.exit(main())
