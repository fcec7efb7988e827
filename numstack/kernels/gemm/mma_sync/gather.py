"""The second kernel of a product that was cut along k: adds the parts of c, in the order of k, and what c held."""

from functools import cache

from numba import cuda, float32, int64

from numstack.device import Kernel, kernel, narrow, widen
from numstack.device.ptx import vectors

BLOCK = 256


@cache
def make_gather(name: str, adds_to_c: bool, is_wide: bool) -> Kernel:
    """The kernel; the parts lie in ``partials`` one after the other. ``is_wide``: it can move four elements at once."""

    @kernel(name=name)
    def gather(partials, c, parts, size, alpha):
        i = int64(cuda.grid(1)) * 4
        part = cuda.local.array(4, float32)
        total = cuda.local.array(4, float32)
        for x in range(4):
            total[x] = float32(0)
        if is_wide and i < size:
            for p in range(parts):
                vectors.load4(partials, p * int64(size) + i, part, 0)
                for x in range(4):
                    total[x] += part[x]
            for x in range(4):
                total[x] *= alpha
            if adds_to_c:
                vectors.load4(c, i, part, 0)
                for x in range(4):
                    total[x] += part[x]
            vectors.store4(c, i, total, 0)
        elif not is_wide:
            for x in range(4):
                if i + x < size:
                    for p in range(parts):
                        total[x] += partials[p * int64(size) + i + x]
                    total[x] *= alpha
                    if adds_to_c:
                        total[x] += widen(c[i + x])
                    c[i + x] = narrow(total[x], c.dtype)

    return gather
