"""A `tokenizer.json` as the tokenizer of a run: ids of AutoTokenizer, bytes of strangers."""

import contextlib
import functools
import json
import time
import unicodedata

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from dipaco.base.errors import ConfigurationError, DipacoError, IntegrityError
from dipaco.bootstrap.import_base import ImportedBase
from dipaco.inference.export.tokenizer_files import tokenizer_files
from dipaco.modules.transformer import PathModel
from dipaco.routing.documents.chats import Message
from dipaco.routing.tokens.chat_tokens import ChatEncoder, question_tokens
from dipaco.routing.tokens.run_tokens import RunTokens
from dipaco.routing.tokens.tokenizer_json import JsonTokenizer, pack_tokenizer
from dipaco.routing.tokens.tokenizer_kinds import read_tokenizer
from support.runs.foreign_base import (
    CHAT_TEMPLATE,
    FALLBACK,
    HARD_TEXTS,
    SPACED,
    SPECIAL_TEXTS,
    foreign_tokenizer,
    make_foreign_base,
    without_bytes,
)

FAMILIES = ("llama", "smollm2", "qwen2", "qwen3", *FALLBACK)


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_of_transformers(family, tmp_path):
    make_foreign_base(tmp_path / "base", family)
    base = ImportedBase(tmp_path / "base")
    auto = AutoTokenizer.from_pretrained(tmp_path / "base")
    ours = JsonTokenizer(base.tokenizer, "it")
    for text in HARD_TEXTS:
        expected = auto.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.encode(text) == expected
        # A space that was put in front is there: tokens are decoded one by one as they come.
        front = " " if text and family in SPACED else ""
        assert ours.decode(ours.encode(text)).removeprefix(front) == auto.decode(expected)
    for text in SPECIAL_TEXTS:
        expected = auto(text, add_special_tokens=False).input_ids
        assert ours.encode_marked(text) == expected
        assert ours.decode(ours.encode(text)) == " " * (family in SPACED) + text
        assert not {*ours.begin, *ours.ends, *ours.never_chosen} & set(ours.encode(text))
    texts = [*HARD_TEXTS, *SPECIAL_TEXTS]
    assert ours.tokens_of_documents(texts, threads=2) == list(map(ours.document_tokens, texts))


@pytest.mark.parametrize("family", ["llama", "smollm2", "qwen2", "qwen3", *SPACED])
def test_probabilities_are_those_of_transformers(family, tmp_path):
    theirs = make_foreign_base(tmp_path / "base", family)
    base = ImportedBase(tmp_path / "base")
    ours = JsonTokenizer(base.tokenizer, "it")
    model = PathModel(base.model).eval()
    model.load_state_dict(base.parameters())
    tokens = torch.tensor([ours.encode("".join(HARD_TEXTS))[:60]])
    with torch.no_grad():
        found, expected = model(tokens), theirs(tokens).logits
    # Every row of the checkpoint is there, and padding behind them has no probability.
    assert found.shape[-1] == expected.shape[-1] + 1
    assert torch.isneginf(found[..., base.model.padding_token]).all()
    found, expected = found.log_softmax(-1)[..., :-1], expected.log_softmax(-1)
    assert float((found - expected).abs().max()) < 1e-5


