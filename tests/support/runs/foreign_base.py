"""Small random checkpoints as people have them: Llama, SmolLM2, Qwen, each with its tokenizer.json.

The tokenizers are built of the same parts as those of the models they are named after.
"""

import copy
import json

import tokenizers
import torch
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from .chat_templates import CHATML
from .tiny_run import tiny_documents

# Of the families that transformers computes: model, configuration, and what is its own.
FOREIGN = {
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {"head_dim": 16, "sliding_window": 60, "query_pre_attn_scalar": 16, "num_hidden_layers": 6},
    ),
    "granite": (
        GraniteForCausalLM,
        GraniteConfig,
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {}),
    "phi3": (
        Phi3ForCausalLM,
        Phi3Config,
        {
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.1, 1.2],
                "long_factor": [1.5, 2.0, 3.0],
                "partial_rotary_factor": 0.75,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config, {"num_hidden_layers": 4}),
}
HARD_TEXTS = (
    "",
    " ",
    "The city lies by the river.",
    "  two  spaces\n\n\n\tand\ttabs \r\n end  ",
    "def f(x):\n    return {'a': [1, 23, 456, 7890]}  # ok\n",
    "Ünïcödé, naïve café, e\u0301 and ﬁ",
    "日本語のテキスト、中文字符 and 한국어",
    "Русский текст, ελληνικά, עברית, العربية, हिन्दी",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 emoji",
    "\u2581 and \u00a0 and \u200b and \x00\x01",
    "a text with <s> and </s> in it, don't we'll I'VE",
)
SPECIAL_TEXTS = (
    "<|endoftext|>",
    "<|im_start|>user\nhello<|im_end|>\n<tool_call>x</tool_call>",
    "a<|begin_of_text|>b<|end_of_text|> c",
)
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
# Llama 2's, and Mistral's but for the names.
TURNS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
    "{{ message['content'] | trim }}{{ '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
