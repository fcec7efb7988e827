import numpy as np
import pytest

from numstack import memory, ops
from numstack.autograd import backward
from numstack.errors import DataError, DTypeError, ShapeError
from numstack.kernels import dropout as dropout_kernels
from numstack.tensor import tensor
from tests.ops.gradients import check_operation
from tests.support import assert_close

TOKENS = np.array([[3, 0, 3, 5], [5, 5, 1, 3]])  # 3 and 5 repeated, 2 and 4 never


@pytest.fixture
def tables(rng):
    return [rng.standard_normal(shape).astype(np.float32) for shape in ((6, 5), (7, 5))]


def test_tokens_and_positions(tables):
    check_operation(
        lambda table, positions: ops.embedding(TOKENS, table, positions),
        lambda table, positions: table[TOKENS] + positions[:4],
        *tables,
    )


def test_tokens_alone(tables):
    check_operation(lambda table: ops.embedding(TOKENS, table), lambda table: table[TOKENS], tables[0])


def test_dropout(tables):
    mask = ops.Dropout(0.3, seed=9)
    keep = dropout_kernels.reference_mask(2 * 4 * 5, p=mask.p, seed=mask.seed, offset=0).reshape(2, 4, 5)
    check_operation(
        lambda table, positions: ops.embedding(TOKENS, table, positions, dropout=mask),
        lambda table, positions: (table[TOKENS] + positions[:4]) * keep / (1 - mask.p),
        *tables,
    )


def test_tokens_on_the_device(tables):
    table = tensor(tables[0], requires_grad=True)
    out = ops.embedding(tensor(TOKENS), table)
    assert_close(out.numpy(), tables[0][TOKENS])
    backward(out)
    assert_close(table.grad.numpy(), np.bincount(TOKENS.reshape(-1), minlength=6)[:, None] * np.ones((6, 5)))


def test_bad_tokens_are_found_before_anything_is_allocated(tables, monkeypatch):
    table = tensor(tables[0])
    monkeypatch.delattr(memory, "empty")
    monkeypatch.delattr(memory, "from_host")
    with pytest.raises(DataError, match=r"tokens holds 6 at \(0, 1\), but ids go from 0 to 5"):
        ops.embedding(np.array([[0, 6]]), table)
    with pytest.raises(DataError, match=r"tokens holds 4 at \(0, 1\), but ids go from 0 to 3"):
        ops.embedding(np.array([[3, 4]]), table, n_ids=4)
    with pytest.raises(DataError, match=r"tokens holds -1 at \(0, 0\)"):
        ops.embedding(np.array([[-1, 6]]), table)
    with pytest.raises(DTypeError, match="tokens has dtype float64; expected integers"):
        ops.embedding(np.zeros((1, 1)), table)


def test_bad_shapes(tables):
    table, positions = map(tensor, tables)
    with pytest.raises(ShapeError, match=r"tokens have shape \(4,\) and token_table \(6, 5\)"):
        ops.embedding(TOKENS[0], table)
    with pytest.raises(ShapeError, match=r"8 tokens in a sequence, but position_table \(7, 5\) has 7 positions"):
        ops.embedding(np.zeros((1, 8), int), table, positions)
    with pytest.raises(ShapeError, match=r"position_table has shape \(7, 4\) but token_table \(6, 5\)"):
        ops.embedding(TOKENS, table, tensor(np.zeros((7, 4))))
    with pytest.raises(DTypeError, match="tokens is a float32 tensor; expected int32"):
        ops.embedding(tensor(np.zeros((1, 1))), table)
