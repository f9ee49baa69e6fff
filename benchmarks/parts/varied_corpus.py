"""A corpus of any size out of a small one: repetition with variation, always the same bytes.

No two documents are alike: each repetition of a document has its sentences in another order and
some of its words taken from its neighbour. So hashes, held-out documents and routes differ as
they do in a real corpus of that size, while the words keep their frequencies.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FILE_BYTES = 2**26
# Of the words of a document, so many come from its neighbour.
BORROWED_WORDS = 0.1

_SENTENCE = re.compile(r"[^.!?\n]*[.!?\n]*\s*")


@dataclass(frozen=True)
class VariedCorpus:
    """What was written: the files, and how much text is in them (UTF-8, without the JSON)."""

    files: tuple[Path, ...]
    documents: int
    text_bytes: int


def write_varied_corpus(
    sources: Sequence[Path], folder: Path, text_bytes: int, seed: int = 0
) -> VariedCorpus:
    """Write at least `text_bytes` of text to `folder` as JSON lines in files of 64 MiB.

    `sources` are files of JSON lines with `text` and perhaps `domain`, plain or gzipped. Raises
    ValueError if they hold no text.
    """
    rows = [row for source in sources for row in _rows(source) if row["text"].strip()]
    if not rows:
        raise ValueError(f"no text in {', '.join(map(str, sources))}")
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    documents = written = 0
    varied = _varied(rows, seed)
    while written < text_bytes:
        files.append(folder / f"varied-{len(files):05d}.jsonl")
        in_file = 0
        with files[-1].open("wb") as file:
            while written < text_bytes and in_file < FILE_BYTES:
                row = next(varied)
                in_file += file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                documents += 1
                written += len(row["text"].encode())
    return VariedCorpus(tuple(files), documents, written)


def varied_text(text: str, neighbour: str, generator: random.Random) -> str:
    """Return `text` with its sentences shuffled and some words of `neighbour` in it."""
    sentences = _SENTENCE.findall(text)
    generator.shuffle(sentences)
    words, others = "".join(sentences).split(" "), neighbour.split()
    if others:
        for _ in range(max(1, int(len(words) * BORROWED_WORDS))):
            words[generator.randrange(len(words))] = generator.choice(others)
    return " ".join(words)


def _varied(rows: list[dict[str, str]], seed: int) -> Iterator[dict[str, str]]:
    """Yield the rows as they are, then for ever varied, each repetition in an order of its own."""
    yield from rows
    repetition = 0
    while True:
        repetition += 1
        generator = random.Random(f"{seed}/{repetition}")
        order = generator.sample(range(len(rows)), len(rows))
        for place, index in enumerate(order):
            row, neighbour = rows[index], rows[order[place - 1]]
            yield {**row, "text": varied_text(row["text"], neighbour["text"], generator)}


def _rows(source: Path) -> Iterator[dict[str, str]]:
    with (gzip.open if source.suffix == ".gz" else open)(source, "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            yield {"text": row["text"], "domain": str(row.get("domain", ""))}
