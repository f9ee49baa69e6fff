"""A process with an exact averager and one of Hivemind's own, told what to do on its input.

Started by `averaging.py`. It prints its addresses, then one line of JSON for each command.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from dipaco.modules.codecs import CODECS
from dipaco.modules.outer import AveragingRule, Contribution
from dipaco.peer.averaging.averager import ExactAverager
from dipaco.peer.averaging.group import averager_prefix
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage
from hivemind.compression import Float16Compression, NoCompression
from parts import common  # noqa: F401  It makes the helpers of the tests importable.
from support.host_process import ANCHOR, digest, loopback_dht, outer_gradient

PART_BYTES = 2**19
MATCHMAKING_S = 4.0
TIMEOUT_S = 60.0
STOCK_CODECS = {"float16": Float16Compression, "none": NoCompression}


def exact(averager: ExactAverager, flat: torch.Tensor, command: dict[str, Any]) -> dict[str, Any]:
    """Average with ours."""
    outcome = averager.average(
        flat,
        candidates=command["candidates"],
        close_s=time.time() + MATCHMAKING_S,
        end_s=time.time() + TIMEOUT_S,
        attempt=0,
        contribution=Contribution(0, averager.peer_id.to_base58(), 1000),
        module="L0.E0",
        round_index=command["round"],
        anchor_digest=ANCHOR,
    )
    return {"reduce_s": outcome.reduce_s, "average": outcome.average, "group": len(outcome.table)}


def stock(
    averager: DecentralizedAverager, flat: torch.Tensor, command: dict[str, Any]
) -> dict[str, Any]:
    """Average with Hivemind's, the group closing when all are together, as with ours."""
    with averager.get_tensors() as tensors:
        tensors[0].copy_(flat)
    control = averager.step(
        weight=1000.0, timeout=TIMEOUT_S, allow_retries=False, wait=False, gather=None
    )
    began_s = None
    while not control.done():
        if began_s is None and control.stage == AveragingStage.RUNNING_ALLREDUCE:
            began_s = time.monotonic()
        time.sleep(0.002)
    members = control.result()
    reduce_s = time.monotonic() - began_s if began_s is not None else float("nan")
    with averager.get_tensors() as tensors:
        average = tensors[0].clone()
    return {"reduce_s": reduce_s, "average": average, "group": len(members or ())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--peers", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--codec", choices=sorted(STOCK_CODECS), default="float16")
    parser.add_argument("--initial-peers", nargs="*", default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    dht = loopback_dht(options.initial_peers)
    ours = ExactAverager(
        dht,
        prefix=averager_prefix("benchmark", "L0"),
        size=options.size,
        rule=AveragingRule(CODECS[options.codec], part_bytes=PART_BYTES),
        matchmaking_s=MATCHMAKING_S,
        paths_of_module={"L0.E0": (0,)},
    )
    theirs = DecentralizedAverager(
        (torch.zeros(options.size),),
        dht,
        start=True,
        prefix="stock",
        target_group_size=options.peers,
        min_matchmaking_time=MATCHMAKING_S,
        request_timeout=2.0,
        part_size_bytes=PART_BYTES,
        compression=STOCK_CODECS[options.codec](),
        sender_timeout=20.0,
        reducer_timeout=40.0,
    )
    addresses = [str(address) for address in dht.get_visible_maddrs()]
    hello = {"addresses": addresses, "peer_id": dht.peer_id.to_base58()}
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        flat = outer_gradient(options.number, command["round"], options.size)
        started = time.monotonic()
        try:
            if command["kind"] == "exact":
                answer = exact(ours, flat, command)
            else:
                answer = stock(theirs, flat, command)
        except Exception as error:  # Any failure is an answer; the benchmark tells of it.
            print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), flush=True)
            continue
        answer["seconds"] = time.monotonic() - started
        expected = sum(
            outer_gradient(number, command["round"], options.size)
            for number in range(options.peers)
        )
        average = answer.pop("average")
        answer["digest"] = digest(average)
        answer["error"] = float((average - expected / options.peers).abs().max())
        print(json.dumps(answer), flush=True)
    theirs.shutdown()
    ours.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
