"""`dipaco-serve` as a command: it starts, says what is wrong in a line, and ends with all that it started."""

import importlib.metadata
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from dipaco.base.errors import AddressError, ConfigurationError, StorageError
from dipaco.base.http_server import listen
from dipaco.inference import serve_command
from dipaco.inference.serve import llama_server
from dipaco.inference.serve.llama_server import LlamaParameters, LlamaServer, LlamaServerError
from dipaco.inference.serve_command import ServeSettings
from dipaco.protocol.config import ModelConfig
from support.programs.processes import is_running
from support.programs.service import lively, trained_run
from support.waiting import wait_until

# Children of dipaco-serve.
NAME = b"dipaco.inference.serve.llama_server"


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return lively(trained_run(tmp_path_factory.mktemp("command")))


def servers_of(process):
    """Return the processes of llama.cpp that a process has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if f"\nPPid:\t{process.pid}\n" in status.read_text() and NAME in (status.parent / "cmdline").read_bytes():
                found.append(int(status.parent.name))
        except OSError:
            continue  # it has ended meanwhile
    return found


@pytest.fixture
def command(out):
    """The command, which listens, its address, and the process of a path that it started."""
    words = ["--state-dir", str(out), "--port", "0", "--threads", "1", "--dtype", "q8_0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "dipaco.inference.serve_command", *words], stderr=subprocess.PIPE, text=True
    )
    try:
        lines = iter(process.stderr.readline, "")
        address = next(
            found[1] for line in lines if (found := re.search(r"serving at (http://127\.0\.0\.1:\d+)", line))
        )
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            assert client.completions.create(model="auto", prompt="ba", max_tokens=3).choices
        (server,) = servers_of(process)
        yield process, address, server
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("how", ["quietly", "while it answers", "while llama.cpp does not"])
def test_ctrl_c_ends_it_and_its_servers(command, how):
    process, address, server = command
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        if how != "quietly":
            body = {"model": "auto", "prompt": "ba", "max_tokens": 40, "stream": True}
            client.completions.create(**body, extra_body={"ignore_eos": True})
        if how == "while llama.cpp does not":
            os.kill(server, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert not is_running(server)
        said = process.stderr.read()
        assert "Traceback" not in said, said


def test_its_servers_end_when_it_is_killed(command):
    process, _, server = command
    process.kill()
    process.wait()
    wait_until(lambda: not is_running(server))


def test_what_cannot_be_is_said_in_a_line(out, capfd, monkeypatch, tmp_path):
    def said(*words, error):
        assert serve_command.main(["--port", "0", *words]) == error.exit_code
        return capfd.readouterr().err.splitlines()[-1]

    run = ("--state-dir", str(out))
    assert "--state-dir DIR" in said(error=ConfigurationError)
    with listen("127.0.0.1", 0) as taken:
        assert "--port" in said(*run, "--port", str(taken.getsockname()[1]), error=AddressError)
    assert "--chat-template" in said(*run, "--chat-template", str(tmp_path / "none"), error=StorageError)
    with monkeypatch.context() as patch:
        odd = ModelConfig(family="qwen3", attention_bias=True)
        patch.setattr("dipaco.inference.serve.gguf_files.check_gguf", lambda *_: refuse(odd))
        assert "qwen3" in said(*run, error=ConfigurationError)
    for missing in ("aiohttp", "gguf", "starlette", "uvicorn", "xllamacpp"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, missing, None)
            assert said(*run, error=ConfigurationError) == (
                f"error: dipaco-serve needs {missing}; install it with pip install 'dipaco[serve]'"
            )


def refuse(model):
    from dipaco.inference.export.path_gguf import lack_of_llama_cpp

    raise ConfigurationError(lack_of_llama_cpp(model))


def test_the_wheel_is_the_one_that_was_tried():
    extras = importlib.metadata.requires("dipaco") or []
    (pinned,) = {line.split(";")[0].strip() for line in extras if line.startswith("xllamacpp")}
    assert pinned == f"xllamacpp=={importlib.metadata.version('xllamacpp')}"


def test_a_key_is_one_that_clients_can_send(monkeypatch):
    monkeypatch.setenv("DIPACO_API_KEY", ' "secret"\r\n')
    assert ServeSettings().key() == "secret"
    for key in ("s\xe9cret", "two\nlines", "two words", '""'):
        with pytest.raises(ConfigurationError, match="--api-key is empty, or has a character"):
            ServeSettings(api_key=key).key()


def parameters(folder, **changes):
    given = {
        "name": "path-1", "model": str(folder / "none.gguf"), "adapter": None, "socket": str(folder / "1.sock"),
        "context": 32, "slots": 2, "threads": 1, "is_exact": True, "uses_gpu": False, "chat_template": None,
    }  # fmt: skip
    return LlamaParameters(**{**given, **changes})


def test_why_llama_cpp_did_not_start_is_said(tmp_path, monkeypatch):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\0" * 100)
    for file, reason in ((tmp_path / "none.gguf", "No such file"), (broken, "exit code 1: .*bad GGUF")):
        server = LlamaServer(parameters(tmp_path, model=str(file)))
        with pytest.raises(LlamaServerError, match=f"llama.cpp did not start: .*{reason}"):
            server.wait_until_ready()
        server.close()
    monkeypatch.setattr(llama_server.subprocess, "Popen", lambda *_, **__: refuse_to_start())
    with pytest.raises(LlamaServerError, match="llama.cpp cannot be started: .*memory"):
        LlamaServer(parameters(tmp_path))


def refuse_to_start():
    raise OSError(12, "Cannot allocate memory")


def test_a_server_that_does_not_start_in_time_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(llama_server.sys, "executable", "/bin/sh")
    popen = subprocess.Popen
    monkeypatch.setattr(llama_server.subprocess, "Popen", lambda words, **options: popen(["sleep", "60"], **options))
    server = LlamaServer(parameters(tmp_path))
    with pytest.raises(LlamaServerError, match="did not start within 0 s"):
        server.wait_until_ready(0.1)
    server.close()
    assert not server.is_alive
