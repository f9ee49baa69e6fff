"""A run whose data are chats: from the file to the batches, and what cannot be such a run."""

import json
import re

import numpy as np
import pytest

from dipaco.base.errors import ConfigurationError, CorpusError
from dipaco.bootstrap import bootstrap_command
from dipaco.modules.marked_tokens import plain_tokens
from dipaco.routing.batches import BatchStream
from dipaco.routing.run_folder import RunFolder
from dipaco.routing.tokens.token_corpus import TokenCorpus
from dipaco.training.inner import InnerLoop
from support.runs.chat_runs import GREETING, TOML, chat_rows, write_chats
from support.runs.chat_templates import CHATML, INSTRUCT
from support.runs.prepared_run import CPU, on_cpu, prepare, quiet_display


def prepared(toml, changes=(), **options):
    display = quiet_display()
    prepare(toml, toml.parent / "out", on_cpu(display, **options), changes=changes)
    return RunFolder(toml.parent / "out"), display.console.file.getvalue()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    rows = chat_rows()
    rows[3]["messages"] = rows[3]["messages"][:2]
    rows[5]["messages"][2]["content"] = rows[5]["messages"][4]["content"] = ""
    rows[9]["messages"] = rows[9]["messages"][:2]
    return prepared(write_chats(tmp_path_factory.mktemp("chats"), rows, CHATML))


def test_shards_hold_whole_chats_and_what_is_learned(run):
    folder, _ = run
    plan = folder.plan()
    index, tokenizer = folder.shard_index(plan), folder.tokenizer(plan)
    assert index.marked
    padding = plan.model.padding_token
    chats = learned = 0
    first = ~np.array(tokenizer.encode_marked("<|im_start|>system\n"))
    for path in range(4):
        rows = folder.train_tokens(plan, path)
        assert len(rows) == index.paths[path].train_sequences > 0
        assert ((rows >= 0) & (rows != padding)).any(axis=1).all()
        for row in rows:
            for document in np.split(row, np.flatnonzero(row == padding)):
                document = document[document != padding]
                if not len(document):
                    continue
                chats += np.array_equal(document[: len(first)], first)
                answers = document[document >= 0]
                learned += len(answers)
                for answer in np.split(answers, np.flatnonzero(answers == tokenizer.end) + 1)[:-1]:
                    assert tokenizer.decode(answer.tolist())[-1:] in ("7", "8", "")
                read = document[document < 0]
                text = tokenizer.decode((~read).tolist())
                assert "7" not in text
                assert "8" not in text
        held_out = folder.validation_tokens(plan, path)
        assert ((held_out >= 0) & (held_out != padding))[:, 8:].any(axis=1).all()
    assert chats == sum(shard.train_documents for shard in index.paths) > 100
    [made] = (folder.path / "work/shards").glob("*/made.json")
    assert sum(one["tokens"] for one in json.loads(made.read_text())["summaries"]) > learned > 1000


def test_what_is_said_of_the_tokens(run):
    _, output = run
    assert "train.jsonl:4): the assistant says nothing" in output
    assert "train.jsonl:6): the answer is empty" in output
    assert " tokens of chats " in output
    assert "are learned" in output
    assert " chats are longer than a row of 64 tokens; " in output


def test_routing_reads_the_question_not_the_template(run):
    folder, output = run
    plan = folder.plan()
    assert "begin with the same" not in output
    tokenizer, router = folder.tokenizer(plan), folder.document_router(plan)
    [tokens] = (folder.path / "work/tokens").iterdir()
    corpus = TokenCorpus(tokens / "train", plan.model.vocabulary_size)
    questions = [row["messages"][1]["content"] for row in chat_rows()]
    beginnings = {tuple(tokenizer.document_tokens(text)[:-1][:8]) for text in questions}
    found = [corpus.beginning(index, 8) for index in range(len(corpus))]
    assert {tuple(beginning.tolist()) for beginning in found} <= beginnings
    paths = router.nearest_paths(found, 1)[:, 0]
    documents = [shard.train_documents for shard in folder.shard_index(plan).paths]
    assert np.bincount(paths, minlength=4).tolist() == documents


