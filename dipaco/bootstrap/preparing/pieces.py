"""The pieces of preparation, as functions that any process can call (`workers.py`).

What they work with lies in the run folder and is read once in each process.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dipaco.modules.transformer import PathModel
from dipaco.protocol.config import ModelConfig
from dipaco.routing.documents.corpus import Document
from dipaco.routing.routers.document_routing import DocumentRouter
from dipaco.routing.routers.kinds import load_router
from dipaco.routing.run_folder import RunFolder
from dipaco.routing.shards import Beginnings
from dipaco.routing.tokens.chat_tokens import ChatEncoder
from dipaco.routing.tokens.token_corpus import EncodedDocument, encoded
from dipaco.routing.tokens.tokenizer import Tokenizer
from dipaco.routing.tokens.tokenizer_kinds import read_tokenizer


@dataclass(frozen=True)
class RoutingTools:
    """What documents are routed with: blobs of a run folder, and where the base model runs."""

    folder: Path
    tokenizer: str
    base: str
    router: str
    model: ModelConfig
    prefix_tokens: int
    device: str


def encode(
    folder: Path,
    tokenizer: str,
    chat_prefix_tokens: int | None,
    chunk: Sequence[tuple[Document, bool]],
) -> list[EncodedDocument]:
    """Return the tokens of a chunk of documents, which are chats if there is a number of tokens
    that routing sees of them. Raises ConfigurationError for a template that cannot be used."""
    chats = None
    if chat_prefix_tokens is not None:
        chats = _chat_encoder(folder, tokenizer, chat_prefix_tokens)
    return encoded(chunk, _tokenizer(folder, tokenizer), torch.get_num_threads(), chats)


def route(tools: RoutingTools, beginnings: Beginnings) -> np.ndarray:
    """Return the best paths of a chunk of documents, int64 [N, paths]."""
    router = _document_router(tools)
    with one_thread():
        return router.nearest_paths(beginnings.tokens, beginnings.paths, beginnings.labels)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch compute in one thread: the last bits of a sum depend on how many share it, and
    a piece shall give the same ones wherever it is done."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@functools.lru_cache(maxsize=1)
def base_model(folder: Path, config: ModelConfig, base: str, device: str) -> PathModel:
    """Return a run's base model on a device."""
    return RunFolder(folder).load_base_model(config, base, torch.device(device))


@functools.lru_cache(maxsize=1)
def _tokenizer(folder: Path, tokenizer: str) -> Tokenizer:
    return read_tokenizer(RunFolder(folder).blobs.read(tokenizer))


@functools.lru_cache(maxsize=1)
def _chat_encoder(folder: Path, tokenizer: str, prefix_tokens: int) -> ChatEncoder:
    return ChatEncoder(_tokenizer(folder, tokenizer), prefix_tokens)


@functools.lru_cache(maxsize=1)
def _document_router(tools: RoutingTools) -> DocumentRouter:
    return DocumentRouter(
        _tokenizer(tools.folder, tools.tokenizer),
        base_model(tools.folder, tools.model, tools.base, tools.device),
        load_router(RunFolder(tools.folder).blobs.read(tools.router)),
        tools.prefix_tokens,
    )
