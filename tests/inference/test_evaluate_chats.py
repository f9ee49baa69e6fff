"""Held-out chats are scored by what the assistant says, and routed by what the user says first."""

import json

import numpy as np
import pytest
import torch

from dipaco.inference import evaluate_command, export_command, generate_command
from dipaco.inference.sources import DiskSource, assemble_path
from dipaco.modules.marked_tokens import plain_tokens
from dipaco.modules.transformer import token_losses
from dipaco.routing.documents.chats import read_chat
from dipaco.routing.run_folder import RunFolder
from dipaco.routing.tokens.chat_tokens import ChatEncoder, routed_tokens
from dipaco.routing.tokens.token_files import scoring_windows
from dipaco.simulator import simulate_command as simulator_cli
from dipaco.training.scoring import sum_losses
from support.runs.chat_runs import chat_rows, write_chats
from support.runs.chat_templates import CHATML
from support.runs.prepared_run import CPU, on_cpu, prepare


def test_held_out_chats_are_scored(tmp_path, capsys):
    rows = chat_rows(10)
    toml = write_chats(tmp_path, rows, CHATML)
    (tmp_path / "held-out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::4]))
    toml.write_text(toml.read_text().replace("held_out_fraction = 0.2", "validation = 'held*'"))
    plan = prepare(toml, tmp_path / "out", on_cpu())
    run = RunFolder(tmp_path / "out")
    base = run.load_base_model(plan.model, plan.blobs.base).eval()
    nll, tokens = 0.0, 0
    for path in range(4):
        held_out = run.validation_tokens(plan, path)
        if len(held_out):
            part = sum_losses(base, held_out, plan.routing.prefix_tokens)
            nll, tokens = nll + part[0], tokens + part[1]
    refused = {"messages": rows[0]["messages"][:2]}
    with (tmp_path / "held-out.jsonl").open("a") as file:
        file.write(json.dumps(refused) + "\n")
    arguments = ["--state-dir", str(tmp_path / "out"), "--data", str(tmp_path / "held-out.jsonl")]
    capsys.readouterr()
    assert evaluate_command.main([*arguments, "--allow-genesis", "--mix", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["tokens"], report["documents"], report["short_documents"]) == (tokens, 10, 1)
    for kind in ("perplexity", "base_perplexity", "mixed_perplexity", "chosen_perplexity"):
        assert report[kind] == pytest.approx(float(np.exp(nll / tokens)), rel=1e-4)
    message = rows[0]["messages"][1]["content"]
    asked = [*arguments[:2], "--allow-genesis", "--max-tokens", "4", "--temperature", "0"]
    assert generate_command.main([*asked, "--chat", message]) == 0
    told = capsys.readouterr()
    source = DiskSource(tmp_path / "out")
    tokens_of_message = routed_tokens(source.tokenizer(), [{"role": "user", "content": message}])
    path = int(source.document_router(CPU).nearest_paths([tokens_of_message], 1)[0, 0])
    assert f"path {path} (" in told.err
    assert not told.out.startswith(message)
    exported = ["--state-dir", str(tmp_path / "out"), "--allow-genesis", "--all"]
    assert export_command.main([*exported, "--out", str(tmp_path / "exported")]) == 0
    card = (tmp_path / "exported/README.md").read_text()
    assert "A chat is routed by the first turn of the user alone" in card
    # As in training: the words of the template stand around what the user says.
    assert "apply_chat_template" in card
    assert 'tokenizer("The city lies"' not in card


def test_a_path_is_chosen_by_what_is_read_before_the_first_answer(tmp_path, capsys):
    """Not by the routing prefix: all chats begin with the same words of the template."""
    rows = chat_rows(10)
    toml = write_chats(tmp_path, rows, CHATML)
    prepare(toml, tmp_path / "run", on_cpu(), changes=("inner.learning_rate=0.02",))
    trained = ["--rounds", "2", "--steps-per-round", "6", "--validation-sequences", "0", "--json"]
    assert simulator_cli.main([str(tmp_path / "run"), "--out", str(tmp_path / "out"), *trained]) == 0
    source = DiskSource(tmp_path / "out")
    models = [assemble_path(source, path) for path in range(4)]
    encoder = ChatEncoder(source.tokenizer(), source.plan.routing.prefix_tokens)
    total, count, paths = 0.0, 0, set()
    padding = source.plan.model.padding_token
    for number, row in enumerate(rows):
        found = encoder.encode(read_chat(row, "text", f"row {number}")).tokens
        windows = scoring_windows(found, source.plan.model.sequence_length, 8, padding)
        with torch.no_grad():
            plain = plain_tokens(torch.from_numpy(windows))
            nats = [token_losses(model, plain).double() for model in models]
        scored = torch.from_numpy((windows >= 0) & (windows != padding))[:, 1:]
        scored[:, :7] = False
        read = int(scored[0].int().argmax()) if scored[0].any() else len(scored[0])
        path = min(range(4), key=lambda path: float(nats[path][0, :read].sum()))
        total += float(nats[path][scored].sum())
        count += int(scored.sum())
        paths.add(path)
    encoder.close()
    assert len(paths) > 1
    capsys.readouterr()
    arguments = ["--state-dir", str(tmp_path / "out"), "--data", str(tmp_path / "train.jsonl")]
    assert evaluate_command.main([*arguments, "--mix", "4", "--no-base", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens"] == count
    assert report["chosen_perplexity"] == pytest.approx(float(np.exp(total / count)), rel=1e-4)
