"""Several machines prepare one run: who does what, and that the result is that of one."""

from __future__ import annotations

import functools
import json
import threading
from pathlib import Path

import pytest
from dipaco.bootstrap import prepare as prepare_module
from dipaco.bootstrap.prepare import prepare
from dipaco.bootstrap.settings import PrepareSettings
from dipaco.bootstrap.stages import StageMarkers
from dipaco.bootstrap.team import ClaimLostError, Team
from dipaco.modules.blobs import BlobStore
from dipaco.modules.errors import ConfigurationError, CorpusError
from dipaco.routing.run_folder import RunFolder
from support.prepared_run import CPU, RUN_TOML, quiet_display, write_run


class Clock:
    """A clock that moves when somebody waits."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds


def member(folder: Path, name: str, clock: Clock | None = None, inputs: str = "run") -> Team:
    clock = clock or Clock()
    # No beats within a test: a claim is alive until the clock has moved by the expiry.
    return Team(
        folder, inputs, lambda line: None, expiry_s=10, beat_s=1000, clock=clock, wait=clock.wait,
        name=name,
    )  # fmt: skip


def test_one_machine_has_a_claim(tmp_path: Path) -> None:
    first, second = member(tmp_path, "a"), member(tmp_path, "b")
    with first._claim("tokens") as is_ours:
        assert is_ours
        with second._claim("tokens") as is_theirs:
            assert not is_theirs
        with second._claim("base") as is_theirs:
            assert is_theirs
    with second._claim("tokens") as is_theirs:
        assert is_theirs
    assert list(tmp_path.iterdir()) == []


def test_the_claim_of_a_machine_that_died_is_taken_over(tmp_path: Path) -> None:
    clock = Clock()
    dead, living = member(tmp_path, "dead"), member(tmp_path, "living", clock)
    # Never ended, as after a power failure.
    assert dead._create("tokens")
    made = []
    living.alone("tokens", lambda: made[0] if made else None, lambda: made.append(1) or 1)
    assert made == [1]
    assert 10 < clock.now_s < 13
    assert list(tmp_path.iterdir()) == []


def test_a_claim_that_changes_is_alive(tmp_path: Path) -> None:
    clock = Clock()
    slow, other = member(tmp_path, "slow"), member(tmp_path, "other", clock)
    path = slow._create("tokens")
    assert path is not None
    for beat in range(5):
        path.write_bytes(slow._content(beat))
        assert other._create("tokens") is None
        clock.now_s += 9
    path.write_bytes(slow._content(9))
    assert other._create("tokens") is None


def test_a_machine_that_slept_notes_nothing(tmp_path: Path) -> None:
    """Another has taken over its stage; what it made meanwhile is of no use."""
    clock = Clock()
    asleep, other = member(tmp_path / "c", "asleep"), member(tmp_path / "c", "other", clock)
    markers = StageMarkers(tmp_path / "work", BlobStore(tmp_path / "blobs"), asleep)

    def sleep_through() -> dict[str, str]:
        if not other._seen:
            assert other._create("base") is None
            clock.now_s += 11
            assert other._create("base") is not None
            with pytest.raises(ClaimLostError):
                asleep.check()
            StageMarkers(tmp_path / "work", markers._blobs).mark("base", "in", {"by": "other"})
        return {"by": "asleep"}

    assert markers.stage("base", "in", sleep_through) == {"by": "other"}


def test_pieces_are_done_once_each(tmp_path: Path) -> None:
    pieces = [f"piece-{number}" for number in range(20)]
    done: list[str] = []
    teams = [Team(tmp_path, "run", lambda line: None, look_s=0.01) for _ in range(4)]

    def work(team: Team) -> None:
        team.share(pieces, lambda piece: piece in done, done.append, lambda: False)

    threads = [threading.Thread(target=work, args=(team,)) for team in teams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == sorted(pieces)


def test_another_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    first, second = member(tmp_path, "a"), member(tmp_path, "b", inputs="another")
    with first._claim("tokens"), pytest.raises(ConfigurationError, match="a prepares another run"):
        second._create("tokens")


def split_corpus(folder: Path) -> Path:
    """Write the corpus of the other tests as five files, one without text, and its RUN.toml."""
    toml = write_run(folder, RUN_TOML.replace('"train.jsonl"', '"part-*.jsonl"'))
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    for number in range(4):
        (folder / f"part-{number}.jsonl").write_text("".join(lines[60 * number : 60 * number + 60]))
    (folder / "part-9.jsonl").write_text(json.dumps({"text": "", "domain": "none"}) + "\n")
    return toml


def test_four_machines_make_the_blobs_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "Team", functools.partial(Team, look_s=0.05))
    toml = split_corpus(tmp_path)
    alone = prepare(toml, tmp_path / "alone", device=CPU, display=quiet_display())
    plans, failures = [], []

    def work() -> None:
        try:
            plans.append(
                prepare(
                    toml, tmp_path / "together", device=CPU, display=quiet_display(), together=True
                )
            )
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(plans) == 4
    # One of them signed, and the others found that done.
    assert len({plan.run_id for plan in plans}) == 1
    assert plans[0].blobs == alone.blobs
    assert blobs(tmp_path / "together") == blobs(tmp_path / "alone")
    work_folder = tmp_path / "together" / "work"
    assert list((work_folder / "claims").iterdir()) == []
    assert not (work_folder / "pieces").exists()
    # Alone again, everything is done.
    again = prepare(toml, tmp_path / "together", device=CPU, display=quiet_display())
    assert again.run_id == plans[0].run_id


def blobs(out: Path) -> dict[str, bytes]:
    folder = RunFolder(out).blobs.folder
    return {file.name: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_an_error_of_one_is_an_error_of_all(tmp_path: Path) -> None:
    toml = split_corpus(tmp_path)
    for file in tmp_path.glob("part-*.jsonl"):
        file.write_text(json.dumps({"text": "", "domain": "none"}) + "\n")
    for _ in range(2):
        with pytest.raises(CorpusError, match="hold no text"):
            prepare(toml, tmp_path / "out", device=CPU, display=quiet_display(), together=True)
    assert list((tmp_path / "out" / "work" / "claims").iterdir()) == []


def test_what_one_machine_does_alone_is_refused(tmp_path: Path) -> None:
    toml = Path("RUN.toml")
    with pytest.raises(ConfigurationError, match="--together and --from"):
        PrepareSettings(run_toml=toml, out=tmp_path, together=True, predecessor=tmp_path)
    with pytest.raises(ConfigurationError, match="--together and --start-in-s"):
        PrepareSettings(run_toml=toml, out=tmp_path, together=True, start_in_s=9)
