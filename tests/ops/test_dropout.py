import numpy as np
import pytest

from numstack import ops
from numstack.errors import ConfigError
from numstack.kernels import dropout as kernels
from numstack.tensor import tensor
from tests.ops.gradients import check_operation


def test_dropout(rng):
    mask = ops.Dropout(0.25, seed=123)
    keep = kernels.reference_mask(3 * 7, p=mask.p, seed=mask.seed, offset=0).reshape(3, 7)
    check_operation(
        lambda x: ops.dropout(x, mask), lambda x: x * keep / 0.75, rng.standard_normal((3, 7)).astype(np.float32)
    )


def test_masks_depend_on_the_seed():
    x = tensor(np.ones(1000))
    first, again, other = (ops.dropout(x, ops.Dropout(0.5, seed)).numpy() for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert 300 < np.sum(first != other) < 700


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_fraction_out_of_range(p):
    with pytest.raises(ConfigError, match="choose at least 0 and below 1"):
        ops.Dropout(p, seed=0)
