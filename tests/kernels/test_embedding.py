"""numstack.kernels.embedding: forward and both backward variants against float64."""

import numpy as np
import pytest

from numstack.device import offline
from numstack.errors import DTypeError, ShapeError
from numstack.kernels import embedding, embedding_parts
from numstack.kernels import embedding_clusters as clusters
from numstack.kernels import embedding_owned as owned
from numstack.kernels import embedding_vectors as by_vectors
from numstack.kernels.rows import row_of
from numstack.kernels.warp import WARP
from tests.support import BFLOAT16, assert_close, poisoned, to_device, to_host

# B, T, V, C
SHAPES = {
    "one of everything": (1, 1, 1, 1),
    "one channel past a warp": (3, 7, 5, 33),
    "one token past a block, one channel past a block": (3, 43, 84, embedding.BLOCK + 1),
    "more rows of the table than threads that scan it": (2, 9, embedding.SCANNERS + 1, 8),
    "no token": (0, 4, 5, 8),
    "texts past a thread's, channels past a warp's": (by_vectors.TEXTS + 1, 9, 7, 4 * WARP + 8),
    "channels of whole warps": (3, 5, 7, 4 * WARP),
    "texts past a chunk's, times past a warp's": (clusters.TEXTS_OF_CHUNK + 1, WARP + 3, 6, 8),
}
BY_OWNERS = [name for name in ("owned_rows", "rows_of_clusters") if name in embedding.BACKWARD.runnable()]


def shapes(variant: str) -> dict[str, tuple[int, ...]]:
    """Those that the variant supports."""
    whole = variant in ("vectors", *BY_OWNERS)
    return {what: shape for what, shape in SHAPES.items() if not whole or shape[3] % by_vectors.VECTOR == 0}


def inputs(B: int, T: int, V: int, C: int) -> tuple[np.ndarray, ...]:
    """Tokens (skewed, as words are; the first and the last of the table among them), the tables, dout."""
    rng = np.random.default_rng(B + 10 * T + 1000 * V + 100000 * C)
    tokens = np.minimum(rng.exponential(V / 4, (B, T)), V - 1).astype(np.int32)
    if tokens.size > 1:
        tokens[0, 0], tokens[-1, -1] = 0, V - 1
    return tokens, *(rng.standard_normal(shape, dtype=np.float32) for shape in ((V, C), (T, C), (B, T, C)))


def forward(tokens, table, positions, dtype=np.float32, **options) -> np.ndarray:
    out = to_device(poisoned((*tokens.shape, table.shape[1]), dtype))
    on_device = None if positions is None else to_device(positions)
    embedding.forward(to_device(tokens), to_device(table), on_device, out, **options)
    return to_host(out)


def backward(tokens, dout, dtable, dpositions, **options) -> tuple[np.ndarray, np.ndarray | None]:
    """What the gradients hold after dout was added to them."""
    table, positions = to_device(dtable), None if dpositions is None else to_device(dpositions)
    workspace = to_device(poisoned(embedding.workspace_size(*tokens.shape, len(dtable)), np.int32))
    embedding.backward(to_device(tokens), to_device(dout), table, positions, workspace, **options)
    return to_host(table), None if positions is None else to_host(positions)


@pytest.mark.parametrize("variant", embedding.FORWARD.runnable())
def test_forward_at_every_shape(variant):
    for what, shape in shapes(variant).items():
        tokens, table, positions, _ = inputs(*shape)
        for p in (positions, None):
            out = forward(tokens, table, p, variant=variant)
            assert_close(out, embedding.reference(tokens, table, p), what=what)


@pytest.mark.parametrize("variant", embedding.BACKWARD.runnable())
def test_backward_adds_at_every_shape(variant):
    for what, shape in shapes(variant).items():
        tokens, table, positions, dout = inputs(*shape)
        expected = embedding.reference_backward(tokens, dout, len(table))
        got = backward(tokens, dout, table, positions, variant=variant)
        assert_close(got[0], table + expected[0], atol=1e-5, what=f"dtoken_table of {what}")
        assert_close(got[1], positions + expected[1], atol=1e-5, what=f"dposition_table of {what}")
        got = backward(tokens, dout, table, None, variant=variant)
        assert_close(got[0], table + expected[0], atol=1e-5, what=f"dtoken_table alone of {what}")


