"""Promise 9 with real processes: two of three trainers of a module report a state that they invented."""

import sys
import time

from dipaco.base.errors import MachineError
from support.runs.tiny_run import make_tiny_run
from support.swarms.swarm import LIMIT_S, Swarm

SHARED, LIED_FROM = "L0.E0", 3
# Both make the same noise, and report, serve and train from it.
LIAR = f"""
import sys, torch
from dataclasses import replace
from dipaco.modules.outer import OuterRule
honest = OuterRule.step

def step(*given):
    made = honest(*given)
    if made.module != "{SHARED}" or made.version < {LIED_FROM}:
        return made
    noise = torch.randn(made.layout.size, generator=torch.Generator().manual_seed(made.version))
    return replace(made, parameters=made.parameters + made.parameters.std() * noise)

OuterRule.step = step
from dipaco.peer.peer_command import main
sys.exit(main(sys.argv[1:]))
"""


def states_of(member):
    """Return the digests of the shared module on which a peer stood, by version."""
    taken = [event for kind in ("outer_step", "adopt") for event in member.of(kind)]
    return {event["version"]: event["digest"] for event in taken if event["module"] == SHARED}


def test_one_of_three_keeps_its_own_state_and_stops_after_three_rounds(tmp_path):
    run = make_tiny_run(
        tmp_path / "run",
        modules_per_level=(1, 3),
        inner_steps=3,
        # A limit: a round ends when everybody is done, and without a step when it is over.
        duration_s=8.0,
        start_s=time.time(),
        rounds={"gather_s": 2.0, "grace_s": 0.5, "validation_sequences": 4},
    )
    with Swarm(tmp_path, run) as swarm:
        bootstrap = swarm.start_bootstrap()
        honest = swarm.start_peer(bootstrap, "--path", "0")
        program = (sys.executable, "-c", LIAR)
        liars = [swarm.start_peer(bootstrap, "--path", str(path), program=program) for path in (1, 2)]
        swarm.wait(liars, "outer_step", lambda event: event["module"] == SHARED and event["version"] > LIED_FROM)
        assert honest.popen.wait(LIMIT_S) == MachineError.exit_code, swarm.outputs()
        kept, invented = states_of(honest), states_of(liars[0])
        assert states_of(liars[1])[LIED_FROM] == invented[LIED_FROM]
        assert kept[LIED_FROM - 1] == invented[LIED_FROM - 1]
        # It may have taken a step alone meanwhile, as after any two rounds in vain.
        assert not set(kept.values()) & {d for version, d in invented.items() if version >= LIED_FROM}
        said = honest.output.read_text()
        assert "L0.E0: a state is refused: it names another state than was computed here" in said
        assert "this machine computes L0.E0 otherwise than most others, twice with the same result" in said
