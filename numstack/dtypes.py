"""The number formats that tensors have, and how each is stored in device memory.

bfloat16 has no array type in ``numba.cuda``, so its arrays are stored as their 16 bits in ``uint16``; kernels convert
element by element (``numstack.device.widen`` and ``narrow``). A ``uint16`` array handed to a kernel means bfloat16.
"""

from typing import Any

import ml_dtypes
import numpy as np

float32 = np.dtype(np.float32)
float16 = np.dtype(np.float16)
bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
int32 = np.dtype(np.int32)

FLOATING = (float32, bfloat16, float16)


def storage(dtype: np.dtype | type) -> np.dtype:
    """The dtype of the array that holds elements of ``dtype`` in device memory: uint16 for bfloat16, else itself."""
    dtype = np.dtype(dtype)
    return np.dtype(np.uint16) if dtype == bfloat16 else dtype
