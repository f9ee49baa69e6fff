"""The rerouter: when it chooses, what it sees, and the file it is kept in."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dipaco.base.errors import ConfigurationError, IntegrityError, StorageError
from dipaco.inference.document_windows import DocumentWindows
from dipaco.inference.fit_rerouter import fit_to_documents
from dipaco.inference.rerouter import Rerouter, decided_at, read_rerouter, rerouted_nats, rerouter_bytes
from dipaco.modules.transformer import PathModel, initialise
from dipaco.protocol.config import GridConfig, ModelConfig
from support.runs.make_plan import make_plan

PREFIX, LENGTH, PATHS = 4, 16, 3


def plan_of(seed=0, paths=PATHS):
    model = ModelConfig(vocabulary_size=64, block_count=2, hidden_size=16, head_count=2, sequence_length=LENGTH)
    return make_plan(seed=seed, model=model, grid=GridConfig(modules_per_level=(paths,)))


def random_rerouter(paths=PATHS):
    plan = plan_of(paths=paths)
    base = PathModel(plan.model)
    initialise(base, 0)
    rerouter = Rerouter(plan.model, paths)
    rerouter.load_base(base)
    with torch.no_grad():
        rerouter.head.weight.normal_(generator=torch.Generator().manual_seed(0))
    return rerouter.eval()


def random_rows():
    """Two documents, of two rows and of one; the last row of each is short."""
    random = np.random.default_rng(0)
    return DocumentWindows(
        rows=random.integers(4, 64, (3, LENGTH)),
        row_tokens=np.array([LENGTH, 9, 13], dtype=np.int32),
        row_documents=np.array([0, 0, 1]),
        document_tokens=np.array([17, 9]),
        ranked=np.array([[1], [2]]),
        label_numbers=np.array([-1, -1], dtype=np.int32),
        label_names=(),
        prefix_tokens=PREFIX,
        short_documents=0,
    )


def test_the_first_choice_is_made_when_the_prefix_has_been_read():
    assert decided_at(12, 4, 3).tolist() == [3, 3, 3, 3, 3, 3, 6, 6, 6, 9, 9, 9]
    assert decided_at(6, 4, 1).tolist() == [3, 3, 3, 3, 4, 5]
    assert set(decided_at(12, 4, 100).tolist()) == {3}


@pytest.mark.parametrize("window", [1, 5, 100])
def test_every_target_costs_what_the_path_chosen_last_says(window):
    rerouter, windows = random_rerouter(), random_rows()
    rows = np.arange(3)
    nats = np.random.default_rng(1).random((PATHS, 3, LENGTH - 1), np.float32)
    paths = np.tile(np.arange(PATHS), (3, 1))
    found = rerouted_nats(rerouter, windows, nats, paths, rows, window)
    used = set()
    for row in range(3):
        routed = torch.tensor([windows.paths[windows.row_documents[row]]])
        for target in range(PREFIX - 1, windows.row_tokens[row] - 1):
            read = PREFIX + (target - PREFIX + 1) // window * window
            seen = torch.from_numpy(windows.rows[row : row + 1, :read])
            with torch.no_grad():
                path = int(rerouter(seen, routed)[0, -1].argmax())
            assert found[row, target] == nats[path, row, target]
            used.add(path)
    assert len(used) > 1
    # In another order of the paths, and with one of them twice in place of another.
    turned = rerouted_nats(rerouter, windows, nats[::-1], paths[:, ::-1], rows, window)
    assert np.array_equal(turned, found)
    fewer = rerouted_nats(rerouter, windows, nats[[1, 1, 2]], paths[:, [1, 1, 2]], rows, window)
    assert np.isin(fewer[:, PREFIX - 1 : 8], nats[1:, :, PREFIX - 1 : 8]).all()


def test_an_unfitted_rerouter_stays_on_the_routed_path():
    windows = random_rows()
    nats = np.random.default_rng(1).random((PATHS, 3, LENGTH - 1), np.float32)
    paths = np.tile(np.arange(PATHS), (3, 1))
    found = rerouted_nats(Rerouter(plan_of().model, PATHS), windows, nats, paths, np.arange(3), 2)
    for row, path in enumerate(windows.paths[windows.row_documents]):
        scored = slice(PREFIX - 1, windows.row_tokens[row] - 1)
        assert np.array_equal(found[row, scored], nats[path, row, scored])


def test_a_base_that_transformers_computes_is_refused_before_anything_is_scored():
    plan = plan_of()
    model = plan.model.model_copy(update={"transformers_config": "{}"})
    source = SimpleNamespace(plan=plan.model_copy(update={"model": model}))
    with pytest.raises(ConfigurationError, match="only adapters are trained; compare paths with --mix N"):
        fit_to_documents(source, [], device=torch.device("cpu"))


def test_a_file_gives_back_the_rerouter_of_its_run(tmp_path):
    plan, rerouter = plan_of(), random_rerouter()
    file = tmp_path / "rerouter.safetensors"
    file.write_bytes(rerouter_bytes(rerouter, plan))
    loaded = read_rerouter(file, plan)
    assert rerouter_bytes(loaded, plan) == file.read_bytes()
    with pytest.raises(ConfigurationError, match="fit one for it with --fit-rerouter"):
        read_rerouter(file, plan_of(seed=1))
    with pytest.raises(StorageError, match="--fit-rerouter"):
        read_rerouter(tmp_path / "absent", plan)


def test_a_broken_file_is_refused(tmp_path):
    plan, file = plan_of(), tmp_path / "rerouter.safetensors"
    sound = rerouter_bytes(random_rerouter(), plan)
    unfit = random_rerouter()
    with torch.no_grad():
        unfit.head.bias[0] = torch.nan
    for data in (
        b"",
        sound[:-4],
        b"no safetensors at all",
        rerouter_bytes(random_rerouter(paths=2), plan),
        rerouter_bytes(unfit, plan),
    ):
        file.write_bytes(data)
        with pytest.raises(IntegrityError, match=r"rerouter\.safetensors"):
            read_rerouter(file, plan)
