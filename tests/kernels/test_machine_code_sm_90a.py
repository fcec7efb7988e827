"""Every kernel's machine code for Hopper, activations in bfloat16."""

import pytest

from tests.kernels import machine_code

pytestmark = pytest.mark.timeout(900)


def test_every_kernel_is_in_the_catalogue() -> None:
    machine_code.assert_every_kernel_is_in_the_catalogue("sm_90a")


def test_every_kernel_is_fit_to_be_shipped() -> None:
    machine_code.assert_every_kernel_is_fit_to_be_shipped("sm_90a", "bf16")


def test_what_the_source_promises_is_there() -> None:
    machine_code.assert_what_the_source_promises_is_there("sm_90a")
