"""Where the pieces of preparation are worked on: in this process, in others, or on a Dask cluster.

The work is a map over pieces: chunks of documents to tokenise or to route, paths to score. This
process reads the documents and writes what comes back, in their order, so the run is the same
wherever the pieces were done.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

import torch

from dipaco.base.errors import ConfigurationError, NetworkError, StorageError

_PieceT = TypeVar("_PieceT")
_DoneT = TypeVar("_DoneT")
# Pieces of a few MB that are read ahead of what is being done, at most: one for each worker.
_MORE_AHEAD = 32
_DASK_TIMEOUT_S = 30.0


class Workers:
    """Does pieces through an executor, or without one here; `count` are done at a time.

    `lost` are the errors that say that a worker is gone, and `remedy` is what to do then.
    """

    def __init__(
        self,
        executor: Executor | None = None,
        count: int = 1,
        lost: tuple[type[BaseException], ...] = (BrokenProcessPool,),
        remedy: str = "give the same command with fewer --workers",
    ) -> None:
        self._executor = executor
        self._ahead = count + min(count, _MORE_AHEAD)
        self._lost, self._remedy = lost, remedy

    def map(
        self, function: Callable[[_PieceT], _DoneT], pieces: Iterable[_PieceT], /
    ) -> Iterator[_DoneT]:
        """Yield what `function` makes of the pieces, in their order; few are read ahead.

        Raises what `function` raises, StorageError when a worker is gone.
        """
        if self._executor is None:
            yield from map(function, pieces)
            return
        waiting: deque[Future[_DoneT]] = deque()
        try:
            for piece in pieces:
                waiting.append(self._executor.submit(function, piece))
                if len(waiting) > self._ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except self._lost as error:
            reason = f" ({type(error).__name__})" if str(error) else ""
            raise StorageError(
                f"a worker has died{reason}, most likely for lack of memory; to continue from "
                f"here, {self._remedy}"
            ) from None
        finally:
            for future in waiting:
                future.cancel()


@contextmanager
def open_workers(count: int = 1, dask: str | None = None) -> Iterator[Workers]:
    """Open `count` processes on this machine, or the Dask cluster at an address; close them after.

    The workers of a cluster must see the run folder under the same name. Raises
    ConfigurationError without Dask, NetworkError when nothing answers at the address.
    """
    if dask is not None:
        with _dask_workers(dask) as workers:
            yield workers
        return
    if count == 1:
        yield Workers()
        return
    threads = max(1, torch.get_num_threads() // count)
    executor = ProcessPoolExecutor(
        count, multiprocessing.get_context("spawn"), _begin, (threads, os.getpid())
    )
    try:
        yield Workers(executor, count)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _begin(threads: int, parent: int) -> None:
    """Begin a worker process: Ctrl+C is for its parent, and it ends when that is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _dask_workers(address: str) -> Iterator[Workers]:
    try:
        from dask.distributed import Client
        from distributed import KilledWorker
        from distributed.comm.core import CommClosedError
    except ImportError:
        raise ConfigurationError("--dask needs Dask: pip install 'dipaco[dask]'") from None
    try:
        client = Client(address, timeout=_DASK_TIMEOUT_S)
    except (OSError, TimeoutError, ValueError) as error:
        raise NetworkError(f"no Dask scheduler answers at {address}: {error}") from None
    with client:
        threads = sum(client.nthreads().values())
        if not threads:
            raise NetworkError(f"the Dask cluster at {address} has no workers; start some first")
        executor = client.get_executor(pure=False)
        try:
            lost = (KilledWorker, CommClosedError, CancelledError, asyncio.CancelledError)
            remedy = "see to the workers of the cluster, and give the same command again"
            yield Workers(executor, threads, lost, remedy)
        finally:
            executor.shutdown(wait=False)
