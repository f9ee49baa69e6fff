"""What of a request is passed on, and what is refused before it costs anything."""

import json
import time

import pytest

from dipaco.base.errors import ConfigurationError
from dipaco.bootstrap.import_base import ImportedBase
from dipaco.inference.serve.api_error import ApiError
from dipaco.inference.serve.request_fields import RequestReader
from dipaco.routing.tokens.run_tokens import RunTokens
from support.runs.foreign_base import make_foreign_base
from support.runs.tiny_run import tiny_tokenizer_bytes

CONTEXT = 48
QUESTION = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def reader():
    reader = RequestReader(RunTokens(tiny_tokenizer_bytes(320)), "{{ messages }}", 4, CONTEXT, 3)
    yield reader
    reader.close()


def completion(reader, **body):
    return reader.completion(json.dumps({"prompt": "a", **body}).encode())


def chat(reader, **body):
    return reader.chat(json.dumps({"messages": [QUESTION], **body}).encode())


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"model": "path-9"}, 404, "one of 'path-0' to 'path-3'"),
        ({"model": "gpt-4"}, 404, "no model 'gpt-4'; give 'auto', or one of 'path-0' to"),
        ({"model": "path-01"}, 404, "no model 'path-01'"),
        ({"model": ["auto"]}, 404, "there is no model"),
        ({"prompt": "ba" * 60}, 400, "context of 48 tokens"),
        ({"prompt": [5] * 49}, 400, "49 tokens are more than this model's context of 48"),
        ({"prompt": []}, 400, "prompt: give 1 to 3 texts"),
        ({"prompt": None}, 400, "prompt: give a text"),
        ({"prompt": {"text": "a"}}, 400, "prompt: give a text"),
        ({"prompt": ["a", ["b"]]}, 400, "prompt: give a text"),
        ({"prompt": [5, 320]}, 400, "is not one of the 320"),
        ({"prompt": [5, -1]}, 400, "is not one of the 320"),
        ({"prompt": [True]}, 400, "prompt: give a text"),
        ({"prompt": ["a"] * 4}, 400, "prompt: give 1 to 3 texts (--parallel)"),
        ({"prompt": ["a"] * 2, "n": 2}, 400, "n: a request may be for 1 to 3 answers"),
        ({"n": 0}, 400, "n: a request may be for"),
        ({"n": "two"}, 400, "n: a request may be for"),
        ({"logprobs": 21}, 400, "logprobs: at most 20"),
        ({"n_probs": 10**6}, 400, "n_probs: at most 20"),
        ({"repeat_last_n": "2147483647"}, 400, "repeat_last_n: give a number"),
        ({"stop": ["a"] * 33}, 400, "stop: give at most 32 texts"),
        ({"stop": [""]}, 400, "none of them empty"),
        ({"samplers": ["top_k"] * 17}, 400, "samplers: give at most 16"),
        ({"grammar": "root ::= " + "(" * 2**14}, 400, "grammar: at most 16384 bytes"),
        ({"logit_bias": {"5": "much"}}, 400, 'logit_bias: give {"token": number}'),
        ({"logit_bias": {str(n): 1 for n in range(1025)}}, 400, "logit_bias: give at most 1024"),
        ({"seed": "s" * 600}, 400, "seed: at most 512 characters"),
        ({"suffix": "b"}, 400, "suffix is not supported"),
        ({"echo": True}, 400, "echo is not supported"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_requests_are_told_why(reader, body, status, said):
    with pytest.raises(ApiError) as caught:
        completion(reader, **body)
    error = caught.value.body()["error"]
    assert (caught.value.status, "\n" in error["message"]) == (status, False)
    assert said in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "not JSON"),
        (b"[1]", "no JSON object"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN is no number"),
        (b'{"prompt": "a\\ud800"}', "half of a surrogate pair"),
        (b'{"prompt": "a", "\\udfff": 1}', "half of a surrogate pair"),
        (b"[" * 100_000, "not JSON"),
        (b'{"prompt": "\xff"}', "not JSON"),
    ],
)
def test_what_is_no_json_is_told_why(reader, content, said):
    with pytest.raises(ApiError, match=said):
        reader.completion(content)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (None, "give a list of 1 to 1024 messages"),
        ([], "give a list of 1 to 1024 messages"),
        ([QUESTION] * 1025, "give a list of 1 to 1024 messages"),
        (["hi"], "messages[0]: give"),
        ([QUESTION, {"content": "hi"}], "messages[1]: give"),
        ([QUESTION, {"role": "user"}], "messages[1].content: give a text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "parts that are texts"),
        ([{"role": "user", "content": "ba" * 20_000}], "shorten messages"),
        ([QUESTION | {"x": json.loads("[" * 900 + "]" * 900)}], "nested too deeply"),
        ([QUESTION | {"name": ["hi"]}], "messages[0].name: give a text"),
        ([QUESTION, {"role": "assistant", "reasoning_content": 0}], "messages[1].reasoning_content: give a text"),
        ([QUESTION, {"role": "tool", "content": "hi", "tool_call_id": True}], "messages[1].tool_call_id: give"),
    ],
)
def test_bad_chats_are_told_why(reader, messages, said):
    with pytest.raises(ApiError) as caught:
        chat(reader, messages=messages)
    assert said in caught.value.message


