"""A run over a base says what transformers says on it, and its texts and answers end where the base's do."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dipaco.bootstrap.import_base import ImportedBase
from dipaco.inference.export.checkpoint import checkpoint_files, in_file_order, save_tensors
from dipaco.inference.export.tokenizer_files import file_rows
from dipaco.modules.adapters import initial_adapters
from dipaco.modules.transformer import PathModel, token_losses
from dipaco.protocol.config import END_TOKEN, PAD_TOKEN, AdaptersConfig, InnerConfig
from dipaco.routing.tokens.tokenizer import Tokenizer
from dipaco.training.inner import InnerLoop
from support.runs.foreign_base import HARD_TEXTS, make_foreign_base
from support.runs.tiny_run import make_tiny_run

CPU = torch.device("cpu")
FAMILIES = ("llama", "smollm2", "qwen2", "qwen3")
TEXT = "The city lies by the river."


class Pair:
    """A base in `folder`, as transformers has it and as a run has it."""

    def __init__(self, folder, family, final_norm=1.0, **config):
        self.theirs = make_foreign_base(folder, family, **config)
        if final_norm != 1:  # a frozen head of a random model makes no token likely
            with torch.no_grad():
                self.theirs.model.norm.weight.mul_(final_norm)
            self.theirs.save_pretrained(folder, max_shard_size="30KB")
        self.auto = AutoTokenizer.from_pretrained(folder)
        self.base = ImportedBase(folder)
        self.tokenizer = Tokenizer(self.base.tokenizer)
        self.model = PathModel(self.base.model).eval()
        self.model.load_state_dict(self.base.parameters())

    def numbers(self, tokens):
        return [self.tokenizer.number_of_token(token) for token in tokens]

    def columns(self):
        """The run's token of each of their rows."""
        return self.tokenizer.tokens_of_numbers(range(self.theirs.config.vocab_size))


@torch.no_grad()
def difference(pair, model, theirs):
    """How far log-probabilities of every token behind a text are apart."""
    tokens = pair.tokenizer.beginning(TEXT)
    found = model(torch.tensor([tokens]))[0].log_softmax(-1)[:, pair.columns()]
    expected = theirs(torch.tensor([pair.numbers(tokens)])).logits[0].float().log_softmax(-1)
    return float((found - expected).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_is_as_likely_as_in_transformers(family, tmp_path):
    pair = Pair(tmp_path / "base", family)
    assert difference(pair, pair.model, pair.theirs) < 1e-5
    # What the run has beside these is never a target, and never likely.
    with torch.no_grad():
        chances = pair.model(torch.tensor([pair.tokenizer.beginning(TEXT)]))[0].softmax(-1)
    assert not chances[:, list(pair.base.model.added_tokens)].any()
    assert len(pair.base.model.added_tokens) + len(pair.columns()) == chances.shape[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_and_a_chat_have_the_tokens_that_they_have_elsewhere(family, tmp_path):
    pair = Pair(tmp_path / "base", family)
    for text in HARD_TEXTS[1:]:
        assert pair.numbers(pair.tokenizer.beginning(text)) == pair.auto(text).input_ids
        document = pair.tokenizer.document_tokens(text)
        assert pair.numbers(document) == [*pair.auto(text).input_ids, pair.auto.eos_token_id]
    # Something comes before the first token of every text.
    assert len(pair.tokenizer.beginning("")) == 1


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_loss_is_that_of_transformers(family, tmp_path):
    pair = Pair(tmp_path / "base", family)
    tokens = pair.tokenizer.document_tokens(TEXT)
    numbers = torch.tensor([pair.numbers(tokens)])
    with torch.no_grad():
        found = token_losses(pair.model, torch.tensor([tokens])).mean()
        expected = pair.theirs(numbers, labels=numbers).loss
    assert abs(float(found - expected)) < 1e-5


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", True), ("qwen2", False)])
@pytest.mark.parametrize("trained", ["adapters", "whole"])
def test_an_end_of_a_fifth_is_learned_as_a_fifth_and_exported_so(family, tied, trained, tmp_path):
    pair = Pair(tmp_path / "base", family, tie_word_embeddings=tied, final_norm=6.0)
    a, b, c = pair.tokenizer.beginning(TEXT)[:3]
    batch = torch.tensor([[a, b, END_TOKEN, PAD_TOKEN]] * 4 + [[a, b, c, END_TOKEN]] * 16)
    if trained == "adapters":
        adapters = AdaptersConfig(rank=8, base_format="float32")
        run = make_tiny_run(tmp_path / "run", imported=pair.base, adapters=adapters)
        model = run.path_model(run.plan())
        model.load_state_dict(initial_adapters(run.plan().model, 0), strict=False)
    else:
        model = pair.model
    config = InnerConfig(optimizer="adamw", learning_rate=1e-2, decay_steps=400, weight_decay=0.0, batch_sequences=20)
    loop = InnerLoop(model, config, CPU)
    losses = [loop.step(batch, step) for step in range(400)]
    with torch.no_grad():
        chances = model(torch.tensor([[a, b, c]]))[0].softmax(-1)
    assert abs(float(chances[1, END_TOKEN]) - 0.2) < 0.02
    assert float(chances[2, END_TOKEN]) > 0.95
    # Of the three targets of a row only whether it ends at once is left open.
    assert losses[-1] < 0.22
    rows = file_rows(pair.base.tokenizer)
    folder = tmp_path / "export"
    folder.mkdir()
    for name, content in checkpoint_files(model.config, pair.base.tokenizer, torch.float32).items():
        (folder / name).write_bytes(content)
    tensors = ((name, in_file_order(name, tensor, rows)) for name, tensor in model.iterate_whole())
    save_tensors(tensors, folder / "model.safetensors", torch.float32)
    assert difference(pair, model, AutoModelForCausalLM.from_pretrained(folder)) < 1e-4
