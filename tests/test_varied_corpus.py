"""The corpus of `benchmarks/large_corpus.py`: as large as asked, varied, and always the same."""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import large_corpus
from parts import varied_corpus
from parts.varied_corpus import varied_text, write_varied_corpus

TEXTS = [
    f"Das ist Text {number}. Er hat drei Sätze, und Wort{number} ist sein eigenes! Ende?\n"
    for number in range(9)
]


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    lines = [json.dumps({"text": text, "domain": f"d{i % 2}"}) for i, text in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:4]) + "\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[4:]).encode()))
    return [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"]


def _rows(files: tuple[Path, ...]) -> list[dict[str, str]]:
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_a_corpus_of_any_size(
    tmp_path: Path, sources: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varied_corpus, "FILE_BYTES", 3000)
    corpus = write_varied_corpus(sources, tmp_path / "out", 10_000)
    rows = _rows(corpus.files)
    assert len(corpus.files) > 3
    assert len(rows) == corpus.documents
    assert sum(len(row["text"].encode()) for row in rows) == corpus.text_bytes
    assert 10_000 <= corpus.text_bytes < 10_200
    assert [row["text"] for row in rows[:9]] == TEXTS
    assert len({row["text"] for row in rows}) > 0.99 * len(rows), "documents repeat"
    assert {row["domain"] for row in rows} == {"d0", "d1"}
    again = write_varied_corpus(sources, tmp_path / "again", 10_000)
    assert [f.read_bytes() for f in again.files] == [f.read_bytes() for f in corpus.files]


def test_a_variation_keeps_most_words() -> None:
    text, neighbour = " ".join(TEXTS), "andere Wörter"
    varied = varied_text(text, neighbour, random.Random(1))
    assert varied != text
    kept = Counter(varied.split()) & Counter(text.split())
    assert sum(kept.values()) > 0.8 * len(text.split())
    assert set(neighbour.split()) & set(varied.split())


def test_no_text_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text('{"text": " "}\n')
    with pytest.raises(ValueError, match=r"no text in .*empty\.jsonl"):
        write_varied_corpus([tmp_path / "empty.jsonl"], tmp_path / "out", 10)


def test_progress_and_kill_points(tmp_path: Path) -> None:
    assert large_corpus.progress_of(tmp_path) == (0, 0)
    for name, documents in (("train", 70), ("validation", 5)):
        (tmp_path / "tokens" / name).mkdir(parents=True)
        values = {"documents": documents, "tokens": 1, "labels": []}
        (tmp_path / "tokens" / name / "progress.json").write_text(json.dumps(values))
    (tmp_path / "shards").mkdir()
    values = {"done": {"train": 30, "validation": 2}}
    (tmp_path / "shards" / "progress.json").write_text(json.dumps(values))
    assert large_corpus.progress_of(tmp_path) == (75, 32)
    seen = large_corpus.Progress(["tokenizer", "tokens"], 3.0, 75, 32)
    assert large_corpus.tokens_at(0.75).reached(seen, 100)
    assert not large_corpus.tokens_at(0.8).reached(seen, 100)
    assert large_corpus.in_stage("tokens", 2.0).reached(seen, 100)
    assert not large_corpus.in_stage("tokenizer", 2.0).reached(seen, 100)
