"""Views of GPU arrays, compared with NumPy's; no memory is read, so no GPU is needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from numstack.device.cuda.array import CudaArray
from numstack.errors import DTypeError, ShapeError


def twin(x: np.ndarray) -> CudaArray:
    return CudaArray(x.__array_interface__["data"][0], x.shape, x.dtype, x.strides, owner=x)


def same(a: CudaArray, x: np.ndarray) -> bool:
    at = x.__array_interface__["data"][0]
    return (a.shape, a.strides, a.dtype, a.address) == (x.shape, x.strides, x.dtype, at) or (
        x.size == 0 and a.shape == x.shape
    )


@given(st.data())
def test_slices_and_transposes_are_numpys(data: Any) -> None:
    x = np.zeros(data.draw(hnp.array_shapes(max_dims=4, max_side=5)), np.float32)
    key = data.draw(hnp.basic_indices(x.shape, allow_newaxis=False, allow_ellipsis=True))
    expected = x[key]
    if not isinstance(expected, np.ndarray):
        with pytest.raises(DTypeError, match="slice it"):
            twin(x)[key]
        return
    got = twin(x)[key]
    assert same(got, expected)
    assert got.flags.c_contiguous == expected.flags.c_contiguous
    axes = data.draw(st.permutations(range(expected.ndim)))
    assert same(got.transpose(*axes) if axes else got.T, expected.transpose(axes))


@given(st.sampled_from([(2, 3, 4), (24,), (4, -1), (-1,), (2, 12), (6, 4), (1, 24, 1)]), st.booleans())
def test_reshape_is_a_view_or_an_error(shape: tuple[int, ...], contiguous: bool) -> None:
    x = np.zeros((4, 6), np.float32) if contiguous else np.zeros((6, 4), np.float32).T
    try:
        expected = np.reshape(x, shape, copy=False)
    except ValueError:
        with pytest.raises(ShapeError, match="needs a copy"):
            twin(x).reshape(*shape)
    else:
        assert same(twin(x).reshape(shape), expected)


def test_wrong_views_say_why() -> None:
    a = twin(np.zeros((4, 6), np.float32))
    with pytest.raises(ShapeError, match=r"\(4, 6\) has 24 elements, \(5, 5\) has 25"):
        a.reshape(5, 5)
    with pytest.raises(ShapeError, match="do not name the 2 axes"):
        a.transpose(0, 2)
    with pytest.raises(DTypeError, match="float32 has 4 bytes an element, float16 has 2"):
        a.view(np.float16)
    assert a.view(np.int32).dtype == np.int32


def test_views_keep_the_owner_and_the_interface_round_trips() -> None:
    x = np.zeros((4, 6), np.float32)
    a = twin(x)
    assert a[1:].T.owner is x
    interface = a[:, 1:].__cuda_array_interface__
    assert interface["strides"] == (24, 4) and interface["shape"] == (4, 5) and interface["version"] == 3
    back = CudaArray.from_interface(a[:, 1:])
    assert same(back, x[:, 1:])
    assert a.__cuda_array_interface__["strides"] is None


def test_the_launchers_fields_are_numbas_array_structure() -> None:
    a = twin(np.zeros((4, 6), np.float32))
    assert np.frombuffer(a.packed, np.int64).tolist() == [0, 0, 24, 4, a.address, 4, 6, 24, 4]
    assert a.type_key == twin(np.ones((2, 3), np.float32)).type_key
    others = [a.T, a[0], a.view(np.int32), twin(np.zeros((4, 6), np.float64))]
    assert len({a.type_key, *(other.type_key for other in others)}) == 5
