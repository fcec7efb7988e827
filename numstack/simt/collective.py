"""Functions of the registers of a whole warp: what tensor cores, and loads and stores of their fragments, do.

    @collective(reads=(1,), writes=(0,))
    def turned(to_LN, from_LN):                       # [lane, register], 32 lanes
        for lane in range(32):
            for i in range(to_LN.shape[1]):
                to_LN[lane, i] = from_LN[31 - lane, i]

A kernel, or the body of a PTX instruction, calls it with registers in ``cuda.local.array``s, each as three arguments:
the array, the first register, and how many: ``turned(after, 0, 4, before, 8, 4)``. All lanes of the warp come to the
call together, as to a shuffle, and each finds its own registers changed. The function is plain Python of a kind that
numba compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from numba.core import cgutils, types
from numba.core.extending import intrinsic, overload
from numba.np.arrayobj import populate_array

from numstack.simt.tile import Tile

WARP = 32


def collective(
    *, reads: tuple[int, ...], writes: tuple[int, ...]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function one of whole warps.

    Parameters
    ----------
    reads, writes : tuple of int
        Which of its parameters' registers it reads, and which it writes (then all of them). A call gives no register
        to two parameters, unless it only reads it.
    """

    def make(function: Callable[..., None]) -> Callable[..., None]:
        assert isinstance(function, FunctionType)
        code = function.__code__
        names = ", ".join(code.co_varnames[: code.co_argcount])  # numba compares signatures
        bare = FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
        overload(function)(eval(f"lambda {names}: bare", {"bare": bare}))
        function.collective_reads = reads  # type: ignore[attr-defined]
        function.collective_writes = writes  # type: ignore[attr-defined]
        return function

    return make


@intrinsic
def registers_of_warp(typingctx: Any, tile: Any, thread: Any, first: Any, count: Any) -> Any:
    """``count`` registers of 32 threads, of whom ``thread`` is the first in a tile, as an array [lane, register]."""
    if not isinstance(tile, Tile):
        return None
    array = types.Array(tile.dtype, 2, "A")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        result = context.make_array(array)(context, builder)
        size = context.get_abi_sizeof(context.get_data_type(tile.dtype))
        data, thread, first, count = args

        def word(value: int) -> Any:
            return context.get_constant(types.intp, value)

        offset = builder.add(thread, builder.mul(first, word(tile.shape[-1])))
        populate_array(
            result,
            data=builder.gep(data, [offset]),
            shape=cgutils.pack_array(builder, [word(WARP), count]),
            strides=cgutils.pack_array(builder, [word(size), word(size * tile.shape[-1])]),
            itemsize=word(size),
            meminfo=None,
        )
        return result._getvalue()

    return array(tile, types.intp, types.intp, types.intp), codegen
