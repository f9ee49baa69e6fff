"""A path that llama.cpp computes, in this process: its weights are a GGUF file in memory.

Tokens go in and logits come out, so text, choice, stop strings, mixtures and log-probabilities are
those of the other decoders. Its caches of keys and values have 16 bits, as those of llama.cpp's own
server: with 32 bits it is slower than what is here without it.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dipaco.inference.export.path_gguf import write_gguf
from dipaco.modules.transformer import PathModel
from dipaco.protocol.config import ModelConfig

from .llama_cpp import FLASH_ATTENTION, MAPPED, Batch, library
from .text_decoder import PathDecoder

# Tokens that are read, and positions whose logits are computed, at once.
_READ_AT_ONCE = 128
# Its caches are as long as a multiple of this.
_CELLS = 256
_BYTES_OF_WEIGHT = {"f32": 4.0, "q8_0": 34 / 32}
_BYTES_OF_CACHE = 2


class LlamaCppDecoder(PathDecoder):
    """A path and the texts in its `slots`; used as `Decoder` is.

    :param stored: how matrices lie in memory, "f32" or "q8_0"
    """

    @torch.no_grad()
    def __init__(self, model: PathModel, slots: int, *, stored: str = "f32") -> None:
        super().__init__(model.config, slots)
        self._library = library()
        self._width = self.config.vocabulary_size
        self._context = self._loaded(model, slots, stored)
        self._memory = self._library.llama_get_memory(self._context)
        # What a batch points to: each token is of one text.
        most = max(slots, _READ_AT_ONCE)
        self._tokens, self._places, self._texts = np.zeros((3, most), np.int32)
        self._wanted = np.zeros(most, np.int8)
        self._counts = np.ones(most, np.int32)
        self._of_text = np.uint64(self._texts.ctypes.data) + 4 * np.arange(most, dtype=np.uint64)
        arrays = (self._places, self._counts, self._of_text, self._wanted)
        addresses = (self._tokens.ctypes.data, None, *(one.ctypes.data for one in arrays))
        self._batch = Batch(0, *addresses)

    def _loaded(self, model: PathModel, slots: int, stored: str) -> int:
        """Return a context of llama.cpp with the weights of a path."""
        functions, parameters = self._library, self._library.llama_model_default_params()
        parameters.load_mode, parameters.gpu_layers = MAPPED, 0
        # A file in memory alone; what llama.cpp maps of it stays when it is closed.
        file = os.memfd_create("path.gguf")
        try:
            name = Path(f"/proc/self/fd/{file}")
            weights = dict(model.named_parameters())
            write_gguf(weights, self.config, None, name, stored=stored, name="path")
            loaded = functions.llama_model_load_from_file(os.fsencode(name), parameters)
        finally:
            os.close(file)
        if not loaded:
            raise RuntimeError("llama.cpp cannot load the path; the log says why")
        options = functions.llama_context_default_params()
        options.n_ctx = slots * self.config.sequence_length
        options.n_seq_max = slots
        options.n_batch = options.n_ubatch = max(slots, _READ_AT_ONCE)
        options.n_outputs_max, options.n_outputs_max_per_seq = options.n_batch, _READ_AT_ONCE
        options.n_threads = options.n_threads_batch = torch.get_num_threads()
        options.flash_attention, options.no_perf = FLASH_ATTENTION, True
        context = functions.llama_init_from_model(loaded, options)
        if not context:
            functions.llama_model_free(loaded)
            raise RuntimeError("llama.cpp has no room for the path; the log says why")
        # Not when the process ends: the thread that computes may still be at it.
        weakref.finalize(self, _free, functions, context, loaded).atexit = False
        return int(context)

    def read(
        self, slot: int, tokens: Sequence[int], *, every: bool = False
    ) -> Iterator[torch.Tensor]:
        """As `Decoder.read`."""
        self.free(slot)
        for start in range(0, len(tokens), _READ_AT_ONCE):
            part = tokens[start : start + _READ_AT_ONCE]
            is_last = start + len(part) == len(tokens)
            places = range(start, start + len(part))
            wanted = len(part) if every else int(is_last)
            logits = self._decoded(part, places, [slot] * len(part), wanted)
            self.lengths[slot] += len(part)
            if wanted:
                yield logits

    def step(self, tokens: Sequence[int | None]) -> torch.Tensor:
        """As `Decoder.step`."""
        slots = [slot for slot, token in enumerate(tokens) if token is not None]
        given = [token for token in tokens if token is not None]
        places = [self.lengths[slot] for slot in slots]
        logits = self._decoded(given, places, slots, len(given))
        for slot in slots:
            self.lengths[slot] += 1
        if len(given) == len(tokens):
            return logits
        rows = logits.new_zeros(len(tokens), self._width)
        rows[slots] = logits
        return rows

    def copy(self, slot: int, length: int) -> list[torch.Tensor]:
        """As `Decoder.copy`."""
        size = self._library.llama_state_seq_get_size(self._context, slot)
        state = torch.empty(size, dtype=torch.uint8)
        self._library.llama_state_seq_get_data(self._context, state.data_ptr(), size, slot)
        return [torch.tensor(length), state]

    def paste(self, slot: int, text: list[torch.Tensor]) -> None:
        """As `Decoder.paste`."""
        length, state = text
        self.free(slot)
        place, size = state.data_ptr(), len(state)
        if not self._library.llama_state_seq_set_data(self._context, place, size, slot):
            raise RuntimeError("llama.cpp took no copy of a text; the log says why")
        self.lengths[slot] = int(length)
        self._library.llama_memory_seq_rm(self._memory, slot, int(length), -1)

    def free(self, slot: int) -> None:
        """As `Decoder.free`."""
        self.lengths[slot] = 0
        self._library.llama_memory_seq_rm(self._memory, slot, -1, -1)

    def _decoded(
        self, tokens: Sequence[int], places: Sequence[int], texts: Sequence[int], wanted: int
    ) -> torch.Tensor:
        """Add tokens to texts; return the logits after the last ones, fp32 [wanted, V]."""
        count = len(tokens)
        self._tokens[:count], self._places[:count], self._texts[:count] = tokens, places, texts
        self._wanted[:count] = 1
        self._wanted[: count - wanted] = 0
        self._batch.count = count
        code = self._library.llama_decode(self._context, self._batch)
        if code != 0:
            raise RuntimeError(f"llama.cpp could not compute {count} tokens: its code is {code}")
        logits = torch.empty(wanted, self._width)
        if wanted:
            found = self._library.llama_get_logits(self._context)
            ctypes.memmove(logits.data_ptr(), found, 4 * wanted * self._width)
        return logits


def _free(functions: Any, context: int, model: int) -> None:
    functions.llama_free(context)
    functions.llama_model_free(model)


def llama_cpp_bytes(model: ModelConfig, parameters: int, slots: int, *, stored: str = "f32") -> int:
    """Return what a `LlamaCppDecoder` takes: its weights and its caches."""
    cells = -(-model.sequence_length // _CELLS) * _CELLS
    cached = 2 * model.kv_heads * cells * model.width_of_head * model.block_count
    return int(parameters * _BYTES_OF_WEIGHT[stored]) + _BYTES_OF_CACHE * slots * cached
