"""`dipaco-serve`: a service over a trained run, with OpenAI's interface and a page for people.

dipaco-serve --state-dir my-run-simulated
dipaco-serve --initial-peers ADDR --port 8000
dipaco-serve --cache-dir ~/.cache/dipaco
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from dipaco.base.command_line import Command
from dipaco.base.errors import ConfigurationError, StorageError
from dipaco.base.files import decoded, tidy
from dipaco.base.running import say
from dipaco.base.settings import Option
from dipaco.dht.addresses import PROXY_NAME

from .options import AnswerSettings

if TYPE_CHECKING:
    import torch

    from .serve.openai_route import OpenAiRoute
    from .sources import StateSource

_KEY_VARIABLE = "DIPACO_API_KEY"
# A server that says nothing for this part of --timeout-s hangs.
_SILENT_SHARE = 1 / 4
# Where the model has no template, a chat is the beginning of a text, which it goes on with.
_NO_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@dataclass(frozen=True, kw_only=True)
class ServeSettings(AnswerSettings):
    """The options of `dipaco-serve`."""

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
    dtype: Annotated[
        Literal["float32", "float16", "q8_0"],
        Option("format of matrices in memory; float32 computes as dipaco-generate does"),
    ] = "float32"
    memory_gb: Annotated[
        float,
        Option("memory for the servers of paths; at least one path is served", "GB", least=0),
    ] = 4.0
    parallel: Annotated[
        int,
        Option("answers of one client that are computed together", "N", least=1, most=255),
    ] = 8
    queue: Annotated[int, Option("requests that may wait; more are refused", "N", least=1)] = 64
    timeout_s: Annotated[float, Option("longest time of an answer, in seconds", "S", least=1)] = (
        300.0
    )
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

    def read_chat_template(self, own: str | None) -> str:
        """Return the chat template. Raises StorageError."""
        if self.chat_template is None:
            return own if own is not None else _NO_TEMPLATE
        try:
            return decoded(self.chat_template.read_bytes())
        except (OSError, UnicodeDecodeError) as error:
            raise StorageError(f"--chat-template {self.chat_template}: {error}") from None


def _run(settings: ServeSettings) -> int:
    """Run the command. Raises the errors of `dipaco.base.errors`."""
    for package in ("aiohttp", "gguf", "starlette", "uvicorn", "xllamacpp"):
        if importlib.util.find_spec(package) is None:
            raise ConfigurationError(
                f"dipaco-serve needs {package}; install it with pip install 'dipaco[serve]'"
            )
    # Importing PyTorch takes seconds; --help and mistakes should not.
    from dipaco.base.http_server import listen, serve_until_told

    socket = listen(settings.host, settings.port)
    device = settings.prepare_process()
    with (
        settings.open_source(follow=True) as source,
        tempfile.TemporaryDirectory(prefix="dipaco-serve-", ignore_cleanup_errors=True) as folder,
    ):
        route = service_of(settings, source, device, Path(folder))
        host, port = socket.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        say(f"serving at http://{shown}:{port} (page) and http://{shown}:{port}/v1 (OpenAI's)")
        serve_until_told(route.application(), socket, settings.proxy_names)
    return 0


def service_of(
    settings: ServeSettings, source: StateSource, device: torch.device, folder: Path
) -> OpenAiRoute:
    """Return the service over a source. `folder` is for files of paths, and private.

    Raises ConfigurationError if llama.cpp cannot serve the run, and as the source does.
    """
    from dipaco.modules.layout import parameter_counts
    from dipaco.routing.tokens.run_tokens import RunTokens

    from .serve.gguf_files import GgufFiles, PathFile, server_bytes
    from .serve.llama_server import LlamaParameters, LlamaServer
    from .serve.openai_route import OpenAiRoute, RouteLimits
    from .serve.path_servers import PathServers
    from .serve.request_fields import RequestReader, path_name

    plan, model, paths = source.plan, source.model, source.grid.path_count
    tokens = RunTokens(source.blob(plan.blobs.tokenizer))
    files = GgufFiles(source, settings.dtype, folder)
    template = settings.read_chat_template(tokens.chat_template)
    # One place is for another client than the one that has all others.
    places = settings.parallel + 1

    def launch(file: PathFile) -> LlamaServer:
        return LlamaServer(
            LlamaParameters(
                name=path_name(file.path),
                model=str(file.model),
                adapter=None if file.adapter is None else str(file.adapter),
                socket=str(folder / f"{file.number}.sock"),
                context=model.sequence_length,
                slots=places,
                threads=settings.threads,
                is_exact=settings.dtype == "float32",
                uses_gpu=device.type != "cpu",
                chat_template=template,
            )
        )

    each = server_bytes(model, parameter_counts(source.grid)["path"], settings.dtype, places)
    capacity = min(paths, max(1, int(settings.memory_gb * 1e9) // each))
    say(f"run '{plan.name}' ({plan.run_id[:16]}), {paths} paths")
    hold = f"hold {capacity} path{'s' * (capacity != 1)}"
    say(f"memory: {settings.memory_gb:g} GB {hold} of about {each / 1e6:.0f} MB")
    return OpenAiRoute(
        PathServers(
            files,
            launch,
            capacity=capacity,
            refresh_s=settings.refresh_s,
            silent_s=_SILENT_SHARE * settings.timeout_s,
        ),
        RequestReader(tokens, template, paths, model.sequence_length, settings.parallel),
        source.document_router(device),
        plan,
        RouteLimits(places=places, queue=settings.queue, timeout_s=settings.timeout_s),
        settings.key(),
    )


COMMAND = Command(
    "dipaco-serve",
    ServeSettings,
    _run,
    description="Serve a run to everything that speaks OpenAI's interface, with a page for people.",
)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
