"""Who trained how much, by the rows in chains."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.tiny_run import make_tiny_run

from dipaco.base.errors import StorageError
from dipaco.peer import client, ledger_cli
from dipaco.peer.credit import own_tokens
from dipaco.peer.exchange.chain_store import ChainStore
from dipaco.protocol.chain import Row, Step, genesis_name
from dipaco.protocol.ledger import EXPORT_FORMAT, credits_of, exported, read_ledger

RUN = "0" * 16
ADDRESS = "/ip4/192.0.2.1/tcp/1/p2p/12D3KooWLGUApiCpST4ZyZPakytsXQ19eY7ZRGCyyJWXKk4tqiZw"


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


def view_of(**said: tuple[str, str]) -> Any:
    """Return a view in which peers say a name and a team."""
    peers = {peer: SimpleNamespace(name=name, team=team) for peer, (name, team) in said.items()}
    return SimpleNamespace(peers=peers)


def test_names_are_what_peers_say_and_teams_add_up() -> None:
    chains = {"L0.E0": chain("L0.E0", {"ann": (0, 10), "bob": (1, 15), "eve": (0, 7)})}
    view = view_of(ann=("same", "red"), bob=("same", "red"), other=("", "blue"))
    ledger = exported(RUN, credits_of(chains), view)
    assert [(p["peer_id"], p["name"], p["team"]) for p in ledger["peers"]] == [
        ("bob", "same", "red"),
        ("ann", "same", "red"),
        # Out of sight, and what it did stays.
        ("eve", "", ""),
    ]
    assert ledger["teams"] == [{"team": "red", "tokens": 25}]
    assert json.loads(json.dumps(ledger)) == ledger
    assert exported(RUN, credits_of({"L0.E0": []}), None)["peers"] == []


def test_what_the_command_writes_is_read_and_nothing_else() -> None:
    ledger = exported(RUN, credits_of({"L0.E0": chain("L0.E0", {"ann": (0, 10)})}), None)
    assert read_ledger(json.dumps(ledger).encode(), RUN) == ledger
    without = {key: value for key, value in ledger.items() if key != "peers"}
    for spoiled, message in (
        (b"[]", "object"),
        (b"\xff", "JSON"),
        (b"{" * 100_000, "JSON"),
        (json.dumps(without).encode(), "peers"),
        (json.dumps({**ledger, "peers": [{"peer_id": "ann"}]}).encode(), "peers.0"),
        (
            json.dumps({**ledger, "peers": [{**ledger["peers"][0], "tokens": -1}]}).encode(),
            "tokens",
        ),
        (json.dumps({**ledger, "format": "dipaco-ledger/2"}).encode(), "format"),
        (json.dumps({**ledger, "run": "f" * 16}).encode(), f"is of run {'f' * 16}"),
    ):
        with pytest.raises(StorageError, match=message) as caught:
            read_ledger(spoiled, RUN)
        assert len(str(caught.value)) < 400


class Client:
    """A swarm of one module, as the command reads it."""

    grid = SimpleNamespace(modules=lambda: ("L0.E0",))
    plan = SimpleNamespace(run_id=RUN, successor_of=None)

    def __init__(self, initial_peers: tuple[str, ...], *, run: str | None) -> None:
        assert (initial_peers, run) == ((ADDRESS,), "mine")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def chain(self, module: str) -> list[Step]:
        return chain(module, {"ann" * 8: (0, 1234)})

    def view(self) -> Any:
        return view_of()


def test_the_command_prints_a_table_or_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client, "ReadOnlyClient", Client)
    words = ["--initial-peers", ADDRESS, "--run", "mine"]
    assert ledger_cli.main([*words, "--json"]) == 0
    ledger = json.loads(capsys.readouterr().out)
    assert (ledger["format"], ledger["run"], ledger["tokens"]) == (EXPORT_FORMAT, RUN, 1234)
    assert ledger_cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "1,234 tokens in the model" in shown
    assert ("ann" * 8)[-8:] in shown
    assert "counts once a step has taken it" in " ".join(shown.split())
    with pytest.raises(SystemExit):
        ledger_cli.main([*words, "--seed", "1"])


def test_the_runs_before_count_too_and_nothing_is_changed_in_their_folders(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = make_tiny_run(tmp_path / "made")
    plan, peer = run.plan(), ADDRESS.rpartition("/")[2]
    cache = tmp_path / "cache"
    cache.mkdir()
    folder = run.path.rename(cache / plan.run_id)
    store = ChainStore(plan.run_id, run.grid(plan).modules(), folder / "chains")
    module = "L0.E0"
    rows = [
        Row(module, 0, genesis_name(plan.run_id, module), 0, peer, 1000, "f" * 64, 1, bytes(64))
    ]
    store.add_verified([step := Step.of(rows)])
    store.serve(module, step.name)
    log = folder / "chains" / f"{module}.log"
    log.write_bytes(log.read_bytes() + b"what its owner is writing")
    before = log.read_bytes()
    monkeypatch.setattr(client, "ReadOnlyClient", Client)
    monkeypatch.setattr(Client, "plan", SimpleNamespace(run_id=RUN, successor_of=plan.run_id))
    words = ["--initial-peers", ADDRESS, "--run", "mine"]
    assert ledger_cli.main([*words, "--json", "--earlier", str(cache)]) == 0
    ledger = json.loads(capsys.readouterr().out)
    assert (ledger["tokens"], ledger["earlier"]) == (2234, [plan.run_id])
    said = [(p["peer_id"], p["tokens"], p["last_round"]) for p in ledger["peers"]]
    assert said == [("ann" * 8, 1234, 0), (peer, 1000, -1)]
    assert log.read_bytes() == before
    here = ChainStore("b" * 16, [module], None)
    step = Step.of([replace(rows[0], parent=genesis_name("b" * 16, module), tokens=500)])
    here.add_verified([step])
    here.serve(module, step.name)
    grid = SimpleNamespace(modules=lambda: [module])
    node = SimpleNamespace(plan=Client.plan, grid=grid, me=peer, chains=here, cache_folder=cache)
    assert own_tokens(node) == 1500  # type: ignore[arg-type]
    assert ledger_cli.main(words) == 0
    assert "--earlier DIR" in " ".join(capsys.readouterr().out.split())
    assert ledger_cli.main([*words, "--earlier", str(tmp_path / "made")]) == 9
    assert "give a peer's cache folder" in capsys.readouterr().err
