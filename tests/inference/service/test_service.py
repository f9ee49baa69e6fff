"""The service: what it answers is what the model says, whatever else is asked at the same time."""

import json
import re
import threading

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from dipaco.base.errors import ConfigurationError
from dipaco.inference.decoding.decoder import Decoder
from dipaco.inference.decoding.engines import TORCH, llama_cpp_engine
from dipaco.inference.decoding.llama_cpp_decoder import LlamaCppDecoder
from dipaco.inference.generate import generate_tokens, prompt_tokens, stream_text
from dipaco.inference.sampling import Sampling
from dipaco.inference.service.app import Service, ServiceLimits
from dipaco.inference.service.cli import ServeSettings
from dipaco.inference.service.engine import Engine, EngineLimits
from dipaco.inference.service.texts import AnswerText
from dipaco.inference.sources import DiskSource, assemble_path
from dipaco.modules.transformer import token_losses
from support.programs.service import trained_run, wait_until
from support.runs.tiny_run import tiny_documents

LIMITS = EngineLimits(memory_bytes=10**9, slots=3, queue=40, refresh_s=0)
PROMPT = tiny_documents(4, 1, 5)[2][:12]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return trained_run(tmp_path_factory.mktemp("service"))


@pytest.fixture(scope="module", params=[TORCH, llama_cpp_engine("float32")], ids=lambda e: e.name)
def engine(out, request):
    engine = Engine(DiskSource(out), torch.device("cpu"), LIMITS, request.param)
    engine.start()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def client(engine):
    with TestClient(Service(engine).application()) as client:
        yield client


