"""A run starts from a Llama checkpoint, whose tokens and rows it takes as they are."""

import json
import shutil

import pytest
import safetensors.torch
import torch
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from dipaco.base.errors import ConfigurationError, IntegrityError, StorageError
from dipaco.bootstrap.import_base import ImportedBase
from dipaco.bootstrap.run_config import load_run_config, read_run_toml
from dipaco.inference import export_command
from dipaco.inference.export.exporter import Exporter
from dipaco.inference.export.form import ExportForm
from dipaco.inference.sources import DiskSource, SourceSettings, assemble_path
from dipaco.routing.documents.corpus import corpus_files
from dipaco.routing.run_folder import RunFolder
from dipaco.routing.tokens.tokenizer_kinds import read_tokenizer
from dipaco.simulator import simulate_command as simulator_cli
from support.runs.prepared_run import on_cpu, prepare, write_run
from support.runs.tiny_run import make_tiny_run, tiny_documents

TOML = """
name = "imported"
base = "checkpoint"
[data]
train = "train.jsonl"
[router]
prefix_tokens = 8
"""


def prepared(folder, toml=TOML, out="out", *, replace=False):
    plan = prepare(write_run(folder, toml), folder / out, on_cpu(replace=replace))
    return RunFolder(folder / out), plan


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A simulated run, and its path 1 as a checkpoint."""
    folder = tmp_path_factory.mktemp("import")
    make_tiny_run(folder / "run", private_embedding=True, kv_head_count=1, rope_theta=700.0)
    arguments = [str(folder / "run"), "--rounds", "1", "--out", str(folder / "trained"), "--json"]
    assert simulator_cli.main(arguments) == 0
    arguments = ["--state-dir", str(folder / "trained"), "--path", "1"]
    assert export_command.main([*arguments, "--out", str(folder / "checkpoint")]) == 0
    return folder / "trained", folder / "checkpoint"


def linked(checkpoint, folder):
    """Put a checkpoint beside a RUN.toml and return where it is."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "checkpoint").symlink_to(checkpoint)
    return folder / "checkpoint"


def test_an_exported_path_comes_back_as_the_base(exported, tmp_path):
    trained, checkpoint = exported
    linked(checkpoint, tmp_path)
    run, plan = prepared(tmp_path)
    source = DiskSource(trained)
    assert plan.blobs.tokenizer == source.plan.blobs.tokenizer
    assert (plan.model.kv_heads, plan.model.rope_theta) == (1, 700.0)
    assert plan.model.feed_forward == source.plan.model.feed_forward
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        expected = assemble_path(source, 1)(tokens)
        assert torch.equal(run.base_model(plan)(tokens)[..., :-1], expected)
    assert prepared(tmp_path)[1] == plan


def test_further_steps_train_the_imported_base(exported, tmp_path):
    linked(exported[1], tmp_path)
    table = TOML.replace('base = "checkpoint"\n', "") + '[base]\ncheckpoint = "checkpoint"\n'
    imported, plan = prepared(tmp_path)
    _, same_plan = prepared(tmp_path, table, "same")
    assert plan.blobs == same_plan.blobs
    run, trained = prepared(tmp_path, f"{table}steps = 2\nlearning_rate = 4e-3\nbatch_sequences = 2\n", "further")
    assert trained.blobs.tokenizer == plan.blobs.tokenizer
    assert trained.blobs.base != plan.blobs.base
    first, then = imported.base_parameters(plan), run.base_parameters(trained)
    greatest = max(float((then[name] - first[name]).abs().max()) for name in first)
    assert 0 < greatest < 0.01


def test_the_model_of_a_run_toml_must_agree(exported, tmp_path):
    linked(exported[1], tmp_path)

    def model(text):
        return load_run_config(write_run(tmp_path, f"{TOML}[model]\n{text}\n")).model

    assert model("").sequence_length == 32
    assert model("hidden_size = 16\nkv_head_count = 1\nfeed_forward_size = 32").hidden_size == 16
    assert model("sequence_length = 16").sequence_length == 16
    for text, words in {
        "hidden_size = 32": "model.hidden_size is 32, but .*config.json has 16",
        "sequence_length = 64": "model.sequence_length is 64, but .* has 32",
        "rope_theta = 10000.0": "model.rope_theta is 10000.0, but .* has 700.0",
        "hiden_size = 16": "unknown key 'model.hiden_size'; did you mean 'hidden_size'",
    }.items():
        with pytest.raises(ConfigurationError, match=words):
            model(text)


