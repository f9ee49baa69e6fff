"""Paths over a base read as many tokens as their base is made for, not only as in training."""

import pytest
import torch

from dipaco.base.errors import ConfigurationError
from dipaco.inference import generate_command
from dipaco.inference.sources import DiskSource, SourceSettings, assemble_path
from dipaco.protocol.config import AdaptersConfig
from support.programs.service import run_with_adapters
from support.runs.tiny_run import make_tiny_run, tiny_documents

TRAINED, LONGER = 32, 64


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return run_with_adapters(tmp_path_factory.mktemp("longer"), AdaptersConfig(rank=4))


@pytest.fixture(scope="module")
def prompt(out):
    """A text of more tokens than a training sequence has, and of fewer than the base reads."""
    tokenizer, words = DiskSource(out).tokenizer(), " ".join(tiny_documents(4, 2, 9)).split()
    text = ""
    while len(tokenizer.beginning(f"{text} {words[0]}")) <= LONGER - 10:
        text = f"{text} {words.pop(0)}"
    assert len(tokenizer.beginning(text)) > TRAINED + 4
    return text


@torch.no_grad()
def likeliest(source, tokens, count):
    """Continue without a cache: the whole text is read for each token."""
    model, made, tokenizer = assemble_path(source, 1), list(tokens), source.tokenizer()
    for _ in range(count):
        logits = model(torch.tensor([made]))[0, -1]
        logits[list(tokenizer.never_chosen)] = -torch.inf
        made.append(int(logits.argmax()))
        if made[-1] == tokenizer.end:
            break
    return [token for token in made[len(tokens) :] if token != tokenizer.end]


def test_generate_reads_it_too(out, prompt, capsys):
    source = DiskSource(out, SourceSettings(context_length=LONGER))
    tokens = source.tokenizer().beginning(prompt)
    expected = source.tokenizer().decode(likeliest(source, tokens, 8))
    words = ["--state-dir", str(out), "--path", "1", "--temperature", "0", "--max-tokens", "8"]
    assert generate_command.main([*words, "--context", str(LONGER), prompt]) == 0
    assert capsys.readouterr().out == f"{prompt}{expected}\n"


def test_more_than_can_be_read_is_refused(out, tmp_path):
    with pytest.raises(ConfigurationError, match="--context 65 is more than the 64 .* base"):
        DiskSource(out, SourceSettings(context_length=65))
    make_tiny_run(tmp_path / "run")
    with pytest.raises(ConfigurationError, match="--context 33 is more than the 32 .* trained on"):
        DiskSource(tmp_path / "run", SourceSettings(context_length=33))


def test_fewer_tokens_than_routing_sees_are_read(out, prompt, capsys):
    words = ["--state-dir", str(out), "--temperature", "0", "--max-tokens", "2"]
    assert DiskSource(out).plan.routing.prefix_tokens >= 8
    assert generate_command.main([*words, prompt]) == 0
    routed = capsys.readouterr().err.splitlines()[0]
    assert generate_command.main([*words, "--context", "8", prompt]) == 0
    said = capsys.readouterr()
    assert routed in said.err
    assert said.out.startswith(prompt)
