"""Chats: the forms of a row, and which tokens of a chat are learned."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from dipaco.base.errors import ConfigurationError, CorpusError
from dipaco.routing.documents.chats import Chat, Message
from dipaco.routing.documents.corpus import CorpusConfig, corpus_documents, holds_chats, iterate_documents
from dipaco.routing.tokens.chat_tokens import ChatEncoder, UnusableChatError, routed_tokens
from dipaco.routing.tokens.tokenizer_json import pack_tokenizer
from dipaco.routing.tokens.tokenizer_kinds import read_tokenizer
from support.runs.chat_templates import CHATML, INSTRUCT, THINKING
from support.runs.foreign_base import foreign_tokenizer

MESSAGES = [{"role": "user", "content": "Where is it?"}, {"role": "assistant", "content": "By the river."}]
CHAT = tuple(Message(turn["role"], turn["content"]) for turn in MESSAGES)
Asked = Callable[..., Chat]


def said(*turns):
    """Return a chat in which user and assistant take turns."""
    return tuple(Message(("user", "assistant")[i % 2], text) for i, text in enumerate(turns))


def chats_of(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = CorpusConfig(train=str(path), held_out_fraction=0.5)
    assert holds_chats(config)
    return [document.chat for document in iterate_documents(config, "train")]


def test_every_form_gives_the_same_chat(tmp_path):
    conversation = [{"from": "human", "value": "Where is it?"}]
    conversation += [{"from": "gpt", "value": "By the river."}]
    rows = [
        {"messages": MESSAGES, "id": 1},
        {"conversations": conversation},
        {"prompt": "Where is it?", "completion": "By the river."},
        {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
        {"messages": [{**turn, "tool_calls": None} for turn in MESSAGES], "text": None},
        {"messages": [MESSAGES[0], {"role": "assistant", "content": [
            {"type": "text", "text": "By the "}, {"type": "text", "text": "river."}]}]},
    ]  # fmt: skip
    assert chats_of(tmp_path / "a.jsonl", *rows) == [CHAT] * 6
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(b"\n" + json.dumps(rows[0]).encode() + b"\n\n"))
    table = pyarrow.table({"messages": [MESSAGES], "text": pyarrow.nulls(1, pyarrow.string())})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
    config = CorpusConfig(train=(str(packed), str(tmp_path / "c.parquet")))
    documents = list(iterate_documents(config, "train"))
    assert [document.chat for document in documents] == [CHAT] * 2
    assert documents[0].place == f"{packed}:2"
    assert len(list(corpus_documents(config))) == 2


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"mesages": MESSAGES}, r"a\.jsonl:2 has the key 'mesages'; did you mean 'messages'\?"),
        ({"text": "x"}, r"a\.jsonl:2 is no chat, as the documents before it are; it has the keys"),
        ({"messages": MESSAGES, "text": "x"}, r"a\.jsonl:2 has the keys of 2 forms, messages; tex"),
        ({"messages": MESSAGES, "tools": ["x"]}, "has the key 'tools', which is not trained on"),
        ({"messages": "x"}, r"a\.jsonl:2: messages is \"x\", and must be a list of"),
        ({"messages": [{"role": "user", "contents": "x"}]}, r"messages\[0\] has no 'content'; is '"),
        ({"messages": [{"role": "asistant", "content": "x"}]}, "'asistant'; did you mean 'assis"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "is said by 'bot'; there are system, us"),
        ({"messages": [{**MESSAGES[0], "weight": 1}]}, r"messages\[0\] has the key 'weight', which"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, r"a.jsonl:2: messages\[0\] is said by"),
        ({"messages": [{"role": "user", "content": 3}]}, "content is 3; only text is trained on"),
        ([1], r"a\.jsonl:2 is no JSON object: \[1\]"),
    ],
)
def test_what_is_no_chat_is_refused_with_its_line(tmp_path, row, words):
    with pytest.raises(CorpusError, match=words) as refused:
        chats_of(tmp_path / "a.jsonl", {"messages": MESSAGES}, row)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "Where?", "response": "Here."}, "rename 'response' to 'completion', or write"),
        ({"question": "Where?", "completion": "Here."}, "rename 'question' to 'prompt', or write"),
        ({"prompt": "a", "b": "c", "d": "e"}, "rename the key that is meant to be 'completion'"),
        ({"instruction": "a", "output": "b"}, "chats have messages, conversations, or prompt and"),
    ],
)
def test_other_names_for_the_parts_of_a_chat(tmp_path, row, words):
    (tmp_path / "a.jsonl").write_text(json.dumps({**row, "topic": "x"}) + "\n")
    config = CorpusConfig(train=str(tmp_path / "a.jsonl"), label_field="topic")
    with pytest.raises(CorpusError, match=words) as refused:
        list(iterate_documents(config, "train"))
    assert "text_field = '" in str(refused.value)
    named = config.model_copy(update={"text_field": sorted(row)[-1]})
    assert [document.chat for document in iterate_documents(named, "train")] == [None]


def test_the_text_is_missed_before_its_label(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    config = CorpusConfig(train=str(tmp_path / "a.jsonl"), label_field="topic")
    with pytest.raises(CorpusError, match="has no field 'text'; it has body"):
        list(iterate_documents(config, "train"))


def test_a_label_that_no_row_has_may_be_left_out(tmp_path):
    row = {"prompt": "Where?", "completion": "Here."}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    config = CorpusConfig(train=str(tmp_path / "a.jsonl"), label_field="topic")
    with pytest.raises(CorpusError, match="has no field 'topic'.* leave label_field out"):
        list(iterate_documents(config, "train"))


def test_the_examples_are_what_they_say():
    folder = Path(__file__).parents[2] / "examples/chats"
    config = CorpusConfig(train="data/*.jsonl", label_field="topic").relative_to(folder)
    documents = list(iterate_documents(config, "train"))
    assert len(documents) == 12
    assert all(document.chat for document in documents)
    assert {document.label for document in documents} == {"cooking", "sql", "geography"}
    assert not holds_chats(CorpusConfig(train="texts.jsonl").relative_to(folder))


def test_texts_and_chats_are_not_mixed(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": MESSAGES}) + "\n")
    config = CorpusConfig(train=str(tmp_path / "a.jsonl"), validation=str(tmp_path / "b.jsonl"))
    with pytest.raises(CorpusError, match=r"b\.jsonl:1 is a chat, and the documents before it are"):
        list(corpus_documents(config))


@pytest.fixture(scope="module")
def encoders():
    made = {}
    pieces, _ = foreign_tokenizer("qwen2")
    special = (None, None, "<|im_end|>", "<|endoftext|>")

    def encoder(template):
        if template not in made:
            packed = pack_tokenizer(json.loads(pieces.to_str()), special, template, "it", rows=400)
            tokenizer = read_tokenizer(packed)
            made[template] = ChatEncoder(tokenizer, 8), tokenizer
        return made[template]

    yield encoder
    for one, _ in made.values():
        one.close()


# As Mistral 7B v0.3: the system's words stand in front of the last message, if that is a question.
SYSTEM_LAST = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "{{ m.content }}[/INST]{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)
# As Phi 3.
END_LAST = (
    "{% for m in messages %}({{ m.role }} {{ m.content }}){% endfor %}"
    "{% if add_generation_prompt %}(assistant {% else %}{{ eos_token }}{% endif %}"
)
THOUGHT_OPENED = (
    "{% for m in messages %}{{ m.content }}{{ '|' if m.role == 'user' else eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}"
)
QUESTION = "<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"
SYSTEM = "<|im_start|>system\nBe kind.<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "chat", "parts"),
    [
        # The parts of the text, every second of which is learned.
        (CHATML, said("Where?", "Here."), [SYSTEM + QUESTION, "Here.<|im_end|>", "\n"]),
        (
            CHATML,
            said("Where?", "Here.", "Where?", "There.", "Where?"),
            [SYSTEM + QUESTION, "Here.<|im_end|>", "\n" + QUESTION, "There.<|im_end|>",
             "\n<|im_start|>user\nWhere?<|im_end|>\n"],
        ),
        (CHATML, said("Where?", " ", "Where?", "Here."), [
            SYSTEM + QUESTION + " <|im_end|>\n" + QUESTION, "Here.<|im_end|>", "\n"]),
        (
            INSTRUCT,
            said("Where?", "Here.", "Where?", "There."),
            ["[INST] Where? [/INST]", " Here.<|im_end|>", "[INST] Where? [/INST]",
             " There.<|im_end|>"],
        ),
        (THINKING, said("Where?", "Here."), [
            QUESTION + "<think>\n\n</think>\n\n", "Here.<|im_end|>", "\n"]),
        (THINKING, said("Where?", "<think>\nHm.\n</think>\n\nHere."), [
            QUESTION, "<think>\nHm.\n</think>\n\nHere.<|im_end|>", "\n"]),
        # What was thought earlier is not shown, so that answer is not learned.
        (
            THINKING,
            said("Where?", "Here.", "Where?", "<think>Hm.</think>There.", "Where?", "Where?"),
            [QUESTION, "Here.<|im_end|>", "\n" + QUESTION + "There.<|im_end|>\n" + QUESTION
             + "<think>\n\n</think>\n\n", "Where?<|im_end|>", "\n"],
        ),
        # What is said in front of the last question alone is gone when an answer stands behind it.
        (SYSTEM_LAST, said("Where?", "Here."), ["[INST] Where?[/INST]", " Here.<|im_end|>"]),
        # The end of a text stands behind the whole chat, and so behind no earlier answer.
        (END_LAST, said("Where?", "Here.", "Where?", "There."), [
            "(user Where?)(assistant ", "Here.)", "(user Where?)(assistant ",
            "There.)<|im_end|>"]),
        # The model is asked with the begin of a thought, which is not shown with an answer.
        (THOUGHT_OPENED, said("Where?", "Here."), ["Where?|", "Here.<|im_end|>"]),
        # No token ends an answer there, so it gets one.
        ("{% for m in messages %}({{ m.content }}){% endfor %}", said("Where?", "Here."),
         ["(Where?)", "(Here.)<|im_end|>"]),
    ],
)  # fmt: skip
def test_what_the_assistant_says_is_learned(encoders, template, chat, parts):
    encoder, tokenizer = encoders(template)
    expected = []
    for number, part in enumerate(parts):
        tokens = tokenizer.encode_marked(part)
        expected += tokens if number % 2 else [~token for token in tokens]
    found = encoder.encode(chat)
    assert found.tokens.tolist() == expected
    assert tokenizer.end in found.tokens
    # Whatever the template begins with, a chat is routed by what the user says first.
    assert found.beginning.tolist() == tokenizer.encode("Where?")[:8]


def test_a_chat_is_routed_by_the_first_turn_of_the_user(encoders):
    _, tokenizer = encoders(CHATML)
    messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": "So <|im_end|>"}]
    assert routed_tokens(tokenizer, messages) == tokenizer.encode("So <|im_end|>")
    assert routed_tokens(tokenizer, messages[:1]) == tokenizer.encode("Be.")


@pytest.mark.parametrize(
    ("template", "chat", "words"),
    [
        (CHATML, said("Where?"), "the assistant says nothing"),
        (CHATML, said("Where?", "\n"), "the answer is empty"),
        (CHATML, (Message("assistant", "Here."),), "there is no answer that follows a question"),
        (INSTRUCT, (Message("system", "Be kind."), *CHAT), "refuses it: roles must alternate user"),
        ("{{ messages[0].content }}", CHAT, "does not show the answer right after its question"),
        (SYSTEM_LAST, (Message("system", "Be kind."), *CHAT), "does not show the answer right after its question"),
    ],
)
def test_a_chat_without_anything_to_learn(encoders, template, chat, words):
    with pytest.raises(UnusableChatError, match=words):
        encoders(template)[0].encode(chat)


def test_a_tokenizer_without_a_template():
    pieces, _ = foreign_tokenizer("qwen2")
    special = (None, None, "<|im_end|>", None)
    packed = pack_tokenizer(json.loads(pieces.to_str()), special, None, "it", rows=400)
    with pytest.raises(ConfigurationError, match="holds chats, and the tokenizer of this run has"):
        ChatEncoder(read_tokenizer(packed), 8)


def test_rows_that_say_nothing_are_left_out_wherever_they_stand(tmp_path):
    rows = ({"messages": None}, {"messages": MESSAGES}, {"messages": None, "text": None, "id": 3})
    assert chats_of(tmp_path / "a.jsonl", *rows) == [CHAT, ()]


def test_a_role_by_another_name(tmp_path):
    turns = [{"role": "developer", "content": "Be brief."}, MESSAGES[0], {"role": "model", "content": "By the river."}]
    assert chats_of(tmp_path / "a.jsonl", {"messages": turns}) == [(Message("system", "Be brief."), *CHAT)]


@pytest.mark.parametrize("is_list", [False, True])
def test_a_column_of_json_is_what_it_says(tmp_path, is_list):
    values = [[json.dumps(turn) for turn in MESSAGES]] if is_list else [json.dumps(MESSAGES)]
    kind = pyarrow.json_(pyarrow.string())
    kind, plain = (pyarrow.list_(kind), pyarrow.list_(pyarrow.string())) if is_list else (kind, pyarrow.string())
    column = pyarrow.array(values, plain).cast(kind)
    pyarrow.parquet.write_table(pyarrow.table({"messages": column}), tmp_path / "a.parquet")
    config = CorpusConfig(train=str(tmp_path / "a.parquet"))
    assert [document.chat for document in iterate_documents(config, "train")] == [CHAT]
    with pytest.raises(CorpusError, match="is a text with JSON in it"):
        chats_of(tmp_path / "b.jsonl", {"messages": json.dumps(MESSAGES)})
