"""Several machines that prepare one run in a shared folder: who does which piece of the work.

A claim is a file that exactly one machine can create. Its owner writes it again every few seconds;
one that has not changed for `expiry_s` is of a machine that died, and the next machine goes on
under the next number. What a piece makes is written whole or not at all and is the same whoever
makes it, so a machine that was only asleep does no harm. No clock is compared with another's.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TypeVar

import numpy as np
from dipaco.modules.errors import ConfigurationError
from dipaco.modules.files import atomic_write, storage_errors
from dipaco.routing.corpus import CorpusConfig, DocumentReader, Part, corpus_files, part_documents
from dipaco.routing.document_routing import DocumentRouter
from dipaco.routing.shards import chunks_of
from dipaco.routing.token_corpus import TokenCorpus, TokenCorpusWriter, write_token_corpora
from dipaco.routing.tokenizer import Tokenizer

T = TypeVar("T")
# Chunks of documents that are routed under one claim; more where there are very many chunks.
_CHUNKS_A_PIECE = 4
_MOST_PIECES = 1000


class ClaimLostError(Exception):
    """This machine was silent for so long that another has taken over what it was doing."""


@dataclass
class Team:
    """The machines that share `folder`; each has a Team of its own.

    `inputs` is a hash of what the run is made from; claims of machines that make something else
    are refused. `say` gets lines for the operator.
    """

    folder: Path
    inputs: str
    say: Callable[[str], None]
    expiry_s: float = 120.0
    beat_s: float = 10.0
    look_s: float = 1.0
    clock: Callable[[], float] = time.monotonic
    wait: Callable[[float], None] = time.sleep
    name: str = field(
        default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    )

    def __post_init__(self) -> None:
        with storage_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._held: Path | None = None
        self._seen: dict[Path, tuple[bytes, float]] = {}
        self._told = ""

    def alone(self, name: str, done: Callable[[], T | None], make: Callable[[], T]) -> T:
        """Return what `done` gives, once one machine of the team has made it; perhaps this one."""
        while (found := done()) is None:
            with contextlib.suppress(ClaimLostError), self._claim(name) as is_ours:
                if is_ours:
                    found = done()
                    return make() if found is None else found
            self._pause(name)
        return found

    def share(
        self,
        pieces: Sequence[str],
        is_done: Callable[[str], bool],
        work: Callable[[str], None],
        is_over: Callable[[], bool],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Do pieces that no other machine does, until all are done, or `is_over`."""
        while not is_over() and (left := [piece for piece in pieces if not is_done(piece)]):
            worked = False
            for place, piece in enumerate(left):
                if is_done(piece) or is_over():
                    continue
                with contextlib.suppress(ClaimLostError), self._claim(piece) as is_ours:
                    if is_ours and not is_done(piece):
                        work(piece)
                        worked = True
                progress(len(pieces) - len(left) + place + 1, len(pieces))
            if not worked:
                self._pause(left[0])

    def check(self) -> None:
        """Raise ClaimLostError if another machine has taken over what this one is doing."""
        if self._held is not None and self._is_lost(self._held):
            raise ClaimLostError(self._held.name)

    @contextlib.contextmanager
    def _claim(self, name: str) -> Iterator[bool]:
        """Hold a claim during the body; it gets whether there is one."""
        path = self._create(name)
        if path is None:
            yield False
            return
        stopped = threading.Event()
        beating = threading.Thread(target=self._beat, args=(path, stopped), daemon=True)
        self._held = path
        beating.start()
        try:
            yield True
        finally:
            self._held = None
            stopped.set()
            beating.join()
            # Of its own number and of the dead before it; never of whoever came after.
            for number, file in self._claims(name):
                if number <= _number(path):
                    file.unlink(missing_ok=True)

    def _create(self, name: str) -> Path | None:
        """Create the claim, or the next one if that there is is dead; None if somebody has it."""
        claims = self._claims(name)
        number = 0
        if claims:
            number, newest = claims[-1]
            if not self._is_dead(newest):
                return None
            number += 1
        path = self.folder / f"{name}.{number:06d}"
        with storage_errors(self.folder):
            try:
                with path.open("xb") as file:
                    file.write(self._content(0))
            except FileExistsError:
                return None
        if number:
            self.say(f"{name}: goes on here; the machine that did it is silent")
        return path

    def _is_dead(self, path: Path) -> bool:
        """Tell whether a claim has not changed for too long, as seen from here."""
        try:
            content = path.read_bytes()
        except OSError:
            return False
        before, since_s = self._seen.get(path, (b"", 0.0))
        if content != before:
            owner, _, inputs = content.decode(errors="replace").partition("\n")
            if inputs and inputs.split("\n")[0] != self.inputs:
                raise ConfigurationError(
                    f"{owner} prepares another run in {self.folder.parent}: its RUN.toml differs, "
                    f"or the sizes or times of the data files; give --out another folder, or try "
                    f"again in {self.expiry_s:.0f} s if that was stopped"
                )
            self._seen[path] = (content, self.clock())
            return False
        return self.clock() - since_s > self.expiry_s

    def _claims(self, name: str) -> list[tuple[int, Path]]:
        found = [path for path in self.folder.glob(f"{name}.*") if path.suffix[1:].isdecimal()]
        return sorted((_number(path), path) for path in found)

    def _is_lost(self, path: Path) -> bool:
        claims = self._claims(path.stem)
        return not claims or claims[-1][1] != path

    def _beat(self, path: Path, stopped: threading.Event) -> None:
        beats = 0
        while not stopped.wait(self.beat_s):
            beats += 1
            if self._is_lost(path):
                return
            # Not by another file that replaces it: that could bring a lost claim back.
            with contextlib.suppress(OSError), path.open("r+b") as file:
                file.write(self._content(beats))

    def _content(self, beats: int) -> bytes:
        return f"{self.name}\n{self.inputs}\n{beats:012d}\n".encode()

    def _pause(self, name: str) -> None:
        claims = self._claims(name)
        if claims and name != self._told:
            self._told = name
            with contextlib.suppress(OSError):
                owner = claims[-1][1].read_bytes().decode(errors="replace").split("\n")[0]
                self.say(f"waiting for {owner}: {name}")
        self.wait(self.look_s)


