"""Tokens that are only read, and documents that share a row: what a step makes of them."""

import math

import pytest
import torch

from dipaco.modules.marked_tokens import are_marked, plain_tokens
from dipaco.protocol.config import PAD_TOKEN
from dipaco.training.scoring import row_losses
from support.runs.inner_loops import batch_of, loop_of, model_of


def chats_of(lengths, seed=0):
    """Return documents whose first half is only read."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length in lengths:
        tokens = torch.randint(4, 64, (length,), generator=generator)
        tokens[: length // 2] = ~tokens[: length // 2]
        found.append(tokens)
    return found


def row_of(chats, length=16):
    parts = [part for chat in chats for part in (chat, torch.tensor([PAD_TOKEN]))]
    row = torch.cat(parts)[:length]
    return torch.nn.functional.pad(row, (0, length - len(row)), value=PAD_TOKEN)


@torch.no_grad()
def loss_by_hand(chats):
    """Return the loss of what is learned, each document by itself, and how many tokens it is of."""
    total, count = 0.0, 0
    for chat in chats:
        logits = model_of()(plain_tokens(chat)[None])[0].double().log_softmax(-1)
        for place in range(1, len(chat)):
            if chat[place] >= 0:
                total -= float(logits[place - 1, chat[place]])
                count += 1
    return total, count


@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_a_step_learns_what_is_counted_each_document_by_itself(micro_batch_size):
    rows = [chats_of((5, 4, 4)), chats_of((15,), 1), chats_of((3, 2), 2)]
    total, count = loss_by_hand([chat for row in rows for chat in row])
    loop = loop_of(micro_batch_size=micro_batch_size)
    loss = loop.step(torch.stack([row_of(row) for row in rows]), 0)
    assert math.isclose(loss, total / count, rel_tol=1e-5)


def test_texts_are_as_ever():
    assert not are_marked(batch_of())
    assert torch.equal(plain_tokens(batch_of()), batch_of())


def test_scores_are_of_what_is_counted():
    chats = chats_of((12,), 3)
    total, count = loss_by_hand(chats)
    losses, counts = row_losses(model_of().eval(), row_of(chats)[None], 2)
    assert counts.tolist() == [count]
    assert math.isclose(float(losses[0]), total, rel_tol=1e-5)
