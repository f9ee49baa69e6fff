import random
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dipaco.base.errors import ConfigurationError, CorpusError, IntegrityError
from dipaco.routing.tokens.sentencepiece_tokenizer import train_tokenizer
from dipaco.routing.tokens.tokenizer_kinds import read_tokenizer

PYTHON = """def f(x):
\tif x:
        return {"a":   [1, 2],\t"b": None}   # two  spaces

    return f"{x!r}\\n"\r
"""
C = '#include <stdio.h>\n\nint main(void)\n{\n\tprintf("%d\\n",   1);\n\n\n    return 0;\n}\n'
PROSE = "Der Bundestag hat beschlossen. Il était une fois; once upon a time, 12,345 ships. "


def _texts():
    generator = random.Random(0)
    words = [w for text in (PYTHON, C, PROSE) for w in text.split()]
    noise = [" ".join(generator.choices(words, k=60)) for _ in range(60)]
    return [PYTHON, C, PROSE * 3, *noise]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    return train_tokenizer(_texts(), 400, path, character_limit=100_000)


@pytest.mark.parametrize(
    "text",
    [
        PYTHON, C, PROSE, "", " ", "\n", "\n\n\t \t\n", "   lead and trail   ", "a\r\nb\rc",
        "<s></s><unk><pad><0x0A>", "\u2581 is\u2581a space mark\u2581", "\x00\x07",
        "日本語 🎉 é e\u0301",
        "\u00a0\u2003\ufeff", "ﬁ ﬀ ①",
    ],
)  # fmt: skip
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip_of_anything(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert all(4 <= token < tokenizer.vocabulary_size for token in tokens)


def test_documents_and_special_pieces(tokenizer):
    tokens = tokenizer.document_tokens("x = 1")
    assert (tokens[0], tokens[-1]) == (1, 2)
    assert tokenizer.decode([*tokens, 3, 3]) == "x = 1"
    assert tokenizer.vocabulary_size == 400
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


def test_many_documents_at_once_and_by_threads(tokenizer):
    texts = [*_texts(), "", "\u2581 a\u2581b", "a\ud800b", "x"]
    expected = [tokenizer.document_tokens(text) for text in texts]
    assert tokenizer.tokens_of_documents(texts) == expected
    assert tokenizer.tokens_of_documents(texts, threads=3) == expected
    assert tokenizer.tokens_of_documents([]) == []


def test_runs_of_spaces_are_cheap(tmp_path):
    code = [" " * 8 + f"return {number}\n" for number in range(200)]
    tokenizer = train_tokenizer(code, 290, tmp_path / "t", character_limit=100_000)
    assert len(tokenizer.encode(" " * 8)) <= 2


def test_same_texts_same_bytes(tmp_path):
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        train_tokenizer(_texts(), 320, file, character_limit=3000, seed=5)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert read_tokenizer(files[0]).encode(PROSE) == read_tokenizer(files[1].read_bytes()).encode(PROSE)


def test_scan_stops(tmp_path):
    def endless():
        while True:
            yield PROSE * 10

    tokenizer = train_tokenizer(endless(), 300, tmp_path / "t", character_limit=5000)
    assert tokenizer.vocabulary_size == 300


def _chinese(characters):
    """Texts with so many different characters, the commoner ones ever more often."""
    drawn = [chr(0x4E00 + number) for number in range(characters)]
    random.Random(1).shuffle(drawn)
    texts = ["".join(drawn[start : start + 50]) for start in range(0, characters, 50)]
    words = ["".join(random.Random(n).choices(drawn[: characters // 6], k=2)) for n in range(3000)]
    random.Random(2).shuffle(words)
    return [*texts, "\u3002".join(words), *_texts()]


def test_more_characters_than_pieces(tmp_path):
    """Rare characters are written as bytes, and that is said in one line."""
    texts, said = _chinese(4400), []
    tokenizer = train_tokenizer(texts, 4096, tmp_path / "t", character_limit=1_000_000, say=said.append)
    assert tokenizer.vocabulary_size == 4096
    distinct = set("".join(texts)) - {"\n"}
    as_bytes = {character for character in distinct if len(tokenizer.encode(character)) > 1}
    assert len(distinct - as_bytes) == (4096 - 261) // 2
    for text in (*texts, "".join(sorted(as_bytes)), "\u9fa0 \U0002a6d6 x"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(texts[-1])) < len(texts[-1]), "pieces are left for words"
    (line,) = said
    assert re.match(r"character coverage 0\.\d{4}: ", line)
    assert f"{len(as_bytes):,} of {len(distinct):,} characters of the sample are written as" in line
    assert "a larger vocabulary_size under [model] would hold them" in line


def test_few_characters_are_covered_as_usual(tmp_path):
    said = []
    train_tokenizer(_texts(), 500, tmp_path / "t", character_limit=100_000, say=said.append)
    assert not said


def test_errors(tmp_path):
    with pytest.raises(CorpusError, match="no text"):
        train_tokenizer([], 300, tmp_path / "t", character_limit=1000)
    with pytest.raises(ConfigurationError, match=r"100 pieces.*vocabulary_size under \[model\]"):
        train_tokenizer(_texts(), 100, tmp_path / "t", character_limit=1000)
    with pytest.raises(ConfigurationError, match="too high"):
        train_tokenizer(_texts(), 30_000, tmp_path / "t", character_limit=10_000)
    with pytest.raises(IntegrityError, match="not a SentencePiece model"):
        read_tokenizer(b"nonsense")
