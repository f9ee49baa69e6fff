"""Memory that runs out: every form of it halves what is done at once, compiled or not."""

import functools
import logging

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.testing import CompileCounter

from dipaco.base.errors import ConfigurationError
from dipaco.inference.token_losses import batch_losses
from dipaco.modules.memory import AtOnce, free_bytes, head_bytes, is_out_of_memory, pass_bytes
from dipaco.modules.transformer import PathModel, initialise, logits_at_once
from dipaco.training import inner
from support.runs.inner_loops import CPU, MODEL, batch_of, flat, loop_of


def caused(error, cause):
    error.__cause__, error.__suppress_context__ = cause, True
    return error


def in_context(error, context):
    error.__context__ = context
    return error


FORMS = {
    "PyTorch's allocator": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
    "a kernel": getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: out of memory"),
    "an older PyTorch": RuntimeError("CUDA error: out of memory"),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cuDNN": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "ROCm": RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB."),
    "Level Zero": RuntimeError("level_zero backend failed: UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"),
    "Metal": RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"),
    "the CPU": RuntimeError("DefaultCPUAllocator: can't allocate memory: 17 bytes"),
    "Python": MemoryError(),
    "the compiler": BackendCompilerFailed(lambda: None, torch.OutOfMemoryError("CUDA out of memory."), None),
    "a cause": caused(ValueError("autotuning"), RuntimeError("CUDA error: out of memory")),
    "a context": in_context(KeyError("graph"), torch.OutOfMemoryError("CUDA out of memory.")),
}
OTHERS = {
    "a kernel's own limit": RuntimeError("out of resource: shared memory, Required: 131072"),
    "a kernel that is not there": RuntimeError("CUDA error: no kernel image is available"),
    "our own": caused(ConfigurationError("does not fit"), torch.OutOfMemoryError("CUDA out of")),
    "a text": ValueError("out of memory"),
}


@pytest.mark.parametrize("error", FORMS.values(), ids=FORMS.keys())
def test_every_form_of_it(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS.values(), ids=OTHERS.keys())
def test_what_a_smaller_piece_would_not_help(error):
    assert not is_out_of_memory(error)


class SmallMemory(PathModel):
    """A model whose device holds only so many sequences."""

    max_rows = 1
    calls: list[int]

    def hidden_states(self, tokens, *others):
        self.calls.append(len(tokens))
        if len(tokens) > self.max_rows:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().hidden_states(tokens, *others)


def small_memory(rows):
    model = SmallMemory(MODEL)
    model.max_rows, model.calls = rows, []
    initialise(model, 0)
    return model


def test_running_out_of_memory_halves_the_batch_once(caplog):
    model = small_memory(2)
    loop, reference = loop_of(model), loop_of()
    with caplog.at_level(logging.WARNING, logger="dipaco"):
        losses = [loop.step(batch_of(step), step) for step in range(2)]
    assert model.calls == [4, 2, 2, 2, 2]
    assert len(caplog.records) == 1
    assert "2 sequences at once" in caplog.text
    assert losses == pytest.approx([reference.step(batch_of(s), s) for s in range(2)], rel=1e-5)
    torch.testing.assert_close(flat(model), flat(reference.model), rtol=1e-4, atol=1e-5)


def test_memory_may_run_out_in_the_middle_of_a_batch():
    model = small_memory(2)
    loop, reference = loop_of(model, micro_batch_size=2), loop_of(micro_batch_size=1)
    original, failed = model.hidden_states, []

    def hidden_states(tokens, *others):
        if len(model.calls) == 1 and not failed:
            failed.append(True)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: 17 bytes")
        return original(tokens, *others)

    model.hidden_states = hidden_states
    loop.step(batch_of(), 0)
    reference.step(batch_of(), 0)
    assert failed
    assert torch.equal(flat(model), flat(reference.model))  # no gradient was counted twice


class SmallerMemory(SmallMemory):
    """It holds no sequence of which all is kept."""

    max_rows = 4

    def hidden_states(self, tokens, *others):
        if not self.recomputes:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().hidden_states(tokens, *others)


def test_blocks_are_computed_twice_where_one_sequence_does_not_fit(caplog):
    model = SmallerMemory(MODEL)
    model.calls = []
    initialise(model, 0)
    loop, reference = loop_of(model), loop_of(micro_batch_size=1)
    for step in range(2):
        assert loop.step(batch_of(step), step) == reference.step(batch_of(step), step)
    assert torch.equal(flat(model), flat(reference.model))
    assert caplog.text.count("computed twice") == 1
    assert model.calls == [1] * 8


