"""Held-out chats are scored by what the assistant says, and routed by what the user says first."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.chat_runs import chat_rows, write_chats
from support.chat_templates import CHATML
from support.prepared_run import CPU, on_cpu

from dipaco.bootstrap.prepare import prepare
from dipaco.inference import evaluate_cli, generate_cli
from dipaco.inference.export import cli as export_cli
from dipaco.inference.sources import DiskSource
from dipaco.routing.chat_tokens import routed_tokens
from dipaco.routing.run_folder import RunFolder
from dipaco.training.scoring import sum_losses


def test_held_out_chats_are_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert evaluate_cli.main([*arguments, "--allow-genesis", "--mix", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["tokens"], report["documents"], report["short_documents"]) == (tokens, 10, 1)
    for kind in ("perplexity", "base_perplexity", "mixed_perplexity", "chosen_perplexity"):
        assert report[kind] == pytest.approx(float(np.exp(nll / tokens)), rel=1e-4)
    message = rows[0]["messages"][1]["content"]
    asked = [*arguments[:2], "--allow-genesis", "--max-tokens", "4", "--temperature", "0"]
    assert generate_cli.main([*asked, "--chat", message]) == 0
    told = capsys.readouterr()
    source = DiskSource(tmp_path / "out")
    tokens_of_message = routed_tokens(source.tokenizer(), [{"role": "user", "content": message}])
    path = int(source.document_router(CPU).nearest_paths([tokens_of_message], 1)[0, 0])
    assert f"path {path} (" in told.err
    assert not told.out.startswith(message)
    exported = ["--state-dir", str(tmp_path / "out"), "--allow-genesis", "--all"]
    assert export_cli.main([*exported, "--out", str(tmp_path / "exported")]) == 0
    said = (tmp_path / "exported/router/README.md").read_text()
    assert "A chat is routed by the first turn of the user alone" in said
