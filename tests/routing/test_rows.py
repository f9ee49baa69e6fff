"""What is read of a file does not depend on what nobody asks for, nor on how it was saved."""

import gzip
import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from dipaco.base.errors import CorpusError
from dipaco.routing.documents import rows as rows_module
from dipaco.routing.documents.corpus import CorpusConfig, Document, iterate_documents


def read(file, **fields):
    return list(iterate_documents(CorpusConfig(train=str(file), **fields), "train"))


def texts(file, **fields):
    return [document.text for document in read(file, **fields)]


def jsonl(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_field_that_nobody_reads_decides_nothing(tmp_path):
    changing = [1, "a", None, {"b": 1}, [[]], 10**30, {"c": []}]
    rows = [{"text": f"{i}", "id": changing[i % 7]} for i in range(70)]
    assert texts(jsonl(tmp_path / "a.jsonl", rows)) == [f"{i}" for i in range(70)]
    headers = pyarrow.array([[("a", "b")]], pyarrow.map_(pyarrow.string(), pyarrow.string()))
    table = pyarrow.table({"text": ["one"], "headers": headers})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    assert texts(tmp_path / "b.parquet") == ["one"]


def test_a_text_stays_one(tmp_path):
    days = ["2019-01-01", "2019-01-01T00:00:00Z", "007", "true", "1e3"]
    rows = [{"text": day, "domain": day} for day in days]
    found = read(jsonl(tmp_path / "a.jsonl", rows), label_field="domain")
    assert found == [Document(day, day) for day in days]


def test_half_a_character_is_a_question_mark(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "cut \\ud83d", "domain": "\\uDE00"}\n{"text": "\\ud83d\\ude00 \\\\ud83d"}\n')
    assert read(file, label_field="domain") == [Document("cut ?", "?"), Document("😀 \\ud83d")]


def test_a_row_may_lack_a_field_but_not_all(tmp_path):
    some = [{"id": 1}, {"text": "one"}]
    assert texts(jsonl(tmp_path / "a.jsonl", some)) == ["one"]
    with pytest.raises(CorpusError, match=r"b\.jsonl has no field 'text'; it has id"):
        texts(jsonl(tmp_path / "b.jsonl", [{"id": 1}]))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"text": "a"}\n\n{"text": \n', r"a\.jsonl:3 is not JSON"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', r"a\.jsonl:2 is not UTF-8"),
        (b'{"text": "a"}\n7\n', r"a\.jsonl:2 is no JSON object: 7"),
        (b'[\n{"text": "a"},\n{"text" "b"}]\n', r"a\.jsonl:3 is not JSON"),
        (b'{"text": "a"}\n{"text": ["b"]}\n', r"a\.jsonl, row 2: 'text' is a list"),
    ],
)
def test_an_error_names_file_and_line(tmp_path, content, said):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(CorpusError, match=said):
        texts(tmp_path / "a.jsonl")


ONE_A_LINE = '{"text": "é one"}\n{"text": "two"}\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("A.JSONL", ONE_A_LINE.encode()),
        ("a::b.jsonl", ONE_A_LINE.encode()),
        ("a.jsonl", gzip.compress(ONE_A_LINE.encode(), mtime=0)),
        ("a.JSON.GZ", gzip.compress(ONE_A_LINE.encode(), mtime=0)),
        ("a.jsonl.gz", ONE_A_LINE.encode()),
        ("a.jsonl", ONE_A_LINE.encode("utf-8-sig")),
        ("a.jsonl", ONE_A_LINE.encode("utf-16")),
        ("a.jsonl", ONE_A_LINE.encode("utf-16-le")),
        ("a.jsonl", ONE_A_LINE.encode("utf-32")),
        ("a.jsonl", ONE_A_LINE.replace("\n", "\r\n").encode()),
        ("a.json", json.dumps([json.loads(line) for line in ONE_A_LINE.splitlines()]).encode()),
        ("a.json", json.dumps(["é one", "two"], indent=2).encode()),
    ],
)
def test_however_it_was_saved(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert texts(tmp_path / name) == ["é one", "two"]


def test_one_object_over_several_lines(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"text": "one"}, indent=2))
    assert texts(tmp_path / "a.json") == ["one"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
def test_plain_text_however_it_was_saved(tmp_path, encoding):
    (tmp_path / "a.TXT").write_bytes("é one\r\ntwo\n".encode(encoding))
    assert texts(tmp_path / "a.TXT") == ["é one\ntwo\n"]


def test_a_part_without_rows_holds_nothing(tmp_path):
    jsonl(tmp_path / "a.jsonl", [{"text": "one"}])
    nothing = pyarrow.table({"text": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(nothing, tmp_path / "b.parquet")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b"", mtime=0))
    (tmp_path / "d.jsonl").write_text("\n")
    (tmp_path / "e.json").write_text("[]")
    assert texts(tmp_path / "*") == ["one"]


def test_what_save_to_disk_writes(tmp_path):
    saved = datasets.Dataset.from_dict({"text": ["one", "two"], "id": [1, 2]})
    saved.save_to_disk(str(tmp_path / "one"))
    splits = datasets.DatasetDict({"train": saved, "test": saved.select([1])})
    splits.save_to_disk(str(tmp_path / "splits"))

    def of(name, part, **fields):
        config = CorpusConfig(hub=name, **fields).relative_to(tmp_path)
        return [document.text for document in iterate_documents(config, part)]

    assert of("one", "train") == ["one", "two"]
    assert of("splits", "validation", validation_split="test") == ["two"]
    assert texts(tmp_path / "one" / "*.arrow") == ["one", "two"]
    with pytest.raises(CorpusError, match="without splits, not 'test'"):
        of("one", "validation", validation_split="test")


def test_a_folder_like_the_hub_reads_wanted_fields(tmp_path):
    (tmp_path / "set").mkdir()
    rows = [{"text": f"{i}", "id": i if i < 50 else "x"} for i in range(99)]
    jsonl(tmp_path / "set" / "train.jsonl", rows)
    config = CorpusConfig(hub="set").relative_to(tmp_path)
    assert len(list(iterate_documents(config, "train"))) == 99


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", "no JSON\n" + '{"text": "one"}\n' * 20, "too long to be one value of many lines"),
        ("a.jsonl", '{"text": "' + "x" * 200 + '"}', "a.jsonl:1 has a line of over 100 characters"),
        ("a.txt", "one line\n" * 20, "txt_documents = 'paragraph' or 'line' under"),
    ],
)
def test_no_document_is_without_an_end(tmp_path, monkeypatch, name, content, said):
    """A large file of another form fills the memory otherwise."""
    monkeypatch.setattr(rows_module, "_MAX_CHARACTERS", 100)
    (tmp_path / name).write_text(content)
    with pytest.raises(CorpusError, match=said):
        read(tmp_path / name)
    (tmp_path / "b.txt").write_text("one line\n" * 20)
    assert len(texts(tmp_path / "b.txt", txt_documents="line")) == 20
