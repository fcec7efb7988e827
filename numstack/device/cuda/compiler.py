"""From a numba.cuda function to a cubin: numba to LTO-IR, nvJitLink to machine code. Needs no GPU.

The LTO route keeps the whole kernel in one program: through PTX, device functions would be linked as external calls,
which costs registers and, on Hopper, serialises wgmma.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import types as python_types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numba.cuda
import numba.cuda.dispatcher
from cuda.bindings import nvjitlink
from numba import types

from numstack.device.cuda.resources import Resources, parse_report
from numstack.errors import KernelError

# numba's compiler is not safe on two threads (numba-cuda#180).
_compiling = threading.Lock()


@dataclass(frozen=True, slots=True)
class Architecture:
    """A GPU to compile for: ``sm_80``, ``sm_90a``..."""

    major: int
    minor: int
    specific: bool  # the "a" of sm_90a: wgmma and setmaxnreg need it

    @staticmethod
    def parse(name: str) -> Architecture:
        """From a name such as ``sm_90a``.

        Raises
        ------
        KernelError
            If it is none, or older than sm_80: bfloat16 conversion starts there.
        """
        digits = name.removeprefix("sm_").removesuffix("a")
        if not name.startswith("sm_") or not digits.isdigit() or not 80 <= int(digits) <= 129:
            raise KernelError(
                f"--arch {name}: no architecture that kernels are built for; give sm_80 to sm_121, or sm_90a"
            )
        return Architecture(int(digits) // 10, int(digits) % 10, name.endswith("a"))

    @staticmethod
    def of(compute_capability: tuple[int, int]) -> Architecture:
        """The architecture of a card; its specific features are used from Hopper on."""
        return Architecture(*compute_capability, specific=compute_capability >= (9, 0))

    @property
    def compute_capability(self) -> tuple[int, int]:
        return self.major, self.minor

    @property
    def starts_early(self) -> bool:
        """Whether a kernel's blocks may be there before the kernel ahead of it on the stream is over."""
        return self.compute_capability >= (9, 0)

    @property
    def name(self) -> str:
        return f"sm_{self.major}{self.minor}{'a' if self.specific else ''}"

    @property
    def numba_cc(self) -> tuple[Any, ...]:
        return (self.major, self.minor, "a") if self.specific else (self.major, self.minor)


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code of one kernel, and its resources."""

    code: bytes
    resources: Resources

    def to_bytes(self) -> bytes:
        """For the on-disk cache: a line of JSON with a hash of the code, then the code."""
        head = {"sha256": hashlib.sha256(self.code).hexdigest(), **asdict(self.resources)}
        return json.dumps(head).encode() + b"\n" + self.code

    @staticmethod
    def from_bytes(stored: bytes) -> Cubin:
        """What :meth:`to_bytes` made.

        Raises
        ------
        ValueError, KeyError, TypeError
            If it is damaged.
        """
        head, code = stored.split(b"\n", 1)
        facts = json.loads(head)
        if facts.pop("sha256") != hashlib.sha256(code).hexdigest():
            raise ValueError("the code was damaged")
        return Cubin(code, Resources(**{**facts, "warnings": tuple(facts["warnings"])}))


@contextlib.contextmanager
def _compiling_for(architecture: Architecture) -> Iterator[None]:
    """Let device functions compile for ``architecture`` too: numba asks the GPU in use, and there may be none."""
    module: Any = numba.cuda.dispatcher
    original = module.get_current_device
    module.get_current_device = lambda: python_types.SimpleNamespace(compute_capability=architecture.numba_cc)
    try:
        yield
    finally:
        module.get_current_device = original


def compile_cubin(
    py_func: Callable[..., None], arg_types: tuple[types.Type, ...], threads: int, architecture: Architecture
) -> Cubin:
    """Compile a kernel for blocks of ``threads`` threads.

    Raises
    ------
    KernelError
        If numba or the assembler refuses it; the message holds what they said.
    """
    with _compiling, _compiling_for(architecture):
        cubin = _compile(py_func, arg_types, (threads,), architecture)
        if cubin.resources.spill_bytes or "setmaxnreg" in " ".join(cubin.resources.warnings):
            # The assembler may spill a few registers to fit one more block on a multiprocessor. Asked for one block,
            # it does not; if it still spills, the kernel needs more than there are. And only then does it know how
            # many registers a kernel starts with that moves them between its warpgroups.
            cubin = _compile(py_func, arg_types, (threads, 1), architecture)
        return cubin


def _compile(
    py_func: Callable[..., None], arg_types: tuple[types.Type, ...], bounds: tuple[int, ...], architecture: Architecture
) -> Cubin:
    """Compile with launch bounds: threads of a block, and blocks that must fit on a multiprocessor."""
    try:
        lto_ir, _ = numba.cuda.compile(
            py_func,
            types.void(*arg_types),
            cc=architecture.numba_cc,
            device=False,
            abi="numba",
            output="ltoir",
            launch_bounds=bounds,
        )
    except Exception as error:  # numba raises many kinds, all of which mean the same here
        raise KernelError(f"{py_func.__name__}: numba could not compile it for {architecture.name}: {error}") from error
    return _link(py_func.__name__, lto_ir, architecture)


def _link(name: str, lto_ir: bytes, architecture: Architecture) -> Cubin:
    # What the linker finds in a cache of its own, the assembler does not report on.
    report = ("-no-cache", "-Xptxas=-v", "-Xptxas=--warn-on-double-precision-use")
    options = [f"-arch={architecture.name}", "-lto", "-O3", *report]
    linker = nvjitlink.create(len(options), options)
    try:
        nvjitlink.add_data(linker, nvjitlink.InputType.LTOIR, lto_ir, len(lto_ir), name)
        nvjitlink.complete(linker)
        code = bytearray(nvjitlink.get_linked_cubin_size(linker))
        nvjitlink.get_linked_cubin(linker, code)
        return Cubin(bytes(code), parse_report(_log(linker, nvjitlink.get_info_log_size, nvjitlink.get_info_log)))
    except nvjitlink.nvJitLinkError as error:
        said = _log(linker, nvjitlink.get_error_log_size, nvjitlink.get_error_log)
        raise KernelError(f"{name}: the linker refused it for {architecture.name}: {said or error}") from None
    finally:
        nvjitlink.destroy(linker)


def _log(linker: Any, size: Callable[[Any], int], read: Callable[[Any, bytearray], None]) -> str:
    text = bytearray(size(linker))
    if text:
        read(linker, text)
    return text.decode(errors="replace").rstrip("\0\n ")
