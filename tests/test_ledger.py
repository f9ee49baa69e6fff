"""Who trained how much, by the rows in chains."""

from __future__ import annotations

from dipaco.dht.chain import Row, Step, genesis_name
from dipaco.dht.ledger import credits_of, exported

RUN = "0" * 16


def chain(module: str, *rounds: dict[str, tuple[int, int]]) -> list[Step]:
    """Return the steps of a module: of each round, the path and the tokens of each peer."""
    steps: list[Step] = []
    for index, said in enumerate(rounds):
        parent = steps[-1].name if steps else genesis_name(RUN, module)
        rows = (
            Row(module, index, parent, path, peer, tokens, "f" * 64, 1)
            for peer, (path, tokens) in said.items()
        )
        steps.append(Step.of(rows))
    return steps


def test_work_on_a_path_counts_once_by_the_module_that_counts_most() -> None:
    credits = credits_of(
        {
            "L0.E0": chain("L0.E0", {"ann": (0, 100), "bob": (1, 50)}, {"ann": (0, 100)}),
            # A step missed here is not lost where it was made.
            "L1.E0": chain("L1.E0", {"ann": (0, 100)}),
        }
    )
    assert (credits["ann"].tokens, credits["bob"].tokens) == (200, 50)
    assert (credits["ann"].rows, credits["ann"].last_round) == (3, 1)


def test_paths_add_up_and_the_most_tokens_come_first() -> None:
    chains = {"L0.E0": chain("L0.E0", {"ann": (0, 10), "bob": (0, 15)}, {"ann": (1, 20)})}
    ledger = exported(RUN, credits_of(chains), None)
    assert [peer["peer_id"] for peer in ledger["peers"]] == ["ann", "bob"]
    assert ledger["peers"][0]["paths"] == {"0": 10, "1": 20}
    assert ledger["tokens"] == 45
