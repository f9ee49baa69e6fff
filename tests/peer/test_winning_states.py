"""Which state a reader takes where others announce what they have not, or tell what nobody has."""

from types import SimpleNamespace

import pytest

from dipaco.base.errors import NetworkError
from dipaco.peer.keeping.winning_states import WinningStates
from dipaco.protocol.chain.steps import Head, Step
from dipaco.protocol.member.events import Answered
from dipaco.protocol.records import Holding
from dipaco.protocol.view import SwarmView
from support.wire.exchanges import GENESIS, GRID, MODULE, chain_of, file_of, row_of
from support.wire.peers import RUN, peer

STEPS = chain_of(3, (0, 1))
HONEST = (1, 2)


class Swarm:
    """Some holders tell a chain and give what belongs to it. All others announce more than anybody
    has, tell what they are said to tell, and give nothing."""

    def __init__(self, folder, liars, honest=HONEST):
        self._folder = folder
        self._told = {peer(number): steps for number, steps in liars.items()}
        self._told |= {peer(number): STEPS for number in honest}
        self.asked = []
        self.files = []
        """Which were asked for."""
        heads = [(n, STEPS[-1].name, 6) for n in honest]
        heads += [(n, s[-1].name if s else f"{n:064x}", 300 + n) for n, s in liars.items()]
        self.view = SwarmView(
            now_s=0.0,
            holdings={
                MODULE: tuple(
                    Holding(peer(n), Head(MODULE, step, 9, weight, 8, "cd" * 32, 100)) for n, step, weight in heads
                )
            },
        )

    def ask(self, holder, module, locator):
        self.asked.append(holder)
        assert locator[-1] == GENESIS
        steps = self._told[holder]
        known = max((n for n, s in enumerate(steps, 1) if s.name in locator), default=0)
        return Answered(holder, module, tuple(steps[known:])) if steps else None

    def state(self, head, sources):
        if head.step in [step.name for step in STEPS]:
            return SimpleNamespace(module=MODULE, digest=head.digest)
        raise NetworkError("nobody gives it")

    def contribution(self, row, sources):
        self.files.append(row.name)
        if row not in STEPS[-1].rows:
            raise NetworkError("nobody gives it")
        path = self._folder / row.peer
        path.write_bytes(file_of(row, b"data"))
        return path

    @property
    def reader(self):
        rule = SimpleNamespace(
            codec=SimpleNamespace(check=lambda data, values: None),
            step=lambda state, files, rows, round_index, paths: SimpleNamespace(
                module=MODULE, digest=STEPS[-1].name, round_index=round_index
            ),
        )
        node = SimpleNamespace(run_id=RUN, me="nobody", exchange=self, grid=GRID, fetcher=self, rule=rule)
        genesis = SimpleNamespace(module=MODULE, digest=STEPS[0].state)
        files = SimpleNamespace(genesis_state=lambda module: genesis)
        return WinningStates(node, files)

    def newest_round(self):
        """Return the round of the state that a reader gets, if it gets one."""
        state = self.reader.state(MODULE, self.view)
        return None if state is None else state.round_index


BESIDE = [Step.of([row_of(9, 3, STEPS[-1].name, data=b"%d" % number)]) for number in range(100)]


@pytest.mark.parametrize(
    "liars",
    [
        pytest.param({number: [] for number in range(10, 16)}, id="a few announce what they have not"),
        pytest.param({9: chain_of(40, (9,))}, id="one signs a row of its own for every round that there was"),
        pytest.param({9: [*STEPS, *BESIDE]}, id="many steps beside each other that nobody can have"),
    ],
)
def test_no_liar_hides_the_chain(tmp_path, liars):
    assert Swarm(tmp_path, liars).newest_round() == 2


def test_a_state_that_was_refused_is_not_given_again_nor_what_stands_on_it(tmp_path):
    swarm = Swarm(tmp_path, {})
    reader = swarm.reader
    assert reader.state(MODULE, swarm.view).round_index == 2
    assert reader.paths_of_last_step(MODULE) == {row.path for row in STEPS[-1].rows}
    reader.refuse(MODULE)
    assert reader.state(MODULE, swarm.view) is None


def test_so_many_are_asked_and_no_more(tmp_path):
    swarm = Swarm(tmp_path, {number: [] for number in range(10, 200)}, honest=())
    assert swarm.newest_round() is None
    assert len(swarm.asked) < 60


def test_a_file_that_nobody_gives_is_asked_for_once(tmp_path):
    """It may take as long as it can."""
    step = Step.of([row_of(9, 3, STEPS[-1].name, state=STEPS[-1].name)])
    swarm = Swarm(tmp_path, {9: [*STEPS, step]})
    assert swarm.newest_round() == 2
    assert swarm.files.count(step.rows[0].name) == 1
