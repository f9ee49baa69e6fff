"""llama.cpp: what it says is what the path says; which engine is taken when."""

import dataclasses
import sys

import pytest
import torch

from dipaco.base.errors import ConfigurationError
from dipaco.inference.decoding.engines import TORCH, chosen_engine, llama_cpp_obstacle
from dipaco.inference.decoding.llama_cpp import VERSION, installed_version, library
from dipaco.inference.decoding.llama_cpp_decoder import LlamaCppDecoder
from dipaco.inference.export.path_gguf import lack_of_llama_cpp
from dipaco.inference.service import cli as serve_cli
from dipaco.protocol.config import AdaptersConfig
from dipaco.routing.run_folder import RunFolder
from support.programs.service import run_with_adapters
from support.runs.small_paths import KINDS, logits_of, small_path
from support.runs.tiny_run import make_tiny_run

LONG = {"family": "llama", "sequence_length": 300}
# Keys and values have 16 bits, and of q8_0 what is multiplied has 8.
CLOSE = {"f32": 0.02, "q8_0": 0.5}


@pytest.mark.parametrize("stored", CLOSE)
@pytest.mark.parametrize("kind", [*KINDS, LONG], ids=lambda kind: "-".join(map(str, kind.values())))
def test_it_says_what_the_model_says(kind, stored):
    model = small_path(**kind)
    decoder = LlamaCppDecoder(model, 6, stored=stored)
    long = model.config.sequence_length
    texts = [[5 + (3 * slot + place * place) % 50 for place in range(long)] for slot in range(6)]
    lengths = [long - 5, 1, 7, 3, 9, long - 4]
    wanted = [logits_of(model, text) for text in texts]

    def check(found, expected):
        torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE[stored])

    for slot, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        check(torch.cat(list(decoder.read(slot, text[:length], every=True))), wanted[slot][:length])
        check(torch.cat(list(decoder.read(slot, text[:length]))), wanted[slot][[length - 1]])
    for width in (6, 5, 2, 1):
        found = decoder.step([texts[slot][decoder.lengths[slot]] for slot in range(width)])
        for slot in range(width):
            check(found[slot], wanted[slot][decoder.lengths[slot] - 1])
    lone = decoder.lengths[3]
    found = decoder.step([None, None, None, texts[3][lone]])
    assert found.shape == (4, 64)
    check(found[3], wanted[3][lone])
    assert decoder.free_slots == 0
    # To the end of the context.
    while decoder.lengths[5] < long:
        found = decoder.step([None] * 5 + [texts[5][decoder.lengths[5]]])
    check(found[5], wanted[5][-1])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "kind",
    [
        {"rope_scaling": {"kind": "linear", "factor": 3.0}},
        {"rope_scaling": {"kind": "llama3", "factor": 8.0, "original_sequence_length": 64}},
        {"head_width": 16, "kv_head_count": 2},
        {"head_width": 8},
    ],
    ids=lambda kind: "-".join(map(str, kind.values())),
)
def test_a_path_is_computed_or_what_it_lacks_is_said(family, kind):
    model = small_path(family=family, **kind)
    if lack_of_llama_cpp(model.config) is None:
        (found,) = LlamaCppDecoder(model, 1).read(0, [7, 8, 9])
        expected = logits_of(model, [7, 8, 9])[-1]
        torch.testing.assert_close(found[0], expected, rtol=0, atol=CLOSE["f32"])
    else:
        with pytest.raises(ConfigurationError, match=family):
            LlamaCppDecoder(model, 1)
        assert family != "llama"


def test_a_text_can_be_copied_and_its_place_taken_by_another():
    model = small_path()
    decoder = LlamaCppDecoder(model, 3)
    list(decoder.read(2, [7, 8, 9]))
    text = decoder.copy(2, 3)
    list(decoder.read(0, [11] * 9))
    decoder.free(2)
    assert (decoder.lengths, decoder.free_slots) == ([9, 0, 0], 2)
    for slot in (0, 1):
        decoder.paste(slot, text)
    found = decoder.step([10, 12])
    for row, last in zip(found, (10, 12), strict=True):
        expected = logits_of(model, [7, 8, 9, last])[-1]
        torch.testing.assert_close(row, expected, rtol=0, atol=CLOSE["f32"])
    assert decoder.lengths == [4, 4, 0]


