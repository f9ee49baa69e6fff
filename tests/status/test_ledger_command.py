"""`dipaco-status --ledger`: a table or JSON, also of the runs before."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dipaco.base.index import Index
from dipaco.peer.exchange.chain_store import ChainStore
from dipaco.peer.keeping.credit import own_tokens, tokens_on_disk
from dipaco.protocol.chain.steps import Row, Step, genesis_name
from dipaco.protocol.ledger import EXPORT_FORMAT
from dipaco.routing.run_folder import RunFolder
from dipaco.status import run_reader, status_command
from dipaco.status.history import History
from support.runs.tiny_run import make_tiny_run

RUN = "0" * 16
ADDRESS = "/ip4/192.0.2.1/tcp/1/p2p/12D3KooWLGUApiCpST4ZyZPakytsXQ19eY7ZRGCyyJWXKk4tqiZw"


class Reader:
    """A swarm of one module, as the command reads it."""

    plan = SimpleNamespace(run_id=RUN, successor_of=None)

    def __init__(self, initial_peers, *, run):
        assert (initial_peers, run) == ((ADDRESS,), "mine")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def chains(self):
        row = Row("L0.E0", 0, genesis_name(RUN, "L0.E0"), "5" * 64, 0, "ann" * 8, 1234, "f" * 64, 1)
        return {"L0.E0": [Step.of([row])]}

    present = {
        "ann" * 8: SimpleNamespace(name="kitchen laptop", team="school"),
        "eve" * 8: SimpleNamespace(name="has not contributed", team=""),
    }

    @property
    def view(self):
        return SimpleNamespace(peers=self.present)


@pytest.fixture(autouse=True)
def kept_elsewhere(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_the_command_prints_a_table_or_json(monkeypatch, capsys):
    monkeypatch.setattr(run_reader, "RunReader", Reader)
    words = ["--ledger", "--initial-peers", ADDRESS, "--run", "mine"]
    assert status_command.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["run"], found["tokens"]) == (EXPORT_FORMAT, RUN, 1234)
    assert status_command.main(words) == 0
    shown = capsys.readouterr().out
    assert "1,234 tokens in the model" in shown
    assert ("ann" * 8)[-8:] in shown
    assert "counts once a step has taken it" in " ".join(shown.split())


def test_a_peer_that_has_left_keeps_its_name(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run_reader, "RunReader", Reader)
    words = ["--ledger", "--initial-peers", ADDRESS, "--run", "mine", "--json"]
    for _ in range(2):
        assert status_command.main(words) == 0
        (found,) = json.loads(capsys.readouterr().out)["peers"]
        assert (found["name"], found["team"], found["tokens"]) == ("kitchen laptop", "school", 1234)
        monkeypatch.setattr(Reader, "present", {})
    kept = History(tmp_path / "state" / "dipaco" / "history.sqlite")
    assert kept.names() == {"ann" * 8: ("kitchen laptop", "school")}
    kept.close()
    # Where nothing can be kept, tokens are shown all the same.
    (tmp_path / "state" / "dipaco" / "history.sqlite").write_text("no database " * 100)
    assert status_command.main(words) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["tokens"] == 1234
    assert "names of peers that have left are not known" in said.err


def test_the_runs_before_count_too_and_nothing_is_changed_in_their_folders(monkeypatch, capsys, tmp_path):
    run = make_tiny_run(tmp_path / "made")
    plan, peer = run.plan(), ADDRESS.rpartition("/")[2]
    cache = tmp_path / "cache"
    cache.mkdir()
    folder = run.path.rename(cache / plan.run_id)
    index = RunFolder(folder, peer).states.kept.index
    store = ChainStore(plan.run_id, run.grid(plan).modules(), index, peer)
    module = "L0.E0"
    rows = [Row(module, 0, genesis_name(plan.run_id, module), "5" * 64, 0, peer, 1000, "f" * 64, 1, bytes(64))]
    step = Step.of(rows)
    store.serve(module, step.name, [step])
    # Its owner goes on writing.
    written = [index.file, Path(f"{index.file}-wal")]
    before = [file.read_bytes() for file in written]
    monkeypatch.setattr(run_reader, "RunReader", Reader)
    monkeypatch.setattr(Reader, "plan", SimpleNamespace(run_id=RUN, successor_of=plan.run_id))
    words = ["--ledger", "--initial-peers", ADDRESS, "--run", "mine"]
    assert status_command.main([*words, "--json", "--earlier", str(cache)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["earlier"]) == (2234, [plan.run_id])
    said = [(p["peer_id"], p["tokens"], p["last_round"]) for p in found["peers"]]
    assert said == [("ann" * 8, 1234, 0), (peer, 1000, -1)]
    assert [file.read_bytes() for file in written] == before
    here = ChainStore("b" * 16, [module], Index(tmp_path / "index"))
    step = Step.of([replace(rows[0], parent=genesis_name("b" * 16, module), tokens=500)])
    here.serve(module, step.name, [step])
    grid = SimpleNamespace(modules=lambda: [module])
    node = SimpleNamespace(plan=Reader.plan, grid=grid, me=peer, chains=here, runs_folder=cache)
    assert own_tokens(node) == 1500
    assert tokens_on_disk(plan.run_id, {peer}, [cache]) == 1000
    assert status_command.main(words) == 0
    assert "--earlier DIR" in " ".join(capsys.readouterr().out.split())
    assert status_command.main([*words, "--earlier", str(tmp_path / "made")]) == 9
    assert "give a peer's cache folder" in capsys.readouterr().err