INSTRUCTION_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# Families whose tokenizer puts a space in front of a text.
SPACED = ("llama2", "mistral")
FALLBACK = (*SPACED, "gemma3")
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def fallback_tokenizer(family):
    """Return a tokenizer with pieces for bytes. Those of Llama 2 and Mistral put a space in front of a text."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if family == "llama2":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    elif family == "mistral":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    strips = [decoders.Strip(" ", 1, 0)] * (family in SPACED)
    tokenizer.decoder = decoders.Sequence([*parts, *strips])
    special = {
        "llama2": ["<unk>", "<s>", "</s>"],
        "mistral": ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"],
        "gemma3": ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"],
    }[family]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=tokens, show_progress=False)
    # Words by themselves, so that no piece has a space in its middle.
    words = [" " + word for text in tiny_documents(4, 20, 0) for word in text.split()]
    tokenizer.train_from_iterator([*words, *" [/INST]"], trainer)
    content = json.loads(tokenizer.to_str())
    # Byte pieces are ordinary ones.
    content["added_tokens"] = content["added_tokens"][: len(special)]
    first = "<bos>" if family == "gemma3" else "<s>"
    begin = {"id": first, "ids": [special.index(first)], "tokens": [first]}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": first, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {first: begin},
    }
    settings = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "chat_template": INSTRUCTION_TEMPLATE}
    if family == "gemma3":
        names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
        settings = {"unk_token": "<unk>", **names, "chat_template": TURNS_TEMPLATE}
    return tokenizers.Tokenizer.from_str(json.dumps(content)), settings


def foreign_tokenizer(family):
    """Return a tokenizer and its `tokenizer_config.json`."""
    if family in FALLBACK:
        return fallback_tokenizer(family)
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=family == "llama"))
    bytes_as_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if family == "smollm2":
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    else:
        split = _SPLIT.replace("{1,3}", "") if family.startswith("qwen") else _SPLIT
        parts = [pre_tokenizers.Split(Regex(split), "isolated"), bytes_as_letters]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    if family.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    in_front = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] if family == "smollm2" else []
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=in_front,
        show_progress=False,
    )
    tokenizer.train_from_iterator([*tiny_documents(4, 20, 0), *HARD_TEXTS], trainer)
    if family == "llama":
        tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
        begin = ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))
        tokenizer.post_processor = TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[begin])
        return tokenizer, {"bos_token": begin[0], "eos_token": "<|end_of_text|>"}
    end = "<|endoftext|>"
    if family == "smollm2":
        names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": end}
        settings = {**names, "pad_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
        return without_bytes(tokenizer, 4, 0x13, 0xC0, 0xF1), settings
    tokenizer.add_special_tokens([end, "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    im_end = {"__type": "AddedToken", "content": "<|im_end|>", "special": True}
    settings = {"bos_token": None, "eos_token": im_end, "pad_token": end}
    return tokenizer, {**settings, "chat_template": CHAT_TEMPLATE}


def without_bytes(tokenizer, *lacking):
    """Return a tokenizer whose vocabulary has no pieces for some bytes."""
    content = json.loads(tokenizer.to_str())
    model, plain = content["model"], [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    # Byte-level BPE writes the other bytes as the characters from U+0100 on.
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte if byte in plain else 0x100 + others.index(byte)) for byte in lacking}
    for letter in letters:
        model["vocab"][f"none {ord(letter)}"] = model["vocab"].pop(letter)
    model["merges"] = [merge for merge in model["merges"] if not letters & set("".join(merge))]
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def make_foreign_base(folder, family, final_norm=1.0, **config):
    """Write a checkpoint of a `family` to `folder`, in several files; return its model. A frozen head of a random
    model makes no token likely, unless a greater `final_norm` does."""
    tokenizer, settings = foreign_tokenizer(family)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    shape = {
        # Qwen's embeddings have more rows than there are tokens.
        "vocab_size": tokenizer.get_vocab_size() + (20 if family.startswith("qwen") else 0),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "tie_word_embeddings": not family.startswith("llama"),
        **config,
    }
    names = ("<|im_start|>", "<|im_end|>")
    if family in FALLBACK:
        names = settings["bos_token"], settings["eos_token"]
    special = [tokenizer.token_to_id(name) for name in names]
    torch.manual_seed(0)
    if family in FOREIGN:
        kind, config_kind, own = FOREIGN[family]
        numbers = {"bos_token_id": special[0], "eos_token_id": special[1], "pad_token_id": special[1]}
        model = kind(config_kind(**shape | own | numbers))
    elif family == "mistral":
        model = MistralForCausalLM(MistralConfig(**shape, sliding_window=None))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**shape))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**{"head_dim": 16, **shape}))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(0.3 * torch.randn_like(parameter))
        model.model.norm.weight.mul_(final_norm)
    if family != "llama":
        numbers = {"bos_token_id": special[0], "eos_token_id": special[1]}
        model.generation_config.update(**numbers, pad_token_id=special[1], temperature=0.6)
        model.generation_config.do_sample = True
        model.config.update({**numbers, "pad_token_id": special[1]})
    model.eval().save_pretrained(folder, max_shard_size="30KB")
    return model


def base_with_ends(folder, stated, template=CHATML, **config):
    """Write a Qwen 2 to `folder` as its base models are: a text ends with <|endoftext|>, a turn of its template with
    <|im_end|>. `stated` are the ends by its generation_config.json."""
    make_foreign_base(folder, "qwen2", tie_word_embeddings=False, **config)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    numbers = [tokenizer.token_to_id(name) for name in stated]
    for name, changes in {
        "tokenizer_config.json": {"eos_token": "<|endoftext|>", "chat_template": template},
        "generation_config.json": {"eos_token_id": numbers if len(numbers) > 1 else numbers[0]},
    }.items():
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, **changes}))


def random_model(kind, config):
    """Return a model in which every parameter matters: biases are not zero, norms are not one."""
    torch.manual_seed(0)
    model = kind(copy.deepcopy(config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5) if parameter.ndim > 1 else parameter.add_(0.3 * torch.randn_like(parameter))
    return model
