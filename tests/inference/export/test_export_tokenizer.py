"""Exported tokenizers give transformers the ids that ours gives."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer
from transformers import AutoTokenizer

from dipaco.inference.export.tokenizer_files import (
    lack_of_transformers,
    tokenizer_config,
    tokenizer_files,
    tokenizer_json,
)
from dipaco.protocol.config import BEGIN_TOKEN, END_TOKEN
from dipaco.routing.tokens.sentencepiece_tokenizer import train_tokenizer
from dipaco.routing.tokens.tokenizer_kinds import read_tokenizer
from support.runs.tiny_run import tiny_documents

CORPUS = Path(__file__).parents[3] / "examples" / "tiny" / "data"


def corpus_texts():
    with gzip.open(CORPUS / "validation.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


class TokenizerPair:
    """A tokenizer of ours and the one that transformers makes of its files."""

    def __init__(self, model, folder):
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(model)), "utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(model, 64)))
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        self.ours = read_tokenizer(model)
        self.theirs = AutoTokenizer.from_pretrained(folder)

    def check(self, text):
        expected = self.ours.encode(text)
        assert self.theirs(text).input_ids == [BEGIN_TOKEN, *expected], text
        assert self.theirs(text, add_special_tokens=False).input_ids == expected
        assert self.theirs.decode(expected) == self.ours.decode(expected)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    texts = [*corpus_texts(), "    indented\n\n\n========\n" * 20]
    train_tokenizer(texts, 900, folder / "model", character_limit=120_000)
    return TokenizerPair((folder / "model").read_bytes(), folder)


def test_ids_of_a_corpus_are_the_same(pair):
    for text in corpus_texts()[::4]:
        pair.check(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  leading and trailing  ",
        "\n\n\t \r\n",
        "a\u2581b \u2581 \u2581",
        "<s>x</s> <pad><unk> <0x41>",
        "def f(x):\n        return x  # <b>",
        "na\u00efve \u4e16\u754c \U0001f642\u200d e\u0301 \ufeff\x00\u00a0",
        "1234567890 3.14",
    ],
)
def test_odd_texts_have_the_same_ids(pair, text):
    pair.check(text)


def test_runs_of_one_character_have_the_same_ids(pair):
    for character in (" ", "=", "-", "a", "\n", "0"):
        for length in (*range(1, 40), 63, 64, 65, 200):
            for ending in ("", "a", " x"):
                pair.check(character * length + ending)


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_has_the_same_ids(pair, text):
    pair.check(text)


def test_special_pieces_are_known(pair):
    tokenizer = pair.theirs
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BEGIN_TOKEN, END_TOKEN)
    assert (tokenizer.unk_token_id, tokenizer.pad_token_id) == (0, 3)
    assert len(tokenizer) == pair.ours.vocabulary_size
    assert tokenizer.decode([BEGIN_TOKEN, *pair.ours.encode("a b"), END_TOKEN]) == "<s>a b</s>"


def trained_elsewhere(folder, **options):
    """Return a SentencePiece model that was not trained by us."""
    folder.mkdir(exist_ok=True)
    (folder / "texts").write_text("\n".join(tiny_documents(4, 20, 0)))
    given = {
        "model_type": "bpe",
        "vocab_size": 330,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "pad_id": 3,
        "unk_id": 0,
        "bos_id": 1,
        "eos_id": 2,
        "minloglevel": 2,
        **options,
    }
    SentencePieceTrainer.train(input=str(folder / "texts"), model_prefix=str(folder / "m"), **given)
    return (folder / "m.model").read_bytes()


def test_symbols_of_several_characters_are_cut_out(tmp_path):
    model = trained_elsewhere(tmp_path, user_defined_symbols=["<|x|>", "<|x|><|y|>", "ab"])
    pair = TokenizerPair(model, tmp_path / "files")
    for text in ("ba <|x|> ab", "<|x|><|y|><|x|>", "cab abab <|x|", "aab b"):
        pair.check(text)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"add_dummy_prefix": True}, "add_dummy_prefix"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
        ({"normalization_rule_name": "nfkc"}, "normalisation is 'nfkc'"),
        ({"model_type": "unigram"}, "not BPE"),
    ],
)
def test_what_cannot_be_written_exactly_is_left_as_it_is(tmp_path, options, reason):
    model = trained_elsewhere(tmp_path, **options)
    assert reason in lack_of_transformers(model)
    assert tokenizer_files(model, context=64) == {"tokenizer.model": model}
