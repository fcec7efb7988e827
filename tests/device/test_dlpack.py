"""DLPack against NumPy's own implementation: no copy, right strides, memory freed when the last user lets go."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from numstack.device import dlpack
from numstack.errors import DTypeError


class Exporter:
    """What ``np.from_dlpack`` wants, over memory of a NumPy array."""

    def __init__(self, x: np.ndarray, owner: object) -> None:
        self.x, self.owner = x, owner

    def __dlpack__(self, **options: Any) -> Any:
        at = self.x.__array_interface__["data"][0]
        return dlpack.export(at, self.x.shape, self.x.strides, self.x.dtype, (dlpack.CPU, 0), self.owner)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU, 0


class Owner:
    pass


ARRAYS = [
    np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    np.arange(24, dtype=np.int32).reshape(4, 6).T,
    np.arange(24, dtype=np.float16)[::3],
    np.zeros((0, 3), np.float64),
    np.array([True, False]),
]


@pytest.mark.parametrize("x", ARRAYS, ids=lambda x: f"{x.dtype}{x.shape}")
def test_numpy_takes_ours_without_a_copy(x: np.ndarray) -> None:
    y = np.from_dlpack(Exporter(x, x))
    np.testing.assert_array_equal(y, x)
    assert y.dtype == x.dtype
    if x.size:
        assert np.shares_memory(x, y) and y.strides == x.strides


@pytest.mark.parametrize("x", ARRAYS, ids=lambda x: f"{x.dtype}{x.shape}")
def test_we_take_numpys_without_a_copy(x: np.ndarray) -> None:
    taken = dlpack.take(x.__dlpack__())
    assert (taken.shape, taken.dtype, taken.device) == (x.shape, x.dtype, (dlpack.CPU, 0))
    if x.size:
        assert (taken.address, taken.strides) == (x.__array_interface__["data"][0], x.strides)


def test_bfloat16_has_a_code_of_its_own() -> None:
    x = np.ones(3, ml_dtypes.bfloat16)
    taken = dlpack.take(Exporter(x, x).__dlpack__())
    assert taken.dtype == x.dtype and taken.address == x.__array_interface__["data"][0]


def test_the_owner_lives_exactly_as_long_as_the_taker() -> None:
    owner = Owner()
    alive = weakref.ref(owner)
    y = np.from_dlpack(Exporter(np.ones(3, np.float32), owner))
    del owner
    gc.collect()
    assert alive() is not None
    del y
    gc.collect()
    assert alive() is None


def test_a_capsule_that_nobody_takes_frees_its_owner() -> None:
    owner = Owner()
    alive = weakref.ref(owner)
    capsule = Exporter(np.ones(3, np.float32), owner).__dlpack__()
    del owner
    assert alive() is not None
    del capsule
    gc.collect()
    assert alive() is None


def test_what_we_took_is_given_back_once() -> None:
    owner = Owner()
    alive = weakref.ref(owner)
    taken = dlpack.take(Exporter(np.ones(3, np.float32), owner).__dlpack__())
    del owner
    assert alive() is not None
    del taken
    gc.collect()
    assert alive() is None


def test_a_capsule_can_be_taken_only_once() -> None:
    capsule = np.ones(3).__dlpack__()
    dlpack.take(capsule)
    with pytest.raises(ValueError, match="PyCapsule_GetPointer"):
        dlpack.take(capsule)


def test_dtypes_without_a_code_are_refused() -> None:
    x = np.zeros(3, "datetime64[s]")
    with pytest.raises(DTypeError, match="no code for dtype datetime64"):
        Exporter(x, x).__dlpack__()
    with pytest.raises(DTypeError, match="128 bits"):
        dlpack.take(np.zeros(3, np.complex128).__dlpack__())
