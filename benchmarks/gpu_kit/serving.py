"""Part f: the service on the device, one stream and eight, beside transformers.

It is benchmarks/model/serving_speed.py with a path of the paper's blocks; this keeps what that
prints.
"""

from __future__ import annotations

import json
import subprocess
import sys

from parts.common import HERE

from gpu_kit.common import begin

LIMIT_S = 600


def main() -> int:
    part = begin("serving", __doc__)
    script = str(HERE / "model" / "serving_speed.py")
    words = ["--json", "--beside", "transformers", "--device", part.device.type]
    size = ["--requests", "16", "--rounds", "1", "--tokens", "8" if part.rehearses else "64"]
    seconds = ["--seconds", "5"] if part.rehearses else ["--paper", "--seconds", "30"]
    with part.measuring("serving"):
        done = subprocess.run(
            [sys.executable, script, *words, *size, *seconds],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        report = json.loads(done.stdout.splitlines()[-1])
        for clients, turns in report["turns"].items():
            for program in ("service", "transformers"):
                figures = sorted(turn[program]["tokens_per_s"] for turn in turns)
                found = {"tokens_per_s": figures[len(figures) // 2], "turns": len(figures)}
                part.note(f"{program}, {clients} streams", found)
        for name, ratios in report["ratios"].items():
            part.note(name, {"tokens_per_s_median": ratios["tokens_per_s"]["median"]})
    return part.conclude()


if __name__ == "__main__":
    sys.exit(main())