def test_not_even_one_sequence_fits():
    with pytest.raises(ConfigurationError, match=r"one sequence of 16 tokens does not fit.*--"):
        loop_of(small_memory(0)).step(batch_of(), 0)


def test_other_errors_are_not_swallowed():
    with pytest.raises(IndexError):
        loop_of().step(torch.full((4, 16), 1000), 0)


def test_a_failed_compilation_is_no_catastrophe(monkeypatch, caplog):
    def broken(*given):
        raise RuntimeError("no compiler was found")

    monkeypatch.setattr(torch, "compile", lambda function: broken)
    loop, reference = loop_of(compile_model=True), loop_of()
    with caplog.at_level(logging.WARNING, logger="dipaco"):
        for step in range(2):
            assert loop.step(batch_of(step), step) == reference.step(batch_of(step), step)
    assert len(caplog.records) == 1
    assert "failed (RuntimeError); continuing without" in caplog.text
    assert loop.micro_batch_size == 4


def test_the_first_micro_batch_comes_from_free_memory(monkeypatch):
    """Beside gradients and AdamW, with a tenth left over, and in pieces of like size."""
    head = head_bytes(MODEL, 4, logits_at_once(torch.device("cpu")))
    kept = 12 * sum(p.numel() for p in PathModel(MODEL).parameters()) + head
    for room, expected in ((0.0, 1), (1.0, 1), (2.0, 2), (3.0, 2), (100.0, 4)):
        free = int((kept + room * pass_bytes(MODEL)) / 0.9) + 1
        monkeypatch.setattr(inner, "free_bytes", lambda device, free=free: free)
        assert loop_of().micro_batch_size == expected
        assert loop_of(micro_batch_size=3).micro_batch_size == 3


def test_free_memory_is_what_the_owner_leaves(monkeypatch):
    def share(device):
        # As PyTorch does it.
        if isinstance(device, torch.device) and device.index is None:
            raise ValueError("Expected a torch.device with a specified index")
        return 0.5

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", share)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100)
    assert free_bytes(torch.device("cuda")) == 400
    assert free_bytes(torch.device("cuda", 1)) == 400
    assert free_bytes(CPU) is None


def test_evaluation_remembers_how_many_tokens_fitted():
    model, reference = small_memory(3), small_memory(100)
    at_once = AtOnce(8 * 16, CPU, "scoring", in_tokens=True)
    for rows in (8, 4):
        tokens = batch_of(rows=rows)
        torch.testing.assert_close(batch_losses(model, tokens, at_once), batch_losses(reference, tokens, at_once))
    assert model.calls == [8, 4, 2, 2, 2, 2, 2, 2]
    model.max_rows = 4
    batch_losses(model, batch_of(rows=4)[:, :8], at_once)
    assert model.calls[-1] == 4, "shorter rows are more of them at once"


# Compiled


@pytest.mark.parametrize("error", FORMS.values(), ids=FORMS.keys())
def test_no_form_of_it_ends_compilation(error, monkeypatch, caplog):
    """The function is tried again with half of the batch, and stays."""
    calls = []

    def compiling(function):
        def compiled(*given):
            # The blocks get rows of tokens; the head a row of outputs each.
            if given[0].dtype == torch.int64:
                calls.append(len(given[0]))
                if len(given[0]) > 2:
                    raise error
            return function(*given)

        return compiled

    monkeypatch.setattr(torch, "compile", compiling)
    loop, reference = loop_of(compile_model=True), loop_of(micro_batch_size=2)
    assert loop.step(batch_of(), 0) == reference.step(batch_of(), 0)
    assert calls == [4, 2, 2]
    assert "continuing without" not in caplog.text


def test_ten_halvings_leave_the_model_compiled(monkeypatch):
    """PyTorch compiles a function eight times at most, and is silent about it."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    torch._dynamo.reset()
    fits = [1024]
    run = []

    class Shrinking(PathModel):
        def hidden_states(self, tokens, *others):
            if not torch.compiler.is_compiling():
                run.append(len(tokens))
            return super().hidden_states(tokens, *others)

    model = Shrinking(MODEL)
    initialise(model, 0)
    loop = loop_of(model, compile_model=True, batch_sequences=1024)
    # What runs out is the backward pass, behind the compiled function.
    whole = torch.Tensor.backward

    def backward(result, *given):
        if loop.micro_batch_size > fits[0]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        whole(result, *given)

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    batch = batch_of(rows=1024)
    while fits[0] > 1:
        fits[0] //= 2
        loop.step(batch, 0)
    assert loop.micro_batch_size == 1
    assert run == []
    assert counter.frame_count <= 6, "blocks and head: the first size, any size, and one"