def test_a_long_text_is_refused_before_it_is_cut_into_tokens(reader, monkeypatch):
    def fail(*_):
        raise AssertionError("it was cut into tokens")

    for name in ("of_text", "routed_by_chat"):
        monkeypatch.setattr(RunTokens, name, fail)
    began_s = time.process_time()
    for ask, body in (
        (reader.completion, {"prompt": "ba " * 600_000}),
        (reader.embedding, {"input": "ba " * 600_000, "model": "path-1"}),
        (reader.chat, {"messages": [{"role": "user", "content": "ba " * 600_000}]}),
    ):
        with pytest.raises(ApiError) as caught:
            ask(json.dumps(body).encode())
        assert caught.value.code == "context_length_exceeded"
    assert time.process_time() - began_s < 5.0


def test_a_prompt_fills_the_context_and_no_more(reader):
    """In tokens, and in characters before they are cut: 4,096 of them are always looked at."""
    assert completion(reader, prompt=[5] * CONTEXT).body["prompt"] == [5] * CONTEXT
    said = {}
    for letters in (4096, 4097):
        with pytest.raises(ApiError, match="than this model's context") as caught:
            completion(reader, prompt="b" * letters)
        said[letters] = caught.value.message.split(" are")[0]
    assert said[4096].endswith("tokens")
    assert said[4097] == "4097 characters"


# Takes longer for some texts than anybody waits.
SLOW = {"type": "Split", "pattern": {"Regex": "a*a*a*[^a!]"}, "behavior": "Isolated", "invert": False}