def test_a_base_for_long_texts_trains_on_shorter_ones_unless_it_is_told_to(exported, tmp_path):
    shutil.copytree(exported[1], tmp_path / "checkpoint")
    file = tmp_path / "checkpoint/config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    for text, length in {"": 1024, "[model]\nsequence_length = 4096": 4096}.items():
        model = load_run_config(write_run(tmp_path, f"{TOML}{text}\n")).model
        assert (model.sequence_length, model.context_length) == (length, 8192)


def test_a_base_is_a_folder_or_a_table(tmp_path):
    for text, words in {
        "base = 3": "base",
        'base = "nowhere"': "'nowhere' is no folder",
        'base = ""': "it has no config.json",
    }.items():
        toml = TOML.replace('base = "checkpoint"', text)
        with pytest.raises((ConfigurationError, StorageError), match=words):
            load_run_config(write_run(tmp_path, toml))


# -- checkpoints of others


def foreign_tokenizer(folder, **options):
    """Train a tokenizer as Llama's is: no padding, a space in front of every text."""
    (folder / "texts").write_text("\n".join(tiny_documents(4, 20, 0)))
    given = {
        "pad_id": -1,
        "minloglevel": 2,
        "byte_fallback": True,
        "model_type": "bpe",
        "normalization_rule_name": "identity",
        **options,
    }
    SentencePieceTrainer.train(
        input=str(folder / "texts"), model_prefix=str(folder / "tokenizer"), vocab_size=320, **given
    )
    return folder / "tokenizer.model"


@pytest.fixture
def foreign(tmp_path):
    """A checkpoint in several files, as `save_pretrained` writes it, with a Llama tokenizer."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=323,
            hidden_size=16,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.3,
            rms_norm_eps=1e-4,
            rope_parameters={"rope_type": "default", "rope_theta": 300.0},
        )
    ).eval()
    checkpoint = tmp_path / "checkpoint"
    model.save_pretrained(checkpoint, max_shard_size="30KB")
    foreign_tokenizer(checkpoint)
    return checkpoint, model


def test_a_llama_keeps_its_numbers(foreign, tmp_path):
    checkpoint, model = foreign
    assert (checkpoint / "model.safetensors.index.json").exists()
    run, plan = prepared(tmp_path)
    assert plan.model.vocabulary_size == 324
    assert not plan.model.tied_embedding
    tokenizer = run.tokenizer(plan)
    text = "  ba du\n\nx"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    theirs = SentencePieceProcessor(model_file=str(checkpoint / "tokenizer.model"))
    tokens = torch.tensor([tokenizer.beginning(" ba du ba")])
    assert tokens[0].tolist() == [theirs.bos_id(), *theirs.encode("ba du ba")]
    with torch.no_grad():
        expected, found = model(tokens).logits, run.base_model(plan)(tokens)
    torch.testing.assert_close(found[..., :-1], expected, atol=1e-4, rtol=1e-4)
    assert torch.isneginf(found[..., plan.model.padding_token]).all()


def test_rows_without_a_piece_have_no_text(foreign, tmp_path):
    run, plan = prepared(tmp_path)
    tokenizer = run.tokenizer(plan)
    assert plan.model.vocabulary_size > tokenizer.vocabulary_size
    tokens = tokenizer.encode("ba du")
    assert tokenizer.decode([*tokens[:1], plan.model.vocabulary_size - 1, *tokens[1:]]) == "ba du"


def test_tokens_that_were_added_to_a_sentencepiece_model(exported, tmp_path):
    """As for a chat: two tokens, another end of a text and a template, which all come along."""
    checkpoint = tmp_path / "checkpoint"
    tokenizer = AutoTokenizer.from_pretrained(exported[1])
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    model = AutoModelForCausalLM.from_pretrained(exported[1])
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    shutil.copy(exported[1] / "tokenizer.model", checkpoint)
    run, plan = prepared(tmp_path)
    ours = run.tokenizer(plan)
    assert ours.vocabulary_size == plan.model.vocabulary_size - 1 == 322
    assert ours.special_names[2] == "<|im_end|>"
    assert ours.chat_template == tokenizer.chat_template
    source = DiskSource(run.path, SourceSettings(allow_genesis=True))
    Exporter(source, ExportForm()).write_path(0, tmp_path / "back")
    back = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert (len(back), back.eos_token, back.chat_template) == (
        322, "<|im_end|>", tokenizer.chat_template,
    )  # fmt: skip
    same = AutoModelForCausalLM.from_pretrained(tmp_path / "back").get_input_embeddings()
    assert torch.equal(same.weight, model.get_input_embeddings().weight)
    (checkpoint / "tokenizer.json").unlink()
    added = {"<|im_end|>": 320, "<|im_start|>": 321}
    decoder = {number: {"content": name} for name, number in added.items()}
    settings = checkpoint / "tokenizer_config.json"
    for file, content in (
        (checkpoint / "added_tokens.json", added),
        (settings, {**json.loads(settings.read_text()), "added_tokens_decoder": decoder}),
    ):
        file.write_text(json.dumps(content))
        with pytest.raises(ConfigurationError, match=r"<\|im_end\|>, .* which its tokenizer.model lacks"):
            load_run_config(tmp_path / "RUN.toml")
        (checkpoint / "added_tokens.json").unlink(missing_ok=True)


def test_special_pieces_may_be_anywhere(foreign):
    checkpoint, _ = foreign
    file = foreign_tokenizer(checkpoint, pad_id=0, unk_id=3, bos_id=7, eos_id=2)
    ours, theirs = read_tokenizer(ImportedBase(checkpoint).tokenizer), SentencePieceProcessor(model_file=str(file))
    assert (ours.begin, ours.end, ours.padding, ours.never_chosen) == ((7,), 2, 0, (3, 7, 0))
    assert ours.encode(" ba du") == theirs.encode("ba du")


def test_a_model_file_is_used_as_it_is(foreign, tmp_path):
    checkpoint, _ = foreign
    own = tmp_path / "own"
    own.mkdir()
    foreign_tokenizer(own, pad_id=3, unk_id=0, bos_id=1, eos_id=2)
    (checkpoint / "tokenizer.model").unlink()
    with pytest.raises(ConfigurationError, match=r"has neither tokenizer.model nor tokenizer.json"):
        load_run_config(write_run(tmp_path, TOML))
    toml = f'{TOML}[tokenizer]\nmodel_file = "own/tokenizer.model"\n'
    config = load_run_config(write_run(tmp_path, toml))
    assert config.model.vocabulary_size == 324
    imported = ImportedBase(checkpoint, own_tokenizer=False)
    assert imported.tokenizer is None
    assert imported.parameters()["lm_head.weight"].shape == (324, 16)


def test_the_size_that_a_checkpoint_says_agrees_with_it(foreign, tmp_path):
    """The run's embedding has a row more, which nobody has to know."""
    assert load_run_config(write_run(tmp_path, f"{TOML}[model]\nvocabulary_size = 323\n")).model.vocabulary_size == 324
    with pytest.raises(ConfigurationError, match=r"vocabulary_size is 324, but .* has 323"):
        load_run_config(write_run(tmp_path, f"{TOML}[model]\nvocabulary_size = 324\n"))


