"""The windows in which a document is scored: every token counts once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dipaco.base.errors import ConfigurationError
from dipaco.protocol.config import PAD_TOKEN
from dipaco.routing.tokens.token_files import scoring_windows


@given(st.integers(0, 300), st.integers(2, 40), st.data())
def test_every_token_behind_the_prefix_is_scored_once(length, sequence_length, data):
    prefix = data.draw(st.integers(1, sequence_length - 1))
    document = np.arange(100, 100 + length)  # every token is different
    rows = scoring_windows(document, sequence_length, prefix, PAD_TOKEN)
    assert rows.shape[1] == sequence_length
    scored = rows[:, prefix:].reshape(-1)
    assert scored[scored != PAD_TOKEN].tolist() == document[prefix:].tolist()
    for row in rows:  # the context of a window is what stands before it in the document
        present = row[row != PAD_TOKEN]
        assert np.array_equal(present, np.arange(present[0], present[0] + len(present)))
    assert len(rows) == 0 or (rows[-1, prefix:] != PAD_TOKEN).any()


def test_short_documents_and_padding():
    assert scoring_windows([1, 2], 8, 2, PAD_TOKEN).shape == (0, 8)
    assert scoring_windows([], 8, 2, PAD_TOKEN).shape == (0, 8)
    assert scoring_windows([5, 6, 7], 6, 2, PAD_TOKEN).tolist() == [[5, 6, 7, *3 * [PAD_TOKEN]]]


@pytest.mark.parametrize("prefix", [0, 8, 9])
def test_a_prefix_must_leave_something(prefix):
    with pytest.raises(ConfigurationError, match="prefix_tokens"):
        scoring_windows([1, 2, 3], 8, prefix, PAD_TOKEN)
