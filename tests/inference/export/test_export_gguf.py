"""GGUF files, read back with the library."""

import json

import gguf
import numpy as np
import pytest
import torch

from dipaco.base.errors import ConfigurationError
from dipaco.bootstrap.import_base import ImportedBase
from dipaco.inference import export_command
from dipaco.inference.export.path_gguf import check_gguf, gguf_name, write_gguf
from dipaco.modules.transformer import PathModel, initialise
from dipaco.protocol.config import ModelConfig
from dipaco.routing.tokens.tokenizer_json import JsonTokenizer
from dipaco.routing.tokens.tokenizer_kinds import read_tokenizer
from support.runs.foreign_base import make_foreign_base
from support.runs.tiny_run import make_tiny_run, tiny_tokenizer_bytes

CUTS = {"llama": "llama-bpe", "smollm2": "smollm", "qwen3": "qwen2"}


def read(file):
    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    return fields, tensors


@pytest.mark.parametrize("family", CUTS)
def test_a_base_is_written_as_its_family(family, tmp_path):
    theirs = make_foreign_base(tmp_path / "base", family).state_dict()
    base = ImportedBase(tmp_path / "base")
    file = tmp_path / "it.gguf"
    write_gguf(base.parameters().items(), base.model, base.tokenizer, file, stored="f32", name="it")
    fields, tensors = read(file)
    assert fields["general.architecture"] == base.model.family
    assert fields["tokenizer.ggml.pre"] == CUTS[family]
    pieces = JsonTokenizer(base.tokenizer, "it")
    tokens, names = fields["tokenizer.ggml.tokens"], pieces.origin.names
    for name, kind in zip(names, ("unknown", "bos", "eos", "padding"), strict=True):
        number = fields.get(f"tokenizer.ggml.{kind}_token_id")
        assert name == (None if number is None else tokens[number])
    assert fields["tokenizer.ggml.add_bos_token"] == (family == "llama")
    # The rows of the embedding are those of the checkpoint again.
    embedding = theirs["model.embed_tokens.weight"].numpy()
    assert len(tokens) == len(embedding)
    assert np.array_equal(tensors["token_embd.weight"], embedding)
    query = theirs["model.layers.0.self_attn.q_proj.weight"].numpy()
    written = tensors["blk.0.attn_q.weight"]
    if base.model.family == "llama":
        half = base.model.width_of_head // 2
        assert np.array_equal(written[:2], query[[0, half]])
        assert not np.array_equal(written, query)
    else:
        assert np.array_equal(written, query)
        assert "blk.1.attn_q_norm.weight" in tensors


def test_a_base_may_name_a_padding_that_is_no_token(tmp_path):
    make_foreign_base(tmp_path / "base", "qwen3")
    settings, file = tmp_path / "base" / "tokenizer_config.json", tmp_path / "it.gguf"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "pad_token": "<pad>"}))
    base = ImportedBase(tmp_path / "base")
    write_gguf(base.parameters().items(), base.model, base.tokenizer, file, stored="f32", name="it")
    assert "tokenizer.ggml.padding_token_id" not in read(file)[0]


@pytest.mark.parametrize(("stored", "bound"), [("f32", 0.0), ("f16", 1e-4), ("q8_0", 2e-3)])
def test_how_parameters_are_stored(stored, bound, tmp_path):
    config = ModelConfig(vocabulary_size=330, hidden_size=32, head_count=2, block_count=1)
    model = PathModel(config)
    initialise(model, seed=0)
    parameters = dict(model.named_parameters())
    data = tiny_tokenizer_bytes(320)
    file = tmp_path / "it.gguf"
    write_gguf(parameters.items(), config, data, file, stored=stored, name="it")
    fields, tensors = read(file)
    found, expected = (tensors["blk.0.ffn_up.weight"], parameters["model.layers.0.mlp.up_proj.weight"])
    assert float(np.abs(found - expected.detach().numpy()).max()) <= bound
    assert set(tensors["output_norm.weight"]) == {1.0}
    tokenizer, tokens = read_tokenizer(data), fields["tokenizer.ggml.tokens"]
    assert len(tokens) == 330
    assert tokens[4 + 1 :][:256] == [f"<0x{byte:02X}>" for byte in range(256)]
    assert fields["tokenizer.ggml.add_space_prefix"] is False
    assert fields["tokenizer.ggml.bos_token_id"] == 1
    assert [tokens[token] for token in tokenizer.encode("\n")] == ["\n"]


