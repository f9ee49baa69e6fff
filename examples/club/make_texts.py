"""The texts of a club, for the example beside it: a sample that all may read, and four owners' own.

    python examples/club/make_texts.py examples/club/texts

They are taken from the corpus of examples/tiny: German law, C, arithmetic, and French novels. The
folder then holds sample.jsonl, and owner-1 to owner-4 with a .txt file for each document. In a real
club nobody but an owner has the owner's folder.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

CORPUS = Path(__file__).parents[1] / "tiny" / "data" / "train-00000.jsonl.gz"
OWNERS = ("law_de", "code_c", "math_word", "fiction_fr")
SAMPLE_DOCUMENTS = 24
SAMPLE_CHARACTERS = 1000
OWN_CHARACTERS = 100_000


def write_texts(folder: Path) -> None:
    """Write the sample and the owners' folders."""
    texts: dict[str, list[str]] = {domain: [] for domain in OWNERS}
    with gzip.open(CORPUS, "rt", encoding="utf-8") as lines:
        for document in map(json.loads, lines):
            if document["domain"] in texts:
                texts[document["domain"]].append(document["text"])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "sample.jsonl").open("w", encoding="utf-8") as sample:
        for domain, found in texts.items():
            for text in found[:SAMPLE_DOCUMENTS]:
                row = {"text": text[:SAMPLE_CHARACTERS], "domain": domain}
                sample.write(json.dumps(row) + "\n")
    for number, found in enumerate(texts.values(), 1):
        own = folder / f"owner-{number}"
        own.mkdir(exist_ok=True)
        taken = 0
        for place, text in enumerate(found[SAMPLE_DOCUMENTS:]):
            if taken < OWN_CHARACTERS:
                (own / f"{place:03}.txt").write_text(text, encoding="utf-8")
                taken += len(text)


def main() -> None:
    """Write the folder named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    write_texts(parser.parse_args().folder)


if __name__ == "__main__":
    main()
