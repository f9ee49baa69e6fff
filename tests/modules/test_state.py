"""A state has one byte string, and nothing that differs from it is believed."""

import hashlib
import json
import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from dipaco.base.errors import IntegrityError
from dipaco.modules.layout import ModuleLayout
from dipaco.modules.state import (
    MAX_COUNT,
    ModuleState,
    PathProgress,
    genesis_state,
    max_state_bytes,
    read_state,
    read_state_summary,
    state_chunks,
    write_state,
)

LAYOUT = ModuleLayout(("a.weight", "b.weight"), ((2, 3), (4,)))
GOLDEN_DIGEST = "fa6241b4afd02552da9df30df4907d8c0e474d97e10a29a01f99f244cf234888"


def state_of(**overrides):
    values = {
        "module": "L0.E1",
        "version": 7,
        "parameters": torch.arange(10, dtype=torch.float32) / 8,
        "momentum": -torch.arange(10, dtype=torch.float32) / 16,
        "progress": {3: PathProgress(4096, 6, 1024, 4096), 2: PathProgress(512, 5, 512, 512)},
        "layout": LAYOUT,
        "usual_norm": 0.1,
    }
    return ModuleState(**{**values, **overrides})


def bytes_of(state):
    return b"".join(state_chunks(state))


def with_header(data, change, *, compact=True):
    """Return the state's bytes with a header that `change` has edited."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    content = json.loads(header["__metadata__"]["state"])
    change(header, content)
    if "__metadata__" in header:
        header["__metadata__"]["state"] = json.dumps(content, sort_keys=True, separators=(",", ":"))
    encoded = json.dumps(header, sort_keys=True, separators=(",", ":") if compact else None).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded + data[8 + length :]


def test_a_golden_state():
    # A new digest here means that peers of two versions can no longer meet.
    assert state_of().digest == GOLDEN_DIGEST


def test_digest_is_the_hash_of_the_file(tmp_path):
    state, file = state_of(), tmp_path / "state.safetensors"
    write_state(state, file)
    assert hashlib.sha256(file.read_bytes()).hexdigest() == state.digest
    assert file.stat().st_size == state.byte_size == len(bytes_of(state))
    assert state.byte_size <= max_state_bytes(LAYOUT, 2)
    longest = state_of(usual_norm=sys.float_info.min)
    assert state.byte_size < longest.byte_size <= max_state_bytes(LAYOUT, 2)


def test_any_safetensors_tool_reads_it(tmp_path):
    state, file = state_of(), tmp_path / "state.safetensors"
    write_state(state, file)
    with safe_open(file, "pt") as tensors:
        assert set(tensors.keys()) == {f"{part}/{name}" for part in ("momentum", "parameters") for name in LAYOUT.names}
        assert torch.equal(tensors.get_tensor("parameters/b.weight"), state.parameters[6:])
        assert torch.equal(tensors.get_tensor("momentum/a.weight"), state.momentum[:6].view(2, 3))
        assert tensors.metadata()["format"] == "dipaco-state/4"


@pytest.mark.parametrize("as_file", [True, False])
def test_round_trip(tmp_path, as_file):
    state = state_of()
    write_state(state, tmp_path / "state")
    source = tmp_path / "state" if as_file else bytes_of(state)
    loaded = read_state(source, LAYOUT, state.digest, module="L0.E1", paths=(2, 3))
    assert torch.equal(loaded.parameters, state.parameters)
    assert torch.equal(loaded.momentum, state.momentum)
    assert loaded.progress == state.progress
    assert loaded.usual_norm == state.usual_norm
    assert list(loaded.progress) == [2, 3]
    assert (loaded.module, loaded.version, loaded.tokens) == ("L0.E1", 7, 4608)
    assert loaded.digest == state.digest
    del loaded.__dict__["digest"]
    assert loaded.digest == state.digest
    loaded.parameters.add_(1)  # memory of its own, and writable


def test_digest_sees_everything():
    one = torch.zeros(10)
    one[9] = 1e-45
    variants = [
        state_of(),
        state_of(module="L0.E0"),
        state_of(version=8),
        state_of(parameters=one),
        state_of(momentum=one),
        state_of(progress={}),
        state_of(usual_norm=0.1 + 2**-56),
        state_of(progress={2: PathProgress(512, 5, 512, 512), 3: PathProgress(4096, 7, 1024, 4096)}),
        state_of(layout=ModuleLayout(("a.weight", "c.weight"), ((2, 3), (4,)))),
        state_of(layout=ModuleLayout(("a.weight", "b.weight"), ((3, 2), (4,)))),
    ]
    assert len({state.digest for state in variants}) == len(variants)
    assert state_of().digest == state_of().digest


def test_summary_needs_no_tensors(tmp_path):
    write_state(state_of(), tmp_path / "state")
    summary = read_state_summary(tmp_path / "state")
    assert (summary.module, summary.version) == ("L0.E1", 7)
    (tmp_path / "cut").write_bytes(bytes_of(state_of())[:50])
    with pytest.raises(IntegrityError, match="cut off"):
        read_state_summary(tmp_path / "cut")


def test_wrong_digest_module_or_paths():
    data = bytes_of(state_of())
    with pytest.raises(IntegrityError, match="digest"):
        read_state(data, LAYOUT, "0" * 64)
    with pytest.raises(IntegrityError, match=r"expected a state of L0\.E0, got one of L0\.E1"):
        read_state(data, LAYOUT, module="L0.E0")
    with pytest.raises(IntegrityError, match="foreign paths"):
        read_state(data, LAYOUT, paths=(2,))


@pytest.mark.parametrize(
    "layout",
    [
        ModuleLayout(("a.weight", "b.weight"), ((3, 2), (4,))),
        ModuleLayout(("a.weight", "b.weight"), ((2, 3), (5,))),
        ModuleLayout(("a.weight",), ((2, 3),)),
        ModuleLayout(("a.weight", "c.weight"), ((2, 3), (4,))),
    ],
)
def test_another_layout_is_refused(layout):
    with pytest.raises(IntegrityError, match="header of a state"):
        read_state(bytes_of(state_of()), layout)


def _set_metadata(key, value):
    return lambda header, content: header["__metadata__"].update({key: value})


def _set_content(key, value):
    return lambda header, content: content.update({key: value})


def _set_dtype(header, content):
    header["parameters/a.weight"]["dtype"] = "F16"


def _add_tensor(header, content):
    header["parameters/z"] = {"dtype": "F32", "shape": [0], "data_offsets": [80, 80]}


def _swap_offsets(header, content):
    header["parameters/a.weight"]["data_offsets"] = [0, 24]


@pytest.mark.parametrize(
    "change",
    [
        _set_metadata("format", "dipaco-state/3"),
        _set_metadata("more", "x"),
        _set_content("version", -1),
        _set_content("version", True),
        _set_content("version", 1.0),
        _set_content("version", MAX_COUNT + 1),
        _set_content("module", 3),
        _set_content("extra", 1),
        _set_content("progress", {"2": [-1, 0, 1, 1]}),
        _set_content("progress", {"-2": [1, 0, 1, 1]}),
        _set_content("progress", {"02": [1, 0, 1, 1]}),
        _set_content("progress", {"x": [1, 0, 1, 1]}),
        _set_content("progress", {"2": [1, 0, 1]}),
        _set_content("progress", {"2": [1, 0, 0, 0, 0]}),
        _set_content("progress", {"2": "10"}),
        _set_content("progress", [[1, 0, 1, 1]]),
        _set_dtype,
        _add_tensor,
        _swap_offsets,
        lambda header, content: header.pop("__metadata__"),
        lambda header, content: header.pop("momentum/b.weight"),
        lambda header, content: content.pop("progress"),
        *(_set_content("usual_norm", value) for value in (-0.5, 1, "0.1", True, None, math.inf, math.nan)),
        lambda header, content: content.pop("usual_norm"),
    ],
)
def test_edited_headers_are_refused(change):
    with pytest.raises(IntegrityError):
        read_state(with_header(bytes_of(state_of()), change), LAYOUT)


def test_other_spellings_of_the_same_content_are_refused():
    spaced = with_header(bytes_of(state_of()), lambda header, content: None, compact=False)
    with pytest.raises(IntegrityError, match="canonical form"):
        read_state(spaced, LAYOUT)


def test_cut_and_lengthened_bytes_are_refused(tmp_path):
    data = bytes_of(state_of())
    for end in (0, 4, 8, 100, len(data) - 80, len(data) - 1, len(data) - 4):
        with pytest.raises(IntegrityError):
            read_state(data[:end], LAYOUT)
        (tmp_path / "cut").write_bytes(data[:end])
        with pytest.raises(IntegrityError):
            read_state(tmp_path / "cut", LAYOUT)
    for more in (b"\0", b"\0\0\0\0"):
        with pytest.raises(IntegrityError):
            read_state(data + more, LAYOUT)
    with pytest.raises(IntegrityError, match="whole header"):
        read_state(b"\xff" * 16, LAYOUT)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_do_more_than_raise(content):
    framed = len(content).to_bytes(8, "little") + content
    for data in (content, framed):
        with pytest.raises(IntegrityError):
            read_state(data, LAYOUT)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("field", ["parameters", "momentum"])
def test_numbers_must_be_finite(value, field):
    numbers = torch.zeros(10)
    numbers[4] = value
    with pytest.raises(IntegrityError, match="not finite"):
        read_state(bytes_of(state_of(**{field: numbers})), LAYOUT)


def test_tensors_of_another_kind_are_refused():
    for wrong in (
        torch.zeros(9),
        torch.zeros(10, dtype=torch.float64),
        torch.zeros(20)[::2],
        torch.zeros(10, requires_grad=True),
    ):
        with pytest.raises(ValueError, match="contiguous fp32"):
            state_of(parameters=wrong)


def test_genesis_takes_the_base_model():
    base = {
        "a.weight": torch.arange(6.0).view(2, 3).requires_grad_(),
        "b.weight": torch.ones(4, dtype=torch.bfloat16),
        "other": torch.zeros(1),
    }
    state = genesis_state("P3", LAYOUT, base)
    assert state.parameters.tolist() == [0, 1, 2, 3, 4, 5, 1, 1, 1, 1]
    assert state.momentum.eq(0).all()
    assert (state.version, state.tokens, state.progress) == (0, 0, {})
    assert state.usual_norm == math.sqrt(59) / 4
    with pytest.raises(IntegrityError, match=r"lacks 'b\.weight'"):
        genesis_state("P3", LAYOUT, {"a.weight": base["a.weight"]})
    with pytest.raises(IntegrityError, match="in shape"):
        genesis_state("P3", LAYOUT, {**base, "b.weight": torch.ones(5)})
    with pytest.raises(IntegrityError, match="not finite"):
        genesis_state("P3", LAYOUT, {**base, "b.weight": torch.full((4,), float("nan"))})
