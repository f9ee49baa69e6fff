"""The programs that ours are measured beside, from the package index, each in its own folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

OPENTELEMETRY = (
    "api", "sdk", "proto", "exporter-otlp-proto-common", "exporter-otlp-proto-http"
)  # fmt: skip
OPENTELEMETRY_BETA = ("semantic-conventions", "exporter-http-transport", "exporter-otlp-common")
PINNED = {
    "peft": ("peft==0.21.2", "accelerate==1.15.0", "transformers==5.24.0", "psutil==7.2.2"),
    "trainer": ("accelerate==1.15.0", "transformers==5.24.0", "psutil==7.2.2"),
    "torchft": (
        "torchft==0.2.0",
        *(f"opentelemetry-{name}==1.45.2" for name in OPENTELEMETRY),
        *(f"opentelemetry-{name}==0.66b2" for name in OPENTELEMETRY_BETA),
        "googleapis-common-protos==1.76.0",
    ),
    "llama.cpp": ("xllamacpp==2026.10.11549",),
}
"""What is installed for a rival. PyTorch and what else they need is that of this environment."""
INSTALL_LIMIT_S = 600.0


def installed(rival: str, folder: Path) -> Path:
    """Return the folder that has a rival, installed there unless it already is."""
    place = folder / PINNED[rival][0]
    if not place.is_dir():
        whole = place.with_name(f"{rival}.new")
        shutil.rmtree(whole, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--target", str(whole), *PINNED[rival]]
        subprocess.run(command, check=True, timeout=INSTALL_LIMIT_S, stdout=sys.stderr)
        whole.rename(place)
    return place