def test_reference_backward_is_the_transpose_of_forward():
    """Forward is linear in the tables, so <dout, forward(tables)> = <backward(dout), tables>."""
    tokens, table, positions, dout = inputs(3, 7, 5, 4)
    dtable, dpositions = embedding.reference_backward(tokens, dout, len(table))
    left = (embedding.reference(tokens, table, positions) * dout).sum()
    assert abs(left - (dtable * table).sum() - (dpositions * positions).sum()) < 1e-12


@pytest.mark.parametrize("variant", embedding.BACKWARD.runnable())
def test_all_tokens_equal(variant):
    """The largest group there can be."""
    tokens = np.full((4, 50), 2, np.int32)
    dout = np.random.default_rng(0).standard_normal((4, 50, 8), dtype=np.float32)
    table, _ = backward(tokens, dout, np.zeros((3, 8), np.float32), None, variant=variant)
    expected = np.zeros((3, 8))
    expected[2] = dout.sum(axis=(0, 1), dtype=np.float64)
    assert_close(table, expected, atol=1e-5)


@pytest.mark.parametrize("variant", BY_OWNERS)
def test_long_lists_of_one_token(variant):
    """More positions than a warp sums, than a block looks at at once, and than it sums at once."""
    window = embedding_parts.A_THREAD * WARP * owned.FEW.warps
    few, many = embedding_parts.SHORT + 1, 2 * window + 5
    rng = np.random.default_rng(0)
    for n_ones, n in ((few, 3 * few), (many, window + many)):
        tokens = np.full(n, 1, np.int32)
        tokens[rng.permutation(n)[n_ones:]] = rng.integers(2, 40, n - n_ones)
        dout = rng.standard_normal((n, 8), dtype=np.float32)
        table = rng.standard_normal((40, 8), dtype=np.float32)
        arrays = (tokens[None], dout[None], table, None)
        got, _ = backward(*arrays, variant=variant)
        assert_close(got, table + embedding.reference_backward(tokens[None], dout[None], 40)[0], rtol=1e-5, atol=1e-4)
        np.testing.assert_array_equal(got, backward(*arrays, variant=variant)[0])


@pytest.mark.parametrize("variant", BY_OWNERS)
def test_a_long_list_of_a_whole_row(variant):
    """Channels of which a lane has MOST_FOURS at once, and a number of positions that not all warps share evenly."""
    C = WARP * embedding_parts.FOUR * embedding_parts.MOST_FOURS
    rng = np.random.default_rng(0)
    tokens = np.where(rng.random((1, 99)) < 0.7, 1, rng.integers(0, 40, (1, 99))).astype(np.int32)
    dout = rng.standard_normal((1, 99, C), dtype=np.float32).astype(BFLOAT16)
    table = rng.standard_normal((40, C), dtype=np.float32)
    got, _ = backward(tokens, dout, table, None, variant=variant)
    assert (tokens == 1).sum() > embedding_parts.SHORT
    assert_close(got, table + embedding.reference_backward(tokens, dout, 40)[0], rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(got, backward(tokens, dout, table, None, variant=variant)[0])


@pytest.mark.parametrize("variant", BY_OWNERS)
def test_more_tokens_and_rows_than_a_block_takes_at_once(variant):
    tokens, table, positions, dout = inputs(3, 7001, 3000, 8)
    expected = embedding.reference_backward(tokens, dout, len(table))
    got = backward(tokens, dout, table, positions, variant=variant)
    assert_close(got[0], table + expected[0], rtol=1e-5, atol=1e-4)
    assert_close(got[1], positions + expected[1], atol=1e-5)


def test_a_cluster_has_room():
    """For the most rows of a block."""
    assert clusters.shared_bytes(embedding_parts.MOST_ROWS) + 4096 < 232_448
    assert embedding_parts.owners(50304, 120) == 120 and embedding_parts.owners(128256, 120) == 360


@pytest.mark.parametrize("variant", embedding.FORWARD.runnable())
def test_tokens_outside_the_table_give_nan(variant):
    out = forward(np.array([[0, -1, 3, 2**31 - 1]], np.int32), np.ones((3, 8), np.float32), None, variant=variant)
    assert (out[0, 0] == 1).all() and np.isnan(out[0, 1:]).all()


@pytest.mark.parametrize("variant", embedding.BACKWARD.runnable())
def test_tokens_outside_the_table_give_no_gradient(variant):
    tokens = np.array([[0, -1, 3, 2**31 - 1]], np.int32)
    got, _ = backward(tokens, np.ones((1, 4, 8), np.float32), np.ones((3, 8), np.float32), None, variant=variant)
    assert_close(got, np.array([2, 1, 1])[:, None] * np.ones((3, 8)))


@pytest.mark.parametrize(
    ("dtype", "of_forward", "variant"),
    [
        (BFLOAT16, "warp_per_row", "counting_sort"),
        *((BFLOAT16, "vectors", variant) for variant in BY_OWNERS),
        (np.dtype(np.float16), "vectors", "counting_sort"),
    ],
    ids=str,
)
def test_sixteen_bits(dtype, of_forward, variant):
    tokens, table, positions, dout = inputs(3, 7, 5, 40)
    table, positions, dout = (a.astype(dtype) for a in (table, positions, dout))
    stored = np.uint16 if dtype == BFLOAT16 else dtype
    out = forward(tokens, table, positions, stored, variant=of_forward).view(dtype)
    assert_close(out, embedding.reference(tokens, table, positions), dtype=str(dtype))
    expected = embedding.reference_backward(tokens, dout, len(table))
    got = backward(tokens, dout, np.zeros_like(table), np.zeros_like(positions), variant=variant)
    for a, b in zip(got, expected, strict=True):
        assert_close(a.view(dtype), b, dtype=str(dtype))
    # Gradients in float32, as training keeps them, get the sums unrounded.
    zeros = (np.zeros(table.shape, np.float32), np.zeros(positions.shape, np.float32))
    got = backward(tokens, dout, *zeros, variant=variant)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, atol=1e-5)


