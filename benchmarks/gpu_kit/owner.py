"""Part h: what an owner sees and sets: the first lines, `--duty`, and `--max-gpu-temp` both ways.

One peer is to use half of the time, on a card that may be warm. Another is told that the card is
too hot from the least degree that can be given; it must pause and say why, unless the card is
cooler than that.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from parts.common import one_thread, scratch_folder
from support.swarms.swarm import BIN, Swarm

from dipaco.peer.owner.gpu_heat import thermometer_of
from gpu_kit.common import Part, begin
from gpu_kit.four_peers import make_run

COMPILING_S = 120.0
SAMPLES, SAMPLE_S = 20, 0.5
DUTY_PERCENT = 50
LEAST_C, WARM_C = 30, 100
TOLD_S = 40.0


def main() -> int:
    part = begin("owner", __doc__)
    heat = {} if part.rehearses else {"degrees": thermometer_of(part.device).first()}
    part.note("temperature", heat)
    with scratch_folder() as folder, Swarm(folder, make_run(part, folder / "run")) as swarm:
        address = swarm.start_bootstrap().address()
        with part.measuring("half of the time"):
            part.note("half of the time", half_of_the_time(part, swarm, address))
        with part.measuring("too hot"):
            part.note("too hot", {"said": said_when_hot(part, folder, address)})
    return part.conclude()


def half_of_the_time(part: Part, swarm: Swarm, address: str) -> dict[str, Any]:
    """Return how busy the card is with `--duty`."""
    heat = () if part.rehearses else ("--max-gpu-temp", str(WARM_C))
    words = ("--device", part.device.type, "--duty", str(DUTY_PERCENT), *heat)
    peer = swarm.start_peer(address, "--path", "0", *words)
    # The first ones compile.
    swarm.wait([peer], "inner", lambda e: len(peer.of("inner")) > 3, timeout_s=COMPILING_S)
    begun, busy = len(peer.of("inner")), []
    for _ in range(SAMPLES):
        time.sleep(SAMPLE_S)
        busy += [] if part.rehearses else [busy_share()]
    steps = peer.of("inner")[begun:]
    tokens_per_s = sum(event["tokens"] for event in steps) / (SAMPLES * SAMPLE_S)
    return {"tokens_per_s": tokens_per_s, "busy": sum(busy) / max(1, len(busy))}


def busy_share() -> float:
    """Return how much of the last moment the card computed, as its driver says."""
    words = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
    return float(done.stdout.split()[0]) / 100


def said_when_hot(part: Part, folder: Path, address: str) -> str:
    """Return what a peer shows its owner whose card is hotter than it may be."""
    heat = () if part.rehearses else ("--max-gpu-temp", str(LEAST_C))
    words = ("--initial-peers", address, "--host-maddrs", "/ip4/127.0.0.1/tcp/0", *heat)
    command = [str(BIN / "dipaco-peer"), *words, "--device", part.device.type]
    file = folder / "said.txt"
    with file.open("w") as said:
        peer = subprocess.Popen(
            [*command, "--cache-dir", str(folder / "hot-cache")],
            stdout=said,
            stderr=subprocess.STDOUT,
            env=one_thread(),
        )
        try:
            time.sleep(3.0 if part.rehearses else TOLD_S)
            peer.terminate()
            peer.wait(timeout=20)
        finally:
            peer.kill()
    return file.read_text()[-3000:]


if __name__ == "__main__":
    sys.exit(main())
