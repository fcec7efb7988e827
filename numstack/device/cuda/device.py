"""One GPU as a device, through the driver's primary context, which PyTorch, CuPy and numba share."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import struct
import sys
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from cuda.bindings import driver

from numstack.device.base import Array, Device, Properties, Region, Stream, check_same
from numstack.device.cuda.array import CudaArray
from numstack.device.cuda.compiler import Architecture
from numstack.device.cuda.driver import DriverError, call, n_devices
from numstack.device.cuda.launch import CompiledKernel, load
from numstack.device.cuda.streams import CudaStream
from numstack.device.cuda.tensor_map import TensorMaps
from numstack.device.door import submit
from numstack.device.launch_types import does_not_fit, numba_types
from numstack.device.tensor_map import TensorMap
from numstack.device.work import Work
from numstack.errors import DeviceError, DTypeError, OutOfMemory

if TYPE_CHECKING:
    from numstack.device.kernel import Kernel

# How many works back an asynchronous fault is traced.
N_REMEMBERED = 16
_ATTRIBUTE = driver.CUdevice_attribute


class CudaDevice(Device):
    """The GPU of this process: of its local rank, or the first.

    ``NUMSTACK_SYNC=1`` waits after every work, so that a fault is reported by the work that caused it.
    """

    kind = "cuda"

    def __init__(self, index: int) -> None:
        super().__init__()
        if index >= n_devices():
            raise DeviceError(
                f"GPU {index} was asked for but the driver shows {n_devices()}; set NUMSTACK_DEVICE=cpu, "
                "start fewer ranks, or let ranks share a GPU (NUMSTACK_RANKS_PER_GPU)"
            )
        self.index = index
        self._handle = call(driver.cuDeviceGet, index)
        self._context = call(driver.cuDevicePrimaryCtxRetain, self._handle)
        self.enter()
        self.name = call(driver.cuDeviceGetName, 256, self._handle).split(b"\0")[0].decode()
        self.n_threads = 1
        major = self._attribute(_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
        minor = self._attribute(_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
        self.properties = Properties(
            alignment=512,
            warp_size=32,
            multiprocessors=self._attribute(_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            shared_bytes_per_block=self._attribute(_ATTRIBUTE.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
            memory_bytes=call(driver.cuDeviceTotalMem, self._handle),
            compute_capability=(major, minor),
        )
        self.architecture = Architecture.of((major, minor))
        # Stream 0, as PyTorch's and numba's default: arrays pass between us and them without an event.
        self.default_stream = CudaStream(self, 0)
        self._synchronous = os.environ.get("NUMSTACK_SYNC", "") not in ("", "0")
        self._compiled: dict[Any, CompiledKernel] = {}
        self._tensor_maps = TensorMaps()
        self._recent: collections.deque[tuple[Any, ...]] = collections.deque(maxlen=N_REMEMBERED)
        self._interruption: BaseException | None = None

    def _attribute(self, attribute: Any) -> int:
        return int(call(driver.cuDeviceGetAttribute, attribute, self._handle))

    def enter(self) -> None:
        """Make the primary context current in the calling thread; every thread that uses the device needs it once."""
        call(driver.cuCtxSetCurrent, self._context)

    # faults

    def remember(self, work: Work) -> None:
        """Keep what is needed to say, when a fault surfaces later, which works were the last and where from."""
        # Past this, execute, submit, and the launch or copy: whoever asked for it. A walk further up would cost more
        # than the launch itself; NUMSTACK_SYNC=1 gives a whole traceback.
        frame = sys._getframe(4)
        # Neither the work nor the frame is kept, since either would keep arrays alive.
        self._recent.append((work.name, work.grid, work.block, frame.f_code, frame.f_lasti))
        if self._synchronous:
            self.check(driver.cuStreamSynchronize(work.stream.handle)[0], work.name)  # type: ignore[attr-defined]

    def check(self, result: Any, during: str) -> None:
        """Raise DeviceError, with the last works submitted, unless ``result`` is CUDA_SUCCESS."""
        if result:
            raise self.explain(DriverError(during, result.name))

    def interrupt(self, error: BaseException | None) -> None:
        """Let the next call that waits for the GPU raise ``error``, in whichever thread: something that the driver does
        not know of, such as a collective that was aborted, makes what is waited for useless. ``None`` takes it back.
        """
        self._interruption = error

    def check_wait(self, result: Any, during: str) -> None:
        """As ``check``, after the host has waited: raises what the wait was interrupted with as well."""
        self.check(result, during)
        if self._interruption is not None:
            error, self._interruption = self._interruption, None
            raise error

    def explain(self, error: DriverError) -> DeviceError:
        """``error`` with the table of the last works: one of them is at fault."""
        if not self._recent:
            return error
        works = "\n".join(
            f"  {name} grid={grid} block={block} from {_place(code, offset)}"
            for name, grid, block, code, offset in self._recent
        )
        hint = "" if self._synchronous else "; NUMSTACK_SYNC=1 stops at the one at fault"
        return DeviceError(f"{error}\nlast works submitted, newest last{hint}:\n{works}")

    # streams

    def create_stream(self, priority: int = 0) -> Stream:
        least, greatest = call(driver.cuCtxGetStreamPriorityRange)
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        handle = call(driver.cuStreamCreateWithPriority, flags, max(greatest, min(least, -priority)))
        return CudaStream(self, int(handle))

    def synchronize(self) -> None:
        self.check_wait(driver.cuCtxSynchronize()[0], "cuCtxSynchronize")

    # memory

    def allocate(self, nbytes: int) -> Region:
        try:
            return Region(int(call(driver.cuMemAlloc, nbytes)), nbytes)
        except DriverError as error:
            if error.result != "CUDA_ERROR_OUT_OF_MEMORY":
                raise self.explain(error) from None
            free, total = call(driver.cuMemGetInfo)
            message = f"allocate: {nbytes} bytes asked for, {free} of {total} bytes free on {self.name}"
            raise OutOfMemory(message) from None

    def release(self, region: Region) -> None:
        call(driver.cuMemFree, region.address)

    def view(
        self,
        address: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any] | type,
        strides: tuple[int, ...] | None = None,
        owner: object = None,
    ) -> CudaArray:
        return CudaArray(address, shape, dtype, strides, owner)

    def address(self, array: Array) -> int:
        return _on_device(array).address

    def pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any] | type) -> np.ndarray:
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        pointer = int(call(driver.cuMemHostAlloc, max(nbytes, 1), 0))
        buffer = (ctypes.c_char * max(nbytes, 1)).from_address(pointer)
        # The end of the process frees what is left: until then MPI may read it, also while Python shuts down.
        weakref.finalize(buffer, _free_pinned, pointer).atexit = False
        return np.ndarray(shape, dtype, buffer)  # type: ignore[arg-type]  # which keeps the buffer

    def to_host(self, array: Array) -> np.ndarray:
        self.synchronize()
        source = _on_device(array)
        if source.size == 0:
            return np.empty(source.shape, source.dtype)
        # The span from the first to the last byte comes over in one copy; strides are applied on the host.
        first, last = _span(source)
        span = np.empty(last - first, np.uint8)
        call(driver.cuMemcpyDtoH, span.ctypes.data, first, span.nbytes)
        view: np.ndarray = np.ndarray(source.shape, source.dtype, span, source.address - first, source.strides)
        return view.copy()

    def copy(self, dst: Any, src: Any, stream: Stream | None = None) -> None:
        check_same("copy", dst, src)
        if dst.size == 0:
            return
        run: Callable[[Any], None]
        if isinstance(src, np.ndarray):
            to, host = _dense(dst), np.ascontiguousarray(src)
            run = lambda s: call(driver.cuMemcpyHtoDAsync, to.address, host.ctypes.data, to.nbytes, s.handle)  # noqa: E731
        elif isinstance(dst, np.ndarray):
            if not dst.flags.c_contiguous:
                raise DTypeError("copy: dst in host memory is not C-contiguous; copy to a contiguous array first")
            source = _dense(src)
            run = lambda s: call(driver.cuMemcpyDtoHAsync, dst.ctypes.data, source.address, source.nbytes, s.handle)  # noqa: E731
        else:
            to, source = _dense(dst), _dense(src)
            run = lambda s: call(driver.cuMemcpyDtoDAsync, to.address, source.address, to.nbytes, s.handle)  # noqa: E731
        submit(Work("copy", "copy", run, stream or self.default_stream, (src,), (dst,)))

    def fill(self, dst: Any, value: float, stream: Stream | None = None) -> None:
        to = _dense(dst)
        if to.size == 0:
            return
        bits = np.asarray(value).astype(to.dtype).tobytes()
        submit(Work("fill", "fill", lambda s: _memset(to, bits, s), stream or self.default_stream, (), (dst,)))

    # kernels

    def bind(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        args: tuple[Any, ...],
    ) -> Callable[[Stream], None]:
        key: list[Any] = [kernel, block]
        values: list[Any] = []  # arrays packed, scalars as they are
        for arg in args:
            kind = type(arg)
            if kind is CudaArray:
                key.append(arg.type_key)
                values.append(arg._packed or arg.packed)
            elif kind is float:
                key.append(kind)
                values.append(arg)
            elif kind is int:
                if not -(2**31) <= arg < 2**31:
                    raise does_not_fit(kernel, len(key) - 2, arg)
                key.append(kind)
                values.append(arg)
            elif kind is TensorMap:
                key.append(kind)
                values.append(arg.address)
            elif isinstance(arg, (bool, np.generic)):
                key.append(kind)
                values.append(arg)
            else:
                return self.bind(kernel, grid, block, shared_bytes, _ours(kernel, args))
        compiled = self._compiled.get(tuple(key))
        if compiled is None:
            threads = block[0] * block[1] * block[2]
            compiled = load(kernel, numba_types(kernel, args), threads, self.architecture)
            self._compiled[tuple(key)] = compiled
        return compiled.bind(grid, block, shared_bytes, values)

    def tensor_map(self, array: Array, box: tuple[int, ...], *, swizzle_bytes: int = 128) -> TensorMap:
        return self._tensor_maps.of(_on_device(array), box, swizzle_bytes)


def _ours(kernel: Kernel, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with other libraries' GPU arrays as ours; an error that names what is no argument."""
    numba_types(kernel, args)

    def ours(name: str, arg: Any) -> Any:
        if isinstance(arg, np.ndarray):
            raise DTypeError(f"{kernel.name}: {name} is in host memory; copy it to the GPU (memory.from_host)")
        return CudaArray.from_interface(arg) if hasattr(arg, "__cuda_array_interface__") else arg

    return tuple(ours(name, arg) for name, arg in zip(kernel.parameters, args, strict=True))


