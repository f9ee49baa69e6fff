"""A simulation whose paths are spread over several processes: the bits of one process."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from dipaco.modules.errors import ConfigurationError
from dipaco.modules.inner import InnerLoop
from dipaco.routing.run_folder import RunFolder
from dipaco.simulator import cli
from dipaco.simulator.checkpoint import CheckpointFolder
from dipaco.simulator.crew import Crew
from dipaco.simulator.processes import devices_of
from dipaco.simulator.reference import ReferenceSwarm
from dipaco.simulator.report import RoundReport
from dipaco.simulator.settings import SimulatedPeer, SimulatorSettings
from support.simulation import simulate

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT_S = 120.0
REPLICAS = (SimulatedPeer(0), SimulatedPeer(0, 1), SimulatedPeer(1), SimulatedPeer(3))


class ThreadEndedError(Exception):
    """The other end of a line has ended."""


class QueueLine:
    """A line between threads of one process."""

    def __init__(self, rank: int, queues: list[list[queue.Queue[torch.Tensor | None]]]) -> None:
        self.rank, self.count = rank, len(queues)
        self._queues = queues

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._queues[self.rank][to].put(tensor.clone())

    def receive(self, tensor: torch.Tensor, sender: int) -> None:
        sent = self._queues[sender][self.rank].get(timeout=LIMIT_S)
        if sent is None:
            raise ThreadEndedError
        assert (sent.shape, sent.dtype) == (tensor.shape, tensor.dtype)
        tensor.copy_(sent)


def in_a_crew(count: int, work: Callable[[Crew], list[RoundReport]]) -> list[RoundReport]:
    """Do the work in a crew of threads and return what the lead reports."""
    queues: list[list[queue.Queue[torch.Tensor | None]]] = [
        [queue.Queue() for _ in range(count)] for _ in range(count)
    ]

    def be_one(rank: int) -> list[RoundReport]:
        torch.set_num_threads(1)
        try:
            return work(Crew(QueueLine(rank, queues)))
        finally:
            for line in queues[rank]:
                line.put(None)

    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(be_one, rank) for rank in range(count)]
        reports, *others = [future.result(LIMIT_S) for future in running]
    for other in others:
        for ours, theirs in zip(reports, other, strict=True):
            assert theirs.as_dict() | {"seconds": 0, "digests": 0} == ours.as_dict() | {
                "seconds": 0,
                "digests": 0,
            }
    return reports


def assert_equal(reports: list[RoundReport], expected: list[RoundReport]) -> None:
    assert len(reports) == len(expected)
    for report, other in zip(reports, expected, strict=True):
        assert report.as_dict() | {"seconds": 0} == other.as_dict() | {"seconds": 0}


@pytest.mark.parametrize(
    ("count", "keep", "peers"),
    [(2, "memory", None), (3, "disk", REPLICAS), (5, "memory", REPLICAS)],
)
def test_several_processes_have_the_bits_of_one(
    tmp_path: Path,
    private_run: RunFolder,
    count: int,
    keep: str,
    peers: tuple[SimulatedPeer, ...] | None,
) -> None:
    expected = list(ReferenceSwarm(private_run, peers=peers).rounds(2))
    settings = SimulatorSettings(keep=keep, folder=tmp_path)

    def work(crew: Crew) -> list[RoundReport]:
        with crew.lead_first():
            swarm = ReferenceSwarm(private_run, peers=peers, settings=settings, crew=crew)
        return list(swarm.rounds(2))

    assert_equal(in_a_crew(count, work), expected)


# A round of the private run: levels end after 1, 2 and 4 of 4 steps; two paths of each process.
@pytest.mark.parametrize("steps", [1, 5])
def test_a_killed_simulation_goes_on_with_another_number_of_processes(
    tmp_path: Path, private_run: RunFolder, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """One process stops in the middle of a segment, the other one goes on until it has to wait."""
    expected = list(ReferenceSwarm(private_run).rounds(1))
    settings = SimulatorSettings(keep="disk", folder=tmp_path)
    step = InnerLoop.step
    trained: dict[int, int] = {}

    def counted(self: InnerLoop, tokens: torch.Tensor, path_step: int) -> float:
        rank = ranks[id(self)]
        trained[rank] = trained.get(rank, 0) + 1
        if rank == 1 and trained[rank] > steps:
            raise KeyboardInterrupt
        return step(self, tokens, path_step)

    ranks: dict[int, int] = {}
    stopped: list[int] = []

    def be_killed(crew: Crew) -> list[RoundReport]:
        with crew.lead_first():
            swarm = ReferenceSwarm(private_run, settings=settings, crew=crew)
        ranks[id(swarm.workers[crew.rank]._bench.inner)] = crew.rank  # type: ignore[union-attr]
        crew.wait()
        try:
            swarm.run_round()
        except (KeyboardInterrupt, ThreadEndedError):
            stopped.append(crew.rank)
        return []

    with monkeypatch.context() as patch:
        patch.setattr(InnerLoop, "step", counted)
        in_a_crew(2, be_killed)
    assert sorted(stopped) == [0, 1]
    assert_equal([ReferenceSwarm(private_run, settings=settings).run_round()], expected)


def test_a_checkpoint_of_several_processes_is_one_of_a_simulation(
    tmp_path: Path, private_run: RunFolder
) -> None:
    expected = list(ReferenceSwarm(private_run).rounds(2))
    checkpoints = CheckpointFolder(tmp_path)

    def first(crew: Crew) -> list[RoundReport]:
        swarm = ReferenceSwarm(private_run, crew=crew)
        reports = [swarm.run_round()]
        checkpoints.save(swarm)
        return reports

    def second(crew: Crew) -> list[RoundReport]:
        latest = checkpoints.latest()
        assert latest is not None
        states = checkpoints.anchors(latest, private_run.grid(private_run.plan()))
        swarm = ReferenceSwarm(private_run, states=states, first_round=1, crew=crew)
        checkpoints.restore(latest, swarm)
        return [swarm.run_round()]

    reports = in_a_crew(3, first)
    assert_equal(reports + in_a_crew(2, second), expected)


def test_the_command_starts_a_process_for_each_device_and_resumes(
    tmp_path: Path, shared_run: RunFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = simulate(capfd, shared_run.path, "--rounds", 2)
    simulate(capfd, shared_run.path, "--out", tmp_path, "--keep", "disk")
    arguments = (shared_run.path, "--out", tmp_path, "--keep", "disk", "--resume")
    (line,) = simulate(capfd, *arguments, "--devices", "cpu,cpu")
    assert line | {"seconds": 0} == expected[1] | {"seconds": 0}
    written, grid = RunFolder(tmp_path), shared_run.grid(shared_run.plan())
    state = written.states.load_latest("L1.E1", grid.layout("L1.E1"))
    assert state is not None
    assert state.digest == json.loads(json.dumps(line))["digests"]["L1.E1"]


def test_devices_that_cannot_be(shared_run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert devices_of("0,1, cuda:3") == ("cuda:0", "cuda:1", "cuda:3")
    for given, words in (
        (["--devices", "0,x"], "'x' is not a device"),
        (["--devices", "cpu,0"], "two types"),
        (["--devices", "0,1", "--device", "cuda"], "give one of them"),
        (["--devices", ""], "is not a device"),
    ):
        assert cli.main([str(shared_run.path), *given]) == ConfigurationError.exit_code
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
