"""Halves of 32-bit words, whatever they hold: what transposes pairs of 16-bit elements.

A word that was loaded as float32 and is stored again keeps its bits; nothing computes with it as a number.

Source: PTX ISA 9.7.8.7 (prmt).
"""

import numpy as np
from numba import float32, uint32

from numstack.device.ptx.assembly import ptx


@ptx("prmt.b32 $result, $first, $second, 0x5410;")
def low_halves(first: float32, second: float32) -> float32:
    """The low 16 bits of both words, those of the first below."""
    low = np.float32(first).view(np.uint32) & uint32(0xFFFF)
    return np.uint32(low | (np.float32(second).view(np.uint32) << uint32(16))).view(np.float32)


@ptx("prmt.b32 $result, $first, $second, 0x7632;")
def high_halves(first: float32, second: float32) -> float32:
    """The high 16 bits of both words, those of the first below."""
    low = np.float32(first).view(np.uint32) >> uint32(16)
    return np.uint32(low | (np.float32(second).view(np.uint32) & uint32(0xFFFF0000))).view(np.float32)
