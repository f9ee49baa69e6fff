"""Adapters for chats over a base like Qwen's, trained by real peers: all programs give equal answers.

Nothing stands in front of its texts. A text ends with <|endoftext|>, and an answer with <|im_end|>, which only the
chat template says.
"""

import http.client
import json
import socket

import pytest
import torch
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM, AutoTokenizer

from dipaco.bootstrap import bootstrap_command
from dipaco.inference import export_command, generate_command
from dipaco.inference.export.path_gguf import write_gguf
from dipaco.inference.serve.llama_server import LlamaParameters, LlamaServer
from dipaco.inference.sources import DiskSource, run_folder_in
from dipaco.routing.run_folder import RunFolder
from support.programs.service import service
from support.runs.chat_templates import CHATML
from support.runs.foreign_base import base_with_ends
from support.swarms.swarm import LIMIT_S, Swarm

ROUNDS, STEPS = 4, 60
TOML = f"""
name = "chats"
base = "base"
[data]
train = "train.jsonl"
held_out_fraction = 0.1
[adapters]
rank = 8
base_format = "float32"
[model]
sequence_length = 64
[grid]
modules_per_level = [1, 2]
[router]
prefix_tokens = 4
[inner]
optimizer = "adamw"
learning_rate = 1e-2
batch_sequences = 4
[rounds]
duration_s = {LIMIT_S}
inner_steps = {STEPS}
validation_sequences = 2
"""
QUESTIONS, ANSWER = ("ba", "du", "pe", "he"), "na na du"


def run(command, *arguments):
    assert command.main([*map(str, arguments)]) == 0


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_an_answer_has_the_same_text_and_end_in_every_program(tmp_path, capsys):
    # A frozen head of a random model makes no token likely.
    base_with_ends(tmp_path / "base", ["<|endoftext|>"], CHATML, final_norm=6.0)
    chats = [
        {"messages": [{"role": "user", "content": one + other}, {"role": "assistant", "content": ANSWER}]}
        for one in QUESTIONS
        for other in QUESTIONS
        for _ in range(8)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (tmp_path / "RUN.toml").write_text(TOML)
    run(bootstrap_command, "prepare", tmp_path / "RUN.toml", "--out", tmp_path / "run",
        "--device", "cpu", "--threads", "1")  # fmt: skip
    with Swarm(tmp_path, RunFolder(tmp_path / "run")) as swarm:
        node = swarm.start_bootstrap()
        rounds = ("--max-rounds", str(ROUNDS))
        peers = [swarm.start_peer(node, "--path", str(path), *rounds) for path in range(2)]
        for peer in peers:
            assert peer.popen.wait(2 * LIMIT_S) == 0, swarm.outputs()
        cache = run_folder_in(peers[1].cache, None)
        states = ("--state-dir", cache, "--path", "1")

    exported = tmp_path / "merged", tmp_path / "adapter.gguf"
    run(export_command, *states, "--format", "transformers", "--out", exported[0])
    run(export_command, *states, "--format", "gguf", "--out", exported[1])
    question = QUESTIONS[0] + QUESTIONS[2]
    capsys.readouterr()
    run(generate_command, *states, "--chat", "--temperature", "0", "--max-tokens", "20", question)
    said = {
        "dipaco-generate": capsys.readouterr().out.strip(),
        "transformers": of_transformers(exported[0], question),
        "llama.cpp": of_llama_cpp(tmp_path, DiskSource(cache), exported[1], question),
    }
    with service(cache) as route, TestClient(route.application()) as client:
        body = chat_of(question, model="path-1")
        said["dipaco-serve"] = answer_of(client.post("/v1/chat/completions", json=body).json())
    assert said == dict.fromkeys(said, ANSWER)


def chat_of(question, **more):
    return {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 20, **more}


def answer_of(content):
    [choice] = content["choices"]
    assert choice["finish_reason"] == "stop", content
    return choice["message"]["content"]


def of_transformers(folder, question):
    """Return the answer of `generate` as the folder sets it up."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    chat = chat_of(question)["messages"]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    made = model.generate(**asked, max_new_tokens=20, do_sample=False)[0, asked.input_ids.shape[1] :]
    assert len(made) < 20
    return tokenizer.decode(made, skip_special_tokens=True)


def of_llama_cpp(folder, source, adapter, question):
    """Return the answer of llama.cpp with the base, the exported adapter, and what the files say."""
    base, tokenizer = folder / "base.gguf", source.blob(source.plan.blobs.tokenizer)
    weights = source.base_model(torch.device("cpu")).iterate_whole()
    write_gguf(weights, source.model, tokenizer, base, stored="f32", name="base")
    address = f"/tmp/{folder.name[:60]}.sock"
    parameters = LlamaParameters(
        name="base", model=str(base), adapter=str(adapter), socket=address, context=64, slots=1, threads=1,
        is_exact=True, uses_gpu=False, chat_template=None,
    )  # fmt: skip
    server = LlamaServer(parameters)
    try:
        server.wait_until_ready()
        connection = http.client.HTTPConnection("localhost", timeout=LIMIT_S)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(address)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(chat_of(question)), headers)
        return answer_of(json.loads(connection.getresponse().read()))
    finally:
        server.close()