@pytest.mark.parametrize("variant", embedding.BACKWARD.runnable())
def test_equal_bits_on_every_run(variant):
    tokens, table, positions, dout = inputs(3, 43, 84, 40)
    runs = (backward(tokens, dout, table, positions, variant=variant) for _ in range(2))
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("variant", embedding.BACKWARD.runnable())
def test_under_checks(under_checks, variant):
    tokens, table, positions, dout = inputs(2, 9, 7, 40 if variant in BY_OWNERS else 35)
    of_forward = "vectors" if variant in BY_OWNERS else "warp_per_row"
    out = forward(tokens, table, positions, variant=of_forward)
    assert_close(out, embedding.reference(tokens, table, positions))
    got = backward(tokens, dout, table, positions, variant=variant)
    expected = embedding.reference_backward(tokens, dout, len(table))
    assert_close(got[0], table + expected[0], atol=1e-5)
    assert_close(got[1], positions + expected[1], atol=1e-5)


def test_a_long_list_under_checks(under_checks):
    tokens = np.full((1, embedding_parts.SHORT + 3), 1, np.int32)
    tokens[0, 5] = 0
    dout = np.random.default_rng(0).standard_normal((*tokens.shape, 8), dtype=np.float32)
    got, _ = backward(tokens, dout, np.zeros((3, 8), np.float32), None, variant="owned_rows")
    assert_close(got, embedding.reference_backward(tokens, dout, 3)[0], atol=1e-5)


def test_defaults_on_a_gpu():
    with offline.device("sm_90a") as device:
        table = device.array((4, 768), np.uint16)
        for row, forward_name in (
            (row_of(768, table), "vectors"),
            (row_of(768, table, device.array((4, 768), np.float32)), "warp_per_row"),
        ):
            assert embedding.FORWARD.pick(None, row, 4).name == forward_name
            assert embedding.BACKWARD.pick(None, row, 4).name == "rows_of_clusters"
        assert embedding.BACKWARD.pick(None, row, 2**25).name == "counting_sort"
        assert embedding.BACKWARD.pick(None, row_of(36, table), 4).name == "counting_sort"


def test_bad_arguments():
    tokens, table, positions, dout = inputs(3, 7, 5, 4)
    with pytest.raises(DTypeError, match="embedding: tokens_BT has dtype int64; expected int32"):
        forward(tokens.astype(np.int64), table, positions)
    with pytest.raises(ShapeError, match=r"embedding: position_table_TC has shape \(6, 4\); expected \(7, 4\)"):
        forward(tokens, table, positions[:6])
    with pytest.raises(ShapeError, match=r"embedding: dout_BTC has shape \(3, 7, 3\); expected \(3, 7, 4\)"):
        backward(tokens, dout[:, :, :3].copy(), table, positions)
    with pytest.raises(ShapeError, match=r"embedding: workspace has shape .* at least 48 elements"):
        embedding.backward(tokens, dout, table, positions, np.empty(46, np.int32))
