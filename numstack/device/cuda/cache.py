"""Compiled kernels on disk, so that a warm start compiles nothing.

A cubin's name is a hash of all it depends on: source of the kernel and of what it calls, constants, argument types,
threads of a block, architecture, our compiler's source, and the versions of numba, numba-cuda and the linker. Files are
written beside their place and renamed, so that two ranks that compile the same kernel leave one whole file.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from numba import types

from numstack import simt
from numstack.device.cuda import passes
from numstack.device.cuda.compiler import Architecture, Cubin, compile_cubin

# Whatever turns source into machine code, our own part of it included.
TOOLS = ("numba", "numba-cuda", "llvmlite", "nvidia-nvvm", "nvidia-nvjitlink")
OUR_TOOLS = ("conversions.py", "ptx/assembly.py", "cuda/compiler.py", "cuda/passes.py")


def cubin(
    py_func: Callable[..., None],
    arg_types: tuple[types.Type, ...],
    threads: int,
    architecture: Architecture,
    first_acts: tuple[str, ...] = (),
) -> Cubin:
    """The machine code of a kernel, from the cache or freshly compiled.

    ``first_acts``: as of a :class:`~numstack.device.kernel.Kernel`.

    Raises
    ------
    KernelError
        If it does not compile.
    """
    acts = first_acts if architecture.starts_early else ()
    depends_on = (simt.source_digest(py_func), str(arg_types), str(threads), architecture.name, str(acts), _tools())
    key = hashlib.sha256("\0".join(depends_on).encode()).hexdigest()
    path = simt.cache_directory() / "cubin" / f"{py_func.__name__.lstrip('_')}-{key[:32]}.cubin"
    try:
        return Cubin.from_bytes(path.read_bytes())
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # never stored, or damaged: compile
        with passes.quick(py_func, acts):
            compiled = compile_cubin(py_func, arg_types, threads, architecture)
        simt.write_atomically(path, compiled.to_bytes())
        return compiled


@functools.cache
def _tools() -> str:
    def of(tool: str) -> str:
        try:
            return f"{tool} {version(tool)}"
        except PackageNotFoundError:  # part of a toolkit that is not a wheel
            return f"{tool} -"

    room = Path(__file__).parents[1]
    ours = hashlib.sha256(b"".join((room / file).read_bytes() for file in OUR_TOOLS)).hexdigest()
    return ", ".join([*(of(tool) for tool in TOOLS), ours])
