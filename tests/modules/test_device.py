"""Which device trains, in which number format, and what is said of the others."""

import pytest
import torch

from dipaco.base.errors import ConfigurationError
from dipaco.base.settings import check_device
from dipaco.modules import device as devices
from dipaco.modules.device import autocast_for, choose_device, limit_memory, number_format, training_format

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NO_KERNELS = "no kernel image is available for execution on the device"


@pytest.fixture
def two_cards(monkeypatch):
    """A machine with two cards; returns what is wrong with each, to be filled."""
    wrong = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices, "device_name", lambda device: f"card {device.index}")
    monkeypatch.setattr(devices, "why_it_does_not_compute", lambda device: wrong.get(str(device), ""))
    return wrong


def test_the_first_card_that_computes(two_cards):
    assert choose_device("auto") == (CUDA, "card 0 is there")
    two_cards["cuda:0"] = NO_KERNELS
    chosen, reason = choose_device("auto")
    assert chosen == torch.device("cuda", 1)
    assert f"cuda:0 was passed over: {NO_KERNELS}" in reason
    two_cards["cuda:1"] = "out of memory"
    chosen, reason = choose_device("auto")
    assert chosen == CPU
    assert NO_KERNELS in reason
    assert "out of memory" in reason


def test_a_card_that_was_asked_for(two_cards):
    assert choose_device("cuda:1")[0] == torch.device("cuda", 1)
    assert choose_device("cuda")[0] == CUDA
    two_cards["cuda:1"] = NO_KERNELS
    with pytest.raises(ConfigurationError, match=f"--device cuda:1: {NO_KERNELS}; give another"):
        choose_device("cuda:1")
    with pytest.raises(ConfigurationError, match="this machine has cuda:0 to cuda:1"):
        choose_device("cuda:2")


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto") == (CPU, "PyTorch sees no GPU")
    assert choose_device("cpu")[0] == CPU
    with pytest.raises(ConfigurationError, match="sees no GPU; use --device cpu"):
        choose_device("cuda")


def test_a_card_is_tried(monkeypatch):
    assert devices.why_it_does_not_compute(CPU) == ""

    def ones(*size, device):
        raise RuntimeError(f"CUDA error: {NO_KERNELS}\nFor debugging consider ...")

    monkeypatch.setattr(torch, "ones", ones)
    assert devices.why_it_does_not_compute(CPU).endswith(f": CUDA error: {NO_KERNELS}")


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((6, 1), torch.float32),
        ((7, 0), torch.float16),
        ((7, 5), torch.float16),
        ((8, 0), torch.bfloat16),
        ((12, 0), torch.bfloat16),
    ],
)
def test_number_formats(capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert number_format(CUDA) == expected


def test_number_formats_elsewhere(monkeypatch):
    assert number_format(CPU) == torch.float32
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert number_format(CUDA) == torch.bfloat16


def test_training_on_a_cpu_with_bf16(monkeypatch):
    for has_bf16, exact, expected in (
        (True, False, torch.bfloat16),
        (True, True, torch.float32),
        (False, False, torch.float32),
    ):
        monkeypatch.setattr(devices, "cpu_has_bf16", lambda has_bf16=has_bf16: has_bf16)
        assert training_format(CPU, exact=exact) == expected
    assert number_format(CPU) == torch.float32


def test_passes_are_in_the_format():
    matrix = torch.ones(4, 4)
    with autocast_for(CPU):
        assert (matrix @ matrix).dtype == torch.float32
    with autocast_for(CPU, torch.bfloat16):
        assert (matrix @ matrix).dtype == torch.bfloat16


def test_a_limit_of_gpu_memory_is_for_gpus():
    limit_memory(CPU, None)
    with pytest.raises(ConfigurationError, match="--vram-gb 8 is for a GPU"):
        limit_memory(CPU, 8.0)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "mps", "xpu", "CUDA", "cuda:0,1"])
def test_devices_that_cannot(name):
    with pytest.raises(ConfigurationError, match=r"--device '.*' is not a device"):
        check_device("--device", name)