def test_a_text_that_takes_too_long_to_cut_is_refused(tmp_path):
    make_foreign_base(tmp_path / "base", "qwen2")
    content = json.loads(ImportedBase(tmp_path / "base").tokenizer)
    split = content["tokenizer"]["pre_tokenizer"]
    content["tokenizer"]["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [SLOW, split]}
    tokens = RunTokens(json.dumps(content).encode(), limit_s=1.0)
    reader = RequestReader(tokens, "{{ messages[0].content }}", 4, CONTEXT, 3)
    try:
        assert len(completion(reader, prompt="a" * 8 + "!").body["prompt"]) > 1
        for model in ("auto", "path-1"):
            with pytest.raises(ApiError, match="prompt: this text cannot be cut into tokens: .*1 s") as caught:
                completion(reader, prompt="a" * 390 + "!", model=model)
            assert caught.value.status == 400
        # The next one is cut by another process.
        assert completion(reader, prompt="hi").body["prompt"]
    finally:
        reader.close()


def test_a_tokenizer_that_cannot_be_read_is_refused():
    with pytest.raises(ConfigurationError, match="the run's tokenizer cannot be used: .*SentencePiece"):
        RunTokens(b"no tokenizer")


def test_a_template_that_loops_over_a_chat_is_not_passed_on(reader):
    """Of the run's operator; llama.cpp would fill it in for ever."""
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    text = "{% if messages[0].content == 'loop' or tools %}" + loops + "{% endif %}{{ messages[0].content * 100 }}"
    slow = RequestReader(reader.tokens, text, 4, CONTEXT, 3)
    assert chat(slow).body["messages"] == [QUESTION]
    for body in (
        {"messages": [{"role": "user", "content": "loop"}]},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ):
        with pytest.raises(ApiError, match="messages: the chat template refuses them"):
            chat(slow, **body)
    # So is a text that it makes too long.
    for letters, is_refused in ((40, False), (41, True)):
        question = {"role": "user", "content": "b" * letters}
        if is_refused:
            with pytest.raises(ApiError, match="4100 characters are more"):
                chat(slow, messages=[question])
        else:
            assert chat(slow, messages=[question]).body["messages"] == [question]
    slow._template.close()


def test_only_what_is_known_is_passed_on(reader):
    """Not what chooses another adapter or slot, and not what llama.cpp sets for itself."""
    for ask in (completion, chat):
        unknown = {"lora": [{"id": 0, "scale": 0}], "id_slot": 1, "chat_format": 99, "grammar_lazy": True}
        passed = ask(reader, temperature=0.5, min_p=0.1, **unknown).body
        assert (passed["temperature"], passed["min_p"]) == (0.5, 0.1)
        assert not unknown.keys() & passed.keys()
        assert json.loads(ask(reader, model="path-2").content("path-2"))["model"] == "path-2"


def test_pieces_that_are_no_text_are_never_chosen(reader):
    """As in dipaco-generate: unknown, begin and padding."""
    assert completion(reader).body["logit_bias"] == [[0, False], [1, False], [3, False]]
    for given in ({"7": -100}, [[7, -100]]):
        assert completion(reader, logit_bias=given).body["logit_bias"][3:] == [[7, -100.0]]


def test_no_memory_is_taken_to_look_back_further_than_the_context(reader):
    """llama.cpp takes 4 to 12 bytes for each token that it is told to look back at."""
    for name in ("repeat_last_n", "dry_penalty_last_n"):
        for given, passed in ((2**31 - 1, CONTEXT), (1e18, CONTEXT), (CONTEXT - 1, CONTEXT - 1), (-1, -1)):
            assert completion(reader, **{name: given}).body[name] == passed


def test_tools_have_no_names_of_control_tokens(reader):
    """Others than the client describe them: llama.cpp would take such a name for the template's own token."""
    [name, *_] = reader.tokens.control_names
    parameters = {"type": "object", "properties": {name: {"description": f"a{name}b"}}}
    tool = {"type": "function", "function": {"name": "f", "description": name, "parameters": parameters}}
    called = {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {name: name}}}],
    }
    passed = chat(reader, tools=[tool], messages=[QUESTION, called]).body
    assert len(passed["tools"]) == 1
    assert name not in json.dumps(passed, ensure_ascii=False)


def test_what_changes_nothing_is_taken(reader):
    neutral = {
        "echo": False, "suffix": None, "best_of": 1, "n": 1.0, "max_tokens": 4.0, "logprobs": None, "top_p": 0,
        "user": "u", "prompt_cache_key": "a", "safety_identifier": "u", "metadata": {}, "store": True,
    }  # fmt: skip
    passed = completion(reader, **neutral).body
    assert (passed["n"], passed["max_tokens"], passed["top_p"]) == (1, 4, 0)
    assert "logprobs" not in completion(reader, logprobs=False).body
    more = {"tools": [], "reasoning_effort": "none", "functions": [], "chat_template_kwargs": {}}
    chatted = chat(reader, logprobs=False, top_logprobs=0, modalities=["text"], verbosity="medium", **more).body
    assert not {"logprobs", "top_logprobs", "modalities", "functions"} & chatted.keys()


