"""How hot the GPU is, and the pause while it is hotter than its owner wants (`--max-gpu-temp`)."""

from __future__ import annotations

import contextlib
import math
import subprocess
import time
from collections.abc import Callable

import torch

from dipaco.base.errors import ConfigurationError

# A peer goes on when the GPU is so much cooler: less, and it would stop and go every minute.
COOLER_C = 10.0
# For so long an old figure counts.
UNKNOWN_AFTER_S = 60.0
ANSWER_LIMIT_S = 10.0


class HotGpu:
    """The reason to pause while a GPU is hotter than `max_c` degrees Celsius, until it is
    `COOLER_C` below.

    `read_c` returns how hot it is, or None while that is not known. A GPU whose temperature has not
    been known for a minute counts as hot.
    """

    def __init__(
        self,
        max_c: float,
        read_c: Callable[[], float | None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_c, self._read_c, self._monotonic = max_c, read_c, monotonic
        self._known_s = monotonic()
        self._is_hot = False

    def __call__(self) -> str:
        degrees = self._read_c()
        if degrees is not None:
            self._known_s = self._monotonic()
            self._is_hot = degrees > self._max_c - (COOLER_C if self._is_hot else 0.0)
        elif self._monotonic() - self._known_s > UNKNOWN_AFTER_S:
            return "the GPU's temperature is unknown (--max-gpu-temp), until nvidia-smi reports it"
        limit = f"--max-gpu-temp {self._max_c:g}"
        goes_on = f"until it has at most {self._max_c - COOLER_C:g} C"
        return f"the GPU is too hot ({limit}), {goes_on}" if self._is_hot else ""


class Thermometer:
    """Asks `nvidia-smi` for the temperature of one GPU, and never waits for the answer.

    A call returns what the call before it has asked for.
    """

    def __init__(self, gpu: str) -> None:
        """`gpu` is as `nvidia-smi -i` takes it."""
        self._words = ("nvidia-smi", "-i", gpu, *_QUERY)
        self._asked: subprocess.Popen[str] | None = None
        self._asked_s = 0.0

    def first(self) -> float:
        """Return the temperature now. Raises ConfigurationError if it cannot be had."""
        try:
            done = subprocess.run(
                self._words,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=ANSWER_LIMIT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigurationError(
                f"--max-gpu-temp: nvidia-smi does not say how hot the GPU is ({error}); leave the "
                "flag out, or install the driver's tools"
            ) from None
        if (degrees := _degrees(done.stdout)) is None:
            raise ConfigurationError(
                "--max-gpu-temp: nvidia-smi does not say how hot the GPU is: "
                f"{done.stdout.strip()[:80]!r}; leave the flag out"
            )
        return degrees

    def __call__(self) -> float | None:
        asked, degrees = self._asked, None
        if asked is not None and asked.poll() is None:
            if time.monotonic() - self._asked_s >= ANSWER_LIMIT_S:
                # With a broken driver even that does not end it; another would wait beside it.
                asked.kill()
            return None
        if asked is not None:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                degrees = _degrees(asked.communicate(timeout=0.1)[0])
        self._asked, self._asked_s = None, time.monotonic()
        with contextlib.suppress(OSError):
            self._asked = subprocess.Popen(
                self._words,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                errors="replace",
            )
        return degrees


_QUERY = ("--query-gpu=temperature.gpu", "--format=csv,noheader,nounits")


def _degrees(said: str) -> float | None:
    with contextlib.suppress(ValueError):
        degrees = float(said.strip())
        return degrees if math.isfinite(degrees) else None
    return None


def thermometer_of(device: torch.device) -> Thermometer:
    """Return a function that reads the temperature of a device, and has read it once.

    Raises ConfigurationError for a device without one: a CPU, or a GPU of another maker.
    """
    if device.type != "cuda" or torch.version.hip:
        raise ConfigurationError(
            f"--max-gpu-temp is for an NVIDIA GPU, not for {device}; leave it out"
        )
    # CUDA_VISIBLE_DEVICES gives GPUs other numbers than nvidia-smi does.
    thermometer = Thermometer(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    thermometer.first()
    return thermometer
