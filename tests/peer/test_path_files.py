"""What a peer begins with in a successor run: fetched by digest, believed only if it fits."""

import dataclasses
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dipaco.base.errors import IntegrityError, NetworkError
from dipaco.base.files import canonical_json
from dipaco.modules.state import PathProgress, state_chunks
from dipaco.peer.keeping.path_files import OptimizerFiles, PathData, PathFiles
from dipaco.protocol.plan import RunPlan
from dipaco.routing.run_folder import RunFolder
from dipaco.training.optimizer_states import load_optimizer
from support.runs.tiny_run import make_tiny_run

MODULE = "L0.E1"


class Served:
    """A successor whose genesis lies with others; `files` is a peer that has nothing yet."""

    def __init__(self, folder):
        self.source = make_tiny_run(folder / "source", documents_per_path=8)
        plan = self.source.plan()
        self.genesis = {}
        for module in self.source.grid(plan).modules():
            state = self.source.genesis_state(plan, module)
            momentum = torch.full_like(state.momentum, 0.25)
            self.genesis[module] = dataclasses.replace(state, momentum=momentum)
        self.index = {module: self.serve(state) for module, state in self.genesis.items()}
        self.own = RunFolder(folder / "own")
        self.fetched = []

    def serve(self, state):
        return self.source.blobs.add_bytes(b"".join(bytes(part) for part in state_chunks(state)))

    def files(self):
        plan = self.source.plan()
        genesis = self.source.blobs.add_bytes(canonical_json(self.index))
        plan = RunPlan.model_validate({**plan.model_dump(), "blobs": {**plan.blobs.model_dump(), "genesis": genesis}})
        node = SimpleNamespace(
            plan=plan,
            grid=self.own.grid(plan),
            run_folder=self.own,
            fetcher=SimpleNamespace(blob=self._fetch, sound=lambda sha256, what, read: read()),
        )
        return PathFiles(node)

    def _fetch(self, sha256, what, max_bytes=2**40):
        if not self.source.blobs.has(sha256):
            raise NetworkError(f"could not fetch {what}")
        assert self.source.blobs.path(sha256).stat().st_size <= max_bytes
        self.fetched.append(what)
        return Path(self.own.blobs.path(self.own.blobs.add_bytes(self.source.blobs.read(sha256))))


@pytest.fixture
def served(tmp_path):
    return Served(tmp_path)


def test_only_what_is_needed_is_fetched(served):
    state = served.files().genesis_state(MODULE)
    assert state.digest == served.genesis[MODULE].digest
    assert bool((state.momentum == 0.25).all())
    assert served.fetched == ["the genesis index", f"the genesis state of {MODULE}"]


def test_what_comes_late_for_a_path_that_was_given_up_is_not_kept(served, monkeypatch):
    """Another path would be trained, or checked, with its documents."""
    opened = []
    rows = torch.zeros(1, 1, dtype=torch.int64)

    def open_files(_, path):
        opened.append(path)
        return PathData(path, None, rows, rows[:0])

    monkeypatch.setattr(PathFiles, "_open", open_files)
    files = served.files()
    assert files.want(3)
    assert not files.want(3)
    assert files.want(5)
    files.fetch(5)
    files.fetch(3)
    assert files.take(5).path == 5
    assert opened == [5, 3]
    files.fetch(5)
    files.release()
    assert files.take(5).path == 5
    assert opened == [5, 3, 5, 5]


def test_a_state_that_nobody_serves_is_named(served):
    served.source.blobs.remove(served.index[MODULE])
    with pytest.raises(NetworkError, match=f"genesis state of {MODULE}"):
        served.files().genesis_state(MODULE)


def test_what_is_no_first_state_of_the_module_is_refused(served):
    good = served.genesis[MODULE]
    for bad, message in (
        (served.genesis["L0.E0"], "expected a state of L0.E1, got one of L0.E0"),
        (dataclasses.replace(good, version=3), "has version 3"),
        (dataclasses.replace(good, progress={0: PathProgress(7, 0, 7, 7)}), "counts 7 tokens|differ|describes"),
        (dataclasses.replace(good, parameters=good.parameters / 0), "not finite"),
    ):
        served.index[MODULE] = served.serve(bad)
        with pytest.raises(IntegrityError, match=message):
            served.files().genesis_state(MODULE)


def test_an_index_that_is_none_is_refused(served):
    del served.index["L1.E0"]
    with pytest.raises(IntegrityError, match=r"names no state of module L1\.E0"):
        served.files().genesis_state(MODULE)
    served.index["L1.E0"] = "../../etc/passwd"
    with pytest.raises(IntegrityError, match="not a table of modules and digests"):
        served.files().genesis_state(MODULE)


def test_what_every_path_begins_with_is_read_once_and_not_kept(tmp_path, monkeypatch):
    """It is as large as a path: a node that trains nothing would hold it for good."""
    own = make_tiny_run(tmp_path / "run", documents_per_path=8)
    plan = own.plan()
    modules = own.grid(plan).modules()
    fetcher = SimpleNamespace(blob=lambda *_: None, sound=lambda sha256, what, read: read())
    files = PathFiles(SimpleNamespace(plan=plan, grid=own.grid(plan), run_folder=own, fetcher=fetcher))
    read, reads, all_ask = own.first_parameters, [], threading.Event()

    def slow(plan):
        assert all_ask.wait(60)
        first = read(plan)
        reads.append([weakref.ref(tensor) for tensor in first.values()])
        return first

    monkeypatch.setattr(own, "first_parameters", slow)
    with ThreadPoolExecutor(len(modules)) as workers:
        asked = [workers.submit(lambda module=module: files.genesis_state(module).digest) for module in modules]
        while files._asking < len(modules):
            threading.Event().wait(0.01)
        all_ask.set()
        assert len({future.result(60) for future in asked}) == len(modules)
    assert len(reads) == 1
    gc.collect()
    assert all(tensor() is None for tensor in reads[0]), "nothing holds it any more"


def test_an_optimizer_is_saved_every_half_an_hour_and_when_a_peer_goes(tmp_path):
    """It is as large as the states of the path: in every round it would be half of all that is written."""
    now_s, moments = [0.0], {"n": 0}
    trainer = SimpleNamespace(path=3, optimizer_state=lambda: dict(moments))
    with ThreadPoolExecutor(1) as saver:
        files = OptimizerFiles(tmp_path, trainer, saver, SimpleNamespace(watch=lambda *_: None), lambda: now_s[0])
        saved = []
        for moments["n"] in range(1, 14):
            files.save()
            saver.submit(lambda: None).result(60)
            saved.append(load_optimizer(tmp_path, 3)["n"])
            now_s[0] += 300.0
        assert saved == [1] * 6 + [7] * 6 + [13]
        moments["n"] = 20
        files.keep()
        assert load_optimizer(tmp_path, 3)["n"] == 20
        files.load(3)
        moments["n"] = 21
        files.save()
        saver.submit(lambda: None).result(60)
        assert load_optimizer(tmp_path, 3)["n"] == 21, "after the first round of a path"
