"""The work of `prepare` as a map over pieces: the same run wherever the pieces are done."""

import functools
import os

import pytest

from dipaco.base.errors import ConfigurationError, CorpusError, NetworkError, StorageError
from dipaco.bootstrap import bootstrap_command
from dipaco.bootstrap.preparing import corpus_stages, routing_stages
from dipaco.bootstrap.preparing.predecessor import open_predecessor
from dipaco.bootstrap.preparing.workers import Workers, open_workers
from dipaco.simulator import simulate_command as simulate
from support.runs.prepared_run import RUN_TOML, on_cpu, prepare, write_run

INNER = "[inner]\nbatch_sequences = 4\n"
SUCCESSOR = RUN_TOML.split("[tokenizer]")[0] + (
    "[grid]\nmodules_per_level = [2, 2]\n"
    '[router]\nkind = "discriminative"\nprefix_tokens = 8\ntraining_documents = 100\n'
)


def two_runs(folder, out, workers):
    """Prepare a run, train it for a round, and prepare its successor; return the blobs of both."""
    first = out / "first"
    plan = prepare(folder / "RUN.toml", first, on_cpu(workers=workers))
    arguments = [str(first), "--out", str(first), "--rounds", "1", "--steps-per-round", "3"]
    assert simulate.main([*arguments, "--validation-sequences", "0"]) == 0
    options, predecessor = on_cpu(workers=workers), open_predecessor(first)
    second = prepare(folder / "NEXT.toml", out / "second", options, predecessor=predecessor)
    return [plan.blobs, second.blobs]


@pytest.fixture(autouse=True, scope="module")
def _small_pieces():
    """Of so small a corpus, too, there shall be several pieces."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((corpus_stages, "write_token_corpora"), (routing_stages, "ShardBuilder")):
            patch.setattr(module, name, functools.partial(getattr(module, name), chunk_documents=16))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workers")
    write_run(folder, RUN_TOML + INNER)
    (folder / "NEXT.toml").write_text(SUCCESSOR + INNER)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    return two_runs(folder, folder / "alone", Workers())


def test_four_processes_make_the_same_run(folder, alone):
    with open_workers(4) as workers:
        assert two_runs(folder, folder / "four", workers) == alone


def test_a_dask_cluster_makes_the_same_run(folder, alone):
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        open_workers(dask=cluster.scheduler_address) as workers,
    ):
        assert two_runs(folder, folder / "dask", workers) == alone


def test_a_worker_of_a_cluster_that_dies_is_told():
    distributed = pytest.importorskip("distributed")
    import dask

    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        distributed.LocalCluster(n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        open_workers(dask=cluster.scheduler_address) as workers,
        pytest.raises(StorageError, match="a worker has died .*give the same command again"),
    ):
        list(workers.map(die, [1]))


def square(number):
    return number * number


def test_pieces_come_back_in_order_and_few_are_read_ahead():
    taken = []

    def pieces():
        for number in range(50):
            taken.append(number)
            yield number

    with open_workers(2) as workers:
        for place, done in enumerate(workers.map(square, pieces())):
            assert done == place * place
            assert len(taken) <= place + 6


def refuse(number):
    raise CorpusError(f"no piece {number}")


def die(number):
    os._exit(9)


def test_what_a_worker_raises_and_its_death_are_told():
    with open_workers(2) as workers:
        with pytest.raises(CorpusError, match="no piece 1"):
            list(workers.map(refuse, [1, 2, 3]))
        with pytest.raises(StorageError, match="fewer --workers"):
            list(workers.map(die, [1]))


def test_flags(folder, tmp_path, capsys):
    arguments = ["prepare", str(folder / "RUN.toml"), "--out", str(tmp_path)]
    code = bootstrap_command.main([*arguments, "--workers", "2", "--dask", "tcp://127.0.0.1:1"])
    assert code == ConfigurationError.exit_code
    assert "give one of them" in capsys.readouterr().err


def test_a_cluster_that_does_not_answer(monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr("dipaco.bootstrap.preparing.workers._DASK_TIMEOUT_S", 1.0)
    with pytest.raises(NetworkError, match="no Dask scheduler answers"), open_workers(dask="tcp://127.0.0.1:1"):
        pass
