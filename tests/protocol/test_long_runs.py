"""What a peer remembers of a module does not grow with the run, beside the chain itself."""

from collections import deque
from collections.abc import Mapping

from dipaco.protocol.chain import Step
from dipaco.protocol.chain_book import ChainBook
from dipaco.protocol.member import events as e
from support.runs.trainer import BOUNDARY_S, DURATION_S, MODULE, Trainer, name


def entries(found, seen):
    """Count the entries of all containers in an object of ours, but for those of the chain."""
    if id(found) in seen or isinstance(found, str | bytes | ChainBook):
        return 0
    seen.add(id(found))
    if isinstance(found, Mapping | set | frozenset | list | tuple | deque):
        values = [*found.values()] if isinstance(found, Mapping) else [*found]
        return len(values) + sum(entries(value, seen) for value in values)
    if type(found).__module__.startswith("dipaco."):
        return sum(entries(value, seen) for value in getattr(found, "__dict__", {}).values())
    return 0


def test_what_is_remembered_of_a_module_does_not_grow_with_its_rounds():
    trainer = Trainer("A", "ABCD")
    counts = []
    for round_index in range(400):
        trainer.known.now_s = BOUNDARY_S + round_index * DURATION_S
        trainer.module.begin(round_index, trainer.known.now_s)
        rows = [trainer.row(peer, round_index=round_index, file=name(f"{peer}{round_index}")) for peer in "BCD"]
        for teller in "BCD":
            trainer.module.hear_steps([Step.of(rows)], teller)
        trainer.gathered(*rows)
        trainer.wait(DURATION_S / 2)
        trainer.module.handle(e.StateHere(MODULE, trainer.head(Step.of(rows))))
        trainer.take(e.Event)
        assert trainer.module.stand == Step.of(rows).name
        counts.append(entries(trainer.module, set()))
    assert max(counts[200:]) <= max(counts[100:200])
