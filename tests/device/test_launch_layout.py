"""The argument buffer of a launch against the alignment rules of C, as ctypes knows them."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from numba import types

from numstack.device.cuda.array import CudaArray
from numstack.device.cuda.launch import _layout

SCALARS = {
    types.boolean: (ctypes.c_bool, True),
    types.int8: (ctypes.c_int8, -3),
    types.uint16: (ctypes.c_uint16, 65535),
    types.int32: (ctypes.c_int32, -7),
    types.float32: (ctypes.c_float, 0.5),
    types.int64: (ctypes.c_int64, 2**40),
    types.float64: (ctypes.c_double, 1 / 3),
}
ARRAY = types.Array(types.float32, 2, "C")

CASES = [
    (ARRAY, types.int32, types.float32),
    (types.int32, ARRAY, types.int8, ARRAY),
    (types.boolean, types.int8, types.uint16, types.int32, types.int64, types.boolean),
    (types.int64, types.int8, types.float64, ARRAY, types.boolean),
    (),
    (ARRAY, ARRAY),
]


@pytest.mark.parametrize("arg_types", CASES, ids=str)
def test_every_parameter_lies_where_a_c_structure_has_it(arg_types: tuple[types.Type, ...]) -> None:
    array = CudaArray(1 << 40, (3, 5), np.float32)
    fields, values, expected = [], [], []
    for i, arg_type in enumerate(arg_types):
        if arg_type == ARRAY:
            fields.append((f"f{i}", ctypes.c_int64 * 9))
            expected.append((ctypes.c_int64 * 9).from_buffer_copy(array.packed))
            values.append(array.packed)
        else:
            c_type, value = SCALARS[arg_type]
            fields.append((f"f{i}", c_type))
            expected.append(value)
            values.append(value)
    structure = type("Arguments", (ctypes.Structure,), {"_fields_": fields})(*expected)
    scalars, size = _layout(arg_types)
    for index, pack in scalars:
        values[index] = pack(values[index])
    got = b"".join(values)
    assert len(got) == size
    assert got == bytes(structure)[:size]
