"""Four machines train one small model and meet every ten steps, calm, and with a loss and a join.

Ours are real peers of a run with one path. Beside them: Hivemind's `Optimizer` with local updates,
and torchft's `DiLoCo`, which has a coordinator. All have the model, the base, the data, the inner
optimizer and the time of a step of a prepared run of `examples/tiny`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import churn
import numpy as np
import torch
from parts.changed_run import ChangedRun
from parts.churn_counts import Fault
from parts.common import Report, scratch_folder
from support.runs.tiny_run import sign_tiny_run, tiny_shard

from dipaco.base.files import canonical_json
from dipaco.modules.transformer import PathModel, token_losses
from dipaco.protocol.config import InnerConfig
from dipaco.protocol.plan import RunPlan, ShardIndex
from dipaco.routing.batches import BatchStream
from dipaco.routing.routers.kinds import KMeansRouter
from dipaco.routing.run_folder import RunFolder
from dipaco.training.inner import learning_rate_at
from dipaco.training.scoring import LossSum, sum_losses
from rivals.packages import installed
from rivals.turns import Figures, Turns, Worker

PEERS, STEPS_OF_A_ROUND, STEP_S = 4, 10, 1.0
ROUND_S = STEPS_OF_A_ROUND * STEP_S
ROUNDS = 8
KILLED_AT, JOINED_AT = 2.5, 4.0
"""In rounds: one of four, and another that was never there."""
HELD_OUT_EVERY = 4
END_S = 60.0
"""A peer that has done its part stays so long for the others, or until it is ended."""
MATCHMAKING_S, AVERAGING_S = 3.0, 30.0
"""Of Hivemind: what it advises for small runs on one machine."""
OUTER_RATE, OUTER_MOMENTUM = 0.8, 0.5
RIVALS = ("hivemind", "torchft")
PROGRAMS = ("ours", *RIVALS)


def compare(
    report: Report, kind: str, prepared: Path, rivals: Path, programs: Sequence[str] = PROGRAMS
) -> None:
    """Add the loss and what was kept; in `churn` one is killed and another joins."""
    with scratch_folder() as folder:
        run = one_path(prepared, folder / "one")
        first = held_out_loss(run, dict(run.base_model(run.plan()).named_parameters()))
        report.row(kind, "loss of the base", "", f"{first:.4f}", "")
        found = {}
        for program in programs:
            if program == "ours":
                found[program] = ours(folder / kind, run, kind)
            else:
                found[program] = theirs(run, kind, program, rivals, folder)
            print(f"{kind}, {program}: {json.dumps(found[program])}", file=sys.stderr, flush=True)
        for program, one in found.items():
            report.row(kind, program, f"loss {one['loss']:.4f}", f"kept {one['kept']:.3f}",
                       f"{one['trained']:,} tokens")  # fmt: skip
    report.figures[kind] = {"base": first, **found}


def one_path(prepared: Path, folder: Path) -> RunFolder:
    """Write a run with one path that has all shards of a prepared run, and AdamW."""
    source = ChangedRun(prepared, {"inner.optimizer": "adamw"}, one_path=True)
    plan = source.plan()
    run = RunFolder(folder)
    shutil.copytree(source.path / "blobs", run.path / "blobs")
    rows = (source.train_tokens(plan, 0), source.validation_tokens(plan, 0)[::HELD_OUT_EVERY])
    shard = tiny_shard(run, plan.model, 0, *rows, documents=len(rows[0]))
    index = ShardIndex(sequence_length=plan.model.sequence_length, paths=(shard,))
    features = np.random.default_rng(0).normal(size=(8, plan.model.hidden_size))
    blobs = plan.blobs.model_copy(
        update={
            "shards": run.blobs.add_bytes(canonical_json(index.model_dump(mode="json"))),
            "router": run.blobs.add_bytes(KMeansRouter.fit(features, 1).to_bytes()),
        }
    )
    routing = plan.routing.model_copy(update={"kind": "kmeans"})
    sign_tiny_run(run, plan.model_copy(update={"blobs": blobs, "routing": routing}))
    return run


def held_out_loss(run: RunFolder, parameters: dict[str, torch.Tensor]) -> float:
    """Return the loss of a model on held-out text, nats a token."""
    plan = run.plan()
    model = PathModel(plan.model).eval()
    model.load_state_dict(parameters)
    rows = run.validation_tokens(plan, 0)
    found = LossSum(*sum_losses(model, rows, plan.routing.prefix_tokens)).loss
    assert found is not None
    return found


# -- ours


class OnePath(churn.World):
    """Real peers of the run of one path, in rounds by the clock."""

    source: RunFolder

    def _make_run(self, folder: Path) -> RunFolder:
        shutil.copytree(self.source.path, folder)
        run = RunFolder(folder)
        plan: RunPlan = run.plan()
        rounds = plan.rounds.model_copy(update={"duration_s": ROUND_S, "inner_steps": 0})
        sign_tiny_run(run, plan.model_copy(update={"rounds": rounds, "start_s": time.time()}))
        return run


def ours(folder: Path, run: RunFolder, kind: str) -> Figures:
    """Let our peers train, and return what they have in the end."""
    chosen = argparse.Namespace(
        rounds=ROUNDS, round_s=ROUND_S, peers=PEERS, step_s=STEP_S, calm=False, closed=0,
        bootstrap_dies=False, elders=0, clocks_off_s=0.0, seed=0,
    )  # fmt: skip
    faults = [Fault(KILLED_AT, 0, "kill"), Fault(JOINED_AT, 0, "join")] if kind == "churn" else []
    OnePath.source = run
    world = OnePath(folder, chosen)
    with world.swarm:
        world.begin()
        world.churn(faults)
        world.settle()
    counts = world.count()
    found = churn.figures_of(world, counts)
    loss = float(np.log(found["perplexity"]))
    # Every token has a count for each module of its path, and there is one.
    return {
        "loss": round(loss, 4),
        "kept": round(counts.final_tokens / counts.trained, 4),
        "trained": counts.trained,
        "all": found,
    }


# -- theirs


def theirs(run: RunFolder, kind: str, program: str, rivals: Path, folder: Path) -> Figures:
    """Let a rival's peers train, and return what they have in the end."""
    packages = [installed("torchft", rivals)] if program == "torchft" else []
    place = folder / f"{kind}-{program}"
    place.mkdir()
    with ExitStack() as stack:
        peers: list[Worker] = []

        def start(role: str, entry: str) -> Worker:
            words = ("--run", str(run.path), "--place", str(place), "--join", entry)
            number = ("--number", str(len(peers)))
            worker = Worker("rivals.local_updates", role, *words, *number, packages=packages)
            return stack.enter_context(worker)

        first = start("coordinator" if program == "torchft" else program, "")
        entry = str(first.turn()["address"])
        peers += [first] if program == "hivemind" else []
        while len(peers) < PEERS:
            peers.append(start(program, entry))
        for peer in peers:
            peer.turn()
        began = time.time() + 1.0
        ended = began + ROUNDS * ROUND_S
        for peer in peers:
            peer.tell(f"{began} {ended}")
        staying = list(peers)
        if kind == "churn":
            wait_until(began + KILLED_AT * ROUND_S)
            staying.pop().__exit__()
            # Its program takes some time to start.
            peers.append(start(program, entry))
            peers[-1].turn()
            wait_until(began + JOINED_AT * ROUND_S)
            peers[-1].tell(f"{time.time()} {ended}")
            staying.append(peers[-1])
        for peer in staying:
            peer.answer()
    notes = [json.loads((place / f"{number}.json").read_text()) for number in range(len(peers))]
    files = [place / f"{peers.index(peer)}.pt" for peer in staying]
    # One that came late has perhaps never met the others.
    losses = [held_out_loss(run, torch.load(file)) for file in files if file.exists()]
    trained, merged = (sum(note[key] for note in notes) for key in ("trained", "merged"))
    return {
        # Of the peers that stayed to the end: what each would hand on.
        "loss": round(float(np.mean(losses)), 4),
        "losses": losses,
        "kept": round(merged / trained, 4),
        "trained": trained,
        "peers": notes,
    }


