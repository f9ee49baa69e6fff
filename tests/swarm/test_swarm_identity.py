"""One identity on two machines: a copied cache folder, a cloned disk."""

import shutil
import time

from support.runs.tiny_run import make_tiny_run
from support.swarms.swarm import LIMIT_S, Swarm


def test_a_copied_identity_is_refused_while_the_other_trains(tmp_path):
    run = make_tiny_run(tmp_path / "run", start_s=time.time(), modules_per_level=(1, 1))
    with Swarm(tmp_path, run) as swarm:
        bootstrap = swarm.start_bootstrap()
        peer = swarm.start_peer(bootstrap, name="peer")
        swarm.wait([peer], "outer_step")
        shutil.copytree(peer.cache, tmp_path / "copy-cache")
        copy = swarm.start_peer(bootstrap, name="copy")
        assert copy.popen.wait(LIMIT_S) == 4
        said = copy.output.read_text()
        assert "identity.key is in use by another machine, at /ip4/127.0.0.1/tcp/" in said
        assert "the next start makes a new one" in said
        swarm.wait([peer], "outer_step", lambda e, now=time.time(): e["time_s"] > now)
        # A peer that is gone can come back.
        peer.kill()
        again = swarm.start_peer(bootstrap, name="peer")
        swarm.wait([again], "outer_step")
