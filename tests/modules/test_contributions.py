"""Contributions: a file means the same numbers everywhere, and bad files are refused."""

import hashlib
import itertools
import math
import struct
from fractions import Fraction
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dipaco.base.errors import ConfigurationError, IntegrityError
from dipaco.modules.contributions import CHUNK_VALUES, CODECS, MAX_SCALE, contribution_norm
from dipaco.protocol.config import CodecName, ContributionsConfig, parse_config
from support.runs.contribution_files import BITS, BLOCKS, made_file

VALUES = 2 * CHUNK_VALUES + 300
BYTES_A_VALUE = {"float32": 4, "int4": 0.54, "int2": 0.27, "sign": 0.15}
MAX_LOSS = {"float32": 0, "int4": 0.16, "int2": 0.36, "sign": 0.61}
"""Norm of what the encoding of normal numbers loses, as a share of their norm."""
GOLDEN_DIGESTS = {
    "float32": "a463860e5223ef12b7e25c2a8a7ff797d23f105a529cc64ff725fc07d2563b8f",
    "int4": "608fd5f18942f0096454373db607998ed021b3a8f5d54a69eb284a85dbe18a9d",
    "int2": "4d8cbbfedb113865b7fd044b8bdf8e258b0128f70cf219bd0d7ffb886e04ce92",
    "sign": "56dc329756331c6ad6c86c127e3b2de108b4c458fcd36fdd234ba93ba436149b",
}
names = st.sampled_from(get_args(CodecName))
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)


def drawn(values, seed=0, scale=1e-3):
    return scale * torch.randn(values, generator=torch.Generator().manual_seed(seed))


