"""Copies of foreign best states: when they are fetched, named, announced and let go of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dipaco.dht.records import BlobRecord, Claim, PeerRecord
from dipaco.dht.view import PathService, SwarmView
from dipaco.modules.best_parameters import BestParameters, BestParametersStore, best_parameters_of
from dipaco.modules.config import RoundsConfig
from dipaco.modules.errors import NetworkError
from dipaco.modules.evaluate import LossSum
from dipaco.modules.grid import Grid
from dipaco.modules.state import ModuleState, genesis_state
from dipaco.modules.transformer import PathModel, initialise
from dipaco.peer import keeper
from dipaco.peer.keeper import BestParametersCopies
from dipaco.peer.publisher import Activity, PeerStatus
from support.make_plan import make_plan

ME, LEAD = "Qm" + "a" * 44, "Qm" + "b" * 44
OTHERS = tuple("Qm" + letter * 44 for letter in "cdef")
PATH = 1


class Process:
    """A node without a network: what it fetches, and what it would tell."""

    def __init__(self, folder: Path, copies: int) -> None:
        plan = make_plan()
        self.plan = plan.model_copy(update={"rounds": RoundsConfig(copies=copies)})
        self.grid = Grid(plan.model, plan.grid)
        self.me = ME
        self.bests = BestParametersStore(folder, self.grid)
        self.fetcher = self
        self.served: dict[str, BestParameters] = {}
        self.holders: tuple[str, ...] = ()
        self.fetches: list[str] = []
        self.events: list[str] = []
        self.announced = 0
        self.published: list[BlobRecord] = []
        self.status = PeerStatus(Activity("serving"))
        node: Any = self
        self.copies = BestParametersCopies(node, self.status, self._announce, node)

    def _announce(self) -> None:
        self.announced += 1

    def emit(self, kind: str, **fields: Any) -> None:
        self.events.append(kind)

    def best_path(self, path: int, sha256: str) -> BestParameters:
        self.fetches.append(sha256)
        if sha256 not in self.served:
            raise NetworkError("nobody has it")
        return self.served[sha256]

    def blob_holders(self, sha256: str) -> tuple[str, ...]:
        return self.holders

    def publish_blob(self, record: BlobRecord, life_s: float) -> bool:
        self.published.append(record)
        return True


@pytest.fixture
def process(tmp_path: Path) -> Process:
    return Process(tmp_path / "best", copies=6)


@pytest.fixture(scope="module")
def states() -> dict[str, ModuleState]:
    plan = make_plan()
    grid, model = Grid(plan.model, plan.grid), PathModel(plan.model)
    initialise(model, 0)
    base = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {m: genesis_state(m, grid.layout(m), base) for m in grid.modules_of_path(PATH)}


def best_of(process: Process, states: dict[str, ModuleState], round_index: int) -> BestParameters:
    best = best_parameters_of(
        process.grid, PATH, round_index, LossSum(100.0 - round_index, 50), states
    )
    process.served[best.sha256] = best
    return best


def view_of(last_round: int, *bests: BestParameters, led: bool = True) -> SwarmView:
    peers = {
        name: PeerRecord.model_validate(
            {
                "peer_id": name,
                "protocol": 1,
                "software": "",
                "device": "",
                "state": "serving",
                "path": None,
                "tokens_per_s": 0.0,
                "round": 0,
                "reachable": "direct",
                "addresses": (),
                "bytes_up": 0,
                "bytes_down": 0,
            }
        )
        for name in (ME, LEAD, *OTHERS)
    }
    claim = Claim(peer_id=LEAD, path=PATH, state="training", since_s=0.0, round=0)
    return SwarmView(
        now_s=0.0,
        peers=peers,
        claims={LEAD: claim} if led else {},
        progress={PATH: PathService(last_round, 10, 1.0, 1, 1.0)},
        bests={PATH: tuple(b.reference for b in bests)},
    )


def test_best_states_are_copied_once_training_has_gone_on(
    process: Process, states: dict[str, ModuleState]
) -> None:
    first = best_of(process, states, 4)
    process.copies.keep(view_of(4, first))
    assert process.fetches == []
    process.copies.keep(view_of(5, first))
    process.copies.keep(view_of(6, first))
    assert process.fetches == [first.sha256]
    assert process.events == ["kept_best"]
    assert process.announced == 1
    held = process.bests.get(PATH)
    assert held is not None
    assert held.sha256 == first.sha256
    entry = process.status.progress[PATH]
    assert (entry.best_sha256, entry.best_round, entry.tokens) == (first.sha256, 4, 0)
    directory: Any = process
    process.copies.publish(directory, 9.0)
    assert [(r.sha256, r.bytes) for r in process.published] == [
        (first.sha256, process.bests.size_bytes(PATH))
    ]
    better = best_of(process, states, 7)
    process.copies.keep(view_of(8, better))
    assert [file.name for file in process.bests.folder.iterdir()] == ["P00001.safetensors"]
    assert process.bests.find(first.sha256) is None


def test_nobody_leads_the_path_any_more(process: Process, states: dict[str, ModuleState]) -> None:
    first = best_of(process, states, 4)
    process.copies.keep(view_of(4, first, led=False))
    assert process.fetches == [first.sha256]


def test_the_next_claim_is_tried_when_one_cannot_be_had(
    process: Process, states: dict[str, ModuleState]
) -> None:
    gone, there = best_of(process, states, 3), best_of(process, states, 2)
    del process.served[gone.sha256]
    process.copies.keep(view_of(9, gone, there))
    process.copies.keep(view_of(9, gone, there))
    assert process.fetches == [gone.sha256, there.sha256]


def test_what_is_trained_here_is_the_sessions_business(
    process: Process, states: dict[str, ModuleState]
) -> None:
    process.status.claim = Activity("training", PATH)
    process.copies.keep(view_of(9, best_of(process, states, 3)))
    assert process.fetches == []
    process.bests.hold(best_of(process, states, 3))
    process.copies.load_from_disk()
    assert process.status.progress == {}


def test_an_earlier_life_is_named_again(process: Process, states: dict[str, ModuleState]) -> None:
    held = process.bests.hold(best_of(process, states, 3))
    process.copies.load_from_disk()
    assert process.status.progress[PATH].best_sha256 == held.sha256


def test_what_others_keep_is_dropped(
    tmp_path: Path, states: dict[str, ModuleState], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "DROP_EVERY_S", 0.0)
    process = Process(tmp_path, copies=1)
    best = best_of(process, states, 3)
    process.bests.hold(best)
    view = view_of(9, best)
    process.copies.keep(view)
    assert process.bests.get(PATH) is not None, "nobody else has it"
    process.holders = ("Qm" + "z" * 44,)
    process.copies.keep(view)
    assert process.bests.get(PATH) is not None, "who has it is gone"
    process.holders = (LEAD,)
    process.copies.keep(view)
    assert process.bests.get(PATH) is None
