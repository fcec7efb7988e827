"""A few random kernels: compiled code must do what Python under checks does. More: tests/simt/random_kernels.py."""

import numpy as np
import pytest

from tests.simt.random_kernels import random_kernel


@pytest.mark.parametrize("seed", range(10))
def test_compiled_code_does_what_python_does(seed):
    kernel = random_kernel(seed)
    compiled, checked = kernel.run()
    np.testing.assert_array_equal(compiled, checked, err_msg=kernel.source)


def test_a_seed_always_gives_the_same_kernel():
    assert random_kernel(5) == random_kernel(5)
    assert random_kernel(5).source != random_kernel(6).source
