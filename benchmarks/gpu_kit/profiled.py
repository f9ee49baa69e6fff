"""Where the time of a step goes: kernels by time, and how often the processor waits or copies."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

# Reading a number from the device, which waits for it; waiting as such; moving or changing tensors.
WAITS = ("aten::_local_scalar_dense", "cudaStreamSynchronize", "cudaDeviceSynchronize")
COPIES = ("aten::_to_copy", "aten::copy_", "aten::cat", "aten::clone", "cudaMemcpyAsync")
SHOWN = 25


def profiled(step: Callable[[], object]) -> dict[str, Any]:
    """Take a step twice, the second time watched; returns counts, and the longest kernels."""
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    step()
    if on_gpu:
        torch.cuda.synchronize()
    started = time.perf_counter()
    with profile(activities=activities) as found:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    averages = found.key_averages()
    counts = {event.key: event.count for event in averages}
    kernels = [e for e in averages if e.device_type != torch.autograd.DeviceType.CPU]
    on_device_s = sum(event.self_device_time_total for event in kernels) / 1e6
    longest = sorted(kernels, key=lambda event: -event.self_device_time_total)[:SHOWN]
    durations_us: dict[str, list[float]] = {}
    for event in found.events():
        durations_us.setdefault(event.name, []).append(event.self_device_time_total)
    return {
        "step_s": seconds,
        "device_busy": on_device_s / seconds,
        "kernels": sum(event.count for event in kernels),
        "waits": {name: counts[name] for name in WAITS if name in counts},
        "copies": {name: counts[name] for name in COPIES if name in counts},
        "longest": {
            event.key[:120]: {
                "ms": event.self_device_time_total / 1e3,
                "count": event.count,
                # A kernel of one name may have small and large work.
                "tenths_us": tenths(durations_us[event.key]),
            }
            for event in longest
        },
    }


def tenths(durations_us: list[float]) -> list[int]:
    """Return the shortest, each tenth, and the longest of some durations."""
    ordered = sorted(durations_us)
    return [round(ordered[(len(ordered) - 1) * tenth // 10]) for tenth in range(11)]