def test_an_answer_comes_back_as_the_client_has_it(reader):
    for content in ({"content": None}, {}, {"content": ""}):
        answer = {"role": "assistant", "annotations": [], "reasoning_content": "", **content}
        sent = chat(reader, messages=[QUESTION, answer, QUESTION]).body["messages"]
        assert sent[1]["content"] == ""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    # What a client's library leaves null, llama.cpp cannot read.
    null = {"name": None, "reasoning_content": None, "refusal": None, "tool_call_id": None}
    for sent in (called, called | null):
        assert chat(reader, messages=[QUESTION, sent]).body["messages"][1] == called
    assert chat(reader, messages=[QUESTION | null | {"tool_calls": None}]).body["messages"] == [QUESTION]


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        (None, '{"type": "function", "function": {...}}'),
        (5, '{"type": "function", "function": {...}}'),
        ([], '{"type": "function", "function": {...}}'),
        ({"type": "function"}, '{"type": "function", "function": {...}}'),
        ({"type": "web_search"}, '{"type": "function", "function": {...}}'),
        ({"type": "function", "function": ["f"]}, '{"type": "function", "function": {...}}'),
        ({"type": "function", "function": {}}, "the name, the description and the id"),
        ({"type": "function", "function": {"name": 5}}, "the name, the description and the id"),
        ({"type": "function", "function": {"name": "f", "description": 5}}, "the name, the description"),
        ({"type": "function", "id": 5, "function": {"name": "f"}}, "the name, the description and the id"),
        ({"type": "function", "function": {"name": "f", "arguments": 5}}, "the arguments of a call"),
    ],
)
def test_a_tool_that_cannot_be_read_is_the_mistake_of_the_client(reader, tool, said):
    """llama.cpp would say that it has failed itself."""
    called = {"role": "assistant", "tool_calls": [tool]}
    for where, body in (("tools", {"tools": [tool]}), ("messages", {"messages": [QUESTION, called]})):
        with pytest.raises(ApiError) as caught:
            chat(reader, **body)
        assert (caught.value.status, caught.value.parameter) == (400, where)
        assert said in caught.value.message
    for tools in ("x", 5, {"type": "function"}):
        with pytest.raises(ApiError, match="tools: a tool"):
            chat(reader, tools=tools)


def test_a_template_that_knows_no_developer_is_told_of_a_system(reader):
    message = {"role": "developer", "content": "Be brief."}
    assert chat(reader, messages=[message, QUESTION]).body["messages"][0]["role"] == "system"
    knows = RequestReader(reader.tokens, "{{ 'developer' }}", 4, CONTEXT, 3)
    assert chat(knows, messages=[message, QUESTION]).body["messages"][0]["role"] == "developer"
    knows._template.close()


def test_a_reasoning_format_that_llama_cpp_does_not_know_is_refused(reader):
    assert chat(reader, reasoning_format="none").body["reasoning_format"] == "none"
    with pytest.raises(ApiError, match="reasoning_format: give one of auto, none, deepseek"):
        chat(reader, reasoning_format="x")


def test_embeddings_are_of_a_path_that_is_named(reader):
    ask = {"input": ["a", [5, 6]], "model": "path-1", "encoding_format": "base64"}
    request = reader.embedding(json.dumps(ask).encode())
    assert (request.path, request.answers, request.body["encoding_format"]) == (1, 2, "base64")
    assert request.body["input"][1] == [5, 6]
    with pytest.raises(ApiError, match="embeddings of two paths cannot be compared"):
        reader.embedding(json.dumps({"input": "a"}).encode())


@pytest.mark.parametrize(
    "field",
    [
        '"temperature": 1e999',
        '"temperature": -1e999',
        '"logprobs": 1' + 400 * "0",
        '"logit_bias": {"5": 1' + 400 * "0" + "}",
        '"logit_bias": [[1e999, 1]]',
        '"logit_bias": {"5": "nan"}',
    ],
)
def test_a_number_that_cannot_be_read_is_refused(reader, field):
    """They were passed on as `Infinity` and `NaN`, which is no JSON, or ended in an error of the service."""
    with pytest.raises(ApiError) as caught:
        reader.completion(f'{{"prompt": "a", {field}}}'.encode())
    assert caught.value.status == 400