def complete(client, **body):
    answer = client.post("/v1/completions", json={"prompt": PROMPT, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def generated(out, prompt, path, sampling):
    """Return what `dipaco-generate` says."""
    source = DiskSource(out)
    tokenizer = source.tokenizer()
    tokens = prompt_tokens(tokenizer, prompt)
    if path is None:
        path = int(source.document_router(torch.device("cpu")).nearest_paths([tokens], 1)[0, 0])
    model = assemble_path(source, path)
    return path, "".join(stream_text(tokenizer, generate_tokens(model, tokens, sampling)))


def test_the_text_is_that_of_generate(client, out):
    for options in ({"temperature": 0}, {"temperature": 0.8, "top_k": 50, "seed": 7}):
        said = complete(client, max_tokens=14, **options)
        path, text = generated(out, PROMPT, None, Sampling(max_tokens=14, **options))
        assert said["choices"][0]["text"] == text
        assert said["model"] == f"path-{path}"
        assert said["dipaco"]["prompts"][0]["path"] == path
        assert said["usage"]["completion_tokens"] == 14
        assert said["system_fingerprint"].startswith("dipaco-")
    for path in range(4):
        said = complete(client, model=f"path-{path}", max_tokens=9, temperature=0)
        wanted = generated(out, PROMPT, path, Sampling(max_tokens=9, temperature=0))
        assert (path, said["choices"][0]["text"]) == wanted


def test_a_long_answer_goes_on_from_the_newer_half(client, out):
    options = {"temperature": 1.0, "top_k": 0, "seed": 3}
    said = complete(client, max_tokens=90, context_shift=True, **options)
    _, text = generated(out, PROMPT, None, Sampling(max_tokens=90, **options))
    assert said["choices"][0]["text"] == text


def test_company_changes_nothing(client):
    def ask(number):
        prompt = tiny_documents(4, 1, number)[number % 4][: 10 + number]
        return {"prompt": prompt, "max_tokens": 8 + number, "seed": number, "logprobs": 2}

    alone = [complete(client, **ask(number))["choices"] for number in range(8)]
    found = {}

    def one(number):
        found[number] = complete(client, **ask(number))["choices"]

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, expected in enumerate(alone):
        [said], [lone] = found[number], expected
        assert (said["text"], said["finish_reason"]) == (lone["text"], lone["finish_reason"])
        shown, own = said["logprobs"], lone["logprobs"]
        assert shown["tokens"] == own["tokens"]
        assert np.allclose(shown["token_logprobs"], own["token_logprobs"], atol=1e-5)


def test_prompts_are_scored_as_evaluation_does(client, out):
    source = DiskSource(out)
    tokenizer = source.tokenizer()
    text = tiny_documents(4, 1, 9)[1][:40]
    tokens = prompt_tokens(tokenizer, text)
    for most in (0, 1):
        said = complete(
            client, prompt=text, model="path-2", echo=True, logprobs=1, max_tokens=most,
            temperature=0,
        )  # fmt: skip
        choice = said["choices"][0]
        found = choice["logprobs"]
        with torch.no_grad():
            model = assemble_path(source, 2)
            losses = token_losses(model, torch.tensor([tokens]))[0]
        assert found["token_logprobs"][0] is None
        scores = np.array(found["token_logprobs"][1 : len(tokens)])
        assert scores == pytest.approx(-losses.numpy(), abs=1e-4)
        assert len(found["tokens"]) == len(tokens) + most
        assert choice["text"].startswith(text)
        for token, offset in list(zip(found["tokens"], found["text_offset"], strict=True))[1:]:
            if not token.startswith("token_id") and token != "</s>":
                assert choice["text"][offset : offset + len(token)] == token
        for token, top, own in zip(
            found["tokens"][1:], found["top_logprobs"][1:], found["token_logprobs"][1:], strict=True
        ):
            assert top[token] == own
            assert max(top.values()) >= own
    ids = complete(
        client, prompt=[tokens], model="path-2", echo=True, logprobs=1, max_tokens=0
    )["choices"][0]  # fmt: skip
    assert ids["logprobs"]["token_logprobs"] == found["token_logprobs"][: len(tokens)]
    assert ids["text"] == text


def test_offsets_of_characters_of_several_tokens(client):
    prompt = "\u65e5\u672c a\u00e9"
    scored = complete(client, prompt=prompt, echo=True, logprobs=0, max_tokens=0)
    tokens, offsets = (scored["choices"][0]["logprobs"][key] for key in ("tokens", "text_offset"))
    # The begin, three bytes for each of the first two characters, and two for the last.
    assert [token.startswith("token_id:") for token in tokens[1:7]] == [True] * 6
    assert offsets[:7] == [0, 0, 0, 0, 1, 1, 1]
    assert offsets[-2:] == [4, 4]


def test_several_prompts_and_answers(client):
    said = complete(client, prompt=[PROMPT, "ba ba"], n=2, seed=5, max_tokens=6)
    assert [choice["index"] for choice in said["choices"]] == [0, 1, 2, 3]
    assert said["choices"][0]["text"] != said["choices"][1]["text"]
    alone = complete(client, prompt="ba ba", n=2, seed=5, max_tokens=6)
    assert [c["text"] for c in alone["choices"]] == [c["text"] for c in said["choices"][2:]]


def streamed(client, **body):
    body = {"prompt": PROMPT, "stream": True, **body}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_stream_is_the_whole_answer_in_pieces(client):
    options = {"max_tokens": 20, "seed": 4, "logprobs": 1, "n": 2, "echo": True, "stop": "zzz"}
    whole = complete(client, **options)
    chunks = streamed(client, stream_options={"include_usage": True}, **options)
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        for key in ("tokens", "token_logprobs", "text_offset"):
            parts = [chunk["logprobs"][key] for chunk in own if chunk["logprobs"]]
            assert [one for part in parts for one in part] == choice["logprobs"][key]
        assert {c["system_fingerprint"] for c in chunks} == {whole["system_fingerprint"]}


def test_a_stop_string_ends_an_answer_and_no_part_of_it_is_sent(client):
    options = {"max_tokens": 30, "temperature": 0}
    full = complete(client, **options)["choices"][0]["text"]
    for start in range(1, 8):
        stop = full[start : start + 4]
        cut = full.find(stop)
        choice = complete(client, stop=["no such", stop], logprobs=0, **options)["choices"][0]
        assert choice["text"] == full[:cut]
        assert choice["finish_reason"] == "stop"
        pieces = [chunk["choices"][0]["text"] for chunk in streamed(client, stop=stop, **options)]
        assert "".join(pieces) == full[:cut]
        assert all(offset < cut for offset in choice["logprobs"]["text_offset"])


class Letters:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens):
        return bytes(tokens).decode("utf-8", "replace")


def test_held_back_text_comes_out():
    def said(text, *stop):
        answer = AnswerText(Letters(), stop)
        pieces = [answer.add(byte) for byte in text.encode()]
        return [*pieces, answer.rest()], answer.stopped

    assert said("aéb") == (["a", "", "é", "b", ""], False)
    assert said("xab", "abc") == (["x", "", "", "ab"], False)
    assert said("xaabcz", "abc") == (["x", "", "a", "", "", "", ""], True)
    assert said("ab", "b", "ab") == (["", "", ""], True)


def test_models_say_which_states_they_are(client, out):
    complete(client, model="path-3", max_tokens=1)
    listed = client.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["auto", *(f"path-{p}" for p in range(4))]
    source = DiskSource(out)
    shown = client.get("/v1/models/path-3").json()["dipaco"]
    assert shown["in_memory"]
    for module in shown["modules"]:
        state = source.state(module["module"])
        assert state is not None
        assert (module["version"], module["digest"]) == (state.version, state.digest)
    assert client.get("/health").json()["status"] == "ok"


def test_the_page_needs_nothing_from_elsewhere(client):
    answer = client.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    page = answer.text.replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"https?:|@import|<link(?! rel=.icon)|<script src|innerHTML", page)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"prompt": "a", "model": "path-9"}, 404, "did you mean 'path-"),
        ({"prompt": "a", "model": "gpt-4"}, 404, "'auto' and 'path-0' to 'path-3'"),
        ({"prompt": "ba" * 60, "max_tokens": 3}, 400, "context is 48 tokens"),
        ({"prompt": "a", "max_tokens": 47}, 400, "of the answer are"),
        ({"prompt": "a", "temperature": "hot"}, 400, "temperature: "),
        ({"prompt": "a", "temperature": -1}, 400, "greater than or equal to 0, not -1"),
        ({"prompt": "a", "temprature": 1}, 400, "did you mean temperature?"),
        ({"prompt": "a", "n": 1000}, 400, "n: "),
        ({"prompt": "a", "stop": [""]}, 400, "stop: give a text"),
        ({"prompt": []}, 400, "prompt: give a text"),
        ({"prompt": [5, 9999]}, 400, "token 9999 is not one of the 320"),
        ({"prompt": {"text": "a"}}, 400, "prompt: give a text"),
        ({}, 400, "prompt is missing"),
        ({"prompt": "a", "suffix": "b"}, 400, "suffix is not supported"),
        ({"prompt": ["a"] * 30, "n": 2}, 400, "60 answers at once, and this service takes 40"),
        ({"prompt": ["a"] * 1025}, 400, "at most 1024"),
        ({"prompt": "a\ud800"}, 400, "half of a surrogate pair"),
        ({"prompt": "a", "model": "\udfff"}, 400, "half of a surrogate pair"),
        ({"prompt": "a", "\ud800": 1}, 400, "half of a surrogate pair"),
        ([1], 400, "no JSON object"),
    ],
    ids=lambda value: str(value)[:80],
)
def test_bad_requests_are_told_why(client, body, status, said):
    headers = {"content-type": "application/json"}
    answer = client.post("/v1/completions", content=json.dumps(body), headers=headers)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert said in error["message"], error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_who_comes_when_all_places_are_taken_is_sent_away(engine, client, monkeypatch):
    wait_until(lambda: engine.unfinished == 0)
    monkeypatch.setattr(engine, "_unfinished", LIMITS.queue - 1)
    answer = client.post("/v1/completions", json={"prompt": "a", "n": 2})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "39 answers are waiting or at work, 2 more would be over" in answer.text