def _place(code: types.CodeType, offset: int) -> str:
    """file:line of an instruction; worked out only when somebody asks, since it is slow."""
    line = next((line for start, end, line in code.co_lines() if start <= offset < end), code.co_firstlineno)
    return f"{code.co_filename}:{line}"


def _on_device(array: Any) -> CudaArray:
    if isinstance(array, CudaArray):
        return array
    if hasattr(array, "__cuda_array_interface__"):
        return CudaArray.from_interface(array)
    raise DTypeError(f"a {type(array).__name__} is not in GPU memory; copy it there (memory.from_host)")


def _dense(array: Any) -> CudaArray:
    ours = _on_device(array)
    if not ours.flags.c_contiguous:
        raise DTypeError(f"copy and fill take C-contiguous GPU arrays, this one has strides {array.strides}; "
                         "use kernels.elementwise.copy")  # fmt: skip
    return ours


def _span(array: CudaArray) -> tuple[int, int]:
    """First and one past the last byte that an array touches."""
    reach = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
    first = array.address + sum(r for r in reach if r < 0)
    return first, array.address + sum(r for r in reach if r > 0) + array.itemsize


def _memset(to: CudaArray, bits: bytes, stream: Any) -> None:
    if len(set(bits)) == 1:
        call(driver.cuMemsetD8Async, to.address, bits[0], to.nbytes, stream.handle)
    elif len(bits) == 2:
        call(driver.cuMemsetD16Async, to.address, struct.unpack("<H", bits)[0], to.size, stream.handle)
    elif len(bits) == 4:
        call(driver.cuMemsetD32Async, to.address, struct.unpack("<I", bits)[0], to.size, stream.handle)
    else:  # 8 bytes: every other word, twice
        for offset, word in zip((0, 4), struct.unpack("<II", bits), strict=True):
            call(driver.cuMemsetD2D32Async, to.address + offset, 8, word, 1, to.size, stream.handle)


def _free_pinned(pointer: int) -> None:
    with contextlib.suppress(DriverError):
        call(driver.cuMemFreeHost, pointer)
