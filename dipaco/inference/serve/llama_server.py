"""llama.cpp's own server of one path, in a process of its own.

llama.cpp ends its process when something is wrong in it, so it is never in the process of
`dipaco-serve`. It listens on a Unix socket in a folder that only this user opens, and needs no
port and no key. `python -m dipaco.inference.serve.llama_server` is that process: it reads its
parameters, a line of JSON, and ends when its input is closed, so also when the process that
started it was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import select
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass

import aiohttp

from dipaco.base.errors import DipacoError

_READY = b"ready\n"
# Until then a large file has been read from a slow disk.
_START_LIMIT_S = 600.0
_END_LIMIT_S = 2.0
# So much of llama.cpp's output is kept to explain why it ended.
_LINES_KEPT = 20
# How it writes an error.
_ERROR = re.compile(r"[\d.]+ E (.*)")
# Tokens of prompts that are computed together.
_READ_AT_ONCE = 512
# The sampling of dipaco-generate, for requests that say nothing.
_TEMPERATURE, _TOP_K = 0.8, 50


class LlamaServerError(DipacoError):
    """A server of llama.cpp did not start, or has ended."""


@dataclass(frozen=True)
class LlamaParameters:
    """What a server is told."""

    name: str
    """What the model is called in answers."""
    model: str
    """A GGUF file, which is mapped: servers of the same file have it in memory once."""
    adapter: str | None
    """A GGUF file of adapters that are put on the model."""
    socket: str
    """The Unix socket to listen on; its name ends with `.sock`."""
    context: int
    """Tokens that a prompt and its answer may have together."""
    slots: int
    """How many answers are computed together."""
    threads: int | None
    """None: as many as there are cores."""
    is_exact: bool
    """Keys and values are kept in fp32, as `dipaco-generate` does, not in 16 bits."""
    uses_gpu: bool
    chat_template: str | None
    """Jinja; None for the one in the model's file."""


class LlamaServer:
    """The process of a server. Wait until it is ready, and close it.

    Raises LlamaServerError when the process cannot be started.
    """

    def __init__(self, parameters: LlamaParameters) -> None:
        self.socket = parameters.socket
        self._is_ready = False
        self._said: deque[str] = deque(maxlen=_LINES_KEPT)
        # A session of its own, so that Ctrl+C is for dipaco-serve alone. With -P nothing in the
        # present folder takes the place of a library.
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                # It would start a debugger to say where it aborts.
                env={**os.environ, "GGML_NO_BACKTRACE": "1"},
            )  # fmt: skip
        except OSError as error:
            raise LlamaServerError(f"llama.cpp cannot be started: {error}") from None
        self._listening = threading.Thread(
            target=self._listen, name="what llama.cpp says", daemon=True
        )
        self._listening.start()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it ended already, and the wait for it tells why
            self._process.stdin.write(json.dumps(dataclasses.asdict(parameters)).encode() + b"\n")
            self._process.stdin.flush()

    def wait_until_ready(self, limit_s: float = _START_LIMIT_S) -> None:
        """Return when it listens. Raises LlamaServerError when it ends first, or is too slow."""
        output = self._process.stdout
        assert output is not None
        came, _, _ = select.select([output], [], [], limit_s)
        if not came:
            raise LlamaServerError(f"llama.cpp did not start within {limit_s:.0f} s")
        if output.readline() != _READY:
            raise LlamaServerError(f"llama.cpp did not start: {self.reason()}")
        self._is_ready = True

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def has_ended(self, limit_s: float) -> bool:
        """Wait so long for the process to end; return whether it has."""
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    async def is_silent(self, limit_s: float) -> bool:
        """Tell whether it says nothing for so long of what it computes: then it hangs."""
        try:
            async with (
                asyncio.timeout(limit_s),
                aiohttp.ClientSession(
                    connector=aiohttp.UnixConnector(self.socket),
                    timeout=aiohttp.ClientTimeout(total=None),
                ) as session,
                # Answered between two batches of tokens, unlike /health.
                session.get("http://localhost/slots") as answer,
            ):
                await answer.read()
        except TimeoutError:
            return True
        except aiohttp.ClientError:
            pass  # it has ended, which whoever asks it finds
        return False

    def reason(self) -> str:
        """Return why the process ended, as far as it said so."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_LIMIT_S)
            # Its last lines may still be on their way.
            self._listening.join(_END_LIMIT_S)
        code = self._process.returncode
        how = "it was stopped" if code is None else f"exit code {code}"
        if code is not None and code < 0:
            how = f"signal {-code}"
        said = [line for line in self._said if line.strip()]
        # At the start, the first error is the cause of the others; later, it belongs to some
        # request.
        errors = [match[1] for line in said if (match := _ERROR.match(line))]
        return ": ".join([how, *(said[-1:] if self._is_ready else errors[:1] or said[-1:])])

    def close(self) -> None:
        """End the process. Bounded."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        with contextlib.suppress(OSError):
            os.unlink(self.socket)

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile
            assert self._process.stderr is not None
            for line in self._process.stderr:
                self._said.append(line.decode("utf-8", "replace").rstrip())


def _serve(parameters: LlamaParameters) -> None:
    """Run the server until the input is closed."""
    import xllamacpp

    given = xllamacpp.CommonParams()
    given.model.path = parameters.model
    given.model_alias = {parameters.name}
    if parameters.adapter is not None:
        given.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(parameters.adapter, 1.0)]
    given.hostnames = [parameters.socket]
    given.n_ctx = parameters.context * parameters.slots
    given.n_parallel = parameters.slots
    # llama.cpp ends where it is not a multiple and vectors are asked for.
    given.n_batch = given.n_ubatch = _READ_AT_ONCE // parameters.slots * parameters.slots
    if parameters.threads is not None:
        given.cpuparams.n_threads = given.cpuparams_batch.n_threads = parameters.threads
    if parameters.is_exact:
        given.cache_type_k = given.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        given.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    given.n_gpu_layers = -1 if parameters.uses_gpu else 0
    # What is asked for is what there is: nothing is fitted to the memory, and no memory is taken
    # for prompts of the past or for weights in another order.
    given.fit_params = False
    given.cache_ram_mib = 0
    given.no_extra_bufts = True
    given.embedding = True
    given.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    if parameters.chat_template is not None:
        given.chat_template = parameters.chat_template
    given.sampling.temp, given.sampling.top_k = _TEMPERATURE, _TOP_K
    given.sampling.top_p, given.sampling.min_p = 1.0, 0.0
    given.verbosity = 1
    try:
        server = xllamacpp.Server(given)  # noqa: F841
    except RuntimeError as error:  # llama.cpp has said why
        sys.exit(str(error))
    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()
    sys.stdin.buffer.read()
    # Threads of llama.cpp may be at work, and need not end what they do.
    os._exit(0)


if __name__ == "__main__":
    _serve(LlamaParameters(**json.loads(sys.stdin.buffer.readline())))
