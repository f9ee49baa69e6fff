import functools
import os
import random

import numpy as np
import pytest

from dipaco.base.blobs import BlobStore
from dipaco.base.errors import CorpusError, IntegrityError
from dipaco.protocol.config import BEGIN_TOKEN, END_TOKEN, PAD_TOKEN
from dipaco.routing.documents.corpus import Document
from dipaco.routing.shards import RowShape, ShardBuilder
from dipaco.routing.tokens import token_corpus
from dipaco.routing.tokens.token_corpus import TokenCorpus, TokenCorpusWriter, encoded, write_token_corpora
from dipaco.routing.tokens.token_files import check_tokens, open_tokens, scoring_windows
from support.programs.power_cut import Disk

LENGTH, PREFIX, PATHS, VOCABULARY = 16, 4, 3, 1000
ROWS = RowShape(sequence_length=LENGTH, prefix_tokens=PREFIX, vocabulary_size=VOCABULARY, padding=PAD_TOKEN)


class LetterTokenizer:
    """One token for every character."""

    vocabulary_size = VOCABULARY

    def __init__(self):
        self.calls = 0

    def document_tokens(self, text):
        self.calls += 1
        return [BEGIN_TOKEN, *(ord(letter) for letter in text), END_TOKEN]

    def tokens_of_documents(self, texts, threads=1):
        return [self.document_tokens(text) for text in texts]

    def unwritable_characters(self, text):
        return 0


class FirstLetterRouter:
    """Routes by the first character, and can be interrupted after some chunks."""

    def __init__(self, chunks=10**9):
        self.chunks = chunks
        self.documents = 0

    def __call__(self, beginnings):
        self.chunks -= 1
        if self.chunks < 0:
            raise KeyboardInterrupt
        self.documents += len(beginnings.tokens)
        assert len(beginnings.labels) == len(beginnings.tokens)
        assert max(len(tokens) for tokens in beginnings.tokens) <= PREFIX
        best = np.array([int(tokens[1]) % PATHS for tokens in beginnings.tokens], dtype=np.int64)
        return (best[:, None] + np.arange(beginnings.paths)[None, :]) % PATHS


def _documents(count=90):
    generator = random.Random(0)
    texts = ["".join(generator.choices("abcdefgh", k=generator.randint(1, 60))) for _ in range(count)]
    return [(Document(text, text[0]), number % 5 == 0) for number, text in enumerate(texts)]


def _encode(tokenizer=None):
    return functools.partial(encoded, tokenizer=tokenizer or LetterTokenizer())


def _corpora(folder, documents):
    writers = [TokenCorpusWriter(folder / p, VOCABULARY) for p in ("t", "v")]
    for _ in write_token_corpora(documents, _encode(), *writers, chunk_documents=7):
        pass
    return [TokenCorpus(folder / part, VOCABULARY) for part in ("t", "v")]


def _builder(folder):
    return ShardBuilder(folder, ROWS, PATHS, chunk_documents=8)


def _build(tmp_path, name="shards"):
    train, validation = _corpora(tmp_path / "tokens", _documents())
    builder = _builder(tmp_path / name)
    builder.build(train, validation, FirstLetterRouter())
    blobs = BlobStore(tmp_path / "blobs")
    return builder.finish(blobs), blobs


def test_token_corpus_holds_the_documents(tmp_path):
    documents = _documents()
    for held_out, corpus in zip((False, True), _corpora(tmp_path, documents), strict=True):
        expected = [document for document, flag in documents if flag == held_out]
        assert len(corpus) == len(expected)
        for index, document in enumerate(expected):
            assert corpus.document(index).tolist() == LetterTokenizer().document_tokens(document.text)
            assert corpus.label_name(index) == document.label
        assert corpus.lengths().tolist() == [len(d.text) + 2 for d in expected]
        rows = corpus.rows(LENGTH)
        assert rows.reshape(-1).tolist() == corpus.tokens[: rows.size].tolist()
    with pytest.raises(CorpusError, match="less than one sequence"):
        corpus.rows(10**6)


def test_what_is_finished_is_safe_when_the_power_fails(tmp_path, monkeypatch):
    """Else zeros are taken for tokens."""
    disk = Disk(monkeypatch)
    _corpora(tmp_path / "tokens", _documents())
    index, blobs = _build(tmp_path)
    disk.lose_power(tmp_path)
    assert [len(TokenCorpus(tmp_path / "tokens" / part, VOCABULARY)) for part in ("t", "v")] == [72, 18]
    for shard in index.paths:
        assert blobs.verify(shard.train_sha256)
        assert blobs.verify(shard.validation_sha256)


def test_a_corpus_or_shard_that_was_interrupted_is_made_anew(tmp_path):
    expected, blobs = _build(tmp_path)
    train, validation = _corpora(tmp_path / "tokens", _documents())
    with pytest.raises(KeyboardInterrupt):
        _builder(tmp_path / "shards").build(train, validation, FirstLetterRouter(chunks=2))
    # They were one file with two names.
    for shard in expected.paths:
        assert blobs.verify(shard.train_sha256)
    writers = [TokenCorpusWriter(tmp_path / "tokens" / p, VOCABULARY) for p in ("t", "v")]
    next(write_token_corpora(_documents(), _encode(), *writers, chunk_documents=7))
    with pytest.raises(IntegrityError, match="holds no tokens of a corpus"):
        TokenCorpus(tmp_path / "tokens" / "t", VOCABULARY)
    assert _build(tmp_path)[0] == expected


