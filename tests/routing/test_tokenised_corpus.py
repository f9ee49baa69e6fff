"""A corpus that is tokenised already gives the run that its texts give."""

import hashlib
import json

import numpy as np
import pytest

from dipaco.base.errors import ConfigurationError, CorpusError
from dipaco.routing.documents.corpus import CorpusConfig, Document, is_held_out, iterate_documents
from dipaco.routing.tokens.tokenizer import Tokenizer, train_tokenizer
from support.runs.prepared_run import RUN_TOML, on_cpu, prepare, write_run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder with a tokenizer, and with documents as texts and as its tokens."""
    folder = tmp_path_factory.mktemp("tokenised")
    write_run(folder)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    train_tokenizer((row["text"] for row in rows), 320, folder / "spm.model", character_limit=100_000, seed=0)
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


def toml_of(corpus, kind, extra=""):
    data = f'train = "{kind}-train.jsonl"\nvalidation = "{kind}-validation.jsonl"\n{extra}'
    text = RUN_TOML.replace("steps = 12", "steps = 1").replace('train = "train.jsonl"', data)
    text = text.replace("held_out_fraction = 0.1\n", "")
    text = text.replace("[tokenizer]\n", '[tokenizer]\nmodel_file = "spm.model"\n')
    (corpus / f"{kind}.toml").write_text(text)
    return corpus / f"{kind}.toml"


def sha256_of(corpus):
    return hashlib.sha256((corpus / "spm.model").read_bytes()).hexdigest()


def made(toml, out):
    return prepare(toml, out, on_cpu())


def test_tokens_give_the_blobs_of_their_texts(corpus, tmp_path):
    fields = f'tokens_field = "ids"\ntokenizer_sha256 = "{sha256_of(corpus)}"\n'
    from_tokens = made(toml_of(corpus, "tokens", fields), tmp_path / "tokens")
    from_texts = made(toml_of(corpus, "texts"), tmp_path / "texts")
    assert from_tokens.blobs == from_texts.blobs
    assert from_tokens.run_id != ""


def test_tokens_of_another_tokenizer_are_refused(corpus, tmp_path):
    fields = f'tokens_field = "ids"\ntokenizer_sha256 = "{"0" * 64}"\n'
    with pytest.raises(ConfigurationError, match=f"has the SHA-256 {sha256_of(corpus)}"):
        made(toml_of(corpus, "tokens", fields), tmp_path / "out")


def without_model_file(toml):
    toml.write_text(toml.read_text().replace('model_file = "spm.model"\n', ""))


def without_fingerprint(toml):
    lines = toml.read_text().splitlines(keepends=True)
    toml.write_text("".join(line for line in lines if "tokenizer_sha256" not in line))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_model_file, "needs the tokenizer that made the tokens; name it with model_file"),
        (without_fingerprint, "tokens_field and tokenizer_sha256 belong together"),
    ],
)
def test_what_belongs_to_tokens(corpus, tmp_path, change, said):
    fields = f'tokens_field = "ids"\ntokenizer_sha256 = "{sha256_of(corpus)}"\n'
    toml = toml_of(corpus, "tokens", fields)
    change(toml)
    with pytest.raises(ConfigurationError, match=said):
        made(toml, tmp_path / "out")


@pytest.mark.parametrize("ids", [[-1, 2], [[1], [2]], [0.5], "text"], ids=str)
def test_what_is_no_list_of_tokens_is_named(tmp_path, ids):
    (tmp_path / "a.jsonl").write_text(json.dumps({"ids": ids}) + "\n")
    with pytest.raises(CorpusError, match=r"a.jsonl, row 1: 'ids' is not a list of tokens"):
        list(iterate_documents(config_of(tmp_path / "a.jsonl"), "train"))


def config_of(file):
    return CorpusConfig(train=(str(file),), tokens_field="ids", tokenizer_sha256="0" * 64)


def test_a_token_beyond_the_vocabulary_is_named(corpus, tmp_path):
    fields = f'tokens_field = "ids"\ntokenizer_sha256 = "{sha256_of(corpus)}"\n'
    toml = toml_of(corpus, "tokens", fields)
    toml.write_text(toml.read_text().replace("tokens-train.jsonl", "beyond.jsonl"))
    (corpus / "beyond.jsonl").write_text(json.dumps({"ids": [7, 70_000], "domain": "x"}) + "\n")
    with pytest.raises(CorpusError, match="holds the token 70000, but the tokenizer has only 320"):
        made(toml, tmp_path / "out")


def test_an_empty_list_is_no_document(tmp_path):
    rows = [{"ids": []}, {"ids": [5, 6]}, {"ids": None}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [document] = iterate_documents(config_of(tmp_path / "a.jsonl"), "train")
    assert document.tokens.tolist() == [5, 6]


def test_equal_tokens_are_on_one_side(tmp_path):
    sides = {
        is_held_out(Document("", label, np.array([3, 4], dtype)), 0.5)
        for label, dtype in (("a", "int64"), ("b", "uint16"))
    }
    assert len(sides) == 1
