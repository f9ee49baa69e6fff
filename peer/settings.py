"""The settings of one peer: what the command line says, validated once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dipaco.modules.errors import ConfigurationError

if TYPE_CHECKING:
    import torch


def default_cache_folder() -> Path:
    """Return where a volunteer's states and blobs live when no flag says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "dipaco"


@dataclass(frozen=True)
class PeerSettings:
    """Everything a volunteer can choose; the rest is the run's plan."""

    initial_peers: tuple[str, ...]
    """Addresses of any peers of the swarm."""
    cache_folder: Path
    """Blobs, states and AdamW states; one folder a run inside."""
    run: str | None = None
    """Run id, its beginning, or its name; needed when the DHT holds several."""
    stay: bool = False
    """Do not move to the run's successor."""
    identity_path: Path | None = None
    """libp2p key; default: `identity.key` in the cache directory."""
    host_maddrs: tuple[str, ...] = ()
    """Addresses to listen on."""
    announce_maddrs: tuple[str, ...] = ()
    """Addresses to tell others, behind a router with a forwarded port."""
    port: int = 0
    """TCP port to listen on at all interfaces; 0 takes a free one."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    path: int | None = None
    """Train this path only."""
    max_rounds: int | None = None
    """Leave after so many rounds."""
    micro_batch_size: int | None = None
    """Sequences on the device at once; default: the whole batch, halved when memory runs out."""
    optimizer: str = "adamw"
    """adamw or adamw8bit."""
    threads: int | None = None
    """Threads for tensor arithmetic on the CPU; default: PyTorch's."""
    compile_model: bool = True
    """Compile the model on CUDA."""
    serve_only: bool = False
    """Keep and serve states without training."""
    log_json: Path | None = None
    """Append one JSON object per event to this file."""
    debug: bool = False
    """Tracebacks and debug logging."""
    address_file: Path | None = None
    """Write this peer's addresses here, one a line."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigurationError(f"--port {self.port} is not a port; give 0 to 65535")
        if self.path is not None and self.path < 0:
            raise ConfigurationError(f"--path {self.path} is not a path; paths count from 0")
        if self.max_rounds is not None and self.max_rounds < 1:
            raise ConfigurationError(f"--max-rounds {self.max_rounds} must be at least 1")
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise ConfigurationError(
                f"--micro-batch-size {self.micro_batch_size} must be at least 1"
            )
        if self.threads is not None and self.threads < 1:
            raise ConfigurationError(f"--threads {self.threads} must be at least 1")
        if self.port and self.host_maddrs:
            raise ConfigurationError("give --port or --host-maddrs, not both")

    def listen_maddrs(self) -> tuple[str, ...]:
        """Return the addresses to listen on."""
        return self.host_maddrs or (f"/ip4/0.0.0.0/tcp/{self.port}",)


def choose_device(name: str) -> tuple[torch.device, str]:
    """Return the device to train on and why, for the peer's first lines."""
    import torch

    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda"), "CUDA is available"
        return torch.device("cpu"), "no CUDA device was found"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigurationError(
            f"--device '{name}' is not a device; give auto, cpu, cuda or cuda:0"
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"--device '{name}' is not supported; give auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            f"--device {name}: this PyTorch sees no CUDA device; use --device cpu, or install a "
            "CUDA build of PyTorch"
        )
    return device, "asked for by --device"
