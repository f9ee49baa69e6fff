"""A volunteer's documents as rows: made once, by the parts of `prepare`, and read on where they were left."""

import json
import stat

import numpy as np
import pytest

from dipaco.base.errors import ConfigurationError, CorpusError
from dipaco.routing.batches import BatchStream
from dipaco.routing.documents.corpus import CorpusConfig, Document, is_held_out
from dipaco.routing.own_texts import HELD_OUT_FRACTION, open_own_texts
from dipaco.routing.run_folder import RunFolder
from support.runs.chat_runs import chat_rows, write_chats
from support.runs.chat_templates import CHATML
from support.runs.prepared_run import on_cpu, prepare
from support.runs.tiny_run import make_tiny_run, tiny_documents


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_tiny_run(tmp_path_factory.mktemp("run") / "run")


class Owner:
    """Somebody with documents in a file, and the folder that their rows are made in."""

    def __init__(self, run, folder):
        self.run, self.plan, self.folder = run, run.plan(), folder
        self.file, self.rows = folder / "mine.jsonl", folder / "own" / "rows"
        self.loaded = 0

    def write(self, *texts):
        self.file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return self

    def router(self):
        self.loaded += 1
        return self.run.document_router(self.plan)

    def open(self, **more):
        corpus = CorpusConfig(train=(str(self.file),), held_out_fraction=HELD_OUT_FRACTION)
        return open_own_texts(self.plan, corpus, self.rows, self.router, **more)


@pytest.fixture
def owner(run, tmp_path):
    return Owner(run, tmp_path)


def of_language(*languages, count=40):
    texts = tiny_documents(4, count, seed=5)
    return [text for language in languages for text in texts[language * count : (language + 1) * count]]


def test_documents_go_where_the_run_s_router_sends_them_and_a_tenth_is_held_out_by_its_hash(owner):
    texts = of_language(1, 3)
    own, router = owner.write(*texts).open(), owner.router()
    paths = router.nearest_paths([router.tokenizer.document_tokens(text) for text in texts], 1)[:, 0]
    held_out = [is_held_out(Document(text), HELD_OUT_FRACTION) for text in texts]
    for path in range(4):
        assert own.documents.get(path, 0) == sum(p == path and not h for p, h in zip(paths, held_out, strict=True))
    assert own.held_out_documents == sum(held_out) > 0
    assert sum(len(own.held_out(path)) for path in own.documents) > 0


def test_they_are_made_once_and_anew_when_the_file_changes(owner):
    owner.write(*of_language(0)).open()
    assert owner.open().documents.keys() == {0}
    assert owner.loaded == 1
    owner.write(*of_language(2))
    assert owner.open().documents.keys() == {2}
    assert owner.loaded == 2


def test_nobody_but_the_owner_can_read_them_and_no_copy_of_the_whole_is_left(owner):
    own = owner.write(*of_language(0)).open()
    own.stream(0, None).batch(0)
    own.keep_places()
    for file in (owner.rows.parent, *owner.rows.parent.rglob("*")):
        assert stat.S_IMODE(file.stat().st_mode) == (0o700 if file.is_dir() else 0o600)
    assert not (owner.rows / "tokens").exists()


def test_an_interrupted_making_is_begun_anew_and_gives_the_same_rows(run, owner, tmp_path):
    class StopError(Exception):
        pass

    def stop_at(wanted):
        def progress(what, done):
            if (what, done) == wanted:
                raise StopError

        return progress

    texts = of_language(0, 1, 2, 3)
    owner.write(*texts)
    for wanted in (("documents read", 64), ("documents routed", 64)):
        with pytest.raises(StopError):
            owner.open(progress=stop_at(wanted))
    (tmp_path / "other").mkdir()
    other = Owner(run, tmp_path / "other").write(*texts)
    ours, whole = owner.open(), other.open()
    assert ours.documents == whole.documents
    for path in whole.documents:
        assert (ours.stream(path, None).batch(0) == whole.stream(path, None).batch(0)).all()


