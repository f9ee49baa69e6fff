"""A live swarm as the inference tools see it, without one."""

from types import SimpleNamespace

from dipaco.base.errors import NetworkError
from dipaco.modules.layout import layout_of
from dipaco.routing.run_folder import RunFolder


class FakeReader:
    """What `SwarmSource` needs of `SwarmReader`, from a folder."""

    def __init__(self, served, cache, unserved=()):
        self._served = RunFolder(served)
        self.unserved = unserved
        self.plan = self._served.plan()
        self.folder = cache
        self.fetched = []
        self.closed = False
        self.refused = []
        self.next_run = None
        self.present = ["a peer"]

    def fetch_blob(self, sha256):
        return self._served.blobs.require(sha256)

    def winning_state(self, module):
        self.fetched.append(module)
        if module in self.unserved:
            raise NetworkError("none serves it")
        layout = layout_of(self._served.grid(self.plan), module)
        return self._served.states.load_latest(module, layout)

    def paths_of_last_step(self, module):
        return frozenset(range(self._served.grid(self.plan).path_count))

    def refuse(self, state):
        self.refused.append(state.module)
        self.unserved = (*self.unserved, state.module)

    def view(self):
        return SimpleNamespace(progress={}, present=self.present)

    def successor(self):
        return self.next_run

    def look_again(self):
        """The folder is read anew each time."""

    def close(self):
        self.closed = True
