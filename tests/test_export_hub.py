"""Exports go to the Hub through its own client; a fake one notes what it is asked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dipaco.inference import export_cli, export_hub
from dipaco.modules.errors import ConfigurationError, NetworkError
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from support.tiny_run import make_tiny_run


class FakeHub:
    """Takes the calls of `HfApi`; raises `error` when it is set."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.error: Exception | None = None
        self.files: set[str] = set()

    def create_repo(self, repo_id: str, **given: Any) -> None:
        self.calls.append(("create", {"repo_id": repo_id, **given}))
        if self.error is not None:
            raise self.error

    def upload_folder(self, *, folder_path: Path, **given: Any) -> SimpleNamespace:
        self.calls.append(("upload", given))
        self.files = {str(p.relative_to(folder_path)) for p in Path(folder_path).rglob("*")}
        return SimpleNamespace(commit_url=f"https://hub.example/{given['repo_id']}/commit/1")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    monkeypatch.setattr(export_hub, "HfApi", lambda: fake)
    return fake


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("hub") / "run").path


def export(run: Path, *arguments: str | Path) -> int:
    given = ["--state-dir", str(run), "--allow-genesis", *map(str, arguments)]
    return export_cli.main([*given, "--push-to-hub", "someone/tiny", "--licence", "apache-2.0"])


def test_a_path_is_uploaded(
    hub: FakeHub, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(run_folder, "--path", "1", "--private", "--out", tmp_path / "out") == 0
    assert [name for name, _ in hub.calls] == ["create", "upload"]
    created, uploaded = (given for _, given in hub.calls)
    assert created == {
        "repo_id": "someone/tiny", "repo_type": "model", "private": True, "exist_ok": True
    }  # fmt: skip
    assert uploaded["commit_message"] == "tiny, path 1"
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= hub.files
    assert "https://hub.example/someone/tiny/commit/1" in capsys.readouterr().out
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.license, card.data.library_name) == ("apache-2.0", "transformers")
    assert 'AutoTokenizer.from_pretrained("someone/tiny")' in card.text


def test_a_run_is_uploaded_without_what_it_has_twice(
    hub: FakeHub, run_folder: Path, tmp_path: Path
) -> None:
    assert export(run_folder, "--all", "--current", "--out", tmp_path / "out") == 0
    assert hub.calls[1][1]["ignore_patterns"] == ["modules/*"]
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert 'from_pretrained("someone/tiny", subfolder="paths/00000")' in card.text


def refused(status: int) -> HfHubHTTPError:
    response: Any = SimpleNamespace(status_code=status, headers={}, request=None)
    return HfHubHTTPError("no", response=response)


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
    hub: FakeHub,
    run_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hub.error = error
    assert export(run_folder, "--path", "1", "--out", tmp_path / "out") == expected.exit_code
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
