"""What the service says is what the path says: as dipaco-generate, and transformers on the export."""

import json
import re

import pytest
import torch
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM

from dipaco.inference import export_command
from dipaco.inference.sources import DiskSource, SourceSettings
from dipaco.protocol.config import AdaptersConfig
from dipaco.routing.tokens.run_tokens import RunTokens
from support.programs.service import greedy_text, lively, run_with_adapters, service, trained_run
from support.runs.chat_runs import asked_tokens
from support.runs.foreign_base import HARD_TEXTS, SPECIAL_TEXTS
from support.runs.tiny_run import tiny_documents
from support.waiting import wait_until

CPU = torch.device("cpu")
DOCUMENTS = [text[:20] for text in tiny_documents(4, 1, 5)]
COUNT = 16


@pytest.fixture(scope="module", params=["whole", "adapters"])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "whole":
        return lively(trained_run(folder))
    return run_with_adapters(folder, AdaptersConfig(rank=3))


@pytest.fixture(scope="module")
def client(run):
    with service(run) as route, TestClient(route.application()) as client:
        yield client


def said(client, **body):
    answer = client.post("/v1/completions", json={"max_tokens": COUNT, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def likeliest(folder, numbers, count):
    """Return the tokens with which transformers goes on, always the likeliest one."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        found = model.generate(torch.tensor([numbers]), max_new_tokens=count, do_sample=False)
    return found[0, len(numbers) :].tolist()


def test_a_path_goes_on_as_dipaco_generate_and_as_transformers_on_its_export(client, run, tmp_path):
    source = DiskSource(run)
    tokens = RunTokens(source.blob(source.plan.blobs.tokenizer))
    texts = set()
    for path, document in enumerate(DOCUMENTS):
        text = said(client, prompt=document, model=f"path-{path}", max_tokens=10)
        wanted = greedy_text(source, path, source.tokenizer().beginning(document), 10)
        # Parts of a character at the end are left out.
        wanted = wanted.rstrip("\ufffd")
        assert text.rstrip("\ufffd") == wanted
        folder = tmp_path / str(path)
        words = ["--state-dir", str(run), "--path", str(path), "--out", str(folder), "--dtype", "float32"]
        assert export_command.main([*words, "--format", "transformers"]) == 0
        numbers = likeliest(folder, tokens.of_text(document), 10)
        # Parts of characters alone are written otherwise by its tokenizer.
        found = source.tokenizer().decode(numbers)
        assert found.rstrip("\ufffd") == wanted
        texts.add(text)
    assert len(texts) == 4


@pytest.mark.parametrize("text", [text for text in (*HARD_TEXTS, *SPECIAL_TEXTS) if len(text.encode()) < 28])
def test_every_text_is_read_as_in_training(client, run, text):
    """Also names of special tokens, which are a text in a document."""
    source = DiskSource(run)
    tokens = source.tokenizer().beginning(text)
    if len(tokens) <= source.model.sequence_length - 4:
        found = said(client, prompt=text, model="path-2", max_tokens=4)
        # Of a character that may still be completed llama.cpp says nothing, nor of what is behind it.
        assert re.fullmatch(re.escape(found) + "(\ufffd.{0,3})?", greedy_text(source, 2, tokens, 4), re.DOTALL)


def test_a_prompt_of_tokens_has_the_numbers_of_the_export(client, run):
    source = DiskSource(run)
    tokens = RunTokens(source.blob(source.plan.blobs.tokenizer))
    numbers = tokens.of_text(DOCUMENTS[1])
    assert said(client, prompt=numbers) == said(client, prompt=[numbers]) == said(client, prompt=DOCUMENTS[1])
    answer = client.post("/v1/completions", json={"prompt": [5, tokens.rows]})
    assert (answer.status_code, "is not one of the" in answer.text) == (400, True)


def test_a_stream_is_the_whole_answer_in_whole_characters(client):
    def pieces(**body):
        body = {"prompt": DOCUMENTS[0], "stream": True, "temperature": 0, "max_tokens": COUNT, **body}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]]

    whole = said(client, prompt=DOCUMENTS[0])
    assert "".join(pieces()) == whole
    assert len(pieces()) > 4
    # Every beginning of a stop string is kept back until it is known to be none.
    for start in range(1, 7):
        stop = whole[start : start + 3]
        if "\ufffd" in stop:
            continue  # of bytes that are no character
        assert "".join(pieces(stop=["no such", stop])) == whole[: whole.find(stop)]


def test_the_run_s_router_chooses_the_path(client, run):
    source = DiskSource(run)
    tokens = [source.tokenizer().beginning(document) for document in DOCUMENTS]
    ranked = source.document_router(CPU).nearest_paths(tokens, 1)[:, 0].tolist()
    assert len(set(ranked)) > 1
    for path, document in zip(ranked, DOCUMENTS, strict=True):
        for model in ({}, {"model": "auto"}):
            answer = client.post("/v1/completions", json={"prompt": document, "max_tokens": 1, **model})
            assert (answer.json()["model"], answer.headers["x-dipaco-path"]) == (f"path-{path}", str(path))
    # The texts of a request go to one server, so to one path.
    answer = client.post("/v1/completions", json={"prompt": DOCUMENTS[:3]})
    assert (answer.status_code, "several paths" in answer.text) == (400, True)
    answer = client.post("/v1/completions", json={"prompt": DOCUMENTS[:3], "model": "path-1", "max_tokens": 2})
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2]


def test_a_chat_is_answered_as_by_dipaco_generate_and_routed_by_its_first_question(run):
    """A template begins all chats alike, so its words would send them all to one path."""
    source = DiskSource(run, SourceSettings(context_length=None if "whole" in str(run) else 64))
    tokenizer = source.tokenizer()
    template = tokenizer.chat_template or "{{ bos_token }}You are kind. {{ messages[-1].content }}"
    router = source.document_router(CPU)
    with service(source, chat_template=written(run, template)) as route, TestClient(route.application()) as client:
        for document in DOCUMENTS:
            messages = [{"role": "system", "content": "Hm."}, {"role": "user", "content": document[:9]}]
            body = {"messages": messages[1:], "max_completion_tokens": 6, "temperature": 0}
            answer = client.post("/v1/chat/completions", json=body).json()
            routed_by = tokenizer.beginning(document[:9])
            path = int(router.nearest_paths([routed_by], 1)[0, 0])
            assert answer["model"] == f"path-{path}"
            if tokenizer.chat_template is not None:
                tokens = asked_tokens(tokenizer, document[:9])
            else:
                tokens = tokenizer.beginning("You are kind. " + document[:9])
            assert answer["choices"][0]["message"]["content"] == greedy_text(source, path, tokens, 6)
            assert answer["usage"]["prompt_tokens"] == len(tokens)
            # What stands in front of the question does not route.
            answer = client.post("/v1/chat/completions", json={**body, "messages": messages}).json()
            assert answer["model"] == f"path-{path}"


def written(run, template):
    file = run / "template.jinja"
    file.write_text(template)
    return file


def test_without_a_template_a_chat_is_a_text_that_is_continued(tmp_path):
    run = lively(trained_run(tmp_path))
    with service(run) as route, TestClient(route.application()) as client:
        messages = [{"role": "user", "content": DOCUMENTS[2][:8]}]
        body = {"messages": messages, "max_tokens": 7, "temperature": 0}
        first = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        assert first == said(client, prompt=DOCUMENTS[2][:8], max_tokens=7)
        more = [*messages, {"role": "assistant", "content": first}, {"role": "user", "content": "ba"}]
        answer = client.post("/v1/chat/completions", json={**body, "messages": more}).json()
        whole = DOCUMENTS[2][:8] + first + "ba"
        assert answer["choices"][0]["message"]["content"] == said(client, prompt=whole, max_tokens=7)


def test_a_longer_context_is_read_as_a_whole(tmp_path):
    run = run_with_adapters(tmp_path, AdaptersConfig(rank=4))
    source = DiskSource(run, SourceSettings(context_length=64))
    tokenizer, text = source.tokenizer(), ""
    for word in " ".join(tiny_documents(4, 2, 9)).split():
        if len(tokenizer.beginning(f"{text} {word}")) > 54:
            break
        text = f"{text} {word}"
    assert len(tokenizer.beginning(text)) > 36
    with service(run) as route, TestClient(route.application()) as client:
        answer = client.post("/v1/completions", json={"prompt": text})
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert "context of 32 tokens" in answer.text
    wanted = greedy_text(source, 1, tokenizer.beginning(text), 8)
    with service(source) as route, TestClient(route.application()) as client:
        assert client.get("/v1/models/auto").json()["max_model_len"] == 64
        assert said(client, prompt=text, model="path-1", max_tokens=8) == wanted
        # An answer ends where the context does.
        answer = client.post("/v1/completions", json={"prompt": text, "model": "path-1", "ignore_eos": True})
        usage, choice = answer.json()["usage"], answer.json()["choices"][0]
        assert (usage["total_tokens"], choice["finish_reason"]) == (64, "length")


@pytest.mark.parametrize("run", ["whole"], indirect=True)
def test_a_grammar_that_takes_for_ever_does_not_end_a_path(run):
    """Each rule is three of the next one, and llama.cpp follows all of them before the first token."""
    rules = [f'r{n} ::= r{n + 1} | r{n + 1} | r{n + 1} "a"' for n in range(40)]
    endless = "\n".join(["root ::= r0", *rules, 'r40 ::= "a" | [a-z]'])
    with service(run, timeout_s=4) as route, TestClient(route.application()) as client:
        asked = {"model": "path-1", "prompt": "a", "max_tokens": 2}
        assert client.post("/v1/completions", json={**asked, "grammar": endless}).status_code == 503
        wait_until(lambda: client.post("/v1/completions", json=asked).status_code == 200)
