"""A peer's states, chains and contributions in a folder that outlives it."""

import torch

from dipaco.base.blobs import BlobStore
from dipaco.modules.layout import layout_of
from dipaco.modules.saved_states import StateStore
from dipaco.modules.state import ModuleState
from dipaco.peer.exchange.chain_store import ChainStore
from dipaco.peer.exchange.files.contribution_files import ContributionFiles
from dipaco.peer.node.states import States, head_of
from support.wire.exchanges import GRID, MODULE
from support.wire.peers import RUN

LAYOUT = layout_of(GRID, MODULE)


def state_of(version):
    values = torch.full((LAYOUT.size,), float(version))
    return ModuleState(MODULE, version, values, torch.zeros(LAYOUT.size), {}, LAYOUT, 1.5)


class Life:
    """A peer between a start and an end."""

    def __init__(self, folder, name=""):
        self.store = StateStore(folder / "store", name)
        self.kept = self.store.kept
        self.kept.tidy()
        self.files = ContributionFiles(self.kept)
        self.chains = ChainStore(RUN, GRID.modules(), self.kept.index, name)
        self.states = States(GRID, self.store, BlobStore(folder / "blobs"), self.chains)
        self.taken_up = self.states.load_from_disk()

    def take(self, *steps):
        """Hold the state after each of these steps, and save it."""
        for step in steps:
            state = state_of(step.round_index + 1)
            self.states.put(step.name, state)
            self.states.hold(head_of(state, step.name, state.version, step.round_index))
            self.states.serve(MODULE, step.name, [step])
            self.states.save(state)
