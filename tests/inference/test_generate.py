"""Generation: the cache changes nothing, the same seed gives the same text, one path is loaded."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dipaco.base.errors import ConfigurationError
from dipaco.inference import generate, generate_command
from dipaco.inference.generate import choose_token, generate_tokens, stream_text
from dipaco.inference.options import SamplingSettings
from dipaco.inference.sources import DiskSource, assemble_path
from dipaco.modules.transformer import token_losses
from dipaco.protocol.config import BEGIN_TOKEN, END_TOKEN, PAD_TOKEN, UNKNOWN_TOKEN
from dipaco.routing.run_folder import RunFolder
from support.programs.service import trained_run
from support.runs.tiny_run import TINY_VOCABULARY, tiny_documents

GREEDY = SamplingSettings(temperature=0, max_tokens=20)
NEVER = (UNKNOWN_TOKEN, BEGIN_TOKEN, PAD_TOKEN)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return trained_run(tmp_path_factory.mktemp("generate"), rounds=3, private_embedding=True)


@pytest.fixture(scope="module")
def model(out):
    """A model with such large weights that every token of its context matters."""
    model = DiskSource(out).base_model(torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(20.0)
    return model


@pytest.fixture(scope="module")
def tokenizer(out):
    return DiskSource(out).document_router(torch.device("cpu")).tokenizer


def test_greedy_generation_is_the_likeliest_token_each_time(model):
    prompt = [BEGIN_TOKEN, 40, 41, 42]
    tokens = list(prompt)
    for token in generate_tokens(model, prompt, GREEDY, ends={END_TOKEN}, never=NEVER):
        with torch.no_grad():
            logits = model(torch.tensor([tokens]))[0, -1]
        logits[[*NEVER]] = -torch.inf
        assert logits[token] >= logits.max() - 1e-3
        tokens.append(token)
    assert len(tokens) > len(prompt)


def test_a_seed_gives_one_text(model):
    def text(seed, **options):
        sampling = SamplingSettings(seed=seed, max_tokens=12, **options)
        return list(generate_tokens(model, [BEGIN_TOKEN], sampling))

    assert text(1) == text(1)
    assert text(1) != text(2)
    assert text(1, top_k=1) == text(2, temperature=0)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    text(3)
    assert torch.equal(state, torch.get_rng_state())


def test_generation_goes_on_when_the_context_is_full(model):
    length = model.config.sequence_length
    sampling = SamplingSettings(temperature=1.0, top_k=0, max_tokens=3 * length)
    tokens = list(generate_tokens(model, [BEGIN_TOKEN] * (length + 5), sampling))
    assert tokens
    assert max(tokens) < model.config.vocabulary_size


def test_a_full_context_continues_from_its_newer_half(model):
    length = model.config.sequence_length
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(10, 300, (length,), generator=generator).tolist()
    first, second = list(generate_tokens(model, prompt, GREEDY))[:2]
    recent = [*prompt, first][-(length // 2) :]
    assert next(generate_tokens(model, recent, GREEDY)) == second
    assert next(generate_tokens(model, recent[1:], GREEDY)) != second


@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingSettings(temperature=1e-6), SamplingSettings(temperature=5.0, top_k=0)]
)
def test_pieces_that_are_no_text_are_never_chosen(sampling):
    logits = torch.zeros(6)
    logits[[*NEVER]] = 100.0
    generator = torch.Generator().manual_seed(0)
    chosen = {choose_token(logits, sampling, generator, NEVER) for _ in range(50)}
    assert chosen <= {END_TOKEN, 4, 5}
    assert logits[PAD_TOKEN] == 100.0


def test_top_k_and_temperature_shape_the_choice():
    logits = torch.tensor([0.0, 0.0, 0.0, 0.0, 5.0, 4.0, 3.0, 2.0])
    generator = torch.Generator().manual_seed(0)

    def chosen(temperature, top_k):
        sampling = SamplingSettings(temperature=temperature, top_k=top_k)
        return [choose_token(logits, sampling, generator) for _ in range(400)]

    assert set(chosen(1.0, 2)) == {4, 5}
    share = chosen(1.0, 2).count(4) / 400
    assert share == pytest.approx(torch.softmax(torch.tensor([5.0, 4.0]), 0)[0].item(), abs=0.08)
    assert set(chosen(0.01, 0)) == {4}


def test_top_p_leaves_the_likeliest_tokens():
    logits = torch.tensor([-9.0, -9.0, -9.0, -9.0, 0.0, 0.0, 0.0, 0.0]) - torch.arange(8) * 0.01
    generator = torch.Generator().manual_seed(0)

    def chosen(top_p):
        sampling = SamplingSettings(temperature=1.0, top_k=0, top_p=top_p)
        return {choose_token(logits, sampling, generator) for _ in range(200)}

    assert chosen(1e-9) == {4}
    assert chosen(0.49) == {4, 5}
    assert chosen(0.6) == {4, 5, 6}
    for wrong in (0.0, 1.1, float("nan")):
        with pytest.raises(ConfigurationError, match="--top-p"):
            SamplingSettings(top_p=wrong)


def test_the_end_of_the_document_ends_generation(model, monkeypatch):
    def ending(logits, *arguments):
        chosen.append(choose_token(logits, *arguments) if len(chosen) < 4 else END_TOKEN)
        return chosen[-1]

    chosen = []
    monkeypatch.setattr(generate, "choose_token", ending)
    assert list(generate_tokens(model, [BEGIN_TOKEN], GREEDY, ends={END_TOKEN})) == chosen[:4]


@settings(max_examples=60, deadline=None)
@given(tokens=st.lists(st.integers(4, TINY_VOCABULARY - 1), max_size=40))
def test_streamed_text_is_the_decoded_text(tokenizer, tokens):
    """Also of bytes that are no character, which a model may say."""
    assert "".join(stream_text(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_no_half_characters_are_streamed(tokenizer):
    text = "ba \u00e9\u4e16\U0001f642 ba"
    pieces = list(stream_text(tokenizer, tokenizer.encode(text)))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert "\U0001f642" in pieces
    cut_off = list(stream_text(tokenizer, tokenizer.encode("\U0001f642")[:2]))
    assert cut_off
    assert set("".join(cut_off)) == {"\ufffd"}


class BytePieces:
    """A tokenizer whose pieces are any bytes of a text, as those of byte-level BPE are."""

    def __init__(self, pieces):
        self.pieces = pieces

    def decode(self, tokens):
        return b"".join(self.pieces[token] for token in tokens).decode("utf-8", "replace")


@settings(max_examples=100)
@given(start=st.binary(max_size=12), text=st.text(st.characters(codec="utf-8"), max_size=12), data=st.data())
def test_pieces_that_end_within_characters_are_streamed_as_their_text(start, text, data):
    rest, pieces = start + text.encode() + "\uc548\ub155.".encode(), []
    while rest:
        size = data.draw(st.integers(1, 5))
        pieces.append(rest[:size])
        rest = rest[size:]
    tokenizer = BytePieces(pieces)
    streamed = list(stream_text(tokenizer, range(len(pieces))))
    assert "".join(streamed) == tokenizer.decode(range(len(pieces)))


def test_a_prompt_is_the_beginning_of_a_document(tokenizer):
    text = tiny_documents(1, 1, 0)[0]
    document = tokenizer.document_tokens(text)
    assert tokenizer.beginning(text) == document[:-1]
    assert tokenizer.beginning("") == [BEGIN_TOKEN]


def test_the_command_routes_the_prompt_and_loads_one_path(out, capsys, monkeypatch):
    loaded = []
    load = DiskSource._newest_state
    monkeypatch.setattr(
        DiskSource, "_newest_state", lambda self, module: (loaded.append(module), load(self, module))[1]
    )
    prompt = tiny_documents(4, 1, 5)[2][:40]
    source = DiskSource(out)
    router = source.document_router(torch.device("cpu"))
    path = int(router.nearest_paths([router.tokenizer.beginning(prompt)], 1)[0, 0])
    arguments = ["--state-dir", str(out), prompt, "--max-tokens", "12", "--threads", "1"]
    assert generate_command.main(arguments) == 0
    first = capsys.readouterr()
    assert first.out.startswith(prompt)
    assert len(first.out) > len(prompt) + 1
    assert f"path {path} (L0.E{path // 2}, L1.E{path % 2}, P{path}" in first.err
    assert loaded == list(source.grid.modules_of_path(path))
    assert generate_command.main(arguments) == 0
    assert capsys.readouterr().out == first.out


def test_the_command_mixes(out, capsys):
    arguments = ["--state-dir", str(out), "ba du", "--temperature", "0", "--max-tokens", "9"]
    assert generate_command.main([*arguments, "--path", "1", "--mix", "2"]) == 0
    said = capsys.readouterr()
    numbers = [int(line.split()[1]) for line in said.err.splitlines()]
    assert (numbers[0], len(numbers)) == (1, 2)
    source = DiskSource(out)
    models = [assemble_path(source, path) for path in numbers]
    tokens = source.tokenizer().beginning("ba du")
    made = generate_tokens(models[0], tokens, SamplingSettings(temperature=0, max_tokens=9), mixed_with=models[1:])
    assert said.out == "ba du" + "".join(stream_text(source.tokenizer(), made)) + "\n"


def test_the_command_chooses_by_the_prompt(out, capsys):
    """Of so many paths the one to which the prompt costs least, whatever the router likes."""
    source = DiskSource(out)
    router = source.document_router(torch.device("cpu"))
    for prompt in tiny_documents(4, 1, 5):
        tokens = source.tokenizer().beginning(prompt[:60])
        with torch.no_grad():
            models = [assemble_path(source, path) for path in range(4)]
            losses = [float(token_losses(m, torch.tensor([tokens])).sum()) for m in models]
        ranked = router.nearest_paths([tokens], 4)[0].tolist()
        for count in (1, 2, 4):
            chosen = min(ranked[:count], key=losses.__getitem__)
            arguments = ["--state-dir", str(out), prompt[:60], "--max-tokens", "1"]
            assert generate_command.main([*arguments, "--choose", str(count)]) == 0
            assert f"path {chosen} (" in capsys.readouterr().err


def test_what_of_a_long_prompt_is_not_read_is_said(out, capsys):
    prompt = "ba " * 60
    arguments = ["--state-dir", str(out), "--path", "1", "--max-tokens", "1"]
    assert generate_command.main([*arguments, prompt]) == 0
    assert re.search(r"the prompt has \d+ tokens, of which the last \d+ are read", capsys.readouterr().err)
    assert generate_command.main([*arguments, "ba"]) == 0
    assert "are read" not in capsys.readouterr().err


def test_a_chosen_path_needs_no_router(out, capsys, monkeypatch):
    for part in ("router", "base_model"):
        monkeypatch.setattr(RunFolder, part, lambda *_, part=part: pytest.fail(f"the {part} was read"))
    arguments = ["--state-dir", str(out), "ba", "--max-tokens", "3", "--path", "3"]
    assert generate_command.main(arguments) == 0
    assert "path 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--temperature", "-1"],
        ["--temperature", "nan"],
        ["--top-k", "-1"],
        ["--max-tokens", "-1"],
        ["--seed", "99999999999999999999"],
        ["--choose", "2", "--mix", "2"],
        ["--choose", "2", "--path", "1"],
        ["--choose", "5"],
    ],
)
def test_impossible_options_are_refused(out, capsys, arguments):
    command = ["--state-dir", str(out), "ba", *arguments]
    assert generate_command.main(command) == ConfigurationError.exit_code
    assert arguments[0] in capsys.readouterr().err
