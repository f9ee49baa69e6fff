"""How much each peer trained, by the rows in chains."""

import json

from dipaco.protocol.chain.steps import Row, Step, genesis_name
from dipaco.protocol.ledger import credits_of, exported

RUN = "0" * 16


def chain(module, *rounds):
    """Return the steps of a module: of each round, the path and the tokens of each peer."""
    steps = []
    for index, said in enumerate(rounds):
        parent = steps[-1].name if steps else genesis_name(RUN, module)
        rows = (
            Row(module, index, parent, "5" * 64, path, peer, tokens, "f" * 64, 1)
            for peer, (path, tokens) in said.items()
        )
        steps.append(Step.of(rows))
    return steps


def test_work_on_a_path_counts_once_by_the_module_that_counts_most():
    credits = credits_of(
        {
            "L0.E0": chain("L0.E0", {"ann": (0, 100), "bob": (1, 50)}, {"ann": (0, 100)}),
            # A step missed here is not lost where it was made.
            "L1.E0": chain("L1.E0", {"ann": (0, 100)}),
        }
    )
    assert (credits["ann"].tokens, credits["bob"].tokens) == (200, 50)
    assert (credits["ann"].rows, credits["ann"].last_round) == (3, 1)


def test_paths_add_up_and_the_most_tokens_come_first():
    chains = {"L0.E0": chain("L0.E0", {"ann": (0, 10), "bob": (0, 15)}, {"ann": (1, 20)})}
    ledger = exported(RUN, credits_of(chains), {})
    assert [peer["peer_id"] for peer in ledger["peers"]] == ["ann", "bob"]
    assert ledger["peers"][0]["paths"] == {"0": 10, "1": 20}
    assert ledger["tokens"] == 45


def test_names_are_what_peers_say_and_teams_add_up():
    chains = {"L0.E0": chain("L0.E0", {"ann": (0, 10), "bob": (1, 15), "eve": (0, 7)})}
    names = {"ann": ("same", "red"), "bob": ("same", "red"), "other": ("", "blue")}
    ledger = exported(RUN, credits_of(chains), names)
    assert [(p["peer_id"], p["name"], p["team"]) for p in ledger["peers"]] == [
        ("bob", "same", "red"),
        ("ann", "same", "red"),
        # It never had a name, and what it did stays.
        ("eve", "", ""),
    ]
    assert ledger["teams"] == [{"team": "red", "tokens": 25}]
    assert json.loads(json.dumps(ledger)) == ledger
    assert exported(RUN, credits_of({"L0.E0": []}), {})["peers"] == []