def test_a_model_file_without_a_base_needs_padding(tmp_path):
    foreign_tokenizer(tmp_path)
    own = "[tokenizer]\nmodel_file = 'tokenizer.model'\n[model]\nvocabulary_size = 320\n"
    with pytest.raises(ConfigurationError, match=r"has no padding at 3, .* train it with pad_id=3"):
        prepared(tmp_path, TOML.replace('base = "checkpoint"\n', "") + own)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling is"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling is .*, and only rope_type 'linear'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters is"),
        ({"sliding_window": "wide"}, "sliding_window is 'wide', and only null"),
        ({"layer_types": ["chunked_attention"]}, "layer_types is"),
        ({"layer_types": -1}, "layer_types is"),
        ({"layer_types": [["full_attention"]]}, "layer_types is"),
        ({"num_local_experts": 8}, "num_local_experts is 8, and only 0"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and only 'silu'"),
        ({"model_type": ["llama"]}, "model_type is .*, and only 'llama' or 'qwen2'"),
        ({"model_type": "gemma"}, "model_type is 'gemma', and only 'llama' or 'qwen2'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures is"),
        ({"head_dim": 7}, "must be even"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_hidden_layers": None}, "block_count"),
        ({"vocab_size": 100}, "320 pieces, but .* has a vocab_size of 100"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_imported_is_refused_by_name(foreign, tmp_path, change, words):
    file = foreign[0] / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ConfigurationError, match=words):
        load_run_config(write_run(tmp_path, TOML))


def test_a_config_must_say_how_large_the_model_is(foreign, tmp_path):
    file = foreign[0] / "config.json"
    values = json.loads(file.read_text())
    del values["intermediate_size"]
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigurationError, match="lacks intermediate_size"):
        load_run_config(write_run(tmp_path, TOML))
    file.write_text("[]")
    with pytest.raises(ConfigurationError, match="is not a JSON object"):
        load_run_config(write_run(tmp_path, TOML))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), "lacks the parameter 'model.norm.weight'"),
        (lambda t: t.update(extra=torch.ones(2)), "has a parameter 'extra'"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), "in shape .3., but"),
        (lambda t: t["model.norm.weight"].fill_(torch.nan), "numbers in 'model.norm.weight'"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(16, dtype=torch.int8)}),
            "'model.norm.weight' as torch.int8",
        ),
        (lambda t: t.update({"lm_head.weight": torch.ones(323, 16)}), None),
    ],
    ids=["missing", "unknown", "shape", "nan", "int8", "fine"],
)
def test_parameters_are_checked(foreign, change, words):
    checkpoint, model = foreign
    (checkpoint / "model.safetensors.index.json").unlink()
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    change(tensors)
    safetensors.torch.save_file(tensors, checkpoint / "model.safetensors")
    if words is None:
        ImportedBase(checkpoint).parameters()
        return
    with pytest.raises(IntegrityError, match=words):
        ImportedBase(checkpoint).parameters()