def test_a_disk_is_waited_for_seldom(tmp_path, monkeypatch):
    """A wait for each path and chunk would be days for a large corpus."""
    train, validation = _corpora(tmp_path / "tokens", _documents())
    waits, usual = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (waits.append(descriptor), usual(descriptor)))
    _builder(tmp_path / "s").build(train, validation, FirstLetterRouter())
    assert len(waits) == 2 * PATHS, "each file once"


def test_shards_hold_each_token_once(tmp_path):
    index, blobs = _build(tmp_path)
    for path in range(PATHS):
        shard = index.paths[path]
        mine = [(d, v) for d, v in _documents() if ord(d.text[0]) % PATHS == path]
        train = open_tokens(blobs.path(shard.train_sha256), LENGTH, VOCABULARY)
        flat = [t for d, v in mine if not v for t in LetterTokenizer().document_tokens(d.text)]
        assert train.reshape(-1)[: len(flat)].tolist() == flat
        assert (train.reshape(-1)[len(flat) :] == PAD_TOKEN).all()
        assert len(train) == shard.train_sequences == -(-len(flat) // LENGTH)
        assert shard.train_documents == sum(not v for _, v in mine)
        held = open_tokens(blobs.path(shard.validation_sha256), LENGTH, VOCABULARY)
        windows = [
            scoring_windows(LetterTokenizer().document_tokens(d.text), LENGTH, PREFIX, PAD_TOKEN)
            for d, v in mine if v
        ]  # fmt: skip
        assert np.array_equal(held, np.concatenate(windows))
        assert shard.validation_sequences == len(held)


def test_overlapping_shards(tmp_path):
    train, validation = _corpora(tmp_path / "tokens", _documents())
    blobs = BlobStore(tmp_path / "blobs")
    plain, _ = _build(tmp_path)
    folder = tmp_path / "two"
    builder = ShardBuilder(folder, ROWS, PATHS, train_paths=2, chunk_documents=8)
    builder.build(train, validation, FirstLetterRouter())
    index = builder.finish(blobs)
    for path in range(PATHS):
        assert index.paths[path].validation_sha256 == plain.paths[path].validation_sha256
        mine = [d for d, v in _documents() if not v and (path - ord(d.text[0])) % PATHS < 2]
        flat = [t for d in mine for t in LetterTokenizer().document_tokens(d.text)]
        tokens = open_tokens(blobs.path(index.paths[path].train_sha256), LENGTH, VOCABULARY)
        assert tokens.reshape(-1)[: len(flat)].tolist() == flat
        assert index.paths[path].train_documents == len(mine)
        summary = builder.summaries()[path]
        assert sum(summary.labels.values()) == summary.tokens == len(flat)


def test_chunks_are_bounded_in_tokens(tmp_path):
    train, validation = _corpora(tmp_path / "tokens", _documents())
    expected, _ = _build(tmp_path)
    builder = ShardBuilder(tmp_path / "s", ROWS, PATHS, chunk_tokens=100)
    seen = []
    builder.build(train, validation, FirstLetterRouter(), progress=lambda done, total: seen.append(done))
    for first, last in zip([0, *seen], seen, strict=False):
        lengths = [*train.lengths(), *validation.lengths()][first:last]
        assert sum(lengths) <= 100 or len(lengths) == 1
    assert len(seen) > 20
    assert builder.finish(BlobStore(tmp_path / "other")) == expected


def test_there_are_so_many_labels_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(token_corpus, "MAX_LABELS", 2)
    documents = [(Document("some text", label), False) for label in ("a", "b", "c", "a", None, "d")]
    writer = TokenCorpusWriter(tmp_path / "t", VOCABULARY)
    for _ in write_token_corpora(documents, _encode(), writer, TokenCorpusWriter(tmp_path / "v", VOCABULARY)):
        pass
    corpus = TokenCorpus(tmp_path / "t", VOCABULARY)
    assert [corpus.label_name(index) for index in range(6)] == ["a", "b", None, "a", None, None]
    assert writer.unlabelled == 2


def test_a_corpus_that_was_spoilt_is_refused(tmp_path):
    corpus = _corpora(tmp_path, _documents())[0]
    ends = np.array(corpus.ends)
    ends[3] = ends[2]
    (tmp_path / "t" / "ends.bin").write_bytes(ends.tobytes())
    with pytest.raises(IntegrityError, match="is damaged"):
        TokenCorpus(tmp_path / "t", VOCABULARY).lengths()


def test_a_last_row_of_one_token_is_left_out(tmp_path):
    documents = [(Document("c" * (LENGTH - 2 + extra)), False) for extra in (0, 1)]
    for count, sequences in ((1, 1), (2, 2)):
        train, validation = _corpora(tmp_path / f"tokens{count}", documents[:count])
        builder = _builder(tmp_path / f"shards{count}")
        builder.build(train, validation, FirstLetterRouter())
        assert builder.finish(BlobStore(tmp_path / "b")).paths[0].train_sequences == sequences


def test_token_files(tmp_path):
    file = tmp_path / "tokens"
    file.write_bytes(np.arange(32, dtype="<u4").tobytes())
    assert open_tokens(file, 16, 2**16 + 1).tolist()[1][0] == 16
    assert open_tokens(file, 16, 2**16).shape == (4, 16)
    with pytest.raises(IntegrityError, match="not a multiple"):
        open_tokens(file, 17, 100)
    file.write_bytes(b"")
    assert open_tokens(file, 17, 100).shape == (0, 17)
    check_tokens(np.array([[1, 99]]), 100, "it")
    with pytest.raises(IntegrityError, match="it holds the token 100"):
        check_tokens(np.array([[1, 100]]), 100, "it")
