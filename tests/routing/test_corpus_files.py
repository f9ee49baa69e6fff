"""Which files a corpus has: none is missing without a word, and none of validation is in train."""

import json
import os

import pytest

from dipaco.base.errors import ConfigurationError, CorpusError
from dipaco.bootstrap.prepare_output import Display
from dipaco.protocol.config import parse_config
from dipaco.routing.documents.corpus import CorpusConfig, corpus_documents, corpus_files
from support.runs.prepared_run import RUN_TOML, on_cpu, prepare, write_run

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


def jsonl(file, *texts):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def refused(folder, pattern):
    with pytest.raises(CorpusError) as caught:
        corpus_files(CorpusConfig(train=pattern).relative_to(folder), "train")
    return str(caught.value)


@pytest.mark.parametrize("pattern", ["*.jsonl", "b.jsonl", "**", "**/*.jsonl"])
def test_a_link_to_nothing_is_refused(tmp_path, pattern):
    jsonl(tmp_path / "a.jsonl", "one")
    (tmp_path / "b.jsonl").symlink_to("../objects/00")
    said = refused(tmp_path, pattern)
    assert f"{tmp_path / 'b.jsonl'} is a link to ../objects/00, which does not exist" in said


@pytest.mark.parametrize("pattern", ["*/train.jsonl", "**/*.jsonl"])
def test_a_folder_that_is_a_link_to_nothing_is_refused(tmp_path, pattern):
    jsonl(tmp_path / "a" / "train.jsonl", "one")
    (tmp_path / "b").symlink_to("nowhere")
    assert "b is a link to nowhere, which does not exist" in refused(tmp_path, pattern)
    (tmp_path / "b").unlink()
    (tmp_path / "notes.pdf").symlink_to("nowhere")
    assert corpus_files(CorpusConfig(train=pattern).relative_to(tmp_path), "train")


@pytest.mark.parametrize("name", ["b.jsonl", "b.txt", "b.parquet", "b.jsonl.gz"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (LFS, "git lfs pull"),
        (b"/annex/objects/SHA256E-s9--00.txt\n", "git annex get"),
        (b"../../blobs/00aa", "the text of a link"),
    ],
)
def test_what_stands_for_a_file_is_none(tmp_path, name, content, said):
    jsonl(tmp_path / "a.jsonl", "one")
    (tmp_path / name).write_bytes(content)
    assert said in refused(tmp_path, "*")


def test_a_folder_with_an_ending_is_not_passed_over(tmp_path):
    jsonl(tmp_path / "a.jsonl", "one")
    jsonl(tmp_path / "b.jsonl" / "part-0.jsonl", "two")
    assert "b.jsonl/**/*" in refused(tmp_path, "*.jsonl")


def test_a_file_with_two_names_is_read_once(tmp_path):
    a = jsonl(tmp_path / "a.jsonl", "one")
    (tmp_path / "b.jsonl").symlink_to("a.jsonl")
    os.link(a, tmp_path / "c.jsonl")
    config = CorpusConfig(train=("./a.jsonl", "*.jsonl")).relative_to(tmp_path)
    assert len(corpus_files(config, "train")) == 1


def test_validation_is_not_trained_on(tmp_path):
    jsonl(tmp_path / "a.jsonl", "one", "two", "three")
    held = jsonl(tmp_path / "v" / "held.jsonl", "four", "two\n")
    (tmp_path / "b.jsonl").symlink_to(held)
    config = CorpusConfig(train="**/*.jsonl", validation="v/*").relative_to(tmp_path)
    both = []
    found = list(corpus_documents(config, lambda document: both.append(document.text)))
    assert [document.text for document, held_out in found if not held_out] == ["one", "three"]
    assert [document.text for document, held_out in found if held_out] == ["four", "two\n"]
    assert both == ["two"]
    same = CorpusConfig(train="*.jsonl", validation="*.jsonl").relative_to(tmp_path)
    with pytest.raises(CorpusError, match="every file of train is one of validation too"):
        corpus_files(same, "train")


@pytest.mark.parametrize("split", ["train", "train[:10%]"])
def test_a_split_is_not_held_out_of_itself(split):
    with pytest.raises(ConfigurationError, match="is in train_split = 'train'"):
        parse_config(CorpusConfig, {"hub": "x", "validation_split": split}, "[data]")
    both = {"train_split": "train[:90%]", "validation_split": "train[90%:]"}
    parse_config(CorpusConfig, {"hub": "x", **both}, "[data]")


def test_prepare_says_what_is_left_out(tmp_path, capsys):
    toml = RUN_TOML.replace('"train.jsonl"', '"*.jsonl"\nvalidation = "held.jsonl"')
    file = write_run(tmp_path, toml.replace("held_out_fraction = 0.1\n", ""))
    rows = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "held.jsonl").write_text("".join(rows[:30]))
    (tmp_path / "train.jsonl").write_text("".join(rows[20:]))
    prepare(file, tmp_path / "out", on_cpu(Display()))
    said = " ".join(capsys.readouterr().out.split())
    assert "held.jsonl of validation is not trained on, though train names it too" in said
    assert "10 documents of train are in validation as well" in said