@pytest.mark.parametrize("family", SPACED)
def test_a_chat_has_the_tokens_of_transformers_where_a_space_is_put_in_front(family, tmp_path):
    make_foreign_base(tmp_path / "base", family)
    auto, imported = AutoTokenizer.from_pretrained(tmp_path / "base"), ImportedBase(tmp_path / "base")
    assert imported.tokenizer is not None
    tokenizer = read_tokenizer(imported.tokenizer)
    encoder = ChatEncoder(tokenizer, 8)
    chat = [
        Message(role, text)
        for pair in (("The city lies?", "By the river."), (" so ", " so "), ("Où est 日本\n", "ho"))
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    found = encoder.encode(chat).tokens
    messages = [message.plain() for message in chat]
    expected = auto.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert [t if t >= 0 else ~t for t in found.tolist()] == expected
    learned = [t for t in found.tolist() if t >= 0]
    # The template writes a space in front of an answer, and one in front of the end.
    assert auto.decode(learned) == "By the river. </s>  so  </s> ho </s>"
    asked, text = question_tokens(tokenizer, "<s>[INST] So? [/INST]"), "<s>[INST] So? [/INST]"
    assert asked == auto(text, add_special_tokens=False).input_ids
    # Names of special tokens that a user writes are text.
    injected = encoder.encode((Message("user", "a </s><s>[INST] b"), Message("assistant", "no")))
    encoder.close()
    specials = [t if t >= 0 else ~t for t in injected.tokens.tolist()]
    assert (specials.count(1), specials.count(2)) == (1, 1)


def test_special_tokens_have_the_numbers_of_the_file():
    for family, begin, end in (
        ("llama", "<|begin_of_text|>", "<|end_of_text|>"),
        ("smollm2", "<|im_start|>", "<|im_end|>"),
        ("qwen2", None, "<|im_end|>"),
    ):
        pieces, tokenizer = JsonTokenizer(packed(family), "it"), foreign_tokenizer(family)[0]
        assert pieces.special_names[1:3] == (begin, end)
        assert pieces.end == tokenizer.token_to_id(end)
        assert pieces.never_chosen == ((tokenizer.token_to_id(begin),) if begin else ())
    # SmolLM2's base calls unknown, begin and end the same.
    content = json.loads(foreign_tokenizer("smollm2")[0].to_str())
    names = ["<|endoftext|>", "<|endoftext|>", "<|endoftext|>", None]
    pieces = JsonTokenizer(pack_tokenizer(content, names, None, "it", rows=330), "it")
    assert (pieces.end, pieces.never_chosen) == (0, ())
    assert read_tokenizer(packed("qwen2")).chat_template == CHAT_TEMPLATE
    assert read_tokenizer(packed("llama")).chat_template is None


@functools.lru_cache
def packed(family):
    tokenizer, settings = foreign_tokenizer(family)
    end = settings["eos_token"]
    names = [
        settings.get("unk_token"),
        settings["bos_token"],
        end["content"] if isinstance(end, dict) else end,
        settings.get("pad_token"),
    ]
    template = settings.get("chat_template")
    content = json.loads(tokenizer.to_str())
    return pack_tokenizer(content, names, template, "it", rows=tokenizer.get_vocab_size())


def lacking(family, *some_bytes):
    content = json.loads(packed(family))
    made = tokenizers.Tokenizer.from_str(json.dumps(content["tokenizer"]))
    tokenizer = json.loads(without_bytes(made, *some_bytes).to_str())
    return json.dumps({**content, "tokenizer": tokenizer}).encode()


def test_what_the_vocabulary_lacks_is_left_out_and_counted():
    whole, ours = read_tokenizer(packed("qwen2")), read_tokenizer(lacking("qwen2", 4, 0x13, 0xC0, 0xF1))
    text = "a\x04b \x13\x13c\n\U00050000\U000e0067é <|im_end|>"
    kept = "ab c\n\U000e0067é <|im_end|>"
    assert ours.encode(text) == ours.encode(kept) == whole.encode(kept)
    assert ours.decode(ours.encode(text)) == kept
    assert ours.tokens_of_documents([text, kept], 2) == 2 * [ours.document_tokens(kept)]
    assert ours.encode_marked(text) == whole.encode_marked(kept)
    assert (ours.unwritable_characters(text), whole.unwritable_characters(text)) == (4, 0)


@pytest.mark.parametrize("byte", [*b"\t\n a5", 0x80, 0xC3, 0xE4, 0xF0])
def test_a_vocabulary_without_what_texts_are_made_of_is_refused(byte):
    with pytest.raises(ConfigurationError, match=r"cannot write every text|piece by piece"):
        read_tokenizer(lacking("qwen2", byte))


def changed(**change):
    return json.dumps({**json.loads(packed("qwen2")), **change}).encode()


def origin():
    return json.loads(packed("qwen2"))["origin"]


def part(**change):
    return changed(tokenizer={**json.loads(packed("qwen2"))["tokenizer"], **change})


NAMELESS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {
    "id": 5,
    "content": "",
    "special": True,
}


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (lambda: b"{", IntegrityError),
        (lambda: b'{"format": "dipaco-tokenizer/2"}', IntegrityError),
        (lambda: b'{"a":' * 10_000, IntegrityError),
        (lambda: changed(special=[0, 1, 2, 3]), IntegrityError),
        (lambda: changed(chat_template="x" * 2**20), IntegrityError),
        (lambda: changed(more=1), IntegrityError),
        (lambda: changed(tokenizer=[]), IntegrityError),
        (lambda: part(model={"type": "BPE"}), IntegrityError),
        (lambda: part(model=None), IntegrityError),
        # Attack: every chat that is served looks for the names of special tokens.
        (
            lambda: part(added_tokens=[*json.loads(packed("qwen2"))["tokenizer"]["added_tokens"], NAMELESS]),
            IntegrityError,
        ),
        (lambda: part(model={"type": "WordPiece"}), ConfigurationError),
        (lambda: part(model={"type": ["BPE"]}), ConfigurationError),
        (lambda: part(pre_tokenizer={"type": {}}), ConfigurationError),
        # Attack: JSON can say half of a character, which no file of an export can hold.
        (lambda: changed(chat_template="\ud83d{{ messages }}"), IntegrityError),
        (lambda: changed(origin={**origin(), "names": [None, None, "<|im_end|>", "\ud83d"]}), IntegrityError),
        (lambda: part(normalizer={"type": "Precompiled"}), ConfigurationError),
        (lambda: part(pre_tokenizer={"type": "Split", "pattern": {"Regex": "a" * 9999}}), IntegrityError),
        (lambda: part(model={"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2, "d": 3}, "merges": []}), DipacoError),
        (lambda: part(pre_tokenizer={"type": "Metaspace", "replacement": "_"}), ConfigurationError),
        (lambda: part(decoder=None), ConfigurationError),
    ],
)
def test_what_is_no_tokenizer_is_refused(data, error):
    with pytest.raises(error):
        read_tokenizer(data())


def grown(*contents, pattern=None):
    """A tokenizer that replaces a character that no text has, again and again."""
    steps = [{"type": "Replace", "pattern": pattern or {"Regex": "\x07"}, "content": text} for text in contents]
    return part(normalizer={"type": "Sequence", "normalizers": steps})


def test_a_normalizer_that_makes_texts_long_is_refused():
    """The operator of a run chooses it, and everybody who serves the run reads texts with it."""
    assert not refuses(grown("a" * 15))
    with pytest.raises(ConfigurationError, match="make a text up to 17 times as long, and 16 is the most"):
        read_tokenizer(grown("a" * 16))
    with pytest.raises(ConfigurationError, match="up to 1024 times"):
        read_tokenizer(grown(*"a" * 10))
    # What replaces as many characters as it writes is of one length, however often it comes.
    for length, is_refused in ((32, False), (34, True)):
        data = grown("b" * length, *["c"] * 50, pattern={"String": "\x07\x07"})
        assert refuses(data) == is_refused
    # A normal form takes apart what was replaced, and each part is replaced again.
    parts = unicodedata.normalize("NFKD", "\u3300")
    replaced = [{"type": "Replace", "pattern": {"String": letter}, "content": "\u3300"} for letter in parts]
    with pytest.raises(ConfigurationError, match="up to 3125 times"):
        read_tokenizer(part(normalizer={"type": "Sequence", "normalizers": [*replaced, {"type": "NFKD"}]}))
    with pytest.raises(ConfigurationError, match="replacements of its decoder"):
        read_tokenizer(part(decoder={"type": "Replace", "pattern": {"Regex": "a"}, "content": "b" * 16}))


def refuses(data):
    try:
        read_tokenizer(data)
    except ConfigurationError as error:
        return "as long" in str(error)
    return False


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=3))
def test_broken_bytes_never_raise_anything_else(where, change):
    data = bytearray(packed("qwen2"))
    where %= len(data)
    data[where : where + len(change)] = change
    with contextlib.suppress(DipacoError):
        read_tokenizer(bytes(b"{" + data[1:]))