def test_files_are_checked(foreign, tmp_path):
    checkpoint = foreign[0]
    index = checkpoint / "model.safetensors.index.json"
    for content, words in {
        '{"weight_map": {"a": "../secret.safetensors"}}': r"names the file '\.\./secret",
        '{"weight_map": {"a": "gone.safetensors"}}': "names the file 'gone.safetensors'",
        "[]": "maps no parameters to files",
    }.items():
        index.write_text(content)
        with pytest.raises(IntegrityError, match=words):
            ImportedBase(checkpoint).parameters()
    index.unlink()
    with pytest.raises(StorageError, match=r"neither model.safetensors nor"):
        ImportedBase(checkpoint).parameters()
    (checkpoint / "model.safetensors").write_bytes(b"not a file of tensors")
    with pytest.raises(IntegrityError, match="is broken.*fetch or save it again"):
        ImportedBase(checkpoint).parameters()
    (checkpoint / "tokenizer.model").write_bytes(b"\xff\xff")
    with pytest.raises(IntegrityError, match="is not a SentencePiece model"):
        _ = ImportedBase(checkpoint).model


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer_config.json"])
def test_files_that_were_not_fetched_are_named(foreign, name, tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    for number, make in enumerate((lambda file: file.symlink_to("nowhere"), lambda file: file.write_text(pointer))):
        folder = tmp_path / str(number)
        shutil.copytree(foreign[0], folder)
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
        base = ImportedBase(folder, own_tokenizer=False)
        with pytest.raises(StorageError, match=f"{name} is a (link to nowhere|pointer of Git LFS)"):
            base.parameters()


def test_a_head_beside_a_tied_embedding_must_be_the_same(exported, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    for name in ("config.json", "tokenizer.model"):
        (checkpoint / name).write_bytes((exported[1] / name).read_bytes())
    tensors = safetensors.torch.load_file(exported[1] / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    file = checkpoint / "model.safetensors"
    safetensors.torch.save_file({**tensors, "lm_head.weight": head}, file)
    assert "lm_head.weight" not in ImportedBase(checkpoint).parameters()
    safetensors.torch.save_file({**tensors, "lm_head.weight": head + 1}, file)
    with pytest.raises(IntegrityError, match="tie_word_embeddings"):
        ImportedBase(checkpoint).parameters()


def test_the_home_folder_may_be_meant_in_a_run_toml(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home/base").mkdir(parents=True)
    (tmp_path / "home/texts.jsonl").write_text('{"text": "one"}')
    toml = tmp_path / "RUN.toml"
    toml.write_text('name = "home"\nbase = "~/base"\n[data]\ntrain = "~/*.jsonl"\n')
    written = read_run_toml(toml)
    assert written.base.checkpoint == tmp_path / "home/base"
    assert corpus_files(written.data, "train") == [tmp_path / "home/texts.jsonl"]
    for base, hint in (
        ("https://huggingface.co/OWNER/NAME", "did you mean the Hub's name 'OWNER/NAME'?"),
        ("OWNER/NAME@main", "did you mean the Hub's name 'OWNER/NAME'?"),
        ("C:/models", "is no folder"),
    ):
        toml.write_text(f'name = "home"\nbase = "{base}"\n[data]\ntrain = "x"\n')
        with pytest.raises(ConfigurationError) as raised:
            read_run_toml(toml)
        assert hint in str(raised.value)
