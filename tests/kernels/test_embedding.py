"""numstack.kernels.embedding: forward and backward variants against float64."""

import numpy as np
import pytest

from numstack.device import offline
from numstack.errors import ConfigError, DTypeError, ShapeError
from numstack.kernels import embedding, embedding_tiles
from numstack.kernels import embedding_vectors as by_vectors
from numstack.kernels.embedding_groups import group
from numstack.kernels.embedding_groups.format import FEW, MANY, ROWS
from numstack.kernels.rows import row_of
from numstack.kernels.warp import WARP
from tests.support import BFLOAT16, assert_close, poisoned, to_device, to_host

# B, T, V, C
SHAPES = {
    "one of everything": (1, 1, 1, 1),
    "one channel past a warp": (3, 7, 5, 33),
    "one token past a block, one channel past a block": (3, 43, 84, embedding.BLOCK + 1),
    "more rows of the table than threads of a block": (2, 9, 1025, 8),
    "no token": (0, 4, 5, 8),
    "texts past a thread's, times and channels past a block's": (
        by_vectors.TEXTS + 1, by_vectors.TIMES + 1, 7, by_vectors.SLICE * by_vectors.VECTOR + 8,
    ),
    "channels of whole warps": (3, 5, 7, 4 * WARP),
    "texts past a tile's, times past a warp's": (ROWS + 1, WARP + 3, 60, 8),
}  # fmt: skip
BY_VECTORS = [name for name in ("rows_of_groups", "tiles_of_times") if name in embedding.BACKWARD.runnable()]


def shapes(variant: str) -> dict[str, tuple[int, ...]]:
    """Those that the variant supports."""
    whole = variant in ("vectors", *BY_VECTORS)
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
    tokens = to_device(tokens)
    groups = to_device(poisoned(embedding.groups_size(*tokens.shape, len(dtable)), np.int32))
    group(tokens, groups, len(dtable))
    embedding.backward(tokens, to_device(dout), table, positions, groups, **options)
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
        if variant != "tiles_of_times":
            got = backward(tokens, dout, table, None, variant=variant)
            assert_close(got[0], table + expected[0], atol=1e-5, what=f"dtoken_table alone of {what}")


def test_reference_backward_is_the_transpose_of_forward():
    """Forward is linear in the tables, so <dout, forward(tables)> = <backward(dout), tables>."""
    tokens, table, positions, dout = inputs(3, 7, 5, 4)
    dtable, dpositions = embedding.reference_backward(tokens, dout, len(table))
    left = (embedding.reference(tokens, table, positions) * dout).sum()
    assert abs(left - (dtable * table).sum() - (dpositions * positions).sum()) < 1e-12


@pytest.mark.parametrize("variant", embedding.FORWARD.runnable())
@pytest.mark.parametrize("shape", [(3, 7, 5, 40), (ROWS + 1, 5, 3, 8), (0, 4, 5, 8), (5, 17, 40, 136)], ids=str)
def test_forward_leaves_groups_for_backward(variant, shape):
    tokens, table, positions, dout = inputs(*shape)
    out, groups = poisoned(dout.shape, np.float32), poisoned(embedding.groups_size(*shape[:3]), np.int32)
    on_device = [to_device(a) for a in (tokens, table, positions, out, groups)]
    embedding.forward(*on_device, variant=variant)
    assert_close(to_host(on_device[3]), embedding.reference(tokens, table, positions))
    got = [to_device(np.zeros_like(a)) for a in (table, positions)]
    embedding.backward(on_device[0], to_device(dout), *got, on_device[4])
    for a, b in zip(got, embedding.reference_backward(tokens, dout, len(table)), strict=True):
        assert_close(to_host(a), b, atol=1e-5)


@pytest.mark.parametrize("variant", embedding.BACKWARD.runnable())
def test_all_tokens_equal(variant):
    """The largest group there can be."""
    tokens = np.full((4, 50), 2, np.int32)
    dout = np.random.default_rng(0).standard_normal((4, 50, 8), dtype=np.float32)
    zeros = np.zeros((3, 8), np.float32), np.zeros((50, 8), np.float32)
    got = backward(tokens, dout, *zeros, variant=variant)
    for a, b in zip(got, embedding.reference_backward(tokens, dout, 3), strict=True):
        assert_close(a, b, atol=1e-5)