def test_what_is_no_request_is_told_why(client):
    def refused(status, said, answer):
        assert answer.status_code == status
        assert said in answer.json()["error"]["message"]

    body = {"messages": [{"role": "user", "content": "hi"}]}
    refused(400, "no chat template", client.post("/v1/chat/completions", json=body))
    refused(415, "application/json", client.post("/v1/completions", content=b"{}"))
    refused(404, "/v1/models", client.get("/v1/nothing"))
    refused(405, "GET", client.get("/v1/completions"))
    headers = {"content-type": "application/json"}
    refused(400, "not JSON", client.post("/v1/completions", content=b"{", headers=headers))


def test_limits_and_key(engine):
    service = Service(engine, limits=ServiceLimits(body_bytes=100), api_key="secret")
    with TestClient(service.application()) as client:
        assert client.get("/v1/models").status_code == 401
        assert client.get("/health").status_code == 200
        client.headers["authorization"] = "Bearer secret"
        assert client.get("/v1/models").status_code == 200
        answer = client.post("/v1/completions", json={"prompt": "a" * 200})
        assert (answer.status_code, "100 bytes" in answer.text) == (413, True)


@pytest.mark.parametrize(
    ("given", "status"),
    [("bearer secret", 200), ("BEARER  secret ", 200), ("Basic secret", 401), ("secret", 401),
     ("Bearer s\xe9cret", 401)],
)  # fmt: skip
def test_the_scheme_of_a_key_is_in_any_case(engine, given, status):
    with TestClient(Service(engine, api_key="secret").application()) as client:
        headers = {"authorization": given.encode("latin-1")}
        assert client.get("/v1/models", headers=headers).status_code == status


def test_a_key_is_one_that_clients_can_send(monkeypatch):
    monkeypatch.setenv("DIPACO_API_KEY", ' "secret"\r\n')
    assert ServeSettings().key() == "secret"
    for key in ("s\xe9cret", "two\nlines", "two words", '""'):
        with pytest.raises(ConfigurationError, match="--api-key is empty, or has a character"):
            ServeSettings(api_key=key).key()


