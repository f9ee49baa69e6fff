import bz2
import gzip
import json
import lzma

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from dipaco.base.errors import CorpusError
from dipaco.routing.documents.corpus import CorpusConfig, Document, is_held_out, iterate_documents


def _jsonl(path, rows, compress=False):
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if compress else content)
    return path


def _texts(config):
    return [document.text for document in iterate_documents(config, "train")]


def test_formats_order_and_labels(tmp_path):
    _jsonl(tmp_path / "a-1.jsonl", [{"text": "one", "domain": "x"}, {"text": "", "domain": "x"}])
    _jsonl(tmp_path / "a-0.jsonl.gz", [{"text": "zero", "domain": "y", "extra": [1]}], True)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["two", None], "domain": ["z", "z"]}), tmp_path / "b.parquet")
    (tmp_path / "c.txt").write_text("three\n\n  lines\n")
    config = CorpusConfig(train=("a-*.jsonl*", "b.parquet", "c.txt"), label_field="domain").relative_to(tmp_path)
    documents = list(iterate_documents(config, "train"))
    assert documents == [
        Document("zero", "y"), Document("one", "x"), Document("two", "z"),
        Document("three\n\n  lines\n", None),
    ]  # fmt: skip
    assert documents == list(iterate_documents(config, "train"))
    limited = config.model_copy(update={"train_limit": 2})
    assert _texts(limited) == ["zero", "one"]


@pytest.mark.parametrize(
    ("unit", "expected"), [("file", ["a\nb\n\nc\n"]), ("line", ["a", "b", "c"]), ("paragraph", ["a\nb", "c"])]
)
def test_text_files(tmp_path, unit, expected):
    (tmp_path / "c.txt").write_text("a\nb\n\nc\n")
    texts = _texts(CorpusConfig(train=str(tmp_path / "c.txt"), txt_documents=unit))
    assert [text.strip("\n") for text in texts] == [text.strip("\n") for text in expected]


def test_texts_from_windows(tmp_path):
    packed = tmp_path / "c.txt.gz"
    packed.write_bytes(gzip.compress("\ufeffone".encode()))
    config = CorpusConfig(train=str(packed), text_field="content", label_field="domain")
    assert list(iterate_documents(config, "train")) == [Document("one", None)]


def test_white_space_of_documents_survives(tmp_path):
    text = "\n  def f():\r\n\treturn\n\n"
    _jsonl(tmp_path / "a.jsonl", [{"text": text}])
    assert _texts(CorpusConfig(train=str(tmp_path / "a.jsonl"))) == [text]


def test_unreadable_files_are_named(tmp_path):
    truncated = tmp_path / "cut.jsonl.gz"
    truncated.write_bytes(gzip.compress(b'{"text": "abc"}\n' * 9000)[:-20])
    with pytest.raises(CorpusError, match=r"cut\.jsonl\.gz cannot be read"):
        _texts(CorpusConfig(train=str(truncated)))
    (tmp_path / "a.docx").write_text("x")
    with pytest.raises(CorpusError, match=r"a\.docx.*\.jsonl"):
        _texts(CorpusConfig(train=str(tmp_path / "a.docx")))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(CorpusError, match=r"empty\.jsonl is empty"):
        _texts(CorpusConfig(train=str(tmp_path / "empty.jsonl")))


def test_nothing_found(tmp_path):
    _jsonl(tmp_path / "real.jsonl", [{"text": "  "}])
    with pytest.raises(CorpusError, match=r"no file matches.*real\.jsonl"):
        _texts(CorpusConfig(train=str(tmp_path / "typo-*.jsonl")))
    with pytest.raises(CorpusError, match=r"there is no folder .*typo\."):
        _texts(CorpusConfig(train=str(tmp_path / "typo" / "*.jsonl")))
    with pytest.raises(CorpusError, match="no text"):
        _texts(CorpusConfig(train=str(tmp_path / "real.jsonl")))


def test_held_out_by_content():
    documents = [Document(f"text {number}") for number in range(4000)]
    chosen = [document for document in documents if is_held_out(document, 0.1)]
    assert 300 < len(chosen) < 500
    assert all(is_held_out(Document(d.text, "other label"), 0.1) for d in chosen)


def test_odd_file_names(tmp_path):
    path = _jsonl(tmp_path / "a[1] b.jsonl", [{"text": "x"}])
    assert _texts(CorpusConfig(train=str(path))) == ["x"]


# Streams behind the first, padding, and what follows them.
XZ = [lzma.compress(b'{"text": "one"}\n'), lzma.compress(b'{"text": "two"}\n')]
BZ2 = [bz2.compress(b'{"text": "one"}\n'), bz2.compress(b'{"text": "two"}\n')]
SKIPPED = b"\x50\x2a\x4d\x18\x04\0\0\0note"
ZST = [zstandard.compress(b'{"text": "one"}\n'), zstandard.compress(b'{"text": "two"}\n')]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.xz", XZ[0] + b"\0" * 8 + XZ[1] + b"\0" * 4),
        ("a.jsonl.bz2", BZ2[0] + BZ2[1]),
        ("a.jsonl.zst", ZST[0] + SKIPPED + ZST[1]),
    ],
)
def test_all_streams_of_a_compressed_file_are_read(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert _texts(CorpusConfig(train=str(tmp_path / name))) == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.xz", XZ[0] + b"\0" * 6 + XZ[1][6:]),
        ("a.jsonl.xz", XZ[0] + XZ[1][:-9]),
        ("a.jsonl.bz2", BZ2[0] + b"xx" + BZ2[1][2:]),
        ("a.jsonl.zst", ZST[0] + ZST[1][:-3]),
        ("a.jsonl.zst", ZST[0] + b"xxxx" + ZST[1][4:]),
    ],
)
def test_a_damaged_compressed_file_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=name):
        _texts(CorpusConfig(train=str(tmp_path / name)))


def test_a_long_window_is_read(tmp_path):
    """Archives of forums are made with `zstd --long=31`."""
    parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    made = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    content = made.compress(b'{"text": "one"}\n') + made.flush()
    (tmp_path / "a.jsonl.zst").write_bytes(content)
    assert zstandard.get_frame_parameters(content).window_size == 2**31
    assert _texts(CorpusConfig(train=str(tmp_path / "a.jsonl.zst"))) == ["one"]


def test_texts_that_differ_by_the_white_space_around_them_are_not_on_both_sides():
    """As where the same texts come from two forms of files."""
    for number in range(2000):
        text = f"text {number}"
        one, other = (is_held_out(Document(form), 0.3) for form in (text, f" {text}\n"))
        assert one == other, text
