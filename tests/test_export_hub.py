"""Exports go to the Hub through its own client, which here speaks to a small server on loopback."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dipaco.inference import export_cli
from dipaco.modules.errors import ConfigurationError, NetworkError
from dipaco.routing.run_folder import RunFolder
from huggingface_hub import HfApi, ModelCard, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from support.tiny_run import make_tiny_run


class FakeHub:
    """Answers on loopback what the Hub does; every file comes with the commit. Notes what came."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.created: dict[str, Any] = {}
        self.summary = ""
        self.files: dict[str, bytes] = {}
        self.wrong: list[dict[str, str]] = []
        """What is found wrong in the header of a card."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                token = self.headers["authorization"]
                status, said = (
                    hub.answer(self.path, body) if token == "Bearer secret" else (401, {})
                )
                content = json.dumps(said).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Return status and body of an answer."""
        self.asked.append(path)
        model = "/api/models/someone/tiny"
        if path == "/api/repos/create":
            self.created = json.loads(body)
            return 200, {"url": f"{self.address}/someone/tiny"}
        if path == "/api/validate-yaml":
            return (400 if self.wrong else 200), {"errors": self.wrong, "warnings": []}
        if path == f"{model}/preupload/main":
            names = [file["path"] for file in json.loads(body)["files"]]
            regular = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            return 200, {"files": [{"path": name, **regular} for name in names]}
        assert path == f"{model}/commit/main", path
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.summary = value["summary"]
            else:
                assert (line["key"], value["encoding"]) == ("file", "base64")
                self.files[value["path"]] = base64.b64decode(value["content"])
        return 200, {"commitUrl": f"{self.address}/someone/tiny/commit/1", "commitOid": "1"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The library's own client, at an address of the test."""
    fake = FakeHub()
    monkeypatch.setattr(constants, "ENDPOINT", fake.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    thread = threading.Thread(target=fake.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield fake
    fake.server.shutdown()
    thread.join()
    fake.server.server_close()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("hub") / "run").path


def export(run: Path, *arguments: str | Path) -> int:
    given = ["--state-dir", str(run), "--allow-genesis", *map(str, arguments)]
    return export_cli.main([*given, "--push-to-hub", "someone/tiny", "--licence", "apache-2.0"])


def evaluation(run: Path) -> dict[str, Any]:
    """A report of `dipaco-eval --json`."""
    row = {"perplexity": 12.5, "tokens": 100, "documents": 3}
    paths = [{"path": path, **row, "perplexity": 10.0 + path} for path in range(4)]
    run_id = RunFolder(run).plan().run_id
    return {"run": run_id, **row, "paths": paths, "labels": {"prose": {**row, "perplexity": 9.5}}}


def test_a_path_is_uploaded(
    hub: FakeHub, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "eval.json").write_text(json.dumps(evaluation(run_folder)))
    arguments = ["--path", "1", "--private", "--eval-json", tmp_path / "eval.json"]
    names = ["--base-model", "someone/base", "--dataset", "someone/texts", "else/more"]
    assert export(run_folder, *arguments, *names, "--out", tmp_path / "out") == 0
    assert (hub.created["organization"], hub.created["name"]) == ("someone", "tiny")
    assert hub.created.get("private") or hub.created.get("visibility") == "private"
    assert hub.asked[0] == "/api/repos/create"
    assert "/api/validate-yaml" in hub.asked
    assert hub.summary == "tiny, path 1"
    written = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert hub.files == written
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= hub.files.keys()
    assert f"{hub.address}/someone/tiny/commit/1" in capsys.readouterr().out
    card = ModelCard(hub.files["README.md"].decode())
    data = card.data
    assert (data.license, data.library_name) == ("apache-2.0", "transformers")
    assert (data.base_model, data.datasets) == ("someone/base", ["someone/texts", "else/more"])
    assert [(r.dataset_name, r.metric_type, r.metric_value) for r in data.eval_results] == [
        ("someone/texts", "perplexity", 11.0)
    ]
    assert 'AutoTokenizer.from_pretrained("someone/tiny")' in card.text
    assert "| this path, on the documents that are routed to it | 11.00 |" in card.text


def test_a_run_is_uploaded_without_what_it_has_twice(
    hub: FakeHub, run_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "eval.json").write_text(json.dumps(evaluation(run_folder)))
    arguments = ["--all", "--current", "--eval-json", tmp_path / "eval.json"]
    assert export(run_folder, *arguments, "--out", tmp_path / "out") == 0
    assert any((tmp_path / "out" / "modules").iterdir())
    assert not [name for name in hub.files if name.startswith("modules/")]
    assert {"paths/00003/config.json", "router/router.safetensors"} <= hub.files.keys()
    card = ModelCard(hub.files["README.md"].decode())
    assert 'from_pretrained("someone/tiny", subfolder="paths/00000")' in card.text
    found = [(result.dataset_config, result.metric_value) for result in card.data.eval_results]
    assert found == [(None, 12.5), ("prose", 9.5)]


def test_what_the_hub_finds_wrong_in_the_card_is_said(
    hub: FakeHub, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.wrong = [{"message": '"license" must be one of apache-2.0, mit'}]
    found = export(run_folder, "--path", "1", "--out", tmp_path / "out")
    assert found == ConfigurationError.exit_code
    shown = capsys.readouterr().err
    assert '"license" must be one of apache-2.0, mit' in shown
    assert "look at --licence" in shown
    assert not hub.files


def test_another_licence_is_in_the_card_of_what_was_there(run_folder: Path, tmp_path: Path) -> None:
    for name in ("apache-2.0", "mit"):
        arguments = ["--path", "1", "--licence", name, "--out", tmp_path / "out"]
        given = ["--state-dir", run_folder, "--allow-genesis", *arguments]
        assert export_cli.main([str(one) for one in given]) == 0
        assert ModelCard.load(tmp_path / "out" / "README.md").data.license == name


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (HFValidationError("no"), ConfigurationError, "is no name of a repository"),
        (LocalTokenNotFoundError("no"), ConfigurationError, "log in with 'hf auth login'"),
        (
            HfHubHTTPError(
                "no", response=SimpleNamespace(status_code=403, headers={}, request=None)
            ),
            ConfigurationError,
            "does not let you write",
        ),
        (
            HfHubHTTPError(
                "no", response=SimpleNamespace(status_code=500, headers={}, request=None)
            ),
            NetworkError,
            "refused 'someone/tiny'",
        ),
        (ConnectionError("down"), NetworkError, "cannot be used: ConnectionError: down"),
    ],
    ids=["name", "login", "rights", "server", "network"],
)
def test_the_hub_is_asked_first_and_its_errors_are_one_line(
    error: Exception,
    expected: type[NetworkError | ConfigurationError],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    run_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(HfApi, "create_repo", fail)
    assert export(run_folder, "--path", "1", "--out", tmp_path / "out") == expected.exit_code
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