@pytest.mark.parametrize("variant", embedding.BACKWARD.runnable())
def test_groups_of_every_size(variant):
    """At each side of what a warp sums with others, alone, and with the rest of its block; two that are frequent."""
    sizes = [1, 2, 3, FEW - 1, FEW, FEW + 1, MANY - 1, MANY, MANY + 1, 5 * MANY + 3]
    rng = np.random.default_rng(0)
    tokens = rng.permutation(np.repeat(np.arange(len(sizes)), sizes)).astype(np.int32)
    tokens = tokens[: len(tokens) // 6 * 6].reshape(6, -1)
    C = 40 if variant == "scan" else 2 * embedding_tiles.BOX + 8
    dout = rng.standard_normal((*tokens.shape, C), dtype=np.float32)
    table, positions = (rng.standard_normal((n, C), dtype=np.float32) for n in (len(sizes), tokens.shape[1]))
    expected = embedding.reference_backward(tokens, dout, len(sizes))
    got = backward(tokens, dout, table, positions, variant=variant)
    assert_close(got[0], table + expected[0], rtol=1e-5, atol=1e-4)
    assert_close(got[1], positions + expected[1], atol=1e-5)
    again = backward(tokens, dout, table, positions, variant=variant)
    np.testing.assert_array_equal(got[0], again[0])


@pytest.mark.parametrize("variant", BY_VECTORS)
def test_more_tokens_and_rows_than_a_block_takes_at_once(variant):
    tokens, table, positions, dout = inputs(3, 7001, 3000, 8)
    expected = embedding.reference_backward(tokens, dout, len(table))
    got = backward(tokens, dout, table, positions, variant=variant)
    assert_close(got[0], table + expected[0], rtol=1e-5, atol=1e-4)
    assert_close(got[1], positions + expected[1], atol=1e-5)


@pytest.mark.parametrize("variant", embedding.BACKWARD.runnable())
def test_groups_serve_again(variant):
    """Blocks share work out by counters that lie in them."""
    tokens, table, positions, dout = (to_device(a) for a in inputs(3, 90, 5, 8))
    groups = to_device(poisoned(embedding.groups_size(3, 90, 5), np.int32))
    group(tokens, groups, 5)
    for _ in range(3):
        embedding.backward(tokens, dout, table, positions, groups, variant=variant)
    host = inputs(3, 90, 5, 8)
    for got, start, added in zip(
        (table, positions), host[1:3], embedding.reference_backward(host[0], host[3], 5), strict=True
    ):
        assert_close(to_host(got), start + 3 * added, rtol=1e-5, atol=1e-4)


def test_a_block_of_tiles_has_room():
    for itemsize in (2, 4):
        for C in (768, 1600):
            size = embedding_tiles.size_of(itemsize, C)
            assert embedding_tiles.shared_bytes(size, itemsize) <= 227 << 10
            assert size.warps == 16  # four for each scheduler, with 128 registers a thread


@pytest.mark.parametrize("variant", embedding.FORWARD.runnable())
def test_tokens_outside_the_table_give_nan(variant):
    out = forward(np.array([[0, -1, 3, 2**31 - 1]], np.int32), np.ones((3, 8), np.float32), None, variant=variant)
    assert (out[0, 0] == 1).all() and np.isnan(out[0, 1:]).all()


@pytest.mark.parametrize("variant", embedding.BACKWARD.runnable())
def test_tokens_outside_the_table_give_no_gradient(variant):
    tokens = np.array([[0, -1, 3, 2**31 - 1]], np.int32)
    ones = np.ones((3, 8), np.float32), np.ones((4, 8), np.float32)
    got, of_positions = backward(tokens, np.ones((1, 4, 8), np.float32), *ones, variant=variant)
    assert_close(got, np.array([2, 1, 1])[:, None] * ones[0])
    assert_close(of_positions, 2 * ones[1])


@pytest.mark.parametrize(
    ("dtype", "of_forward", "variant"),
    [
        (BFLOAT16, "warp_per_row", "row_per_warp"),
        *((BFLOAT16, "vectors", variant) for variant in BY_VECTORS),
        (np.dtype(np.float16), "vectors", "row_per_warp"),
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
    tokens, table, positions, dout = inputs(2, 9, 7, 40 if variant in BY_VECTORS else 35)
    of_forward = "vectors" if variant in BY_VECTORS else "warp_per_row"
    out = forward(tokens, table, positions, variant=of_forward)
    assert_close(out, embedding.reference(tokens, table, positions))
    got = backward(tokens, dout, table, positions, variant=variant)
    expected = embedding.reference_backward(tokens, dout, len(table))
    assert_close(got[0], table + expected[0], atol=1e-5)
    assert_close(got[1], positions + expected[1], atol=1e-5)


def test_a_long_list_under_checks(under_checks):
    tokens = np.full((1, MANY + 3), 1, np.int32)
    tokens[0, 5] = 0
    dout = np.random.default_rng(0).standard_normal((*tokens.shape, 8), dtype=np.float32)
    got, _ = backward(tokens, dout, np.zeros((3, 8), np.float32), None, variant="rows_of_groups")
    assert_close(got, embedding.reference_backward(tokens, dout, 3)[0], atol=1e-5)


def test_defaults_on_a_gpu():
    with offline.device("sm_90a") as device:
        table = device.array((4, 768), np.uint16)
        for row, forward_name in (
            (row_of(768, table), "vectors"),
            (row_of(768, table, device.array((4, 768), np.float32)), "warp_per_row"),
        ):
            assert embedding.FORWARD.pick(None, row, 4).name == forward_name
            assert embedding.BACKWARD.pick(None, row, True).name == "tiles_of_times"
            assert embedding.BACKWARD.pick(None, row, False).name == "rows_of_groups"
        assert embedding.BACKWARD.pick(None, row_of(36, table), True).name == "row_per_warp"


def test_bad_arguments():
    tokens, table, positions, dout = inputs(3, 7, 5, 4)
    with pytest.raises(DTypeError, match="embedding: tokens_BT has dtype int64; expected int32"):
        forward(tokens.astype(np.int64), table, positions)
    with pytest.raises(ShapeError, match=r"embedding: position_table_TC has shape \(6, 4\); expected \(7, 4\)"):
        forward(tokens, table, positions[:6])
    with pytest.raises(ShapeError, match=r"embedding: dout_BTC has shape \(3, 7, 3\); expected \(3, 7, 4\)"):
        backward(tokens, dout[:, :, :3].copy(), table, positions)
    few, *on_device = (to_device(a) for a in (np.empty(46, np.int32), tokens, table, positions, dout))
    tokens, table, positions, dout = on_device
    with pytest.raises(ShapeError, match=r"embedding: groups has shape .* at least \d+ elements"):
        embedding.backward(tokens, dout, table, positions, few)
    with pytest.raises(ShapeError, match=r"embedding: groups has shape .* at least \d+ elements"):
        embedding.forward(tokens, table, positions, dout, few)
    with pytest.raises(ConfigError, match=r"variant 'tiles_of_times'"):
        embedding.BACKWARD.pick("tiles_of_times", row_of(8, table), False)
