"""A small run of chats, to be prepared."""

import json
from contextlib import closing

from dipaco.inference.conversation import Conversation

from .foreign_base import make_foreign_base
from .tiny_run import tiny_documents

TOML = """
name = "chats"
base = "base"
[data]
train = "train.jsonl"
label_field = "language"
held_out_fraction = 0.2
[model]
sequence_length = 64
[router]
prefix_tokens = 8
"""
GREETING = "Be kind."


def write_chats(folder, rows, template):
    """Write a run of chats and its base; returns its RUN.toml."""
    make_foreign_base(folder / "base", "qwen2")
    settings = folder / "base" / "tokenizer_config.json"
    content = json.loads(settings.read_text()) | {"chat_template": template}
    settings.write_text(json.dumps(content))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "RUN.toml").write_text(TOML)
    return folder / "RUN.toml"


def chat_rows(count=40):
    """Return chats in four languages; every answer ends with a digit that no question has."""
    rows = []
    for number, text in enumerate(tiny_documents(4, count, 0)):
        third = 12
        messages = [
            {"role": "system", "content": GREETING},
            {"role": "user", "content": text[:third]},
            {"role": "assistant", "content": text[third : 2 * third] + "7"},
            {"role": "user", "content": text[2 * third : 3 * third]},
            {"role": "assistant", "content": text[3 * third : 4 * third] + "8"},
        ]
        rows.append({"messages": messages, "language": str(number // count)})
    return rows


def asked_tokens(tokenizer, message):
    """Return the tokens of a chat of one message up to where its answer begins."""
    with closing(Conversation(tokenizer)) as conversation:
        return conversation.ask(message)
