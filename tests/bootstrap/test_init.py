"""`dipaco-bootstrap init`: a RUN.toml that works, from some files."""

import json
import tomllib
import weakref
from pathlib import Path

import pytest

from dipaco.base.errors import ConfigurationError, CorpusError
from dipaco.bootstrap import first_look, new_run
from dipaco.bootstrap.bootstrap_command import main
from dipaco.bootstrap.first_look import look_at_files
from dipaco.bootstrap.new_run import write_run_toml
from dipaco.bootstrap.run_config import load_run_config
from support.runs.chat_runs import chat_rows, write_chats
from support.runs.chat_templates import CHATML

TINY = Path(__file__).parents[2] / "examples" / "tiny" / "data"
CHATS = TINY.parents[1] / "chats" / "data"


def rows(path, values):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")


def articles(count, **more):
    return [{"id": f"{i:07}", "title": f"No {i}", "body": f"{i} " + "some words " * 80, **more} for i in range(count)]


def written(tmp_path, files, peers=4):
    out = tmp_path / "RUN.toml"
    said = write_run_toml([str(file) for file in files], out, None, peers)
    return tomllib.loads(out.read_text(encoding="utf-8")), said


def test_the_shipped_corpus_gets_a_run_that_can_be_prepared(tmp_path):
    found, said = written(tmp_path, [TINY])
    assert found["data"]["label_field"] == "domain"
    assert found["grid"]["modules_per_level"] == [2, 2]
    assert "validation.jsonl.gz" in said
    config = load_run_config(tmp_path / "RUN.toml")
    assert config.grid.path_count == 4
    assert config.data.has_validation


def test_the_longest_field_is_the_text_and_the_one_of_few_values_the_label(tmp_path):
    values = articles(150, section="news") + articles(150, section="sports")
    rows(tmp_path / "texts" / "a.jsonl", values)
    found, _ = written(tmp_path, [tmp_path / "texts" / "a.jsonl"])
    assert found["data"] == {
        "train": "texts/a.jsonl", "text_field": "body", "label_field": "section", "held_out_fraction": 0.067,
    }  # fmt: skip


def test_files_of_one_folder_are_named_by_a_pattern(tmp_path):
    for name in ("b", "a", "test"):
        rows(tmp_path / "texts" / f"{name}.jsonl", [{"text": f"{name} {i} words"} for i in range(60)])
    found, _ = written(tmp_path, sorted((tmp_path / "texts").iterdir()))
    assert found["data"] == {"train": "texts/*.jsonl", "validation": "texts/test.jsonl"}


def test_a_text_file_is_read_by_paragraphs_if_it_has_some(tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join(f"paragraph {i} of a book" for i in range(100)))
    (tmp_path / "b.txt").write_text("\n".join(f"line {i} of a list" for i in range(100)))
    assert look_at_files([str(tmp_path / "a.txt")]).text_unit == "paragraph"
    assert look_at_files([str(tmp_path / "b.txt")]).text_unit == "line"


@pytest.mark.parametrize(
    ("documents", "words", "peers", "paths"),
    [(1000, 1000, 4, 4), (1000, 1000, 11, 8), (1000, 1000, 1, 2), (120, 1000, 8, 2), (1000, 20, 8, 2)],
)
def test_a_path_for_each_peer_but_none_with_too_few_texts(tmp_path, documents, words, peers, paths):
    rows(tmp_path / "a.jsonl", [{"text": f"{i} " + "word " * words} for i in range(documents)])
    found, _ = written(tmp_path, [tmp_path / "a.jsonl"], peers)
    first, second = found["grid"]["modules_per_level"]
    assert first * second == paths


def test_much_text_is_counted_by_its_beginning(tmp_path, monkeypatch):
    for name in ("a", "b", "c"):
        rows(tmp_path / f"{name}.jsonl", articles(1000))
    files = sorted(map(str, tmp_path.glob("*.jsonl")))
    whole = look_at_files(files)
    monkeypatch.setattr(first_look, "_CHARACTERS", whole.characters // 2)
    part = look_at_files(files)
    assert part.counted < 0.7
    assert part.documents == pytest.approx(whole.documents, rel=0.05)
    assert part.characters == pytest.approx(whole.characters, rel=0.05)


def test_rows_are_looked_at_one_by_one(tmp_path, monkeypatch):
    """A row may be a whole file, and all files together more than the memory."""

    class Row(dict):
        __hash__ = object.__hash__

    alive, most = weakref.WeakSet(), 0

    def rows_of_file(*_):
        nonlocal most
        for number in range(20):
            row = Row(text=f"words {number}", kind=f"{number % 2}")
            alive.add(row)
            most = max(most, len(alive))
            yield row

    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.jsonl").touch()
    monkeypatch.setattr(first_look, "_rows", rows_of_file)
    found = look_at_files([str(tmp_path)])
    assert (found.documents, found.label_field) == (60, "kind")
    assert most <= 4


def test_chats_need_a_base(tmp_path):
    with pytest.raises(ConfigurationError, match="--base"):
        write_run_toml([str(CHATS)], tmp_path / "RUN.toml", None, 4)
    assert not (tmp_path / "RUN.toml").exists()


def test_chats_over_a_base_become_adapters(tmp_path):
    toml = write_chats(tmp_path, chat_rows(), CHATML)
    toml.unlink()
    [base] = [path.parent for path in tmp_path.rglob("config.json")]
    [chats] = tmp_path.rglob("*.jsonl")
    write_run_toml([str(chats)], tmp_path / "RUN.toml", str(base), 4)
    config = load_run_config(tmp_path / "RUN.toml")
    assert config.adapters is not None
    assert config.base.checkpoint == base
    assert config.grid.modules_per_level == (1, 2)  # forty chats are few


def test_the_folder_of_a_base_may_have_any_name(tmp_path):
    base = tmp_path / "modèle 😀"
    base.mkdir()
    written = new_run._base(str(base), tmp_path / "RUN.toml")
    assert tomllib.loads(f"base = {written}") == {"base": base.name}


def test_a_base_that_is_not_here_is_told_and_nothing_is_written(tmp_path):
    with pytest.raises(ConfigurationError, match="OWNER/NAME|some-body/some-base"):
        write_run_toml([str(CHATS)], tmp_path / "RUN.toml", "some-body/some-base", 4)
    assert not (tmp_path / "RUN.toml").exists()


def test_files_without_texts_are_refused(tmp_path):
    rows(tmp_path / "a.jsonl", [{"number": 1}])
    (tmp_path / "empty").mkdir()
    for name in ("a.jsonl", "empty", "nothing.jsonl"):
        with pytest.raises(CorpusError):
            look_at_files([str(tmp_path / name)])


def test_a_run_toml_is_never_replaced(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows(tmp_path / "a.jsonl", articles(60))
    assert main(["init", "a.jsonl"]) == 0
    before = Path("RUN.toml").read_bytes()
    assert main(["init", "a.jsonl"]) != 0
    assert "--out" in capsys.readouterr().err
    assert Path("RUN.toml").read_bytes() == before