def test_a_peer_trains_on_them(run):
    folder, _ = run
    plan = folder.plan()
    stream = BatchStream(folder.train_tokens(plan, 1), seed=0, path=1, batch_sequences=4)
    loop = InnerLoop(folder.load_base_model(plan.model, plan.blobs.base), plan.inner, CPU)
    batch = stream.batch(0)
    assert int(plain_tokens(batch).max()) < plan.model.vocabulary_size
    losses = [loop.step(batch, step) for step in range(3)]
    assert losses[2] < losses[0]


def test_a_preparation_goes_on_and_gives_the_same(tmp_path):
    toml = write_chats(tmp_path, chat_rows(12), CHATML)
    first = prepared(toml, start_in_s=0)[0].plan().blobs
    for stage in ("shards", "tokens"):
        [made] = (tmp_path / "out" / "work" / stage).glob("*/made.json")
        made.unlink()
    assert prepared(toml)[0].plan().blobs == first


@pytest.mark.parametrize(
    ("changes", "template", "words"),
    [
        ((), None, "the tokenizer of this run has no chat template; give a base that has one"),
        ((), INSTRUCT, r"no chat of \[data\] can be trained on: \d+ chats left out \(first at .*: "
                       "the chat template refuses it: roles must alternate"),
        ((), "{{", "the chat template cannot be used"),
        (("base.steps=5", "base.checkpoint=base", "base.learning_rate=4e-4"), CHATML,
                       "steps is 5 under .* leave steps out"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_in_one_line(tmp_path, changes, template, words):
    toml = write_chats(tmp_path, chat_rows(8), template)
    if changes:
        toml.write_text(TOML.replace('base = "base"', ""))
    with pytest.raises((ConfigurationError, CorpusError), match=words) as refused:
        prepared(toml, changes=changes)
    assert "\n" not in str(refused.value)


def test_chats_need_a_base(tmp_path):
    toml = write_chats(tmp_path, chat_rows(8), CHATML)
    toml.write_text(TOML.replace('base = "base"', ""))
    with pytest.raises(ConfigurationError, match=r"need the chat template of a base; name its fol"):
        prepared(toml)
    assert bootstrap_command.main(["plan", str(toml)]) == 3
    toml.write_text(TOML)
    assert bootstrap_command.main(["plan", str(toml)]) == 0


def test_a_plan_shows_a_chat_as_it_is_trained(tmp_path, capsys):
    rows = chat_rows(8)
    rows[0]["messages"] = rows[0]["messages"][:2]
    toml = write_chats(tmp_path, rows, CHATML)
    assert bootstrap_command.main(["plan", str(toml)]) == 0
    shown = capsys.readouterr().out.partition("train.jsonl:2")[2]
    answers = [m["content"] for m in rows[1]["messages"] if m["role"] == "assistant"]
    assert re.findall("»(.*?)«", shown.partition("\n")[2], re.S) == [f"{said}<|im_end|>" for said in answers]
    assert f"<|im_start|>system\n{GREETING}<|im_end|>" in shown
    assert "asks for an answer" not in shown


def test_a_plan_says_where_the_template_asks_otherwise_than_it_trains(tmp_path, capsys):
    asks = "<|im_start|>assistant\n"
    assert asks in CHATML
    head, _, tail = CHATML.rpartition(asks)
    toml = write_chats(tmp_path, chat_rows(8), f"{head}{asks}<think>\n{tail}")
    assert bootstrap_command.main(["plan", str(toml)]) == 0
    assert r"asks for an answer with '<|im_start|>assistant\n<think>\n'" in capsys.readouterr().out


def test_a_path_is_added_to_a_run_of_chats(tmp_path, capsys, recwarn):
    folder, _ = prepared(write_chats(tmp_path, chat_rows(8), CHATML))
    documents = tmp_path / "new.jsonl"
    documents.write_text("".join(json.dumps(row) + "\n" for row in chat_rows(12)[36:]))
    added = ["--from", str(folder.path), "--add-path", str(documents), "--allow-genesis"]
    assert bootstrap_command.main(["prepare", *added, "--out", str(tmp_path / "next"), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"The router sends \d+% of its documents to it\n", said)
    assert not [warning for warning in recwarn if warning.category is RuntimeWarning]
