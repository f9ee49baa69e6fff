"""A volunteer's texts: who is refused, what is kept for the next start, and how all of it is removed."""

import json
from types import SimpleNamespace

import pytest
import torch

from dipaco.base.errors import ConfigurationError, CorpusError
from dipaco.peer.kept_flags import NAME
from dipaco.peer.peer_settings import PeerSettings
from dipaco.peer.texts_at_home import texts_at_home
from dipaco.peer.trainers import trainer_settings
from dipaco.protocol.identity import load_or_create_identity
from dipaco.protocol.plan import RoutingPlan
from dipaco.training.interruption import PassInterrupted
from support.runs.tiny_run import make_tiny_run, tiny_documents

ADDRESS, OTHER = (
    f"/ip4/203.0.113.{n}/tcp/31337/p2p/12D3KooWLGUApiCpST4ZyZPakytsXQ19eY7ZRGCyyJWXKk4tqiZw" for n in (5, 6)
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_tiny_run(tmp_path_factory.mktemp("run") / "run")


@pytest.fixture
def begin(run, tmp_path):
    """Give texts to a peer of a run; returns them as rows, and what was said."""
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in tiny_documents(4, 20, 5)[20:40]))

    def begin(plan=None, *, texts=file, is_stopped=lambda: False, **flags):
        plan = plan or run.plan().model_copy(update={"own_texts": "yes"})
        node = SimpleNamespace(
            plan=plan,
            run_folder=run,
            cache_folder=tmp_path / "cache",
            run_id=plan.run_id,
            fetcher=SimpleNamespace(blob=lambda sha256, what: run.blobs.require(sha256)),
        )
        said = []
        settings = PeerSettings(texts=texts, cache_folder=tmp_path / "cache", **flags)
        return texts_at_home(settings, node, torch.device("cpu"), said.append, is_stopped), said

    return begin


def test_a_peer_says_how_many_of_its_documents_fall_on_which_path(begin):
    own, said = begin()
    held_out = own.held_out_documents
    assert said == [f"your texts: {20 - held_out} for path 1; {held_out} more are held out"]
    assert begin(texts=None) == (None, [])


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"own_texts": "no"}, "does not allow texts of volunteers"), ({"routing": "label"}, "by labels that your texts")],
)
def test_a_run_that_forbids_them_or_cannot_route_them_refuses_them(run, begin, changes, said):
    plan = run.plan()
    if "routing" in changes:
        changes = {"own_texts": "yes", "routing": RoutingPlan(kind="label", prefix_tokens=8)}
    with pytest.raises(ConfigurationError, match=said):
        begin(plan.model_copy(update=changes))


def test_mistakes_are_told_in_one_line(begin, tmp_path):
    for texts, said in ((tmp_path, r"it is a folder; name the files"), (tmp_path / "none.txt", "matches no file")):
        with pytest.raises(CorpusError, match=said):
            begin(texts=texts)
    with pytest.raises(CorpusError, match="--text-field"):
        begin(text_field="body")
    with pytest.raises(ConfigurationError, match="take one of 1"):
        begin(path=3)
    with pytest.raises(ConfigurationError, match="give --texts FILE"):
        PeerSettings(only_my_texts=True)
    with pytest.raises(ConfigurationError, match="--texts is for one peer"):
        trainer_settings(PeerSettings(texts=tmp_path, devices=("cuda:0", "cuda:1")))


def test_a_tokenizer_is_read_first_in_a_process_with_bounds(run, begin):
    """The operator chose it, and what it does to texts can fill any memory."""
    blob = run.blobs.add_bytes(b'{"no": "tokenizer"}')
    plan = run.plan()
    blobs = plan.blobs.model_copy(update={"tokenizer": blob})
    with pytest.raises(ConfigurationError, match="the run's tokenizer cannot be used"):
        begin(plan.model_copy(update={"own_texts": "yes", "blobs": blobs}))


def test_ctrl_c_ends_the_reading_of_long_texts(begin):
    with pytest.raises(PassInterrupted):
        begin(is_stopped=lambda: True)
    assert begin()[0].documents.keys() == {1}


def test_texts_are_for_the_swarm_that_their_owner_named(start, tmp_path):
    start(ADDRESS, "--texts", "mine.jsonl", "--text-field", "body", "--only-my-texts", "--hours", "22-7")
    again, _ = start()
    assert (again.texts.name, again.text_field, again.only_my_texts) == ("mine.jsonl", "body", True)
    assert again.texts.is_absolute()
    other, _ = start(OTHER)
    assert (other.texts, other.only_my_texts, other.hours) == (None, False, "22-7")


def test_what_was_made_of_them_is_removed_and_they_are_not_given_again(begin, start, tmp_path):
    begin()
    start(ADDRESS, "--texts", "mine.jsonl", "--hours", "22-7")
    folder = tmp_path / "cache" / "own-texts"
    assert [*folder.rglob("train-*.bin")]
    identity = load_or_create_identity(tmp_path / "cache" / "identity.key")
    code, said = start("--forget-texts")
    assert (code, folder.exists()) == (4, True)
    assert "stop it first" in said
    identity.release()
    code, said = start("--forget-texts")
    assert code == 0
    assert "stays in the model" in said
    assert not folder.exists()
    assert (tmp_path / "cache" / NAME).read_text().splitlines()[2:] == ["--hours 22-7"]
    assert "no texts of yours" in start("--forget-texts")[1]
