"""A peer says which device trains, and once how fast it does, beside what its card can do."""

import pytest
import torch

from dipaco.modules import device as devices
from dipaco.modules.cards import flops_per_token
from dipaco.peer.reporting import first_speed
from dipaco.peer.reporting.first_speed import FirstSpeed, device_line, speed_line
from support.runs.make_plan import make_plan

MODEL = make_plan().model


def test_the_first_line_says_whether_the_gpu_trains(monkeypatch):
    assert "on the CPU" in device_line(torch.device("cpu"), "PyTorch sees no GPU", 0)
    monkeypatch.setattr(first_speed, "device_name", lambda device: "NVIDIA L4")
    gpu = torch.device("cuda", 0)
    assert device_line(gpu, "", 0) == "this peer trains on the GPU: NVIDIA L4 (cuda:0)"
    assert "--devices cuda:0 cuda:1 cuda:2 starts" in device_line(gpu, "", 2)


def test_gpus_are_idle_that_nobody_asked_to_leave(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    assert devices.gpus_left(torch.device("cuda", 0), "auto") == 7
    assert devices.gpus_left(torch.device("cuda", 0), "cuda:0") == 0
    assert devices.gpus_left(torch.device("cpu"), "auto") == 0


def test_the_speed_is_told_once_and_without_the_steps_that_compile():
    said = []
    speed = FirstSpeed(MODEL, "cpu x2", said.append)
    steps = [70.0, 5.0, 5.0, *[10.0] * 20]
    for number, seconds in enumerate(steps):
        speed.on_event("inner", {"tokens": 1000, "seconds": seconds})
        speed.on_event("outer_step", {})
        assert bool(said) == (number >= 7)
    assert said == ["it trains 100 tokens a second on cpu x2"]


@pytest.mark.parametrize(
    ("device", "tflops", "has_usual"),
    [("NVIDIA H100 80GB HBM3", 989, True), ("NVIDIA H100 PCIe", 756, False), ("Tesla T4", 65, False)],
)
def test_a_known_card_is_compared_with_what_its_maker_states(device, tflops, has_usual):
    fast = 0.4 * tflops * 1e12 / flops_per_token(MODEL)
    line = speed_line(MODEL, device, fast)
    assert f"40.0% of the {tflops} TFLOP/s" in line
    assert ("28 to 40 %" in line) == has_usual


def test_an_unknown_card_has_its_tokens_alone():
    assert speed_line(MODEL, "NVIDIA RTX A1000", 1234.5).endswith("1,234 tokens a second on NVIDIA RTX A1000")
