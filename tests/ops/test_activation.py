import math

import numpy as np
import pytest

from numstack import ops
from tests.ops.gradients import check_operation


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_erf(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def softmax(x):
    exponentials = np.exp(x - x.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


@pytest.mark.parametrize(("form", "reference"), [("tanh", gelu_tanh), ("erf", gelu_erf)])
def test_gelu(rng, form, reference):
    x = 3 * rng.standard_normal((2, 3, 7)).astype(np.float32)
    check_operation(lambda x: ops.gelu(x, form=form), reference, x)


def test_softmax(rng):
    check_operation(ops.softmax, softmax, rng.standard_normal((2, 3, 7)).astype(np.float32))
