"""`dipaco-serve`: a service over a trained run, with OpenAI's interface and a page for people.

dipaco-serve --state-dir my-run-simulated
dipaco-serve --initial-peers ADDR --port 8000
dipaco-serve --cache-dir ~/.cache/dipaco
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from dipaco.base.command_line import Command
from dipaco.base.errors import ConfigurationError, StorageError
from dipaco.base.files import decoded, tidy
from dipaco.base.running import say
from dipaco.base.settings import Option
from dipaco.dht.addresses import PROXY_NAME
from dipaco.inference.options import AnswerSettings

if TYPE_CHECKING:
    from dipaco.inference.decoding.engines import DecodingEngine
    from dipaco.protocol.plan import RunPlan

_KEY_VARIABLE = "DIPACO_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServeSettings(AnswerSettings):
    """What `dipaco-serve` can be told."""

    group = "the service"

    host: Annotated[str, Option("address to listen on; 0.0.0.0 lets everybody in", "ADDR")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Option("TCP port; 0 is any free one", "PORT", least=0, most=65535)] = 8000
    proxy_names: Annotated[tuple[str, ...], PROXY_NAME] = ()
    api_key: Annotated[
        str | None,
        Option(
            f"what clients must send as their key (default: ${_KEY_VARIABLE}, if set)",
            "KEY",
        ),
    ] = None
    engine: Annotated[
        Literal["auto", "torch", "llama.cpp"],
        Option("what computes paths; auto is llama.cpp if it is there and can serve the run"),
    ] = "auto"
    dtype: Annotated[
        Literal["float32", "q8_0"], Option("format of matrices in llama.cpp's memory")
    ] = "float32"
    memory_gb: Annotated[
        float,
        Option(
            "memory for paths and their caches, or for adapters alone; at least one path is held",
            "GB",
            least=0,
        ),
    ] = 4.0
    parallel: Annotated[
        int,
        Option(
            "answers of one path that are computed together; with adapters, of all paths",
            "N",
            least=1,
            most=256,
        ),
    ] = 8
    queue: Annotated[
        int, Option("answers that may wait or be computed; more are refused", "N", least=1)
    ] = 256
    timeout_s: Annotated[float, Option("longest time of an answer, in seconds", "S", least=1)] = (
        300.0
    )
    max_body_mb: Annotated[float, Option("longest body of a request", "MB", least=0)] = 4.0
    refresh_s: Annotated[
        float, Option("seconds between looks for newer states; 0 is never", "S", least=0)
    ] = 60.0
    chat_template: Annotated[
        Path | None,
        Option("Jinja file that makes text from messages (default: the model's own)", "FILE"),
    ] = None

    def key(self) -> str | None:
        """Return what clients must send, if anything. Raises ConfigurationError for what they
        cannot."""
        given = self.api_key or os.environ.get(_KEY_VARIABLE, "")
        key = tidy(given)
        if (given and not key) or not all("!" <= character <= "~" for character in key):
            raise ConfigurationError(
                f"{'--api-key' if self.api_key else _KEY_VARIABLE} is empty, or has a character "
                f"that no client can send (a line break, a space, an accent); use letters, digits "
                f"and signs of ASCII alone"
            )
        return key or None

    def decoding_engine(self, plan: RunPlan, device: str) -> DecodingEngine:
        """Return what computes the paths of a run. Raises ConfigurationError."""
        from dipaco.inference.decoding.engines import (
            TORCH,
            chosen_engine,
            llama_cpp_engine,
            llama_cpp_obstacle,
        )
        from dipaco.inference.decoding.llama_cpp import installed_version, obstacle_to_loading

        installed = installed_version()
        obstacle = llama_cpp_obstacle(plan, device, installed)
        if obstacle is None and self.engine != "torch":
            obstacle = obstacle_to_loading()
        if chosen_engine(self.engine, self.dtype, obstacle) == "llama.cpp":
            say(f"llama.cpp computes the paths, with matrices in {self.dtype}")
            return llama_cpp_engine(self.dtype)
        if self.engine == "auto" and installed is not None:
            say(f"llama.cpp does not compute the paths: {obstacle}")
        return TORCH

    def read_chat_template(self, own: str | None) -> str | None:
        """Return the chat template, if there is one. Raises StorageError."""
        if self.chat_template is None:
            return own
        try:
            return decoded(self.chat_template.read_bytes())
        except (OSError, UnicodeDecodeError) as error:
            raise StorageError(f"--chat-template {self.chat_template}: {error}") from None


def run(settings: ServeSettings) -> int:
    """Run the command. Raises the errors of `dipaco.base.errors`."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            f"dipaco-serve needs {error.name}; install it with pip install 'dipaco[serve]'"
        ) from None
    # Importing PyTorch takes seconds; --help and mistakes should not.
    from dipaco.base.http_server import listen, serve_until_told
    from dipaco.inference.service.app import Service, ServiceLimits
    from dipaco.inference.service.engine import Engine, EngineLimits

    socket = listen(settings.host, settings.port)
    device = settings.prepare_process()
    source = settings.open_source(follow=True)
    try:
        engine = Engine(
            source,
            device,
            EngineLimits(
                memory_bytes=int(settings.memory_gb * 1e9),
                slots=settings.parallel,
                queue=settings.queue,
                refresh_s=settings.refresh_s,
            ),
            settings.decoding_engine(source.plan, device.type),
        )
        service = Service(
            engine,
            limits=ServiceLimits(
                body_bytes=int(settings.max_body_mb * 1e6), timeout_s=settings.timeout_s
            ),
            api_key=settings.key(),
            template=settings.read_chat_template(engine.tokenizer.chat_template),
        )
    except BaseException:
        source.close()
        raise
    paths = engine.grid.path_count
    company = "a path" if engine.model.adapters is None else "all paths"
    say(f"run '{engine.plan.name}' ({engine.plan.run_id[:16]}), {paths} paths")
    say(
        f"memory: {settings.memory_gb:g} GB hold {min(engine.capacity, paths)} paths of "
        f"{engine.path_bytes / 1e6:.1f} MB; {settings.parallel} answers of {company} together"
    )
    if engine.base_bytes:
        say(f"the base and the room for texts take {engine.base_bytes / 1e9:.1f} GB beside that")
    engine.start()
    try:
        host, port = socket.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        say(f"serving at http://{shown}:{port} (page) and http://{shown}:{port}/v1 (OpenAI's)")
        serve_until_told(service.application(), socket, settings.proxy_names)
    finally:
        service.close()
        engine.close()
    return 0


COMMAND = Command(
    "dipaco-serve",
    ServeSettings,
    run,
    description="Serve a run to everything that speaks OpenAI's interface, with a page for people.",
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