def _number(claim: Path) -> int:
    return int(claim.suffix[1:])


class SharedTokens:
    """A corpus of files as tokens, each file a piece of its own."""

    def __init__(self, config: CorpusConfig, folder: Path, vocabulary_size: int) -> None:
        self._config = config
        self._folder = folder
        self._vocabulary_size = vocabulary_size
        parts: tuple[Part, ...] = ("train", "validation") if config.validation else ("train",)
        self.pieces: dict[str, tuple[Part, int]] = {
            f"tokens-{part}-{number:05d}": (part, number)
            for part in parts
            for number in range(len(corpus_files(config, part)))
        }

    @staticmethod
    def can_be(config: CorpusConfig) -> bool:
        """Tell whether the documents of a file depend on no other file."""
        return not (config.hub or config.train_limit or config.validation_limit)

    def is_done(self, piece: str) -> bool:
        """Tell whether the tokens of a file are there."""
        return (self._folder / piece).is_dir()

    def work(self, piece: str, tokenizer: Tokenizer, threads: int, owner: str) -> None:
        """Make the tokens of a file; they appear all at once."""
        part, number = self.pieces[piece]
        unfinished = self._folder / f"{piece}.{owner}"
        shutil.rmtree(unfinished, ignore_errors=True)
        writers = [
            TokenCorpusWriter(unfinished / name, self._vocabulary_size, piece)
            for name in ("train", "validation")
        ]
        reader = DocumentReader(self._config, part, only=number)
        documents = part_documents(self._config, part, reader)
        for _ in write_token_corpora(documents, tokenizer, *writers, threads=threads):
            pass
        with storage_errors(self._folder):
            try:
                unfinished.rename(self._folder / piece)
            except OSError:
                if not self.is_done(piece):
                    raise
                shutil.rmtree(unfinished, ignore_errors=True)

    def merge(self, writers: dict[str, TokenCorpusWriter]) -> None:
        """Put all pieces together, in the order of the files."""
        for piece in self.pieces:
            for name, writer in writers.items():
                writer.add_corpus(TokenCorpus(self._folder / piece / name, self._vocabulary_size))


class SharedRoutes:
    """The best paths of all documents, some chunks of documents a piece."""

    def __init__(self, corpora: dict[str, TokenCorpus], counts: dict[str, int], folder: Path):
        self._corpora = corpora
        self._counts = counts
        self._folder = folder
        self.pieces: dict[str, tuple[str, list[range]]] = {}
        self._piece_of: dict[tuple[str, int], tuple[str, int]] = {}
        for part, corpus in corpora.items():
            chunks = list(chunks_of(corpus))
            each = max(_CHUNKS_A_PIECE, -(-len(chunks) // _MOST_PIECES))
            for number, start in enumerate(range(0, len(chunks), each)):
                piece = f"routes-{part}-{number:05d}"
                self.pieces[piece] = (part, chunks[start : start + each])
                for chunk in chunks[start : start + each]:
                    self._piece_of[part, chunk.start] = (piece, chunk.start - chunks[start].start)

    def is_done(self, piece: str) -> bool:
        """Tell whether the documents of a piece are routed."""
        return self._file(piece).is_file()

    def work(self, piece: str, router: DocumentRouter) -> None:
        """Route the documents of a piece, chunk by chunk, as one machine alone would."""
        part, chunks = self.pieces[piece]
        corpus = self._corpora[part]
        found = [
            router.nearest_paths(
                [corpus.document(index) for index in chunk],
                self._counts[part],
                [corpus.label_name(index) for index in chunk],
            )
            for chunk in chunks
        ]
        content = BytesIO()
        np.save(content, np.concatenate(found))
        atomic_write(self._file(piece), content.getvalue())

    def paths(self, part: str, chunk: range) -> np.ndarray:
        """Return the best paths of the documents of a chunk, int64 [N, count]."""
        piece, first = self._piece_of[part, chunk.start]
        routes: np.ndarray = np.load(self._file(piece), mmap_mode="r", allow_pickle=False)
        return np.asarray(routes[first : first + len(chunk)])

    def _file(self, piece: str) -> Path:
        return self._folder / f"{piece}.npy"
