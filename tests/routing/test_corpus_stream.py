"""All documents of a corpus, and data sets in the form of the Hub."""

import gzip
import json

import pytest

from dipaco.base.errors import CorpusError
from dipaco.routing.documents.corpus import CorpusConfig, Document, corpus_documents, iterate_documents

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


def _hub_folder(folder):
    """Write a data set as C4 lies on the Hub: gzipped JSON lines, named in its README."""
    (folder / "en").mkdir(parents=True)
    (folder / "README.md").write_text(HUB_README)
    for name, count in (("train.00000", 6), ("train.00001", 5), ("validation.00000", 2)):
        rows = [{"text": f"{name} {row}" if row != 3 else " ", "timestamp": "2019", "url": "u"} for row in range(count)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "en" / f"c4-{name}.json.gz").write_bytes(gzip.compress(lines.encode()))
    return folder


def _files(folder):
    for number in range(3):
        rows = [{"text": f"{number} {row}" if row % 4 else ""} for row in range(7)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"train-{number}.jsonl").write_text(lines)
    return CorpusConfig(train="train-*.jsonl", held_out_fraction=0.4).relative_to(folder)


def _hub(folder, **fields):
    _hub_folder(folder / "c4")
    config = CorpusConfig(hub="c4", hub_config="en", validation_split="validation", **fields)
    return config.relative_to(folder)


def test_a_local_folder_reads_as_the_hub_does(tmp_path):
    config = _hub(tmp_path)
    train = [document.text for document in iterate_documents(config, "train")]
    assert train == [f"train.00000 {i}" for i in (0, 1, 2, 4, 5)] + [f"train.00001 {i}" for i in (0, 1, 2, 4)]
    assert list(iterate_documents(config, "validation")) == [
        Document("validation.00000 0"), Document("validation.00000 1")
    ]  # fmt: skip
    wrong = config.model_copy(update={"train_split": "trane"})
    with pytest.raises(CorpusError, match=r"c4 \(trane\) cannot be read.*check hub"):
        list(iterate_documents(wrong, "train"))


def test_a_name_of_the_hub_stays_one(tmp_path):
    config = CorpusConfig(hub="allenai/c4", hub_config="en")
    assert config.relative_to(tmp_path).hub == "allenai/c4"


@pytest.mark.parametrize("make", [_files, _hub])
def test_all_documents_come_once_the_held_out_marked(tmp_path, make):
    config = make(tmp_path)
    found = list(corpus_documents(config))
    assert {held_out for _, held_out in found} == {False, True}
    parts = ("train", "validation") if config.has_validation else ("train",)
    read = [document for part in parts for document in iterate_documents(config, part)]
    assert [document for document, _ in found] == read


def test_a_limit_counts_documents_with_text(tmp_path):
    config = _files(tmp_path).model_copy(update={"train_limit": 9})
    assert len(list(iterate_documents(config, "train"))) == 9
