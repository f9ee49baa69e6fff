"""A process with a DHT and one exact averager, told what to do by lines of JSON on its input.

Run by `tests/test_averager_processes.py`. It prints its addresses, then one line for each command.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
from typing import Any

import torch
from dipaco.modules.codecs import CODECS, Codec
from dipaco.modules.outer import SECTION_ROWS, AveragingRule, Contribution
from dipaco.peer.averaging.averager import AveragingFailed, ExactAverager
from dipaco.peer.averaging.codec import PartCodec
from dipaco.peer.averaging.group import averager_prefix
from hivemind.proto import runtime_pb2

from support.allreduce_harness import signing_of
from support.host_process import (
    ANCHOR,
    MATCHMAKING_S,
    SILENCE_S,
    digest,
    loopback_dht,
    outer_gradient,
)


class DeadlyCodec(PartCodec):
    """Kills its host, and so its averager, when it has decoded so many parts."""

    def __init__(self, codec: Codec, parts: int) -> None:
        super().__init__(codec)
        self.parts_left = parts

    def decode(self, message: runtime_pb2.Tensor, elements: int) -> torch.Tensor:
        self.parts_left -= 1
        if self.parts_left == 0:
            os.kill(os.getppid(), signal.SIGKILL)
            # The averager ends with its host, but its other threads could go on until it does.
            os.kill(os.getpid(), signal.SIGKILL)
        return super().decode(message, elements)


def average(averager: ExactAverager, number: int, command: dict[str, Any]) -> dict[str, Any]:
    round_index = command["round"]
    flat = outer_gradient(number, round_index, command["size"])
    before = flat.clone()
    started = time.monotonic()
    answer: dict[str, Any]
    try:
        outcome = averager.average(
            flat,
            candidates=command["candidates"],
            close_s=command["close_s"],
            end_s=command["close_s"] + 60.0,
            attempt=command.get("attempt", 0),
            contribution=Contribution(
                command.get("path", number % 2),
                averager.peer_id.to_base58(),
                command.get("tokens", 1000 + number),
            ),
            module=command.get("module", "L0.E0"),
            round_index=round_index,
            anchor_digest=command.get("anchor", ANCHOR),
            greatest_tokens=command.get("greatest_tokens", 10_000),
        )
        answer = {
            "digest": digest(outcome.average),
            "table": [(row.path, row.peer, row.tokens) for row in outcome.table],
            "reduce_s": outcome.reduce_s,
        }
    except AveragingFailed as failure:
        answer = {
            "failed": str(failure),
            "peers_seen": failure.peers_seen,
            "culprits": failure.culprits,
            "notices": failure.notices,
        }
    answer["seconds"] = time.monotonic() - started
    answer["unchanged"] = torch.equal(flat, before)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--codec", default="float16")
    parser.add_argument("--initial-peers", nargs="*", default=[])
    parser.add_argument("--die-after-parts", type=int, default=0)
    parser.add_argument("--section-rows", type=int, default=SECTION_ROWS)
    parser.add_argument("--check-pieces", type=int, default=0)
    parser.add_argument("--debug", action="store_true")
    arguments = parser.parse_args()
    if arguments.debug:
        logging.basicConfig(level=logging.DEBUG)
    torch.set_num_threads(1)
    torch.randn(100_000).sum()  # A host that has used its threads before it forks.
    handler = signal.getsignal(signal.SIGINT)
    dht = loopback_dht(arguments.initial_peers)
    signal.signal(signal.SIGINT, handler)
    rule = AveragingRule(
        CODECS[arguments.codec],
        section_rows=arguments.section_rows,
        part_bytes=2**16,
        check_pieces=arguments.check_pieces,
    )
    averager = ExactAverager(
        dht,
        prefix=averager_prefix("test", "L0"),
        size=arguments.size,
        rule=rule,
        matchmaking_s=MATCHMAKING_S,
        paths_of_module={"L0.E0": (0, 1)},
        silence_s=SILENCE_S,
        signing=signing_of(dht.peer_id),
        start=False,
    )
    if arguments.die_after_parts:
        averager._codec = DeadlyCodec(rule.codec, arguments.die_after_parts)
    averager.run_in_background()
    assert signal.getsignal(signal.SIGINT) is handler
    hello = {
        "addresses": [str(address) for address in dht.get_visible_maddrs()],
        "peer_id": dht.peer_id.to_base58(),
        "processes": [averager.pid, dht.pid],
    }
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        command = {"size": arguments.size, **json.loads(line)}
        if "shutdown_after_s" in command:
            threading.Timer(command["shutdown_after_s"], averager.shutdown).start()
        print(json.dumps(average(averager, arguments.number, command)), flush=True)
    started = time.monotonic()
    averager.shutdown()
    averager.shutdown()
    assert time.monotonic() - started < SILENCE_S
    dht.shutdown()


if __name__ == "__main__":
    main()
