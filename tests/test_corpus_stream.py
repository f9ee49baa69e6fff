"""Going on in the middle of a corpus, and data sets in the form of the Hub."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path

import pytest
from dipaco.modules.errors import CorpusError
from dipaco.routing import corpus as corpus_module
from dipaco.routing.corpus import (
    CorpusBookmark,
    CorpusConfig,
    CorpusStream,
    Document,
    DocumentReader,
    iterate_documents,
)

HUB_README = """---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/c4-train.*.json.gz
  - split: validation
    path: en/c4-validation.*.json.gz
---
"""


def _hub_folder(folder: Path) -> Path:
    """Write a data set as C4 lies on the Hub: gzipped JSON lines, named in its README."""
    (folder / "en").mkdir(parents=True)
    (folder / "README.md").write_text(HUB_README)
    for name, count in (("train.00000", 6), ("train.00001", 5), ("validation.00000", 2)):
        rows = [
            {"text": f"{name} {row}" if row != 3 else " ", "timestamp": "2019", "url": "u"}
            for row in range(count)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "en" / f"c4-{name}.json.gz").write_bytes(gzip.compress(lines.encode()))
    return folder


def _files(folder: Path) -> CorpusConfig:
    for number in range(3):
        rows = [{"text": f"{number} {row}" if row % 4 else ""} for row in range(7)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"train-{number}.jsonl").write_text(lines)
    return CorpusConfig(train="train-*.jsonl", held_out_fraction=0.4).relative_to(folder)


def _hub(folder: Path, **fields: object) -> CorpusConfig:
    _hub_folder(folder / "c4")
    config = CorpusConfig(hub="c4", hub_config="en", validation_split="validation", **fields)
    return config.relative_to(folder)


def test_a_local_folder_reads_as_the_hub_does(tmp_path: Path) -> None:
    config = _hub(tmp_path)
    train = [document.text for document in iterate_documents(config, "train")]
    assert train == [f"train.00000 {i}" for i in (0, 1, 2, 4, 5)] + [
        f"train.00001 {i}" for i in (0, 1, 2, 4)
    ]
    assert list(iterate_documents(config, "validation")) == [
        Document("validation.00000 0"), Document("validation.00000 1")
    ]  # fmt: skip
    wrong = config.model_copy(update={"train_split": "trane"})
    with pytest.raises(CorpusError, match=r"c4 \(trane\) cannot be read.*check hub"):
        list(iterate_documents(wrong, "train"))


def test_a_name_of_the_hub_stays_one(tmp_path: Path) -> None:
    config = CorpusConfig(hub="allenai/c4", hub_config="en")
    assert config.relative_to(tmp_path).hub == "allenai/c4"


@pytest.mark.parametrize("make", [_files, _hub])
def test_a_stream_goes_on_behind_any_document(tmp_path: Path, make: object) -> None:
    config = make(tmp_path)  # type: ignore[operator]
    whole = list(CorpusStream(config))
    assert {held_out for _, held_out in whole} == {False, True}
    for count in range(len(whole) + 1):
        stream = CorpusStream(config)
        assert list(islice(stream, count)) == whole[:count]
        position = json.loads(json.dumps(stream.position()))
        again = CorpusStream(config, position)
        held_out = sum(flag for _, flag in whole[:count])
        assert again.counts == {False: count - held_out, True: held_out}
        assert list(again) == whole[count:]


def test_files_that_are_behind_are_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _files(tmp_path)
    reader = DocumentReader(config, "train")
    rest = list(reader)[12:]
    reader = DocumentReader(config, "train")
    assert len(list(islice(reader, 12))) == 12
    opened: list[str] = []
    original = corpus_module._file_source

    def noted(path: Path, config: CorpusConfig) -> object:
        source = original(path, config)
        open_rows = source.open
        note = lambda: opened.append(path.name) or open_rows()  # noqa: E731
        return corpus_module._Source(source.name, note, source.complaint)

    monkeypatch.setattr(corpus_module, "_file_source", noted)
    assert list(DocumentReader(config, "train", reader.position())) == rest
    assert opened == ["train-2.jsonl"]


def test_the_limit_counts_what_was_read_before(tmp_path: Path) -> None:
    config = _files(tmp_path).model_copy(update={"train_limit": 9})
    reader = DocumentReader(config, "train")
    first = list(islice(reader, 7))
    again = list(DocumentReader(config, "train", reader.position()))
    assert (len(first), len(again)) == (7, 2)


def test_a_bookmark_is_used_only_where_it_fits(tmp_path: Path) -> None:
    stream = CorpusStream(_files(tmp_path))
    list(islice(stream, 6))
    train, held_out = stream.counts[False], stream.counts[True]
    file = tmp_path / "position.json"
    bookmark = CorpusBookmark(file, "inputs")
    assert bookmark.load(train, held_out) is None
    bookmark.save(stream.position())
    assert bookmark.load(train, held_out) == stream.position()
    assert bookmark.load(train + 1, held_out) == stream.position()
    assert bookmark.load(train - 1, held_out) is None, "the writer would miss a document"
    assert CorpusBookmark(file, "others").load(train, held_out) is None
    file.write_text("{")
    assert bookmark.load(train, held_out) is None