def test_a_chat_with_what_other_servers_put_into_it_goes_on(engine):
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    question = {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {}}]}
    with TestClient(Service(engine, template=template).application()) as client:

        def said(*more):
            body = {"messages": [question, *more], "max_completion_tokens": 1}
            return client.post("/v1/chat/completions", json=body)

        answer = {"role": "assistant", "annotations": [], "reasoning_content": "", "tool_calls": []}
        for content in ({"content": None}, {}, {"content": ""}):
            assert said(answer | content, question).status_code == 200
        for wrong, line in (
            ({"role": "user", "content": None}, "messages[1].content: give"),
            ({"role": "user"}, "messages[1].content is missing"),
            ({**answer, "tool_calls": [{}]}, "messages[1].tool_calls is not supported"),
            ({"role": "boss", "content": ""}, "messages[1].role"),
        ):
            refused = said(wrong)
            assert refused.status_code == 400
            assert line in refused.json()["error"]["message"]


def test_a_chat_goes_through_the_template(engine):
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}"
        "{{ raise_exception('no tools') }}{% endif %}{{ m.content }}\n{% endfor %}"
    )
    service = Service(engine, template=template)
    with TestClient(service.application()) as client:
        messages = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
        body = {"messages": messages, "max_completion_tokens": 5, "temperature": 0}
        said = client.post("/v1/chat/completions", json={**body, "logprobs": True}).json()
        plain = complete(client, prompt=PROMPT + "\n", max_tokens=5, temperature=0)
        choice = said["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": plain["choices"][0]["text"]}
        assert len(choice["logprobs"]["content"]) == 5
        # What clients send along: an answer as it was taken apart, and fields that change nothing.
        sent = {**messages[0], "refusal": None, "tool_calls": None}
        extra = {"store": False, "metadata": {}, "parallel_tool_calls": True, "audio": None}
        again = client.post("/v1/chat/completions", json={**body, **extra, "messages": [sent]})
        assert again.json()["choices"][0]["message"] == choice["message"]
        messages[0]["role"] = "tool"
        answer = client.post("/v1/chat/completions", json=body)
        assert (answer.status_code, "no tools" in answer.text) == (400, True)


def test_a_chat_is_routed_by_what_the_user_says_first(engine):
    """A template begins all chats alike, so its words would send them all to one path."""
    template = "You are a kind helper of the people.{% for m in messages %} {{ m.content }}{% endfor %}"
    texts = [tiny_documents(4, 1, 0)[number][:16] for number in range(4)]
    with TestClient(Service(engine, template=template).application()) as client:
        routed, expected = [], []
        for text in texts:
            messages = [{"role": "system", "content": "Hm."}, {"role": "user", "content": text}]
            body = {"messages": messages, "max_completion_tokens": 1}
            answer = client.post("/v1/chat/completions", json=body).json()
            routed.append(answer["model"])
            expected.append(complete(client, prompt=text, max_tokens=1)["model"])
        assert routed == expected
        assert len(set(routed)) > 1


def test_a_broken_template_keeps_no_text_from_being_continued(engine):
    with TestClient(Service(engine, template="{% for %}").application()) as client:
        assert complete(client, max_tokens=2)["choices"][0]["text"]
        body = {"messages": [{"role": "user", "content": PROMPT}]}
        answer = client.post("/v1/chat/completions", json=body)
        assert (answer.status_code, "cannot be used: Expected" in answer.text) == (400, True)
        assert client.get("/v1/models/auto").json()["dipaco"]["chat"] is False


def test_an_answer_that_fails_takes_no_neighbours_along(client, engine, monkeypatch):
    add = AnswerText.add

    def adding(self, token):
        if self._stop == ("poison",) and self.decoded:
            raise IndexError("piece id is out of range")
        return add(self, token)

    monkeypatch.setattr(AnswerText, "add", adding)
    statuses = {}

    def ask(number):
        body = {"prompt": PROMPT, "model": "path-1", "max_tokens": 20, "seed": number}
        if number == 1:
            body["stop"] = "poison"
        statuses[number] = client.post("/v1/completions", json=body).status_code

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == {0: 200, 1: 503, 2: 200}
    wait_until(lambda: engine.unfinished == 0)


def test_a_model_that_fails_does_not_end_the_service(client, engine, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        for decoder in (Decoder, LlamaCppDecoder):
            patch.setattr(decoder, "read", fail)
        answer = client.post("/v1/completions", json={"prompt": "a", "model": "path-0", "n": 2})
        assert (answer.status_code, "path 0 failed" in answer.text) == (503, True)
    complete(client, model="path-0")
    wait_until(lambda: engine.unfinished == 0)
