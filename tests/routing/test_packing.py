import numpy as np
import pytest

from dipaco.routing.tokens.token_files import check_tokens, pack_documents, token_dtype


@pytest.mark.parametrize("seed", range(3))
def test_every_document_has_a_place_of_its_own(seed):
    lengths = np.random.default_rng(seed).integers(2, 65, 400)
    rows = pack_documents(lengths, 64)
    assert sorted(index for row in rows for index in row) == list(range(400))
    assert all(sum(lengths[row]) + len(row) - 1 <= 64 for row in rows)
    assert rows == pack_documents(lengths, 64)
    # Hardly more rows than there must be.
    assert len(rows) <= 1.1 * -(-int(lengths.sum() + 400) // 65)


def test_the_room_left_over_is_the_least():
    assert pack_documents([3, 8, 5, 4], 8) == [[1], [2], [3, 0]]
    assert pack_documents([3, 4, 2], 8) == [[1, 0], [2]]
    assert pack_documents([], 8) == []


def test_marked_tokens_have_a_sign():
    assert token_dtype(2**15, marked=True) == np.dtype("<i2")
    assert token_dtype(2**15 + 1, marked=True) == np.dtype("<i4")
    check_tokens(np.array([[99, ~99]], "<i2"), 100, "it")
    for tokens in ([[100]], [[~100]]):
        with pytest.raises(Exception, match="it holds the token 100, but"):
            check_tokens(np.array(tokens, "<i2"), 100, "it")
