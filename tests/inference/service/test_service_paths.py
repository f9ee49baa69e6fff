"""The service's paths: kept in memory by use, taken over between requests, from any source; and
real clients over real sockets."""

import dataclasses
import gc
import math
import re
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import contextmanager

import numpy as np
import openai
import pytest
import torch
from starlette.testclient import TestClient
from transformers import AutoTokenizer

from dipaco.base.errors import AddressError, ConfigurationError, IntegrityError, RunSelectionError
from dipaco.base.http_server import listen, server_of
from dipaco.inference.decoding.decoder import Decoder
from dipaco.inference.decoding.engines import TORCH, llama_cpp_engine
from dipaco.inference.decoding.mixing import mixed_losses
from dipaco.inference.generate import generate_tokens, prompt_tokens, stream_text
from dipaco.inference.sampling import Sampling
from dipaco.inference.service import cli as serve_cli
from dipaco.inference.service import engine as engine_module
from dipaco.inference.service import path_batch
from dipaco.inference.service.app import Service, ServiceLimits
from dipaco.inference.service.engine import Engine, EngineLimits
from dipaco.inference.service.work import Began, Ended, Piece, Work
from dipaco.inference.sources import DiskSource, SourceSettings, SwarmSource, assemble_path, open_source
from dipaco.modules.layout import layout_of
from dipaco.modules.state import ModuleState
from dipaco.protocol.config import AdaptersConfig
from dipaco.routing.routers.document_routing import DocumentRouter
from dipaco.routing.run_folder import RunFolder
from support.programs.service import run_with_adapters, trained_run, wait_until
from support.runs.tiny_run import tiny_documents
from support.swarms.fake_reader import FakeReader

CPU = torch.device("cpu")
ENGINES = [TORCH, llama_cpp_engine("float32")]
PROMPTS = [text[:12] for text in tiny_documents(4, 1, 5)]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return trained_run(tmp_path_factory.mktemp("paths"))


@contextmanager
def engine_of(source, memory_bytes=10**9, decoding=TORCH):
    limits = EngineLimits(memory_bytes=memory_bytes, slots=2, queue=40, refresh_s=0)
    engine = Engine(source, CPU, limits, decoding)
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