def wait_until(at_s: float) -> None:
    """Sleep until then."""
    time.sleep(max(0.0, at_s - time.time()))


class Peer:
    """One of their peers: the loop around the rival's optimizer, and notes of what was kept."""

    def __init__(self, run: RunFolder, place: Path, number: int) -> None:
        plan = run.plan()
        self.config: InnerConfig = plan.inner
        self.model = run.base_model(plan).train()
        self.batches = BatchStream(
            run.train_tokens(plan, 0),
            seed=plan.seed,
            path=0,
            batch_sequences=self.config.batch_sequences,
        )
        self.replica = number
        self._file, self._states = place / f"{number}.json", place / f"{number}.pt"
        self.trained = self.merged = self.dropped = 0
        self.groups: list[int] = []
        self.troubles: list[str] = []

    def inner_optimizer(self, parameters: Any = None) -> torch.optim.Optimizer:
        """Return AdamW as our peers have it."""
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        others = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": self.config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        betas = (self.config.beta1, self.config.beta2)
        return torch.optim.AdamW(
            groups, lr=self.config.learning_rate, betas=betas, eps=self.config.epsilon
        )

    def train(self, step: Callable[[], Any], groups: Any, began_s: float, ended_s: float) -> None:
        """Take steps of at least `STEP_S` until the end."""
        wait_until(began_s)
        number = 0
        while time.time() < ended_s:
            due = time.time() + STEP_S
            tokens = self.batches.batch(number, self.replica)
            for group in groups():
                group["lr"] = learning_rate_at(self.config, number, number)
            self.model.zero_grad()
            losses = token_losses(self.model, tokens)
            (losses.sum() / (losses != 0).sum()).backward()
            torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), self.config.gradient_clip or float("inf")
            )
            self.trained += self.batches.tokens_per_batch
            number += 1
            try:
                step()
            except Exception as error:
                self.troubles.append(f"step {number}: {type(error).__name__}: {error}"[:300])
            self.note()
            wait_until(due)

    def meet(self, group: int) -> None:
        """Note that what was trained is in what all of a group have, and what that is."""
        self.merged = self.trained - self.dropped
        self.groups.append(group)
        states = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        torch.save(states, self._states.with_suffix(".new"))
        self._states.with_suffix(".new").replace(self._states)

    def drop(self) -> None:
        """Note that what was trained since the last meeting is replaced by what others have."""
        self.dropped = self.trained - self.merged

    def note(self) -> None:
        """Write down what is known, for the case that this peer is killed."""
        found = {
            "trained": self.trained,
            "merged": self.merged,
            "dropped": self.dropped,
            "groups": self.groups,
            "troubles": self.troubles,
        }
        self._file.with_suffix(".new").write_text(json.dumps(found))
        self._file.with_suffix(".new").replace(self._file)


