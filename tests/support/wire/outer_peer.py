"""One peer's outer rounds with real files, chains and states, and no network or member."""

import hashlib
import queue
from dataclasses import replace
from types import SimpleNamespace

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dipaco.base.errors import IntegrityError, NetworkError
from dipaco.base.files import atomic_write
from dipaco.modules.compose import gather_module
from dipaco.modules.outer import OuterRule
from dipaco.peer.exchange.chain_store import ChainStore
from dipaco.peer.exchange.files.contribution_files import ContributionFiles
from dipaco.peer.node.states import States
from dipaco.peer.shell.outer_steps import OuterSteps
from dipaco.protocol.chain.steps import MARK_BYTES, Head, genesis_name, sign_row
from dipaco.protocol.identity import peer_id_of_public_key, raw_public_key
from dipaco.protocol.member import actions as a
from dipaco.protocol.member import events as e
from dipaco.routing.batches import BatchStream
from dipaco.routing.run_folder import RunFolder
from dipaco.training.trainer import PathTrainer
from support.swarms.fake_swarm import FakeEvents, FakeRun, FakeTime

MODULE = "L0.E0"
WAIT_S = 60.0


class FakeExchange:
    """Gives the files that lie with other peers of the test."""

    def __init__(self, own):
        self._own = own
        self.others = []

    def gather(self, rows, others, *, check, on_done, timeout_s):
        for row in rows:
            found = [files.find(row.file) for files in (self._own, *self.others)]
            file = next((file for file in found if file is not None), None)
            if file is None:
                on_done(row, "nobody has it", False)
                continue
            try:
                check(row, file)
            except IntegrityError as error:
                on_done(row, str(error), True)
                continue
            self._own.add(row, (file.read_bytes(),))
            on_done(row, "", False)


class FakeNode(FakeRun):
    """What outer rounds need of a node; `fetch` gives states of others."""

    def __init__(self, run, folder, key, fetch):
        plan, own = run.plan(), RunFolder(folder / "run")
        atomic_write(own.manifest_path, run.manifest_path.read_bytes())
        me = peer_id_of_public_key(raw_public_key(key))
        super().__init__(plan, FakeTime(plan.start_s + 100.0).clock, me)
        self.identity = SimpleNamespace(key=key)
        self.rule = OuterRule.of(plan, run.shard_index(plan))
        kept = own.states.kept
        self.chains = ChainStore(plan.run_id, self.grid.modules(), kept.index)
        self.contributions = ContributionFiles(kept)
        self.held = States(self.grid, own.states, own.blobs, self.chains)
        self.folder = own.path
        self.exchange = FakeExchange(self.contributions)
        self.fetcher = SimpleNamespace(state=fetch)


class Peer:
    """One peer that trains path 0, or a keeper that trains nothing."""

    def __init__(self, run, folder, path):
        plan = self.plan = run.plan()
        grid = self.grid = run.grid(plan)
        key = Ed25519PrivateKey.generate()
        self.reported = queue.SimpleQueue()
        self.events = FakeEvents()
        self.fetched = {}
        self.node = FakeNode(run, folder, key, self._fetch)
        self.me = self.node.me
        base = run.base_parameters(plan)
        self.genesis = {m: run.genesis_state(plan, m, base) for m in grid.modules()}
        rows = torch.ones(2, plan.model.sequence_length, dtype=torch.int64)
        files = SimpleNamespace(
            genesis_state=lambda module: self.genesis[module], path=path, validation=rows, own_texts=None
        )
        self.trainer = None if path is None else PathTrainer(plan, grid, torch.device("cpu"))
        self.outer = OuterSteps(
            self.node, files, self.events, self.reported.put, announce=lambda: None, trainer=self.trainer
        )
        if self.trainer is not None:
            heads = []
            for module in grid.modules_of_path(path):
                found = self.do(a.FetchState(self.head0(module), ()))
                assert isinstance(found, e.StateHere)
                heads.append(found.head)
            states = self.outer.hold(tuple(heads))
            tokens = run.train_tokens(plan, path)
            sequences = plan.inner.batch_sequences
            stream = BatchStream(tokens, seed=plan.seed, path=path, batch_sequences=sequences)
            self.trainer.start_path(path, states, stream)

    def _fetch(self, head, holders):
        if head.digest not in self.fetched:
            raise NetworkError(f"none of {len(holders)} holders answers")
        return self.fetched[head.digest]

    def head0(self, module):
        return Head(module, genesis_name(self.plan.run_id, module), 0, 0, -1, "", 0)

    def do(self, action):
        """Have an action carried out, and return what came of it."""
        return self.begin(action) or self.reported.get(timeout=WAIT_S)

    def begin(self, action):
        """Have an action carried out, and return what is known at once."""
        return {**self.outer.handlers(), **self.outer.model_handlers()}[type(action)](action)

    def publish(self, round_index=0, steps=2, module=MODULE):
        for _ in range(steps):
            self.trainer.inner_step()
        held = self.node.held.get(module)
        event = self.do(a.Publish(module, round_index, held.step, held.digest, 0.0))
        assert isinstance(event, e.Published), event
        return event.row

    def foreign_row(self, files, own, data):
        """Return the row of an unknown peer beside an own one, whose file lies in `files` now."""
        key = Ed25519PrivateKey.generate()
        peer = peer_id_of_public_key(raw_public_key(key))
        row = replace(own, peer=peer, bytes=MARK_BYTES + len(data), signature=b"")
        row = replace(row, file=hashlib.sha256(row.mark + data).hexdigest())
        files.add(row, (row.mark, data))
        return sign_row(row, key)

    def gather(self, *rows):
        self.begin(a.Gather(rows[0].module, rows))
        return [self.reported.get(timeout=WAIT_S) for _ in rows]

    def compute(self, base, *steps):
        event = self.do(a.Compute(steps[0].module, base, steps))
        assert isinstance(event, e.StateHere), event
        return event.head

    def adopt(self, head, *steps, save=False):
        """Adopt the state after `steps`, which were not served yet."""
        held = self.node.held
        usual, held.save = held.save, held.save if save else lambda state: None
        adopt = a.Adopt(head, steps[-1], True, 2, True)
        assert self.begin(adopt) is None
        assert self.begin(a.Serve(head.module, head.step, steps)) is None
        self.wait_until_saved()
        held.save = usual

    def wait_until_saved(self):
        for workers in (self.outer._telling, self.outer._saving):
            workers.submit(lambda: None).result(WAIT_S)

    def local(self, module=MODULE):
        return gather_module(self.trainer.model, self.grid, module)