def read_modelfile(text):
    """Return commands and arguments, by the rules of Ollama's parser: a command that it knows, a
    space, and an argument to the end of the line, in quotes if it has spaces in it. Whole numbers
    where it wants these."""
    found = []
    for line in text.splitlines():
        kind, _, value = line.partition(" ")
        assert kind.lower() in ("from", "parameter", "template"), line
        if kind == "PARAMETER":
            name, number = value.split(" ")
            assert name in ("temperature", "top_k", "top_p", "repeat_penalty", "num_ctx")
            int(number) if name in ("top_k", "num_ctx") else float(number)
        elif " " in value:
            assert value[0] == value[-1] == '"'
            assert '"' not in value[1:-1]
            value = value[1:-1]
        found.append((kind.lower(), value))
    return found


def test_a_path_is_exported(tmp_path):
    make_tiny_run(tmp_path / "run")
    out = tmp_path / "out"
    arguments = ["--state-dir", str(tmp_path / "run"), "--allow-genesis", "--format", "gguf"]
    arguments += ["--dtype", "q8_0"]
    assert export_command.main([*arguments, "--path", "1", "--out", str(out)]) == 0
    name = gguf_name("tiny", 1, "q8_0")
    assert {file.name for file in out.iterdir()} == {name, "Modelfile", "README.md", "dipaco.json"}
    commands = read_modelfile((out / "Modelfile").read_text())
    parameters = dict(value.split(" ") for kind, value in commands if kind == "parameter")
    assert commands[0] == ("from", f"./{name}")
    assert commands[-1] == ("template", "{{ .Prompt }}")
    assert {key: float(value) for key, value in parameters.items()} == {
        "temperature": 0.8, "top_k": 50, "top_p": 1, "repeat_penalty": 1, "num_ctx": 32
    }  # fmt: skip
    assert "library_name: gguf" in (out / "README.md").read_text()
    assert json.loads((out / "dipaco.json").read_text())["form"]["dtype"] == "q8_0"
    file = tmp_path / "new" / "one.gguf"
    for _ in range(2):  # also in place of an earlier one
        assert export_command.main([*arguments, "--path", "1", "--out", str(file)]) == 0
    assert file.read_bytes() == (out / name).read_bytes()
    assert [one.name for one in file.parent.iterdir()] == [file.name]
    assert export_command.main([*arguments, "--all", "--out", str(tmp_path / "all")]) == 0
    assert (tmp_path / "all" / "paths" / "00003" / gguf_name("tiny", 3, "q8_0")).is_file()
    card = (tmp_path / "all" / "README.md").read_text()
    assert f"llama-completion -m paths/00000/{gguf_name('tiny', 0, 'q8_0')} -no-cnv" in card
    assert "ollama create tiny-path-0-q8_0 -f paths/00000/Modelfile" in card
    assert (tmp_path / "all" / "router" / "base" / "model.safetensors").is_file()
    arguments[-1] = "bfloat16"
    assert export_command.main([*arguments, "--path", "1", "--out", str(out)]) == 3


def test_a_model_that_llama_cpp_cannot_compute_is_refused():
    with pytest.raises(ConfigurationError, match="no biases for the family qwen3"):
        check_gguf(ModelConfig(family="qwen3", attention_bias=True), b"")


@pytest.mark.parametrize(
    ("family", "part", "setting"),
    [
        ("llama", 0, {"pattern": {"Regex": r"\w+|\W"}}),
        ("llama", 0, {"behavior": "MergedWithPrevious"}),
        ("smollm2", 0, {"individual_digits": False}),
        ("llama", None, {"ignore_merges": False}),
        ("qwen3", None, {"ignore_merges": True}),
    ],
)
def test_a_tokenizer_that_cuts_otherwise_than_llama_cpp_is_refused(family, part, setting, tmp_path):
    make_foreign_base(tmp_path / "base", family)
    data = ImportedBase(tmp_path / "base").tokenizer
    check_gguf(ModelConfig(), data)
    content = json.loads(data)
    parts = content["tokenizer"]["pre_tokenizer"]["pretokenizers"]
    (content["tokenizer"]["model"] if part is None else parts[part]).update(setting)
    with pytest.raises(ConfigurationError, match=r"no tokenizer that cuts a text as this one does"):
        check_gguf(ModelConfig(), json.dumps(content).encode())


def test_rotary_scaling_is_a_table_of_factors(tmp_path):
    scaling = {"kind": "llama3", "factor": 8.0, "original_sequence_length": 16}
    config = ModelConfig.model_validate(
        {"hidden_size": 32, "vocabulary_size": 320, "block_count": 1, "rope_scaling": scaling}
    )
    parameters = dict(PathModel(config).named_parameters())
    file = tmp_path / "it"
    write_gguf(parameters.items(), config, tiny_tokenizer_bytes(320), file, stored="f32", name="it")
    factors = read(file)[1]["rope_freqs.weight"]
    assert factors.shape == (4,)
    assert torch.tensor(factors[0]) >= 1
    assert factors[-1] == 8.0