def batches(stream, count):
    return [tuple(map(tuple, stream.batch(place).tolist())) for place in range(count)]


def test_alone_they_are_read_once_an_epoch_and_go_on_where_they_ended(owner):
    own = owner.write(*of_language(0)).open()
    per_epoch = own.stream(0, None).batches_per_epoch
    whole = batches(own.stream(0, None), per_epoch)
    own = owner.write(*of_language(0)).open()
    begun = batches(own.stream(0, None), 5)
    own.keep_places()
    assert begun + batches(owner.open().stream(0, None), per_epoch - 5) == whole
    rows = [row for batch in whole for row in batch]
    assert len(set(rows)) >= len(rows) - owner.plan.inner.batch_sequences


def test_a_damaged_note_of_the_places_begins_anew(owner):
    first = batches(owner.write(*of_language(0)).open().stream(0, None), 1)
    for damage in (b"\xff", b"[]", b'{"0": 1}', b'{"0": {"batches": "x", "due": 0}}'):
        (owner.rows / "places.json").write_bytes(damage)
        assert batches(owner.open().stream(0, None), 1) == first


def test_beside_a_shard_each_row_is_read_equally_often_and_the_shard_s_batches_are_those_of_their_places(owner):
    own = owner.write(*of_language(0)).open()
    mine = own.stream(0, None).sequences
    tokens = np.zeros((3 * mine, owner.plan.model.sequence_length), np.uint16)
    shard = BatchStream(tokens + 7, seed=0, path=0, batch_sequences=owner.plan.inner.batch_sequences)
    both = own.stream(0, shard)
    assert both.batches_per_epoch == shard.batches_per_epoch
    places = []

    class Noted:
        sequences = shard.sequences

        def batch(self, place):
            places.append(place)
            return shard.batch(place)

    batches(own.stream(0, Noted()), 400)
    assert len(places) == 300
    assert set(range(400)) - set(places) == set(range(3, 400, 4))


def test_what_is_wrong_with_a_document_is_said_without_a_word_of_it(owner):
    secret = "wahfrudzle"
    for line in (f'"{secret}', f"[{json.dumps([secret])}]", json.dumps({"messages": secret}),
                 json.dumps({"messages": [{"role": secret, "content": "a"}]}),
                 json.dumps({"messages": [{"role": "user", "content": {"a": secret}}]}),
                 json.dumps({"messages": [{"role": "user", "content": "a", secret: "b"}]}),
                 json.dumps({"prompt": "a", secret: "b"})):  # fmt: skip
        owner.file.write_text(line + "\n")
        with pytest.raises(CorpusError) as complaint:
            owner.open()
        assert secret not in str(complaint.value)
    owner.file.write_text(json.dumps({secret: secret}))
    with pytest.raises(CorpusError, match="no field 'text'; name the one") as complaint:
        owner.open()
    assert secret not in str(complaint.value)


def test_texts_of_which_nothing_is_left_to_train_on_are_refused(owner):
    [held_out, *_] = [text for text in of_language(0) if is_held_out(Document(text), HELD_OUT_FRACTION)]
    with pytest.raises(CorpusError, match="none of these documents can be trained on"):
        owner.write(held_out).open()


def test_chats_need_a_run_with_a_chat_template(owner):
    owner.file.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    with pytest.raises(ConfigurationError, match="no chat template"):
        owner.open()


def test_of_chats_the_answers_are_learned_and_those_without_one_are_counted(tmp_path):
    rows = chat_rows(10)
    prepare(write_chats(tmp_path, rows, CHATML), tmp_path / "out", on_cpu())
    owner = Owner(RunFolder(tmp_path / "out"), tmp_path)
    asked = [{"messages": row["messages"][:2]} for row in rows[:3]]
    owner.file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *asked]))
    own = owner.open()
    assert own.left_out_chats == 3
    assert sum(own.documents.values()) + own.held_out_documents == len(rows)
    batch = own.stream(next(iter(own.documents)), None).batch(0)
    assert 0 < (batch < 0).sum() < batch.numel(), "some tokens are only read"
