"""Which arrays the norms take: the checks that :mod:`layernorm`, :mod:`layernorm_residual` and :mod:`rmsnorm` share."""

from __future__ import annotations

import numpy as np

from numstack.device import Array, current_device
from numstack.errors import ShapeError
from numstack.kernels.launch import check_contiguous, check_dtype, check_floats, check_ndim, check_shape


def check(operation: str, rows: dict[str, Array], columns: dict[str, Array], statistics: dict[str, Array]) -> None:
    """The arrays fit x.

    Parameters
    ----------
    operation : str
        As messages call it.
    rows : dict of arrays by name, floating, shape (R, C), C-contiguous
        Among them x_RC, of two axes.
    columns : dict of arrays by name, floating, shape (C,), C-contiguous
    statistics : dict of arrays by name, float32, shape (R,), C-contiguous

    Raises
    ------
    ShapeError, DTypeError
        Naming the first that does not.
    """
    check_ndim(operation, 2, x_RC=rows["x_RC"])
    R, C = rows["x_RC"].shape
    check_shape(operation, (C,), **columns)
    check_shape(operation, (R, C), **rows)
    check_shape(operation, (R,), **statistics)
    check_floats(operation, **rows, **columns)
    check_dtype(operation, np.float32, **statistics)
    check_contiguous(operation, **rows, **columns, **statistics)


def given(operation: str, **statistics: Array | None) -> dict[str, Array]:
    """The statistics of rows that a forward pass is to keep: all, or none.

    Raises
    ------
    ShapeError
        If some are arrays and others None.
    """
    arrays = {name: array for name, array in statistics.items() if array is not None}
    if 0 < len(arrays) < len(statistics):
        missing = next(name for name, array in statistics.items() if array is None)
        raise ShapeError(f"{operation}: {next(iter(arrays))} is given, {missing} is None; give both, or neither")
    return arrays


def nothing(x: Array) -> Array:
    """An array without elements for statistics that nobody wants: kernels store no row that it does not have."""
    device = current_device()
    return device.view(device.address(x), (0,), np.float32, owner=x)
