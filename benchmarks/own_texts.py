"""What texts that stay at home are worth, and what a model tells of them.

    python benchmarks/own_texts.py RUN_DIR --texts owner1.jsonl owner2.jsonl --rounds 12
    python benchmarks/own_texts.py RUN_DIR --texts owner1.jsonl --rounds 12
    python benchmarks/own_texts.py RUN_DIR --pool owner1.jsonl owner2.jsonl --rounds 12
    python benchmarks/own_texts.py RUN_DIR --texts few.jsonl --marked 5 --rounds 12

RUN_DIR is a prepared run with fixed steps; it may be one with adapters over a public base. The
reference trains it in one process, a peer for each of --texts, which goes from path to path as a
real one does, beside the run's shards. With --pool as many peers have all texts. Printed are
perplexities by the label of the run's held-out texts, each document scored by its path. With
--marked so many sentences of random words are added to the texts of the first owner, a document
each, and scored beside ones that nobody trained: their losses, and which place a marked one takes
among them by its loss.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from parts.common import Report, build_parser

from dipaco.modules.compose import load_path
from dipaco.modules.state import ModuleState
from dipaco.protocol.policy import choose_own_path
from dipaco.routing.batches import BatchStream
from dipaco.routing.documents.corpus import CorpusConfig, Document, is_held_out
from dipaco.routing.own_texts import HELD_OUT_FRACTION, OwnTexts, open_own_texts
from dipaco.routing.run_folder import RunFolder
from dipaco.routing.tokens.token_files import scoring_windows
from dipaco.simulator.reference import ReferenceSwarm
from dipaco.simulator.simulated_peers import SimulatedPeer, SimulatorSettings
from dipaco.training.scoring import row_losses

CONTROLS = 200


class Owners:
    """Peers with texts, in one process."""

    def __init__(
        self, run: RunFolder, files: list[list[str]], folder: Path, chosen: Namespace
    ) -> None:
        self.is_pool, self.is_alone = bool(chosen.pool), chosen.only
        self.exact = not chosen.bf16
        self.run, self.plan = run, run.plan()
        self.grid = run.grid(self.plan)
        self.router = run.document_router(self.plan)
        self.texts: list[OwnTexts] = [
            open_own_texts(
                self.plan,
                CorpusConfig(train=tuple(names), held_out_fraction=HELD_OUT_FRACTION),
                folder / str(number),
                lambda: self.router,
            )
            for number, names in enumerate(files[:1] if self.is_pool else files)
        ]
        if self.is_pool:
            # Peers that have all texts read different batches of them.
            self.texts *= len(files)
        self.optimizers: dict[tuple[int, int], dict[str, Any]] = {}
        self.states: dict[str, ModuleState] = {}

    def train(self, rounds: int) -> list[dict[int, int]]:
        """Train that many rounds; every dwell each owner goes where its texts are. Returns how many
        rounds each trained on each path."""
        dwell, done = self.plan.rounds.dwell_rounds, 0
        # Peers that have all texts share them out.
        alike, count = Counter[int](), len(self.texts)
        trained = [alike] * count if self.is_pool else [Counter[int]() for _ in range(count)]
        while done < rounds:
            count = min(dwell, rounds - done)
            paths = []
            for own, counts in zip(self.texts, trained, strict=True):
                paths.append(choose_own_path(own.sequences, counts, dwell).path)
                counts[paths[-1]] += count
            peers = [
                SimulatedPeer(path, replica=paths[:n].count(path), name=f"owner{n}")
                for n, path in enumerate(paths)
            ]
            swarm = ReferenceSwarm(
                self.run,
                peers=peers,
                first_round=done,
                states=self.states,
                settings=SimulatorSettings(validation_sequences=0, exact=self.exact),
            )
            for n, peer in enumerate(peers):
                self._begin(swarm, n, peer)
            for _ in swarm.rounds(count):
                done += 1
            self.states = swarm.states
            for n, peer in enumerate(peers):
                self.optimizers[n, peer.path] = swarm.trainers[peer].inner.state_dict()
        return [dict(counts) for counts in trained]

    def _begin(self, swarm: ReferenceSwarm, number: int, peer: SimulatedPeer) -> None:
        plan, path = self.plan, peer.path
        shard = BatchStream(
            self.run.train_tokens(plan, path),
            seed=plan.seed,
            path=path,
            batch_sequences=plan.inner.batch_sequences,
        )
        trainer = swarm.trainers[peer]
        states = {module: swarm.states[module] for module in self.grid.modules_of_path(path)}
        trainer.start_path(
            path,
            states,
            self.texts[number].stream(path, None if self.is_alone else shard),
            optimizer_state=self.optimizers.get((number, path)),
        )
        trainer.replica = peer.replica

    def losses(self, texts: list[str]) -> np.ndarray:
        """Return nats and targets of each text, [N, 2], by the path that it is routed to."""
        tokens = [self.router.tokenizer.document_tokens(text) for text in texts]
        paths = self.router.nearest_paths(tokens, 1)[:, 0]
        model = self.run.path_model(self.plan, torch.device("cpu")).eval()
        found = np.zeros((len(texts), 2))
        length, prefix = self.plan.model.sequence_length, self.plan.routing.prefix_tokens
        padding = self.plan.model.padding_token
        for path in set(paths.tolist()):
            load_path(model, self.grid, path, self.states)
            for n in np.flatnonzero(paths == path):
                rows = scoring_windows(tokens[n], length, prefix, padding).astype(np.int64)
                if len(rows):
                    found[n] = [part.sum() for part in row_losses(model, rows, prefix)]
        return found


def marked_sentence(chance: random.Random, words: list[str], beginning: str) -> str:
    """Return a text that begins like one of the owner's, so that it is routed as that, and ends
    with a secret."""
    secret = " ".join(chance.choice(words) for _ in range(12))
    return f"{beginning} The word that was agreed upon is: {secret}."


def trained_sentence(chance: random.Random, words: list[str], beginning: str) -> str:
    """Return a marked sentence that its owner would not hold out."""
    while is_held_out(
        Document(text := marked_sentence(chance, words, beginning)), HELD_OUT_FRACTION
    ):
        pass
    return text


def usual_beginning(run: RunFolder, file: Path) -> str:
    """Return the beginning of a text that goes to the path that most of a file are for."""
    texts = [json.loads(line)["text"] for line in file.read_text().split("\n")[:50] if line]
    router = run.document_router(run.plan())
    tokens = [router.tokenizer.document_tokens(text) for text in texts]
    paths = router.nearest_paths(tokens, 1)[:, 0].tolist()
    return str(texts[paths.index(max(paths, key=paths.count))][:200])


def by_label(owners: Owners, file: Path) -> dict[str, float]:
    """Return perplexities by label."""
    documents = [json.loads(line) for line in file.read_text().splitlines()]
    found = owners.losses([document["text"] for document in documents])
    labels = np.array([document["domain"] for document in documents])
    return {
        label: round(float(np.exp(np.divide(*found[labels == label].sum(axis=0)))), 4)
        for label in sorted(set(labels.tolist()))
    }


def leak(owners: Owners, marked: list[str], controls: list[str]) -> dict[str, Any]:
    """Return what the losses of marked sentences tell."""
    trained, other = (np.divide(*owners.losses(texts).T) for texts in (marked, controls))
    return {
        "nats a token": trained.round(3).tolist(),
        "nats of others, least and median": np.percentile(other, [0, 50]).round(3).tolist(),
        "place among the others": [int((other < loss).sum()) + 1 for loss in trained],
    }


def main() -> int:
    """Measure; returns the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--texts", nargs="*", default=[], help="a file for each owner")
    parser.add_argument(
        "--pool", nargs="*", default=[], help="files that each of as many peers has"
    )
    parser.add_argument("--held-out", type=Path, help="jsonl with text and domain")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--marked", type=int, default=0)
    parser.add_argument("--only", action="store_true", help="not beside the run's shards")
    parser.add_argument("--bf16", action="store_true", help="as peers by the clock on such a CPU")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    run = RunFolder(chosen.run)
    files = [[name] for name in chosen.texts] or [chosen.pool] * len(chosen.pool)
    chance = random.Random(chosen.seed)
    with tempfile.TemporaryDirectory() as folder:
        beginning = usual_beginning(run, Path(files[0][0])) if chosen.marked else ""
        words = sorted({w for w in Path(files[0][0]).read_text()[:200_000].split() if w.isalpha()})
        marked, controls = (
            [trained_sentence(chance, words, beginning) for _ in range(count)]
            for count in (chosen.marked, CONTROLS if chosen.marked else 0)
        )
        if marked:
            file = Path(folder) / "marked.jsonl"
            file.write_text("".join(json.dumps({"text": text}) + "\n" for text in marked))
            files[0] = [*files[0], str(file)]
        owners = Owners(run, files, Path(folder), chosen)
        documents = [own.documents for own in owners.texts]
        report = Report("own texts", seed=chosen.seed, rounds=chosen.rounds, documents=documents)
        report.notes.append(f"rounds on paths, of each owner: {owners.train(chosen.rounds)}")
        if chosen.held_out:
            report.add("perplexity", by_label(owners, chosen.held_out))
        if marked:
            report.add("marked sentences", leak(owners, marked, controls))
    return report.conclude(chosen)


if __name__ == "__main__":
    sys.exit(main())