def ask(client, **body):
    answer = client.post("/v1/completions", json={"temperature": 0, "max_tokens": 9, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("patience_s", [1.0, -1.0])
def test_one_path_in_memory_serves_all(patience_s, out, monkeypatch):
    # Without patience, as on a busy machine, each path is wanted by others before it has begun.
    monkeypatch.setattr(engine_module, "_PATIENCE_S", patience_s)
    source = DiskSource(out)
    tokenizer = source.tokenizer()
    wanted = {}
    for path in range(4):
        for prompt in PROMPTS:
            model = assemble_path(source, path)
            tokens = prompt_tokens(tokenizer, prompt)
            sampling = Sampling(temperature=0, max_tokens=9)
            pieces = stream_text(tokenizer, generate_tokens(model, tokens, sampling))
            wanted[path, prompt] = "".join(pieces)
    found = {}
    with engine_of(DiskSource(out), memory_bytes=1) as engine, TestClient(Service(engine).application()) as client:
        assert engine.capacity == 1

        def one(path, prompt):
            said = ask(client, prompt=prompt, model=f"path-{path}")
            found[path, prompt] = said["choices"][0]["text"]
            assert len(engine.loaded()) <= 1

        threads = [threading.Thread(target=one, args=key) for key in wanted]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == wanted


@pytest.mark.parametrize("decoding", ENGINES, ids=lambda one: one.name)
def test_a_request_for_many_paths_keeps_none_of_them_in_memory(decoding, out):
    """A request for several answers to each of many prompts lasts longer than any path is held."""
    made = []

    def noted(model, slots):
        decoder = decoding.decoder(model, slots)
        made.append(weakref.ref(decoder))
        return decoder

    watched = dataclasses.replace(decoding, decoder=noted)
    with engine_of(DiskSource(out), memory_bytes=1, decoding=watched) as engine:
        tokens, sampling = prompt_tokens(engine.tokenizer, PROMPTS[0]), Sampling(max_tokens=2)
        ended = []

        def emit(event):
            if isinstance(event, Ended):
                ended.append(event)

        works = [Work(tokens, path, sampling, emit, deadline_s=float("inf"), answers=3) for path in range(4)]
        engine.submit(works)
        wait_until(lambda: len(ended) == 12)
        assert len(made) == 4

        def in_memory():
            gc.collect()
            return sum(decoder() is not None for decoder in made)

        # The end of the last answer is told before its place is given up.
        wait_until(lambda: in_memory() <= engine.capacity)
        # Nor do they keep what was read of their prompts.
        wait_until(lambda: [work.shared for work in works] == [None] * 4)


def test_two_paths_that_are_asked_for_all_the_time_starve_no_third(out, monkeypatch):
    monkeypatch.setattr(engine_module, "_PATIENCE_S", -1.0)
    with engine_of(DiskSource(out), memory_bytes=1) as engine:
        tokens, sampling = prompt_tokens(engine.tokenizer, PROMPTS[0]), Sampling(max_tokens=2)
        ended = []
        asked = [0, 1] * 3 + [2] + [0, 1] * 6

        def work(path):
            def emit(event):
                if isinstance(event, Ended):
                    ended.append(path)

            return Work(tokens, path, sampling, emit, deadline_s=float("inf"))

        engine.submit([work(path) for path in asked])
        wait_until(lambda: len(ended) == len(asked))
    assert ended.index(2) < len(asked) - 5, ended


def changed(state):
    """Return a newer state that says something else."""
    drawn = torch.Generator().manual_seed(state.version)
    parameters = torch.randn(state.layout.size, generator=drawn)
    return ModuleState(
        module=state.module,
        version=state.version + 1,
        parameters=parameters,
        momentum=state.momentum,
        progress=state.progress,
        layout=state.layout,
    )


@pytest.mark.parametrize(("kind", "decoding"), [("disk", TORCH), ("swarm", ENGINES[1])])
def test_newer_states_are_taken_over_between_requests(out, tmp_path, kind, decoding):
    folder = tmp_path / "served"
    shutil.copytree(out, folder)
    source = DiskSource(folder)
    if kind == "swarm":
        source = SwarmSource(FakeReader(folder, folder))
    states = RunFolder(folder).states
    with engine_of(source, decoding=decoding) as engine, TestClient(Service(engine).application()) as client:
        body = {"prompt": PROMPTS[0], "model": "path-1", "max_tokens": 60, "context_shift": True}
        before = ask(client, **body)
        looked = threading.Event()
        deliver = engine._loader._deliver

        def delivered(news):
            deliver(news)
            looked.set()

        engine._loader._deliver = delivered
        events = []
        done = threading.Event()

        def emit(event):
            events.append(event)
            if isinstance(event, Piece) and not looked.is_set():
                # In the middle of the answer: the model thread waits here for the loader.
                for module in engine.grid.modules_of_path(1):
                    newest = states.load_latest(module, layout_of(engine.grid, module))
                    assert newest is not None
                    states.save(changed(newest))
                engine.look_again()
                assert looked.wait(60)
            if isinstance(event, Ended):
                done.set()

        tokens = prompt_tokens(engine.tokenizer, PROMPTS[0])
        sampling = Sampling(temperature=0, max_tokens=60, top_k=0)
        engine.submit([Work(tokens, 1, sampling, emit, deadline_s=float("inf"), slide=True)])
        assert done.wait(60)
        text = "".join(event.text for event in events if isinstance(event, Piece))
        assert text == before["choices"][0]["text"]
        after = ask(client, **body)
        assert after["choices"][0]["text"] != text
        assert after["system_fingerprint"] != before["system_fingerprint"]
        old, new = (said["dipaco"]["prompts"][0]["modules"] for said in (before, after))
        assert [m["version"] for m in new] == [m["version"] + 1 for m in old]
        assert client.get("/v1/models/path-1").json()["dipaco"]["modules"] == new


def test_a_swarm_that_moved_on_is_served_from_its_last_good_states(out):
    swarm = FakeReader(out, out)
    source = SwarmSource(swarm, SourceSettings(follow=True))
    with engine_of(source) as engine, TestClient(Service(engine).application()) as client:
        body = {"prompt": PROMPTS[0], "model": "path-1", "max_tokens": 4}
        before = ask(client, **body)
        assert client.get("/health").json()["status"] == "ok"
        swarm.unserved = engine.grid.modules()
        swarm.next_run = engine.plan.model_copy(update={"name": "the next one"})
        looked = threading.Event()
        deliver = engine._loader._deliver
        engine._loader._deliver = lambda news: (deliver(news), looked.set())[0]
        engine.look_again()
        assert looked.wait(60)
        for path in ("path-1", "path-2"):  # in memory, and not yet
            said = ask(client, **{**body, "model": path})
            assert path == "path-2" or said["choices"] == before["choices"]
        health = client.get("/health").json()
        assert health["status"] == "degraded"
        assert [line.split(":")[0] for line in health["troubles"]][:1] == [
            f"no peer serves {', '.join(sorted(engine.grid.modules_of_path(1)))}"
        ]
        assert "continued as 'the next one'" in health["troubles"][1]


@pytest.mark.parametrize("decoding", ENGINES, ids=lambda engine: engine.name)
def test_a_mixture_says_what_generate_says(out, decoding):
    source = DiskSource(out)
    prompt = tiny_documents(4, 1, 6)[3][:30]
    tokens = prompt_tokens(source.tokenizer(), prompt)
    router = source.document_router(torch.device("cpu"))
    paths = sorted(router.nearest_paths([tokens], 2)[0].tolist())
    models = [assemble_path(source, path) for path in paths]
    sampling = Sampling(temperature=0, max_tokens=60)
    made = generate_tokens(models[0], tokens, sampling, mixed_with=models[1:])
    text = "".join(stream_text(source.tokenizer(), made))
    with engine_of(DiskSource(out), decoding=decoding) as engine, TestClient(Service(engine).application()) as client:
        body = {"prompt": prompt, "max_tokens": 60, "context_shift": True, "mix": 2, "n": 2}
        said = ask(client, **body)
        assert [choice["text"] for choice in said["choices"]] == [text, text]
        assert said["choices"][0]["dipaco"]["paths"] == paths
        assert said["dipaco"]["prompts"][0]["mixed"] == paths
        scored = {"max_tokens": 0, "echo": True, "logprobs": 0, "model": "path-3", "mix": 4}
        answered = ask(client, prompt=prompt, **scored)
        # It is called by the path that was asked for, and otherwise by the router's choice.
        assert (answered["model"], answered["dipaco"]["prompts"][0]["path"]) == ("path-3", 3)
        assert said["dipaco"]["prompts"][0]["path"] == said["dipaco"]["prompts"][0]["routed"]
        listed = answered["choices"][0]["logprobs"]["token_logprobs"]
        with torch.no_grad():
            row, targets = torch.tensor([tokens]), torch.tensor(tokens[1:])[:, None]
            models = [assemble_path(source, path) for path in range(4)]
            logprobs = [model(row)[0, :-1].log_softmax(-1) for model in models]
            nats = -torch.stack([found.gather(1, targets) for found in logprobs])[:, None, :, 0]
        assert np.allclose(listed[1:], -mixed_losses(nats)[0].numpy(), atol=1e-4)
        for wrong in ({"mix": 5}, {"mix": 0}):
            answer = client.post("/v1/completions", json={"prompt": "ba", **wrong})
            assert answer.status_code == 400, answer.text


@pytest.fixture
def cache(out, tmp_path):
    """The cache of a peer that trained one path and knows the others by name alone."""
    run = tmp_path / "cache" / RunFolder(out).plan().run_id
    shutil.copytree(out, run)
    states = RunFolder(run).states
    states.remove("L0.E1")
    states.kept.index.close()
    return tmp_path / "cache"


def test_the_cache_of_a_peer_is_served(cache):
    def files():
        return {file: file.read_bytes() for file in cache.rglob("*") if file.is_file()}

    states = RunFolder(next(cache.iterdir())).states
    broken = states.find(states.newest_digest("L1.E1"))
    broken.write_bytes(broken.read_bytes()[:-1])
    before = files()
    source = open_source(cache_folder=cache)
    missing = [path for path in range(4) if source.missing_modules(path)]
    assert 0 < len(missing) < 4
    with engine_of(source) as engine, TestClient(Service(engine).application()) as client:
        for prompt in PROMPTS:
            said = ask(client, prompt=prompt)["dipaco"]["prompts"][0]
            assert said["path"] not in missing
            assert said["routed"] in (said["path"], *missing)
        path = missing[0]
        answer = client.post("/v1/completions", json={"prompt": "a", "model": f"path-{path}"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "path_unavailable")
        assert "there is no state of its module" in answer.text
        assert "unavailable" in client.get(f"/v1/models/path-{path}").json()["dipaco"]
    assert files() == before


def test_what_a_peer_that_left_soon_never_fetched_is_named(cache):
    source = open_source(cache_folder=cache)
    RunFolder(next(cache.iterdir())).blobs.path(source.plan.blobs.tokenizer).unlink()
    with pytest.raises(IntegrityError, match="has no tokenizer of the run .* --initial-peers"):
        source.tokenizer()


def test_which_run_of_a_cache_is_meant(cache):
    first = next(cache.iterdir())
    shutil.copytree(first, cache / "other")
    with pytest.raises(RunSelectionError, match="--run NAME"):
        open_source(state_folder=cache)
    source = open_source(state_folder=cache, run="oth")
    assert isinstance(source, DiskSource)
    with pytest.raises(RunSelectionError, match="'nothing' is none"):
        open_source(state_folder=cache, run="nothing")
    with pytest.raises(ConfigurationError, match="--cache-dir DIR alone"):
        open_source(settings=SourceSettings())


# -- real clients


@pytest.fixture(scope="module", params=ENGINES, ids=lambda engine: engine.name)
def served(out, request):
    with engine_of(DiskSource(out), decoding=request.param) as engine:
        application = Service(engine, api_key="secret", template="{{ messages[0].content }}")
        listening = listen("127.0.0.1", 0)
        server = server_of(application.application())
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        yield engine, f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        server.should_exit = True
        thread.join(30)
        listening.close()


def test_the_openai_client(served):
    with openai.OpenAI(base_url=served[1], api_key="secret", max_retries=0) as client:
        assert [model.id for model in client.models.list()][:2] == ["auto", "path-0"]
        whole = client.completions.create(model="auto", prompt=PROMPTS[1], max_tokens=12, seed=3, logprobs=2, echo=True)
        choice = whole.choices[0]
        assert choice.text.startswith(PROMPTS[1])
        assert choice.logprobs is not None
        assert whole.system_fingerprint
        stream = client.completions.create(
            model="auto", prompt=PROMPTS[1], max_tokens=12, seed=3, stream=True, echo=True
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == choice.text
        chat = client.chat.completions.create(
            model=whole.model,
            messages=[{"role": "user", "content": PROMPTS[1]}],
            max_completion_tokens=12,
            seed=3,
            stream=True,
        )
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chat)
        assert PROMPTS[1] + said == choice.text
        with pytest.raises(openai.NotFoundError, match="did you mean 'path-1'"):
            client.completions.create(model="path1", prompt="a")
        with pytest.raises(openai.BadRequestError, match="context is 48 tokens"):
            client.completions.create(model="auto", prompt="a", max_tokens=99)
    with (
        openai.OpenAI(base_url=served[1], api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_a_client_that_leaves_costs_nothing_more(served, monkeypatch):
    engine, address = served
    # No answer ends by itself.
    monkeypatch.setattr(path_batch, "END_TOKEN", -1)
    endless = {"prompt": "ba", "max_tokens": 10**6, "model": "path-2"}
    extra = {"context_shift": True, "top_k": 3}
    with openai.OpenAI(base_url=address, api_key="secret", max_retries=0) as client:
        stream = client.completions.create(**endless, extra_body=extra, stream=True)
        next(iter(stream))
        assert engine.unfinished
        stream.close()
        wait_until(lambda: engine.unfinished == 0)
        with pytest.raises(openai.APITimeoutError):
            client.completions.create(**endless, extra_body=extra, timeout=1.0)
        wait_until(lambda: engine.unfinished == 0)


def test_a_client_that_leaves_while_its_prompt_is_routed_leaves_its_place(out, monkeypatch):
    with engine_of(DiskSource(out)) as engine:
        work = Work(
            tokens=[1, 5, 6], path=None, sampling=Sampling(max_tokens=2), answers=3,
            emit=lambda event: None, deadline_s=math.inf,
        )  # fmt: skip
        route = DocumentRouter.nearest_paths

        def leaving(self, *given):
            work.cancelled = True
            return route(self, *given)

        monkeypatch.setattr(DocumentRouter, "nearest_paths", leaving)
        engine.submit([work])
        wait_until(lambda: work.cancelled and engine.unfinished == 0, 5.0)


def test_an_answer_that_takes_too_long_is_given_up(served):
    service = Service(served[0], limits=ServiceLimits(timeout_s=0.0))
    with TestClient(service.application()) as client:
        answer = client.post("/v1/completions", json={"prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "timeout")


@pytest.mark.parametrize("words", [("--engine", "torch"), ("--dtype", "q8_0")])
def test_the_command_serves_and_ends(words, out, capfd):
    command = [sys.executable, "-m", "dipaco.inference.service.cli", "--state-dir", str(out)]
    process = subprocess.Popen([*command, *words, "--port", "0"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        address = None
        for line in process.stderr:
            if found := re.search(r"serving at (http://127\.0\.0\.1:\d+)", line):
                address = found[1]
                break
        assert address
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            assert client.completions.create(model="auto", prompt="ba", max_tokens=3).choices
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()
    assert serve_cli.main(["--port", "0"]) == ConfigurationError.exit_code
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        arguments = ["--state-dir", str(out), "--port", str(port)]
        assert serve_cli.main(arguments) == AddressError.exit_code
    assert "--port" in capfd.readouterr().err


def test_paths_over_one_base_answer_together(tmp_path, monkeypatch):
    source = DiskSource(run_with_adapters(tmp_path, AdaptersConfig(rank=3)))
    texts = []
    step = Decoder.step

    def stepping(self, tokens):
        texts.append(sum(token is not None for token in tokens))
        return step(self, tokens)

    monkeypatch.setattr(Decoder, "step", stepping)
    with engine_of(source) as engine, TestClient(Service(engine).application()) as client:
        assert engine.capacity == 4
        assert engine.max_mixed == 2
        asked = [
            {"model": f"path-{path}", "prompt": PROMPTS[path], "max_tokens": 30 + path, "context_shift": True}
            for path in range(4)
        ]
        asked.append({"model": "path-1", "mix": 2, "prompt": PROMPTS[0], "max_tokens": 20})
        found = {}

        def one(number):
            found[number] = ask(client, **asked[number])["choices"][0]["text"]

        threads = [threading.Thread(target=one, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert max(texts) == 2  # texts of two paths, in one step
        for path in range(4):
            tokens = prompt_tokens(source.tokenizer(), PROMPTS[path])
            sampling = Sampling(max_tokens=30 + path, temperature=0)
            made = generate_tokens(assemble_path(source, path), tokens, sampling)
            assert found[path] == "".join(stream_text(source.tokenizer(), made))
        wait_until(lambda: engine.unfinished == 0)


def test_a_mixture_that_waits_for_two_places_is_not_overtaken_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(path_batch, "END_TOKEN", -1)  # no answer ends by itself
    began = []

    def endless(name, mix=1):
        def emit(event):
            if isinstance(event, Began):
                began.append(name)

        sampling = Sampling(max_tokens=10**9, top_k=3)
        return Work([1, 5, 6], 0, sampling, emit, math.inf, mix=mix, slide=True)

    with engine_of(DiskSource(run_with_adapters(tmp_path, AdaptersConfig(rank=3)))) as engine:
        first, second = endless("first"), endless("second")
        engine.submit([first, second])
        wait_until(lambda: len(began) == 2)
        engine.submit([endless("mixture", mix=2)])
        wait_until(lambda: any(len(paths) == 2 for paths in engine.loaded()))
        engine.submit([endless("third")])
        first.cancelled = True
        wait_until(lambda: engine.unfinished == 3)
        second.cancelled = True
        wait_until(lambda: "mixture" in began, 10.0)


def test_tokens_have_the_numbers_of_the_base_s_own_tokenizer(tmp_path):
    source = DiskSource(run_with_adapters(tmp_path, AdaptersConfig(rank=3)))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "base")
    text = "\u65e5 ba du"
    numbers = [theirs.bos_token_id, *theirs(text, add_special_tokens=False).input_ids]
    with engine_of(source) as engine, TestClient(Service(engine).application()) as client:
        by_text, by_numbers = (
            ask(client, prompt=prompt, echo=True, logprobs=3)["choices"][0] for prompt in (text, numbers)
        )
        assert by_numbers == by_text
        # Those of half a character have no text.
        named = [name for name in by_text["logprobs"]["tokens"] if name.startswith("token_id:")]
        assert named[:3] == [f"token_id:{number}" for number in numbers[1:4]]