def test_a_mistake_is_an_error_after_which_it_goes_on(caplog):
    model = small_path()
    decoder = LlamaCppDecoder(model, 1)
    with pytest.raises(RuntimeError, match="code is -1"):
        decoder.step([64])  # not one of the vocabulary
    assert "llama.cpp: " in caplog.text
    (found,) = decoder.read(0, [7, 8])
    torch.testing.assert_close(found[0], logits_of(model, [7, 8])[-1], rtol=0, atol=CLOSE["f32"])


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "run"
    make_tiny_run(folder)
    return RunFolder(folder).plan()


def test_what_keeps_llama_cpp_from_serving_is_said(plan):
    assert llama_cpp_obstacle(plan, "cpu", VERSION) is None
    assert "pip install 'dipaco[llamacpp]'" in str(llama_cpp_obstacle(plan, "cpu", None))
    assert f"{VERSION} is needed" in str(llama_cpp_obstacle(plan, "cpu", "2025.1.1"))
    assert "--device cuda" in str(llama_cpp_obstacle(plan, "cuda", VERSION))
    model = plan.model.model_copy(update={"family": "qwen3", "attention_bias": True})
    odd = plan.model_copy(update={"model": model})
    assert "qwen3" in str(llama_cpp_obstacle(odd, "cpu", VERSION))


@pytest.mark.parametrize(
    ("asked", "dtype", "obstacle", "expected"),
    [
        ("auto", "float32", None, "llama.cpp"),
        ("auto", "q8_0", None, "llama.cpp"),
        ("llama.cpp", "float32", None, "llama.cpp"),
        ("torch", "float32", None, "torch"),
        ("torch", "float32", "no wheel", "torch"),
        ("auto", "float32", "no wheel", "torch"),
        ("torch", "q8_0", None, ConfigurationError("--dtype q8_0 is for llama.cpp")),
        ("auto", "q8_0", "no wheel", ConfigurationError("--dtype q8_0: no wheel")),
        ("llama.cpp", "q8_0", "no wheel", ConfigurationError("--engine llama.cpp: no wheel")),
    ],
)
def test_which_engine_is_taken(asked, dtype, obstacle, expected):
    if isinstance(expected, ConfigurationError):
        with pytest.raises(ConfigurationError, match=str(expected)):
            chosen_engine(asked, dtype, obstacle)
    else:
        assert chosen_engine(asked, dtype, obstacle) == expected


def test_the_wheel_is_that_of_the_interface():
    assert installed_version() == VERSION


@pytest.mark.parametrize("broken", ["gguf", "xllamacpp"])
def test_a_wheel_that_cannot_be_loaded_is_not_taken(broken, plan, monkeypatch, capfd):
    library.cache_clear()
    monkeypatch.setitem(sys.modules, broken, None)
    settings = serve_cli.ServeSettings()
    assert settings.decoding_engine(plan, "cpu") is TORCH
    said = capfd.readouterr().err
    assert "llama.cpp does not compute the paths: xllamacpp is installed and cannot be load" in said
    asked = dataclasses.replace(settings, engine="llama.cpp")
    with pytest.raises(ConfigurationError, match=f"--engine llama.cpp: .*{broken}"):
        asked.decoding_engine(plan, "cpu")
    monkeypatch.undo()
    assert settings.decoding_engine(plan, "cpu") is not TORCH


def test_a_run_with_adapters_has_its_own_engine(tmp_path, capfd):
    out = run_with_adapters(tmp_path, AdaptersConfig(rank=3))
    words = ["--state-dir", str(out), "--port", "0", "--engine", "llama.cpp"]
    assert serve_cli.main(words) == ConfigurationError.exit_code
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith("error: --engine llama.cpp: run ")
    assert "adapters" in said
