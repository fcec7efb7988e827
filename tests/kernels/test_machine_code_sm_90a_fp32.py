"""Every kernel's machine code for Hopper, activations in float32."""

import pytest

from tests.kernels import machine_code

pytestmark = pytest.mark.timeout(900)


def test_every_kernel_is_fit_to_be_shipped() -> None:
    machine_code.assert_every_kernel_is_fit_to_be_shipped("sm_90a", "fp32")
