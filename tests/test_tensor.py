import ml_dtypes
import numpy as np
import pytest

from numstack import memory
from numstack.dtypes import bfloat16, float16, float32, int32
from numstack.errors import DataError, DTypeError, NumstackError, ShapeError
from numstack.tensor import tensor


@pytest.mark.parametrize(
    ("data", "dtype"),
    [
        ([1.5, -2.0], float32),
        (np.array([1.5, -2.0]), float32),
        (np.array([1.5, -2.0], np.float16), float16),
        (np.array([1.5, -2.0], ml_dtypes.bfloat16), bfloat16),
        ([3, -4], int32),
        (np.array(7), int32),
        (np.zeros((0, 3)), float32),
    ],
)
def test_to_the_device_and_back(data, dtype):
    x = tensor(data)
    assert x.dtype == dtype
    assert x.shape == np.shape(data) and x.ndim == np.ndim(data) and x.size == np.size(data)
    for host in (x.numpy(), np.asarray(x)):
        assert host.dtype == dtype
        np.testing.assert_array_equal(host, np.asarray(data, host.dtype))


def test_bfloat16_is_stored_as_its_bits():
    x = tensor([1.0, 1.00390625], dtype=bfloat16)
    assert x.array.dtype == np.uint16
    np.testing.assert_array_equal(x.numpy().astype(np.float32), [1.0, 1.0])


def test_strided_host_data_is_copied_in_order():
    host = np.arange(12, dtype=np.float32).reshape(3, 4).T[::2]
    np.testing.assert_array_equal(tensor(host).numpy(), host)


def test_numpy_is_a_copy():
    x = tensor([1.0])
    x.numpy()[0] = 5
    assert x.item() == 1.0


def test_views_share_memory_and_keep_it():
    before = memory.statistics().live
    x = tensor(np.arange(6.0))
    view, row = x.reshape(2, -1), x.reshape(2, 3)[1]
    assert view.shape == (2, 3) and row.shape == (3,)
    del x, view
    assert memory.statistics().live > before
    np.testing.assert_array_equal(row.numpy(), [3, 4, 5])
    del row
    assert memory.statistics().live == before


def test_reshape_errors():
    x = tensor(np.zeros((2, 3)))
    for shape in ((4,), (-1, 4), (-1, -1), (-2, -3), (-1, 0)):
        with pytest.raises(ShapeError, match=r"has shape \(2, 3\), 6 elements, which do not fill"):
            x.reshape(*shape)
    assert tensor(np.zeros((0, 3))).reshape(3, 0).shape == (3, 0)
    with pytest.raises(DTypeError, match=r"shape \(2, 2\) is not C-contiguous"):
        x[:, 1:].reshape(4)


def test_item_of_more_than_one():
    with pytest.raises(ShapeError, match=r"shape \(2,\); only one element is a number"):
        tensor([1.0, 2.0]).item()


def test_what_is_no_tensor():
    with pytest.raises(DTypeError, match="dtype complex128; tensors are"):
        tensor([1j])
    with pytest.raises(DTypeError, match="dtype float64"):
        tensor([1.0], dtype=np.float64)
    with pytest.raises(DataError, match="values from 0 to 2147483648 do not fit int32"):
        tensor(np.array([0, 2**31]))
    with pytest.raises(DTypeError, match="requires_grad with dtype int32"):
        tensor([1], requires_grad=True)


def test_indexing_never_loses_a_gradient_silently():
    x = tensor([1.0, 2.0], requires_grad=True)
    with pytest.raises(NumstackError, match="would lose the gradient; call detach"):
        x[0]
    assert x.detach()[1:].item() == 2.0


def test_asarray_without_copy_is_refused():
    with pytest.raises(NumstackError, match="leave out copy=False"):
        np.asarray(tensor([1.0]), copy=False)


def test_repr():
    assert repr(tensor([[1.0]], dtype=bfloat16, requires_grad=True)) == "<Tensor bfloat16 (1, 1), requires_grad>"