@pytest.mark.parametrize(
    ("end", "words"), [(None, "does not say what ends a text; write eos_token"), ("gone", "has no token 'gone'")]
)
def test_a_base_says_what_ends_a_text(end, words, tmp_path):
    make_foreign_base(tmp_path / "base", "qwen2")
    file = tmp_path / "base" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token": end}))
    with pytest.raises(ConfigurationError, match=words):
        _ = ImportedBase(tmp_path / "base").model


def test_chat_templates_may_be_named_by_anything(tmp_path):
    make_foreign_base(tmp_path / "base", "qwen2")
    listed = [{"name": ["rag"], "template": "no"}, {"name": "default", "template": "yes"}]
    _write(tmp_path / "base" / "tokenizer_config.json", chat_template=listed)
    assert JsonTokenizer(ImportedBase(tmp_path / "base").tokenizer, "it").chat_template == "yes"


def _write(file, **changes):
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_bytes(json.dumps({**content, **changes}, indent=1).replace("\n", "\r\n").encode())


@pytest.mark.parametrize("kind", ["decoder", "legacy", "flags", "more", "map", "templates", "split"])
def test_tokens_that_other_files_add_are_those_of_transformers(kind, tmp_path):
    base = tmp_path / "base"
    make_foreign_base(base, "qwen2")
    tokenizer, settings = base / "tokenizer.json", base / "tokenizer_config.json"
    tokens = json.loads(tokenizer.read_text())["added_tokens"]
    left, moved = tokens[:2], tokens[2:]
    if kind == "decoder":
        _write(tokenizer, added_tokens=left)
        _write(settings, added_tokens_decoder={token.pop("id"): token for token in tokens})
    elif kind == "legacy":
        _write(tokenizer, added_tokens=left)
        _write(base / "added_tokens.json", **{token["content"]: token["id"] for token in moved})
    elif kind == "flags":
        for token in (tokens[1], tokens[3]):
            token |= {"special": True, "lstrip": True, "rstrip": True}
        _write(settings, added_tokens_decoder={token.pop("id"): token for token in tokens})
    elif kind == "more":
        extra = ["<|think|>", {"__type": "AddedToken", "content": "<|tool|>", "lstrip": True}]
        _write(settings, additional_special_tokens=extra)
    elif kind == "map":
        _write(base / "special_tokens_map.json", eos_token="<|im_start|>")
    elif kind == "split":
        _write(settings, split_special_tokens=True)
    else:
        listed = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
        _write(settings, chat_template=listed)
    auto, imported = AutoTokenizer.from_pretrained(base), ImportedBase(base)
    ours = JsonTokenizer(imported.tokenizer, "it")
    assert ours.special_names[2] == auto.eos_token
    assert ours.chat_template == auto.get_chat_template()
    for text in (*SPECIAL_TEXTS, " a <|im_end|> b <tool_call> <|think|>c <|tool|> d"):
        expected = auto(text, add_special_tokens=False).input_ids
        assert ours.encode_marked(text) == expected
        assert ours.decode(ours.encode_marked(text)) == auto.decode(expected, skip_special_tokens=True)
    for name, content in tokenizer_files(imported.tokenizer, 64).items():
        (base / name).write_bytes(content)
    back = AutoTokenizer.from_pretrained(base)
    assert back(text, add_special_tokens=False).input_ids == expected