def numbers_of(name, data, values):
    """Return what a file says, read a value at a time as the protocol describes it."""
    if name == "float32":
        return list(struct.unpack(f"<{values}f", data))
    width = BLOCKS[name]
    blocks = -(-values // width)
    scales = [struct.unpack("<f", b"\0\0" + data[2 * block : 2 * block + 2])[0] for block in range(blocks)]
    found = [0.0] * (blocks * width)
    bits = BITS[name]
    raw = data[2 * blocks :]
    for value in range(values):
        code = raw[value * bits // 8] >> value * bits % 8 & 2**bits - 1
        number = {"int4": code - 8, "int2": 2 * code - 3, "sign": 2 * code - 1}[name]
        found[value] = float(np.float32(scales[value // width]) * np.float32(number))
    return found[:values]


@every_codec
def test_golden_numbers_are_as_the_protocol_describes_them(codec):
    data = made_file(codec.name, VALUES)
    codec.check(data, VALUES)
    decoded = codec.decode(data, VALUES)
    assert decoded.tolist() == numbers_of(codec.name, data, VALUES)
    assert hashlib.sha256(decoded.numpy().tobytes()).hexdigest() == GOLDEN_DIGESTS[codec.name]


@every_codec
def test_threads_and_ranges_do_not_change_the_bits(codec):
    values = 80 * CHUNK_VALUES + 5  # enough for PyTorch to use several threads
    data = codec.encode(drawn(values))
    threads, found, norms = torch.get_num_threads(), set(), set()
    try:
        for count, step in ((1, 1), (2, 7), (3, 200)):
            torch.set_num_threads(count)
            bounds = [*range(0, values, step * CHUNK_VALUES), values]
            pieces = [codec.decode(data, values, *pair) for pair in itertools.pairwise(bounds)]
            found.add(torch.cat(pieces).numpy().tobytes())
            norms.add(contribution_norm(codec, data, values))
    finally:
        torch.set_num_threads(threads)
    assert found == {codec.decode(memoryview(data), values).numpy().tobytes()}
    assert len(norms) == 1


@every_codec
def test_files_are_small_and_lose_little(codec):
    flat = drawn(64 * CHUNK_VALUES)
    data = codec.encode(flat)
    assert len(data) == codec.file_bytes(flat.numel())
    assert len(data) / flat.numel() <= BYTES_A_VALUE[codec.name]
    lost = flat - codec.decode(data, flat.numel())
    assert lost.norm() <= MAX_LOSS[codec.name] * flat.norm()


@settings(max_examples=60, deadline=None)
@given(names, st.integers(1, 3 * CHUNK_VALUES), st.floats(0, 1e29), st.integers(0, 99))
def test_what_is_encoded_passes_the_check(name, values, scale, seed):
    codec = CODECS[name]
    flat = drawn(values, seed, scale)
    data = codec.encode(flat)
    assert len(data) == codec.file_bytes(values)
    decoded = codec.decode(data, values)
    assume(bool(decoded.any()))
    codec.check(data, values)
    decoded = codec.decode(data, values)
    assert decoded.shape == flat.shape
    assert bool(torch.isfinite(decoded).all())
    exact = math.sqrt(sum(Fraction(value) ** 2 for value in decoded.tolist()))
    assert contribution_norm(codec, data, values) == pytest.approx(exact, rel=1e-14)


@every_codec
def test_nothing_trained_is_no_contribution(codec):
    data = codec.encode(torch.zeros(VALUES))
    assert not codec.decode(data, VALUES).any()
    with pytest.raises(IntegrityError, match="is empty"):
        codec.check(data, VALUES)


@every_codec
def test_no_negative_zero_is_accepted(codec):
    """The sign of a zero would come out of a vector instruction, and give one step two digests."""
    data = bytearray(codec.encode(drawn(VALUES)))
    width = 4 if codec.name == "float32" else 2
    data[:width] = bytes(width - 1) + b"\x80"
    with pytest.raises(IntegrityError, match="negative zero|no encoder writes"):
        codec.check(data, VALUES)
    flat = drawn(VALUES)
    flat[:10] = -0.0
    codec.check(codec.encode(flat), VALUES)


@pytest.mark.parametrize("name", ["int2", "sign"])
@pytest.mark.parametrize("left", [1, 8, 127])
def test_a_short_last_block_is_told_at_its_size(name, left):
    codec, whole = CODECS[name], CODECS[name].block_values
    flat = torch.full((whole + left,), 0.5)
    told = codec.decode(codec.encode(flat), flat.numel())
    assert torch.equal(told[whole:], told[:left])


@every_codec
@pytest.mark.parametrize("change", [-1, 1, "empty"])
def test_files_of_another_length_are_refused(codec, change):
    data = made_file(codec.name, VALUES)
    wrong = b"" if change == "empty" else data[:-1] if change == -1 else data + b"\0"
    with pytest.raises(IntegrityError, match="bytes, not"):
        codec.check(wrong, VALUES)


@every_codec
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -1.0, 2.0**101])
def test_numbers_that_no_encoding_gives_are_refused(codec, value):
    data = bytearray(made_file(codec.name, VALUES))
    half = struct.pack("<f", value)[2:]
    if codec.name == "float32":
        data[8:12] = struct.pack("<f", float("nan") if value == -1.0 else value)
    else:
        data[2:4] = half
    with pytest.raises(IntegrityError, match="a contribution has"):
        codec.check(bytes(data), VALUES)


def test_a_scale_that_would_overflow_is_refused():
    codec = CODECS["int4"]
    data = bytearray(made_file("int4", VALUES))
    data[:2] = struct.pack("<f", MAX_SCALE * 2)[2:]
    with pytest.raises(IntegrityError, match="scale"):
        codec.check(data, VALUES)
    data[:2] = struct.pack("<f", MAX_SCALE)[2:]
    codec.check(data, VALUES)
    assert bool(torch.isfinite(codec.decode(data, VALUES)).all())


@settings(max_examples=100, deadline=None)
@given(names, st.integers(0, 2**32))
def test_arbitrary_bytes_never_do_more_than_raise(name, seed):
    codec = CODECS[name]
    data = np.random.default_rng(seed).bytes(codec.file_bytes(VALUES))
    try:
        codec.check(data, VALUES)
    except IntegrityError:
        return
    assert bool(torch.isfinite(codec.decode(data, VALUES)).all())


def test_the_table_has_the_codecs_that_a_plan_may_name():
    assert list(CODECS) == list(get_args(CodecName))
    with pytest.raises(ConfigurationError, match="'int4'"):
        parse_config(ContributionsConfig, {"codec": "float8"}, "run.toml")
