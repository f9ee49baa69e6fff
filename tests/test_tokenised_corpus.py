"""A corpus that is tokenised already gives the run that its texts give."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dipaco.bootstrap.prepare import prepare
from dipaco.bootstrap.run_config import load_run_config
from dipaco.bootstrap.stages import corpus_fingerprint, inputs_hash
from dipaco.modules.config import END_TOKEN
from dipaco.modules.errors import ConfigurationError, CorpusError
from dipaco.modules.plan import RunPlan
from dipaco.routing.corpus import (
    CorpusConfig,
    Document,
    DocumentReader,
    is_held_out,
    iterate_documents,
)
from dipaco.routing.tokenizer import Tokenizer, train_tokenizer
from support.prepared_run import CPU, RUN_TOML, quiet_display, write_run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, and with documents as texts and as its tokens."""
    folder = tmp_path_factory.mktemp("tokenised")
    write_run(folder)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    train_tokenizer(
        (row["text"] for row in rows), 320, folder / "spm.model", character_limit=100_000, seed=0
    )
    tokenizer = Tokenizer(folder / "spm.model")
    for name, part in (("train", rows[:200]), ("validation", rows[200:])):
        lines = {"texts": [], "tokens": []}
        for number, row in enumerate(part):
            tokens = tokenizer.encode(row["text"])
            # Some come with begin and end.
            whole = tokenizer.document_tokens(row["text"]) if number % 2 else tokens
            lines["texts"].append(json.dumps(row))
            lines["tokens"].append(json.dumps({"ids": whole, "domain": row["domain"]}))
        for kind, found in lines.items():
            (folder / f"{kind}-{name}.jsonl").write_text("\n".join(found) + "\n")
    return folder


def toml_of(corpus: Path, kind: str, extra: str = "") -> Path:
    data = f'train = "{kind}-train.jsonl"\nvalidation = "{kind}-validation.jsonl"\n{extra}'
    text = RUN_TOML.replace("steps = 12", "steps = 1").replace('train = "train.jsonl"', data)
    text = text.replace("held_out_fraction = 0.1\n", "")
    text = text.replace("[tokenizer]\n", '[tokenizer]\nmodel_file = "spm.model"\n')
    (corpus / f"{kind}.toml").write_text(text)
    return corpus / f"{kind}.toml"


def sha256_of(corpus: Path) -> str:
    return hashlib.sha256((corpus / "spm.model").read_bytes()).hexdigest()


def made(toml: Path, out: Path) -> RunPlan:
    return prepare(toml, out, device=CPU, display=quiet_display())


def test_tokens_give_the_blobs_of_their_texts(corpus: Path, tmp_path: Path) -> None:
    fields = f'tokens_field = "ids"\ntokenizer_sha256 = "{sha256_of(corpus)}"\n'
    from_tokens = made(toml_of(corpus, "tokens", fields), tmp_path / "tokens")
    from_texts = made(toml_of(corpus, "texts"), tmp_path / "texts")
    assert from_tokens.blobs == from_texts.blobs
    assert from_tokens.run_id != ""


def arrays_of(corpus: Path) -> Path:
    """Write the documents as arrays, with the end token between them, and return the RUN.toml."""
    for name, kind in (("train", "bin"), ("validation", "npy")):
        lines = (corpus / f"tokens-{name}.jsonl").read_text().splitlines()
        flat: list[int] = []
        for ids in (json.loads(line)["ids"] for line in lines):
            flat += [token for token in ids if token != END_TOKEN] + [END_TOKEN]
        if kind == "bin":
            np.array(flat, "<u2").tofile(corpus / f"arrays-{name}.bin")
        else:
            np.save(corpus / f"arrays-{name}.npy", np.array(flat, np.int32))
    fields = f'separator_token = {END_TOKEN}\ntokenizer_sha256 = "{sha256_of(corpus)}"\n'
    toml = toml_of(corpus, "arrays", fields)
    text = toml.read_text().replace("arrays-train.jsonl", "arrays-train.bin")
    text = text.replace("arrays-validation.jsonl", "arrays-validation.npy")
    toml.write_text(text.replace('label_field = "domain"\n', ""))
    return toml


def test_arrays_of_tokens_are_the_documents_that_are_in_them(corpus: Path) -> None:
    config = load_run_config(arrays_of(corpus)).data
    for part in ("train", "validation"):
        lines = (corpus / f"tokens-{part}.jsonl").read_text().splitlines()
        expected = [[t for t in json.loads(line)["ids"] if t != END_TOKEN] for line in lines]
        reader = DocumentReader(config, part)  # type: ignore[arg-type]
        found = [document.tokens for document in itertools.islice(reader, 5)]
        # A second reader goes on after what the first one gave.
        rest = DocumentReader(config, part, json.loads(json.dumps(reader.position())))  # type: ignore[arg-type]
        found += [document.tokens for document in rest]
        assert [list(tokens) for tokens in found if tokens is not None] == expected


