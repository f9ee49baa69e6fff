"""A small made-up corpus in three scripts, free of anybody's rights, for the example beside it.

python examples/language/make_corpus.py corpus

Each language has its own words, and sentences in which a word depends on the one before it. The
texts mean nothing; put your own in their place.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

ALPHABETS = {
    "greek": "αβγδεζηθικλμνξοπρστυφχψω",
    "devanagari": "कखगघचछजझटठडढतथदधनपफबभमयरलवशसह",
    # Two thousand characters: most have to be written as bytes in a small vocabulary.
    "han": "".join(chr(0x4E00 + 9 * number) for number in range(2000)),
}
ENDS = {"greek": ". ", "devanagari": "। ", "han": "。"}
DOCUMENTS = 300
WORDS = 400


def words_of(language: str, generator: random.Random) -> list[str]:
    """Return the words of a language; those of Han have one or two characters."""
    letters = ALPHABETS[language]
    longest = 2 if language == "han" else 7
    return [
        "".join(generator.choices(letters, k=generator.randint(1 if longest == 2 else 3, longest)))
        for _ in range(WORDS)
    ]


def document(words: Sequence[str], language: str, generator: random.Random) -> str:
    """Return some sentences; a word has eight that may follow it."""
    space = "" if language == "han" else " "
    sentences, place = [], generator.randrange(WORDS)
    for _ in range(generator.randint(6, 20)):
        sentence = []
        for _ in range(generator.randint(4, 12)):
            sentence.append(words[place])
            place = (7 * place + generator.randrange(8) ** 2) % WORDS
        sentences.append(space.join(sentence) + ENDS[language])
    return "".join(sentences).strip()


def main(folder: Path) -> None:
    """Write train-0.jsonl to train-3.jsonl and validation.jsonl."""
    generator = random.Random(0)
    rows = []
    for language in ALPHABETS:
        words = words_of(language, generator)
        rows += [
            {"text": document(words, language, generator), "language": language}
            for _ in range(DOCUMENTS)
        ]
    generator.shuffle(rows)
    held_out, rest = rows[:90], rows[90:]
    files = {"validation.jsonl": held_out}
    files |= {f"train-{number}.jsonl": rest[number::4] for number in range(4)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, chosen in files.items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in chosen]
        (folder / name).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