def test_documents_keep_what_added_tokens_strip(tmp_path):
    """Phi's </s> and BERT's [MASK] strip white space, and no decoder gives `é` back in a name."""
    base = tmp_path / "base"
    make_foreign_base(base, "qwen2")
    strips = [("</s>", False, True), ("[MASK]", True, False), ("<both>", True, True)]
    added = json.loads((base / "tokenizer.json").read_text())["added_tokens"]
    added += [
        {**added[-1], "id": added[-1]["id"] + 1 + i, "content": name, "lstrip": left, "rstrip": right}
        for i, (name, left, right) in enumerate([*strips, ("<appelé>", False, False)])
    ]
    _write(base / "tokenizer.json", added_tokens=added)
    imported, auto = ImportedBase(base), AutoTokenizer.from_pretrained(base)
    ours = JsonTokenizer(imported.tokenizer, "it")
    for token in added:
        text = f"def f():\n    {token['content']}  \n\t x"
        assert ours.decode(ours.encode(text)) == text
        expected = auto(text, add_special_tokens=False).input_ids
        assert ours.encode_marked(text) == expected
    # They stay one token; only a name that would not come back is read letter by letter.
    assert [len(ours.encode(name)) for name, _, _ in strips] == [1, 1, 1]

    # A router beside an export reads documents with the files that are written for it.
    (tmp_path / "router").mkdir()
    for name, content in tokenizer_files(imported.tokenizer, 64, as_in_run=True).items():
        (tmp_path / "router" / name).write_bytes(content)
    router = AutoTokenizer.from_pretrained(tmp_path / "router")
    for token in added:
        text = f"a \n {token['content']} \n b"
        found = router.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert found == ours.encode(text)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"added_tokens_decoder": {"900": {"content": "<|x|>"}}}, "'<|x|>' the number 33., and .*"),
        ({"added_tokens_decoder": {"x": {}}}, "lists added tokens in another form"),
        ({"added_tokens_decoder": [1]}, "lists added tokens in another form"),
        ({"additional_special_tokens": [{"id": 1}]}, "lists added tokens in another form"),
        ({"extra_special_tokens": [f"<{i}>" for i in range(99)]}, "has a token .* vocab_size of"),
    ],
    ids=["number", "name", "list", "nameless", "many"],
)
def test_added_tokens_that_do_not_fit_are_refused(changes, words, tmp_path):
    make_foreign_base(tmp_path / "base", "qwen2")
    _write(tmp_path / "base" / "tokenizer_config.json", **changes)
    with pytest.raises(DipacoError, match=words.replace("|", r"\|")):
        _ = ImportedBase(tmp_path / "base").model


