"""A program that needs a blob looks for holders again, within a bound."""

from pathlib import Path

import numpy as np
import pytest

from dipaco.base.blobs import BlobStore
from dipaco.base.errors import IntegrityError, NetworkError, StorageError
from dipaco.base.kept_files import KeptFiles
from dipaco.modules.layout import layout_of
from dipaco.peer.exchange import fetching
from dipaco.peer.exchange.fetching import ContentFetcher, shard_bytes
from dipaco.protocol.config import ModelConfig
from dipaco.protocol.grid import Grid
from dipaco.protocol.plan import PathShard, ShardIndex
from dipaco.routing.tokens.token_files import token_dtype
from support.runs.make_plan import make_plan
from support.wire.exchanges import GRID, row_of

SHA = "a" * 64


class _Swarm:
    """The directory and the exchange of a swarm in which every fetch ends with the next error."""

    def __init__(self, *errors):
        self.errors, self.asked = list(errors), 0

    def find_blob_holders(self, sha256):
        return ("a peer",)

    def get(self, sha256, sources, *given, **options):
        self.asked, self.sources, self.options = self.asked + 1, sources, options
        if self.errors:
            raise self.errors.pop(0)
        return Path("here")


def _fetcher(swarm, folder, monkeypatch, **options):
    monkeypatch.setattr(fetching, "NEEDED_AGAIN_S", 0.0)
    plan = make_plan()
    stores = BlobStore(folder / "blobs"), KeptFiles(folder / "store")
    grid = Grid(plan.model, plan.grid)
    return ContentFetcher(swarm, swarm, *stores, plan, grid, given_peers=["given"], **options)


def test_a_holder_that_has_just_gone_ends_no_program(tmp_path, monkeypatch):
    swarm = _Swarm(NetworkError("its address is not known"), NetworkError("it is busy"))
    said = []
    fetcher = _fetcher(swarm, tmp_path, monkeypatch, say=said.append)
    assert fetcher.needed_blob(SHA, "the tokenizer") == Path("here")
    assert swarm.asked == 3
    assert len(said) == 1, said
    # Whatever the swarm says, the given addresses are asked too.
    assert swarm.sources == ("a peer", "given")


@pytest.mark.parametrize("error", [NetworkError("nobody answers"), IntegrityError("wrong bytes")])
def test_the_search_is_bounded_and_says_what_to_do(tmp_path, monkeypatch, error):
    monkeypatch.setattr(fetching, "NEEDED_LIMIT_S", -1.0)
    swarm = _Swarm(error)
    fetcher = _fetcher(swarm, tmp_path, monkeypatch)
    with pytest.raises(type(error), match=f"the tokenizer: {error}; start again"):
        fetcher.needed_blob(SHA, "the tokenizer")
    assert swarm.asked == 1


def test_a_contribution_is_waited_for_as_long_as_a_state_by_its_bytes(tmp_path, monkeypatch):
    """Somebody who sends a file very slowly would else hold up a reader for long."""
    swarm = _Swarm(*[NetworkError("it is slow")] * 2)
    fetcher = _fetcher(swarm, tmp_path, monkeypatch)
    limits_s = []
    for size in (1000, 8 * layout_of(GRID, "L0.E0").size):
        row = row_of(0, module="L0.E0", path=0, bytes=size)
        with pytest.raises(NetworkError):
            fetcher.contribution(row, ("a peer",))
        limits_s.append(swarm.options["timeout_s"])
    assert limits_s == [fetching.LEAST_FILE_TIMEOUT_S, pytest.approx(fetching.FETCH_TIMEOUT_S)]


@pytest.mark.parametrize("marked", [False, True], ids=["texts", "chats"])
def test_shards_are_as_large_as_they_are_written(marked):
    # Between 2^15 and 2^16 pieces, as SmolLM2 has, tokens of chats are wider than those of texts.
    model = ModelConfig(vocabulary_size=49_152, sequence_length=16)
    shard = PathShard(
        path=0, train_sha256="a" * 64, train_sequences=3, train_documents=3,
        validation_sha256="b" * 64, validation_sequences=2,
    )  # fmt: skip
    index = ShardIndex(sequence_length=16, paths=(shard,), marked=marked)
    row = np.zeros(16, token_dtype(49_152, marked=marked))
    expected = {"a" * 64: 3 * row.nbytes, "b" * 64: 2 * row.nbytes}
    assert shard_bytes(index, model) == expected


def test_a_base_that_is_more_than_the_disk_has_room_for_is_not_begun(tmp_path, monkeypatch):
    """Attack: an operator signs a run, or a successor, of petabytes, and serves zeros."""
    huge = {"block_count": 1024, "hidden_size": 2**17, "head_count": 2**10, "vocabulary_size": 2**20}
    swarm = _Swarm()
    plan = make_plan(model=ModelConfig(**huge))
    stores = BlobStore(tmp_path / "blobs"), KeptFiles(tmp_path / "store")
    fetcher = ContentFetcher(swarm, swarm, *stores, plan, Grid(plan.model, plan.grid))
    with pytest.raises(StorageError, match="the base model: it has up to .* and there is room for"):
        fetcher.blob(plan.blobs.base, "the base model")
    assert swarm.asked == 0
    assert fetcher.blob(plan.blobs.tokenizer, "the tokenizer") == Path("here")
