"""numstack.kernels.embedding_rows: what test_embedding.py does not see."""

import numpy as np
import pytest

from numstack.device import current_device
from numstack.kernels import embedding, embedding_rows
from numstack.kernels.embedding_groups.format import FEW, MANY
from tests.kernels.test_embedding import backward, inputs
from tests.support import assert_close


def test_slices():
    """C channels, slices of a warp, times FOUR channels of a lane."""
    for C, expected in ((8, (1, 1)), (128, (1, 1)), (136, (1, 2)), (768, (1, 6)), (776, (2, 4)), (1600, (3, 5))):
        assert embedding_rows.slices_of(C) == expected


@pytest.mark.parametrize("C", [776, 1024])
def test_channels_of_several_slices(C):
    """With and without a slice that has fewer channels than the others."""
    tokens, table, _, dout = inputs(3, 5, 7, C)
    got, _ = backward(tokens, dout, table, None, variant="rows_of_groups")
    assert_close(got, table + embedding.reference_backward(tokens, dout, len(table))[0], atol=1e-5)


@pytest.mark.parametrize("B", [1, 3, 9, 16])
def test_many_positions_and_few_texts(B):
    """A plan has rows with many positions in its last places, of which such a tile would not need any."""
    rng = np.random.default_rng(B)
    tokens = rng.permutation(np.repeat(np.arange(12, dtype=np.int32), [1, 2, FEW, FEW + 1, 20, MANY] * 2))
    tokens = tokens[: len(tokens) // B * B].reshape(B, -1)
    dout, table = (rng.standard_normal((*n, 8), dtype=np.float32) for n in (tokens.shape, (12,)))
    got, _ = backward(tokens, dout, table, None, variant="rows_of_groups")
    assert_close(got, table + embedding.reference_backward(tokens, dout, 12)[0], atol=1e-5)


def test_more_strips_than_blocks_that_sum_frequent_tokens():
    """Equal bits, whoever claims which."""
    n_summers = embedding_rows.SUMMERS * current_device().properties.multiprocessors
    C = embedding_rows.FOURS + 8  # three strips
    n_tokens = n_summers // 3 + 2
    rng = np.random.default_rng(0)
    tokens = rng.permutation(np.repeat(np.arange(n_tokens, dtype=np.int32), MANY + 5)).reshape(1, -1)
    dout, table = (rng.standard_normal((*n, C), dtype=np.float32) for n in (tokens.shape, (n_tokens,)))
    got, _ = backward(tokens, dout, table, None, variant="rows_of_groups")
    assert_close(got, table + embedding.reference_backward(tokens, dout, n_tokens)[0], rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(got, backward(tokens, dout, table, None, variant="rows_of_groups")[0])
