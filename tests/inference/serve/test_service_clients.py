"""Real clients over real sockets: what they ask for, how they leave, and what they cannot do."""

import contextlib
import dataclasses
import http.client
import json
import os
import shutil
import signal
import socket
import threading
import time
from types import SimpleNamespace
from urllib.parse import urlsplit

import openai
import pytest
from starlette.testclient import TestClient
from transformers import AutoTokenizer

from dipaco.base import http_server
from dipaco.inference.serve import openai_route
from dipaco.inference.sources import DiskSource, SourceSettings, SwarmSource, open_source, path_states
from dipaco.modules.layout import layout_of
from dipaco.protocol.config import AdaptersConfig
from dipaco.routing.run_folder import RunFolder
from support.programs.browser import served
from support.programs.service import changed, lively, run_with_adapters, service, trained_run
from support.runs.tiny_run import tiny_documents
from support.swarms.fake_reader import FakeReader
from support.waiting import wait_until

PROMPTS = [text[:12] for text in tiny_documents(4, 1, 5)]
# An answer of so many tokens is interrupted here before it ends.
LONG = 16_384
# Much as Qwen 2.5 has it: how tools are told of, and called.
TOOLS = """{%- if tools %}<|im_start|>system
# Tools
You may call one or more functions to assist with the user query.
You are provided with function signatures within <tools></tools> XML tags:
<tools>{%- for tool in tools %}
{{ tool | tojson }}{%- endfor %}
</tools>
For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call><|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{%- for call in message.tool_calls or [] %}{% set called = call.function -%}
<tool_call>{"name": "{{ called.name }}", "arguments": {{ called.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "w",
        "description": "d",
        "parameters": {"type": "object", "properties": {"c": {"enum": ["a", "b"]}}, "required": ["c"]},
    },
}
SCHEMA = {"type": "object", "properties": {"y": {"type": "boolean"}}, "required": ["y"]}


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return lively(trained_run(tmp_path_factory.mktemp("whole")))


@pytest.fixture(scope="module")
def over_a_base(tmp_path_factory):
    """A run over a base that reads long texts."""
    folder = tmp_path_factory.mktemp("adapters")
    return run_with_adapters(folder, AdaptersConfig(rank=3), "qwen2", max_position_embeddings=LONG)


@pytest.fixture(scope="module")
def calling(over_a_base):
    """Options with which a model that was taught nothing calls a tool: its likeliest token begins a call."""
    tokenizer = AutoTokenizer.from_pretrained(over_a_base.parent / "base")
    (begin,) = tokenizer("<tool_call>", add_special_tokens=False).input_ids
    return {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 600,
            "logit_bias": {str(begin): 100}}  # fmt: skip


@pytest.fixture(scope="module")
def address(over_a_base):
    """A service with a key, whose template knows tools."""
    template = over_a_base / "tools.jinja"
    template.write_text(TOOLS)
    source = DiskSource(over_a_base, SourceSettings(context_length=LONG))
    with service(source, api_key="secret", chat_template=template) as route, served(route.application()) as address:
        yield address


@pytest.fixture
def client(address):
    with openai.OpenAI(base_url=f"{address}v1", api_key="secret", max_retries=0) as client:
        yield client


def test_the_openai_client(client):
    assert [model.id for model in client.models.list()] == ["auto", "path-0", "path-1", "path-2", "path-3"]
    letters = {"grammar": "root ::= [a-z ]+"}
    options = {"prompt": PROMPTS[1], "max_tokens": 12, "temperature": 0, "extra_body": letters}
    whole = client.completions.create(model="auto", **options)
    assert whole.model.startswith("path-")
    pieces = client.completions.create(model="auto", stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in pieces) == whole.choices[0].text
    messages = [{"role": "user", "content": PROMPTS[1]}]
    chat = client.chat.completions.create(
        model=whole.model, messages=messages, max_completion_tokens=12, logprobs=True, top_logprobs=2, seed=3, n=2
    )
    assert len(chat.choices) == 2
    assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2
    vectors = client.embeddings.create(model="path-1", input=PROMPTS[:2]).data
    assert [len(vector.embedding) for vector in vectors] == [32, 32]
    assert vectors[0].embedding != vectors[1].embedding
    with pytest.raises(openai.NotFoundError, match="give 'auto'"):
        client.completions.create(model="path1", prompt="a")
    with pytest.raises(openai.BadRequestError, match="shorten prompt") as caught:
        client.completions.create(model="auto", prompt="b a" * LONG)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="exceeds the available context size") as caught:
        client.chat.completions.create(model="auto", messages=[{"role": "user", "content": "b a" * LONG}])
    assert (caught.value.code, caught.value.type) == ("context_length_exceeded", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="auto", prompt="a", temperature="hot")


def test_tools_are_called_and_schemas_kept_to(client, calling):
    messages = [{"role": "user", "content": PROMPTS[0]}]
    asked = {"model": "path-0", "messages": messages, **calling}
    call, *_ = client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert call.function.name == "w"
    assert json.loads(call.function.arguments)["c"] in ("a", "b")
    # It comes back with what the tool said.
    answer = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    more = [*messages, answer, {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
    assert client.chat.completions.create(model="path-0", messages=more, tools=[WEATHER], max_tokens=4).choices
    form = {"type": "json_schema", "json_schema": {"name": "y", "schema": SCHEMA}}
    said = client.chat.completions.create(
        model="path-0", messages=messages, response_format=form, max_tokens=400, temperature=0
    )
    assert json.loads(said.choices[0].message.content)["y"] in (True, False)
    said = client.completions.create(
        model="path-0", prompt="ba", max_tokens=9, extra_body={"grammar": 'root ::= "yes" | "no"'}
    )
    assert said.choices[0].text in ("yes", "no")


def test_what_open_webui_asks_for(client, calling):
    """Its requests, as it sends them: streams with the usage, stops, tools and schemas."""
    messages = [{"role": "system", "content": "Hm."}, {"role": "user", "content": PROMPTS[2]}]
    form = {"type": "json_schema", "json_schema": {"name": "y", "schema": SCHEMA, "strict": True}}
    for more in ({"stop": ["xyz"], "max_tokens": 8}, calling, {"response_format": form, "max_tokens": 400}):
        chunks = list(
            client.chat.completions.create(
                model="auto", messages=messages, stream=True, stream_options={"include_usage": True}, temperature=0,
                extra_body={"chat_id": "1", "session_id": "s", "features": {"web_search": False}}, **more,
            )
        )  # fmt: skip
        assert chunks[-1].usage.completion_tokens > 0
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert choices[-1].finish_reason in ("stop", "length", "tool_calls")
        if "tools" in more:
            calls = [call for choice in choices for call in choice.delta.tool_calls or [] if call.index == 0]
            assert json.loads("".join(call.function.arguments or "" for call in calls))["c"] in ("a", "b")
        else:
            said = "".join(choice.delta.content or "" for choice in choices)
            assert "response_format" not in more or json.loads(said)["y"] in (True, False)


def test_a_key_is_asked_for_before_anything_is_read(address):
    for headers, status in (
        ({}, 401), ({"Authorization": "Bearer wrong"}, 401), ({"Authorization": "Basic secret"}, 401),
        ({"Authorization": "bearer  secret "}, 200),
    ):  # fmt: skip
        for method, path in (("GET", "v1/models"), ("GET", "props"), ("POST", "v1/completions")):
            connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
            body = {"prompt": "a", "max_tokens": 1}
            sent = json.dumps(body) if method == "POST" else None
            connection.request(method, f"/{path}", sent, {"Content-Type": "application/json", **headers})
            answer = connection.getresponse()
            assert answer.status == status
            assert status == 200 or json.loads(answer.read())["error"]["code"] == "invalid_api_key"
            connection.close()


@pytest.mark.parametrize(
    ("method", "path", "content", "kind", "status", "said"),
    [
        ("POST", "v1/completions", b"{}", "text/plain", 415, "application/json"),
        ("POST", "v1/completions", b"{", "application/json", 400, "not JSON"),
        ("POST", "v1/completions", b" " * 2**21, "application/json", 400, "not JSON"),
        ("POST", "v1/completions", b" " * (2**21 + 1), "application/json", 413, "longer than"),
        # In pieces, whose length nobody says beforehand.
        ("POST", "v1/completions", [b" " * 2**20] * 2, "application/json", 400, "not JSON"),
        ("POST", "v1/completions", [b" " * 2**20, b" " * 2**20, b" "], "application/json", 413, "longer than"),
        ("GET", "v1/nothing", None, "", 404, "/v1/models"),
        ("GET", "v1/completions", None, "", 404, "/v1/models"),
        ("GET", "slots", None, "", 404, "nothing at"),
        ("GET", "metrics", None, "", 404, "nothing at"),
        ("POST", "lora-adapters", b"[]", "application/json", 405, "POST is not for"),
        ("POST", "props", b"{}", "application/json", 405, "POST is not for"),
        ("GET", "_app/../slots", None, "", 404, "nothing at"),
        ("GET", "v1/models/path-9", None, "", 404, "give 'auto'"),
    ],
)
def test_what_is_no_request_is_told_why(address, method, path, content, kind, status, said):
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    headers = {"Content-Type": kind, "Authorization": "Bearer secret"}
    connection.request(method, f"/{path}", content, headers)
    answer = connection.getresponse()
    error = json.loads(answer.read())["error"]
    assert (answer.status, set(error)) == (status, {"message", "type", "param", "code"})
    assert said in error["message"]
    connection.close()


# -- how they leave, and what of them is not waited for


def asked(address, *, content=None, length=None, come_from=None, **body):
    """Send a request for a long answer, and return the socket on which it comes."""
    if content is None:
        body = {"prompt": "ba", "max_tokens": LONG, "ignore_eos": True, "model": "path-1", **body}
        content = json.dumps(body).encode()
    place = (urlsplit(address).hostname, urlsplit(address).port)
    found = socket.create_connection(place, 60, come_from and (come_from, 0))
    found.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer secret\r\nContent-Length: %d\r\n\r\n%s" % (length or len(content), content)
    )
    return found


def answered(connection):
    """Return the status and the body of a whole answer, however many parts it comes in."""
    found = http.client.HTTPResponse(connection)
    found.begin()
    return found.status, found.read()


def health(address):
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    connection.request("GET", "/health")
    found = json.loads(connection.getresponse().read())
    connection.close()
    return found


def llama_cpp(route, method, name, body=None, path=1):
    """Return what llama.cpp says without the route."""
    connection = http.client.HTTPConnection("localhost", timeout=60)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(route._servers._current[path].server.socket)
    connection.request(method, name, json.dumps(body), {"Content-Type": "application/json"})
    found = json.loads(connection.getresponse().read())
    connection.close()
    return found


def slots_of(route):
    """Return what llama.cpp says of its places."""
    return llama_cpp(route, "GET", "/slots")


def test_a_whole_answer_is_that_of_llama_cpp(busy):
    address, route, _ = busy
    with openai.OpenAI(base_url=f"{address}v1", api_key="secret", max_retries=0) as client:
        greedy = {"temperature": 0, "max_tokens": 5, "model": "path-1"}
        chat = {"messages": [{"role": "user", "content": PROMPTS[1]}], "n": 2, "logprobs": True, **greedy}
        for ask, name, body in (
            (client.completions.create, "completions", {"prompt": PROMPTS[1], "logprobs": 1, **greedy}),
            (client.completions.create, "completions", {"prompt": PROMPTS[1], "n": 3, **greedy}),
            (client.chat.completions.create, "chat/completions", chat),
        ):
            found = ask(**body).model_dump(exclude_unset=True)
            wanted = llama_cpp(route, "POST", f"/v1/{name}", {**body, "logit_bias": [[1, False]]})
            assert found.keys() == wanted.keys()
            for one, other in zip(found["choices"], wanted["choices"], strict=True):
                for choice in (one, other):
                    if told := choice.pop("logprobs", None):
                        # Of a chat, parts of characters are not told.
                        choice["chosen"] = [token["token"] for token in told["content"] if token["token"]]
                assert one == other


@pytest.fixture
def busy(over_a_base):
    """A service with three places for each client, and what halts the server of path 1."""
    source = DiskSource(over_a_base, SourceSettings(context_length=LONG))
    with service(source, api_key="secret") as route, served(route.application()) as address:
        answered(asked(address, max_tokens=1))
        process = route._servers._current[1].server._process

        def halt(is_halted=True):
            os.kill(process.pid, signal.SIGSTOP if is_halted else signal.SIGCONT)

        yield address, route, halt
        with contextlib.suppress(ProcessLookupError):
            halt(False)


def test_a_client_that_leaves_gives_its_place_back(busy):
    address, route, halt = busy
    for stream in (False, True):
        halt()
        connections = [asked(address, stream=stream) for _ in range(5)]
        wait_until(lambda: ((found := health(address))["answering"], found["waiting"]) == (3, 2))
        for connection in connections:
            connection.close()
        wait_until(lambda: (found := health(address))["answering"] == found["waiting"] == 0)
        halt(False)
    reading = asked(address, stream=True)
    assert reading.recv(10).startswith(b"HTTP/1.1 2")
    reading.close()
    # llama.cpp stops too, long before it has said all.
    wait_until(lambda: not any(slot["is_processing"] for slot in slots_of(route)), told=lambda: slots_of(route))
    said = [slot["next_token"][0]["n_decoded"] for slot in slots_of(route) if "next_token" in slot]
    assert max(said, default=0) < LONG - 100


def test_an_answer_that_is_not_taken_is_given_up(busy, monkeypatch):
    address, _, _ = busy
    monkeypatch.setattr(http_server, "ANSWER_LIMIT_S", 0.5)
    reading = asked(address, stream=True, n=3, logprobs=20)
    wait_until(lambda: health(address)["answering"] == 3)
    wait_until(lambda: health(address)["answering"] == 0)
    # What had been sent is there, and no end of it.
    while part := received(reading):
        assert b"[DONE]" not in part
    reading.close()


def test_an_answer_that_is_taken_slowly_comes_whole(busy, monkeypatch):
    address, _, _ = busy
    monkeypatch.setattr(http_server, "ANSWER_LIMIT_S", 5.0)
    reading = asked(address, stream=True, max_tokens=2000, logprobs=20)
    wait_until(lambda: health(address)["answering"] == 1)
    parts = []
    while b"[DONE]" not in b"".join(parts[-2:]):
        time.sleep(0.02)
        parts.append(reading.recv(8192))
        assert parts[-1]
    reading.close()


def received(connection):
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(65536)
    return b""


def test_a_body_that_does_not_come_is_not_waited_for(busy, monkeypatch):
    address, _, _ = busy
    monkeypatch.setattr(openai_route, "_BODY_LIMIT_S", 0.5)
    with asked(address, content=b"{", length=100) as slow:
        assert answered(slow)[0] == 408
    monkeypatch.setattr(openai_route, "_BODY_LIMIT_S", 30.0)
    body = b'{"prompt": "ba", "max_tokens": 1}'
    with asked(address, content=body[:9], length=len(body)) as slow:
        time.sleep(0.6)
        slow.sendall(body[9:])
        assert answered(slow)[0] == 200


def test_an_answer_that_takes_too_long_is_given_up(busy):
    address, route, halt = busy
    halt()
    route._limits = dataclasses.replace(route._limits, timeout_s=0.2)
    with asked(address) as late:
        status, said = answered(late)
    assert status == 503
    assert b'"timeout"' in said


@pytest.mark.parametrize("name", ["/", "/props"])
def test_a_page_that_takes_too_long_is_given_up(busy, name):
    address, route, halt = busy
    halt()
    route._limits = dataclasses.replace(route._limits, timeout_s=0.2)
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    connection.request("GET", name, headers={"Authorization": "Bearer secret"})
    found = connection.getresponse()
    assert (found.status, json.loads(found.read())["error"]["code"]) == (503, "timeout")


def test_one_client_keeps_no_other_out(busy):
    address, _, halt = busy
    halt()
    connections = [asked(address) for _ in range(20)]
    wait_until(lambda: ((found := health(address))["answering"], found["waiting"]) == (3, 17))
    # Another address of this machine is another client.
    other = asked(address, max_tokens=2, come_from="127.0.0.2")
    wait_until(lambda: health(address)["answering"] == 4)
    halt(False)
    assert answered(other)[0] == 200
    for connection in (other, *connections):
        connection.close()


# -- what fails, and what becomes newer


def test_a_server_that_aborts_is_told_of_and_started_anew(busy):
    address, route, halt = busy
    stream = asked(address, stream=True)
    assert stream.recv(10).startswith(b"HTTP/1.1 2")
    halt()
    whole = asked(address)
    wait_until(lambda: health(address)["answering"] == 2)
    process = route._servers._current[1].server._process
    os.kill(process.pid, signal.SIGABRT)
    halt(False)
    status, said = answered(whole)
    assert status == 503
    assert b"path 1 did not answer: signal 6" in said
    # A stream that has begun ends with the error.
    parts = []
    while not parts[-1:] or b"0\r\n\r\n" not in b"".join(parts[-2:]):
        parts.append(stream.recv(65536))
    assert b'data: {"error"' in b"".join(parts[-2:])
    with asked(address, max_tokens=2) as again:
        assert answered(again)[0] == 200
    assert route._servers._current[1].server._process.pid != process.pid


@pytest.mark.parametrize("kind", ["disk", "swarm"])
def test_newer_states_answer_once_they_are_there(out, tmp_path, kind):
    folder = tmp_path / "run"
    shutil.copytree(out, folder)
    reader = FakeReader(folder, folder)
    reader.paths_of_last_step = lambda module: frozenset()  # What is made here is of no training.
    source = DiskSource(folder) if kind == "disk" else SwarmSource(reader)
    body = {"prompt": PROMPTS[0], "model": "path-1", "max_tokens": 9, "temperature": 0}
    with service(source, refresh_s=0.2) as route, TestClient(route.application()) as client:
        before = client.post("/v1/completions", json=body)
        states = RunFolder(folder).states
        for module in source.grid.modules_of_path(1):
            states.save(changed(states.load_latest(module, layout_of(source.grid, module))))

        def shown():
            return client.get("/v1/models/path-1").json()["dipaco"]

        # Module by module, if they are looked at while they are written.
        wait_until(lambda: {module["version"] for module in shown()["modules"]} == {4})
        after = client.post("/v1/completions", json=body)
    assert after.json()["choices"][0]["text"] != before.json()["choices"][0]["text"]
    assert after.headers["x-dipaco-states"] != before.headers["x-dipaco-states"]


def test_a_damaged_state_starts_no_server_anew(out, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(out, folder)
    states = RunFolder(folder).states
    damaged = states.find(states.newest_digest("L1.E1"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    source = DiskSource(folder)
    path = source.grid.paths_of_module("L1.E1")[0]
    used = tuple(state.digest for state in path_states(source, path).values())
    source.look_again()
    assert source.digests(path) == used
    newer = changed(changed(states.load_latest("L1.E1", layout_of(source.grid, "L1.E1"))))
    states.save(newer)
    source.look_again()
    assert newer.digest in source.digests(path)


def test_a_swarm_that_moved_on_is_served_from_its_last_good_states(out):
    swarm = FakeReader(out, out)
    swarm.paths_of_last_step = lambda module: frozenset()  # What is served here is of no training.
    source = SwarmSource(swarm, SourceSettings(follow=True))
    with service(source, refresh_s=0.2) as route, TestClient(route.application()) as client:
        body = {"prompt": PROMPTS[0], "model": "path-1", "max_tokens": 4, "temperature": 0}
        before = client.post("/v1/completions", json=body).json()
        assert client.get("/health").json()["status"] == "ok"
        swarm.unserved = source.grid.modules()
        swarm.next_run = SimpleNamespace(plan=source.plan.model_copy(update={"name": "the next one"}))
        wait_until(lambda: client.get("/health").json()["status"] == "degraded")
        for path in ("path-1", "path-2"):  # in memory, and not yet
            answer = client.post("/v1/completions", json={**body, "model": path}).json()
            assert path == "path-2" or answer["choices"] == before["choices"]
        troubles = " ".join(client.get("/health").json()["troubles"])
        assert "no peer serves " in troubles
        assert "continued as 'the next one'" in troubles


def test_the_cache_of_a_peer_is_served_without_being_changed(out, tmp_path):
    """The peer trained one path and knows the others by name alone; one file is damaged."""
    run = tmp_path / "cache" / RunFolder(out).plan().run_id
    shutil.copytree(out, run)
    states = RunFolder(run).states
    states.remove("L0.E1")
    damaged = states.find(states.newest_digest("L1.E1"))
    states.kept.index.close()

    def files():
        return {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}

    damaged.write_bytes(damaged.read_bytes()[:-1])
    before = files()
    source = open_source(cache_folder=tmp_path / "cache")
    missing = [path for path in range(4) if source.missing_modules(path)]
    assert 0 < len(missing) < 4
    with service(source) as route, TestClient(route.application()) as client:
        for prompt in PROMPTS:
            answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
            assert int(answer.headers["x-dipaco-path"]) not in missing
        answer = client.post("/v1/completions", json={"prompt": "a", "model": f"path-{missing[0]}"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "path_unavailable")
        assert "there is no state of its module" in answer.text
        assert "unavailable" in client.get(f"/v1/models/path-{missing[0]}").json()["dipaco"]
    assert files() == before


def test_one_path_in_memory_serves_all(out):
    with service(out, memory_gb=0) as route, TestClient(route.application()) as client:
        found = []

        def ask(path):
            body = {"prompt": "ba", "model": f"path-{path}", "max_tokens": 3}
            found.append(client.post("/v1/completions", json=body).status_code)

        threads = [threading.Thread(target=ask, args=(number % 4,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [200] * 12
        assert len(client.get("/health").json()["paths_in_memory"]) == 1