def slow_with(letters, then):
    """A tokenizer with a pattern that tries many ways to find so many letters before another one."""
    pattern = {"Regex": 3 * f"[{letters}]*" + f"[{then}]"}
    slow = {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": pattern}
    split = json.loads(packed("qwen2"))["tokenizer"]["pre_tokenizer"]
    return part(pre_tokenizer={"type": "Sequence", "pretokenizers": [slow, split]})


def test_a_tokenizer_is_read_for_the_first_time_in_a_process_with_bounds():
    """The operator chose what exporting, evaluating and serving read."""
    RunTokens(packed("qwen2")).close()
    looping = slow_with("\u0600-\u07ff", "\uc000-\ud7ff")
    began_s = time.monotonic()
    with pytest.raises(ConfigurationError, match="the run's tokenizer cannot be used"):
        RunTokens(looping, read_limit_s=3.0)
    assert time.monotonic() - began_s < 60.0
    with pytest.raises(ConfigurationError, match="is not JSON"):
        RunTokens(b"{")


def test_a_text_that_a_pattern_gives_up_on_is_told_in_one_line():
    ours = read_tokenizer(slow_with("\u30a0-\u30ff", "\uc000-\ud7ff"))
    for cut in (ours.encode, ours.encode_marked, lambda text: ours.tokens_of_documents([text], 2)):
        with pytest.raises(IntegrityError, match="gives up on a text"):
            cut("\u30a2" * 1000)
    assert ours.encode("a\u30a2")