def hivemind_peer(peer: Peer, turns: Turns, entry: str) -> None:
    """Be a peer of Hivemind's `Optimizer` that averages parameters, not gradients."""
    import hivemind

    dht = hivemind.DHT(
        host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=[entry] if entry else [], start=True
    )
    batch = peer.config.batch_sequences
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="beside",
        batch_size_per_step=batch,
        target_batch_size=batch * STEPS_OF_A_ROUND * PEERS,
        optimizer=peer.inner_optimizer(),
        use_local_updates=True,
        matchmaking_time=MATCHMAKING_S,
        averaging_timeout=AVERAGING_S,
        verbose=True,
    )

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            words = record.getMessage()
            if words.startswith("Averaged parameters with"):
                self.group = int(words.split()[3])
            elif words.startswith("Received parameters from background"):
                peer.meet(self.group)
            elif "out of sync" in words:
                peer.drop()

    for name in ("optimizer", "state_averager"):
        logging.getLogger(f"hivemind.optim.{name}").addHandler(Listener())
    begin(peer, turns, str(dht.get_visible_maddrs()[0]), optimizer.step,
          lambda: optimizer.param_groups)  # fmt: skip


def torchft_peer(peer: Peer, turns: Turns, entry: str, number: int) -> None:
    """Be a replica of torchft's `DiLoCo`."""
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    inner = peer.inner_optimizer()
    outer = torch.optim.SGD(
        peer.model.parameters(), lr=OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True
    )

    def load(state: Any) -> None:
        peer.drop()
        peer.model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])
        outer.load_state_dict(state["outer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=AVERAGING_S)),
        min_replica_size=2,
        use_async_quorum=False,
        # All have the same base; otherwise the first round of all but one is lost.
        init_sync=False,
        load_state_dict=load,
        state_dict=lambda: {
            "model": peer.model.state_dict(),
            "inner": inner.state_dict(),
            "outer": outer.state_dict(),
        },
        timeout=timedelta(seconds=AVERAGING_S),
        lighthouse_addr=entry,
        replica_id=f"peer{number}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    seen = 0

    def step() -> None:
        nonlocal seen
        inner.step()
        if manager.current_step() > seen:
            seen = manager.current_step()
            peer.meet(manager.num_participants())

    with DiLoCo(manager, [peer.model], inner, outer, sync_every=STEPS_OF_A_ROUND):
        begin(peer, turns, "", step, lambda: inner.param_groups)


def begin(
    peer: Peer, turns: Turns, address: str, step: Callable[[], Any], groups: Callable[[], Any]
) -> None:
    """Say where this peer is, train when told, and end even if a step does not."""
    while not (command := turns.next()):
        turns.answer({"address": address})
    began_s, ended_s = map(float, command.split())
    work = threading.Thread(target=peer.train, args=(step, groups, began_s, ended_s), daemon=True)
    work.start()
    wait_until(ended_s + 2.0)
    peer.note()
    turns.answer({})
    time.sleep(END_S)
    os._exit(0)


def coordinate(turns: Turns) -> None:
    """Be torchft's coordinator."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=5000)
    while True:
        turns.next()
        turns.answer({"address": server.address()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("coordinator", *RIVALS))
    for name in ("--run", "--place", "--join", "--number"):
        parser.add_argument(name, required=True)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    turns, number = Turns(), int(chosen.number)
    if chosen.role == "coordinator":
        coordinate(turns)
    peer = Peer(RunFolder(chosen.run), Path(chosen.place), number)
    if chosen.role == "hivemind":
        hivemind_peer(peer, turns, chosen.join)
    else:
        torchft_peer(peer, turns, chosen.join, number)


if __name__ == "__main__":
    main()
