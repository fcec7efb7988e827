"""One step of a reduction, and what cannot be reduced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from numstack.comm import reduction
from numstack.dtypes import bfloat16
from numstack.errors import ConfigError, DTypeError
from tests.support import poisoned


def test_uint16_bits_are_computed_with_as_bfloat16() -> None:
    bits = np.array([[0x3F80, 0x4000]], np.uint16)
    assert reduction.numbers(bits).tolist() == [1.0, 2.0]
    assert np.shares_memory(reduction.numbers(bits), bits)


@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_the_mean_of_2_byte_floats_is_rounded_once(dtype: Any, size: int) -> None:
    a, b = np.array([1.0, 255.0], dtype), np.array([0.0078125, 1.5], dtype)
    out = poisoned(2, dtype)
    reduction.step("mean", a, b, out, divide_by=size)
    assert (out == ((a.astype(np.float64) + b.astype(np.float64)) / size).astype(dtype)).all()


def test_the_mean_of_numbers_whose_sum_overflows_float16() -> None:
    a = np.array([60000.0], np.float16)
    reduction.step("mean", a, a, a, divide_by=2)
    assert a[0] == 60000


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
def test_nan_comes_out_of_max_and_min(op: Any, dtype: Any) -> None:
    a, b, out = np.array([np.nan, 1], dtype), np.array([1, np.nan], dtype), np.zeros(2, dtype)
    reduction.step(op, a, b, out)
    assert np.isnan(out).all()


def test_an_unknown_reduction() -> None:
    with pytest.raises(ConfigError, match="allreduce: op='avg' is no reduction; take one of sum, max, min, mean"):
        reduction.check("allreduce", np.zeros(1), "avg")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [bool, np.complex64, np.int16])
def test_a_dtype_that_cannot_be_reduced(dtype: Any) -> None:
    with pytest.raises(DTypeError, match=f"cannot reduce {np.dtype(dtype).name}; take float32"):
        reduction.check("allreduce", np.zeros(1, dtype), "sum")  # type: ignore[arg-type]


def test_the_mean_of_integers() -> None:
    with pytest.raises(DTypeError, match="the mean of int32 is no int32; take op='sum'"):
        reduction.check("allreduce", np.zeros(1, np.int32), "mean")  # type: ignore[arg-type]