@pytest.mark.parametrize(
    ("name", "content", "given", "said"),
    [
        ("a.bin", b"123", {}, "3 bytes, which is no multiple of 2; .* bin_token_bytes = 4"),
        ("a.bin", b"1234", {"separator_token": None}, "separator_token = ID under"),
        ("a.npy", b"1234", {}, "a.npy is not an .npy file"),
        ("a.jsonl", b"{}", {}, "not a file of nothing but tokens"),
        ("a.bin", b"\3\0\3\0", {}, "no tokens between separators"),
        ("a.bin", b"", {}, "no tokens between separators|is empty"),
    ],
)
def test_what_is_no_array_of_tokens_is_named(
    tmp_path: Path, name: str, content: bytes, given: dict[str, Any], said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    values: dict[str, Any] = {"separator_token": 3, "tokenizer_sha256": "0" * 64, **given}
    if values["separator_token"] is None:
        del values["tokenizer_sha256"]
    config = CorpusConfig(train=(str(tmp_path / name),), **values)
    with pytest.raises(CorpusError, match=said):
        list(iterate_documents(config, "train"))


def test_tokens_of_another_tokenizer_are_refused(corpus: Path, tmp_path: Path) -> None:
    fields = f'tokens_field = "ids"\ntokenizer_sha256 = "{"0" * 64}"\n'
    with pytest.raises(ConfigurationError, match=f"has the SHA-256 {sha256_of(corpus)}"):
        made(toml_of(corpus, "tokens", fields), tmp_path / "out")


def without_model_file(toml: Path) -> None:
    toml.write_text(toml.read_text().replace('model_file = "spm.model"\n', ""))


def without_fingerprint(toml: Path) -> None:
    lines = toml.read_text().splitlines(keepends=True)
    toml.write_text("".join(line for line in lines if "tokenizer_sha256" not in line))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_model_file, "needs the tokenizer that made the tokens; name it with model_file"),
        (without_fingerprint, "tokens_field and tokenizer_sha256 belong together"),
    ],
)
def test_what_belongs_to_tokens(
    corpus: Path, tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    fields = f'tokens_field = "ids"\ntokenizer_sha256 = "{sha256_of(corpus)}"\n'
    toml = toml_of(corpus, "tokens", fields)
    change(toml)
    with pytest.raises(ConfigurationError, match=said):
        made(toml, tmp_path / "out")


@pytest.mark.parametrize("ids", [[-1, 2], [[1], [2]], [0.5], "text"], ids=str)
def test_what_is_no_list_of_tokens_is_named(tmp_path: Path, ids: Any) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"ids": ids}) + "\n")
    with pytest.raises(CorpusError, match=r"a.jsonl, row 1: 'ids' is not a list of tokens"):
        list(iterate_documents(config_of(tmp_path / "a.jsonl"), "train"))


def config_of(file: Path) -> CorpusConfig:
    return CorpusConfig(train=(str(file),), tokens_field="ids", tokenizer_sha256="0" * 64)


def test_a_token_beyond_the_vocabulary_is_named(corpus: Path, tmp_path: Path) -> None:
    fields = f'tokens_field = "ids"\ntokenizer_sha256 = "{sha256_of(corpus)}"\n'
    toml = toml_of(corpus, "tokens", fields)
    toml.write_text(toml.read_text().replace("tokens-train.jsonl", "beyond.jsonl"))
    (corpus / "beyond.jsonl").write_text(json.dumps({"ids": [7, 70_000], "domain": "x"}) + "\n")
    with pytest.raises(CorpusError, match="holds the token 70000, but the tokenizer has only 320"):
        made(toml, tmp_path / "out")


def test_an_empty_list_is_no_document(tmp_path: Path) -> None:
    rows = [{"ids": []}, {"ids": [5, 6]}, {"ids": None}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [document] = iterate_documents(config_of(tmp_path / "a.jsonl"), "train")
    assert document.tokens is not None
    assert document.tokens.tolist() == [5, 6]


def test_equal_tokens_are_on_one_side(tmp_path: Path) -> None:
    sides = {
        is_held_out(Document("", label, np.array([3, 4], dtype)), 0.5)
        for label, dtype in (("a", "int64"), ("b", "uint16"))
    }
    assert len(sides) == 1


def test_the_hash_of_a_corpus_of_texts_is_what_it_was(tmp_path: Path) -> None:
    """Else every preparation would begin again after an upgrade."""
    (tmp_path / "a.txt").write_text("text")
    config = CorpusConfig(train=(str(tmp_path / "a.txt"),))
    found = (tmp_path / "a.txt").stat()
    old = {
        "hub": None, "hub_config": None, "hub_revision": None, "train_split": "train",
        "validation_split": None, "text_field": "text", "label_field": None,
        "txt_documents": "file", "held_out_fraction": 0.01, "train_limit": None,
        "validation_limit": None,
    }  # fmt: skip
    files = [["train", "a.txt", found.st_size, found.st_mtime_ns]]
    assert corpus_fingerprint(config) == inputs_hash(old, files)
