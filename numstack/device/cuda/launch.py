"""Launching a cubin: numba's argument structure packed once into one buffer, handed straight to cuLaunchKernel."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver
from numba import types

from numstack.device.cuda import cache
from numstack.device.cuda.compiler import Architecture
from numstack.device.cuda.driver import DriverError, call
from numstack.device.cuda.resources import Resources

if TYPE_CHECKING:
    from numstack.device.cuda.streams import CudaStream
    from numstack.device.kernel import Dim, Kernel

_cu_launch_kernel = driver.cuLaunchKernel

# Values of CU_LAUNCH_PARAM_* in cuda.h: the arguments come as one buffer instead of a pointer each.
PARAM_END, PARAM_BUFFER_POINTER, PARAM_BUFFER_SIZE = 0, 1, 2
# A block gets more dynamic shared memory than this only once the function's attribute allows it.
SHARED_BYTES_WITHOUT_ASKING = 48 * 1024


class CompiledKernel:
    """A kernel loaded on the GPU for one set of argument types.

    numba passes an array as the fields of its structure, each a 64-bit parameter, and a scalar as itself; each
    parameter lies at a multiple of its size, as the driver expects.
    """

    def __init__(
        self,
        code: bytes,
        resources: Resources,
        arg_types: tuple[types.Type, ...],
        cluster: int,
        starts_early: bool,
    ) -> None:
        self.resources = resources
        self._cluster = cluster
        self._starts_early = starts_early
        self._configs: dict[Any, Any] = {}  # launch shapes with attributes
        self._scalars, size = _layout(arg_types)
        self._library = call(driver.cuLibraryLoadData, code, None, None, 0, None, None, 0)
        (kernel,) = call(driver.cuLibraryEnumerateKernels, 1, self._library)
        self._function = call(driver.cuKernelGetFunction, kernel)
        self._shared_bytes = SHARED_BYTES_WITHOUT_ASKING - resources.shared_bytes  # what the source declares counts too
        # One buffer serves all launches, since the driver copies it before it returns; the lock is for other threads.
        self._lock = threading.Lock()
        self._buffer = ctypes.create_string_buffer(max(size, 1))
        self._size = ctypes.c_size_t(size)
        self._extra = (ctypes.c_void_p * 5)(
            PARAM_BUFFER_POINTER,
            ctypes.addressof(self._buffer),
            PARAM_BUFFER_SIZE,
            ctypes.addressof(self._size),
            PARAM_END,
        )
        self._extra_address = ctypes.addressof(self._extra)

    def bind(self, grid: Dim, block: Dim, shared_bytes: int, values: list[Any]) -> Callable[[Any], None]:
        """What enqueues this launch on a stream, now or again later; ``values`` holds each argument, arrays packed."""
        self._allow(shared_bytes)
        for index, pack in self._scalars:
            values[index] = pack(values[index])
        arguments = b"".join(values)
        if self._cluster > 1 or self._starts_early:
            shape = (grid, block, shared_bytes)
            config = self._configs.get(shape)
            if config is None:
                config = self._configs[shape] = _config(grid, block, shared_bytes, self._cluster, self._starts_early)
            return partial(self._launch_config, arguments, config)
        return partial(self._launch, arguments, grid, block, shared_bytes)

    def _allow(self, shared_bytes: int) -> None:
        if shared_bytes > self._shared_bytes:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(driver.cuFuncSetAttribute, self._function, attribute, shared_bytes)
            self._shared_bytes = shared_bytes

    def _launch(self, arguments: bytes, grid: Dim, block: Dim, shared_bytes: int, stream: CudaStream) -> None:
        x, y, z = grid
        u, v, w = block
        with self._lock:
            self._buffer.raw = arguments
            result = _cu_launch_kernel(
                self._function, x, y, z, u, v, w, shared_bytes, stream.driver_handle, None, self._extra_address
            )[0]
        if result:
            raise DriverError("cuLaunchKernel", result.name)

    def _launch_config(self, arguments: bytes, config: Any, stream: CudaStream) -> None:
        with self._lock:
            self._buffer.raw = arguments
            config.hStream = stream.driver_handle
            result = driver.cuLaunchKernelEx(config, self._function, None, self._extra_address)[0]
        if result:
            raise DriverError("cuLaunchKernelEx", result.name)


def _config(grid: Dim, block: Dim, shared_bytes: int, cluster: int, starts_early: bool) -> Any:
    """A launch shape in clusters of ``cluster`` blocks along x, which may start before the kernel ahead is over."""
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = shared_bytes
    attributes = []
    if cluster > 1:
        attributes.append(driver.CUlaunchAttribute())
        attributes[-1].id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        value = driver.CUlaunchAttributeValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = cluster, 1, 1
        attributes[-1].value = value
    if starts_early:
        attributes.append(driver.CUlaunchAttribute())
        attributes[-1].id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        value = driver.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        attributes[-1].value = value
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


def load(kernel: Kernel, arg_types: tuple[types.Type, ...], threads: int, architecture: Architecture) -> CompiledKernel:
    """Take the kernel's cubin from the cache, or compile it, and load it on the GPU."""
    cubin = cache.cubin(kernel.py_func, arg_types, threads, architecture, kernel.first_acts)
    starts_early = kernel.starts_early and architecture.starts_early
    return CompiledKernel(cubin.code, cubin.resources, arg_types, kernel.cluster, starts_early)


_SCALARS = {
    types.boolean: "?",
    types.int8: "b",
    types.uint8: "B",
    types.int16: "h",
    types.uint16: "H",
    types.int32: "i",
    types.uint32: "I",
    types.int64: "q",
    types.uint64: "Q",
    types.float16: "e",
    types.float32: "f",
    types.float64: "d",
}


def _layout(arg_types: tuple[types.Type, ...]) -> tuple[list[tuple[int, Callable[[Any], bytes]]], int]:
    """How to pack each scalar, padding on both sides included, by its index; and the bytes of all arguments."""
    scalars = []
    offset = 0
    for index, arg_type in enumerate(arg_types):
        if isinstance(arg_type, types.Array):
            offset += 8 * (5 + 2 * arg_type.ndim)
            continue
        size = struct.calcsize("=" + _SCALARS[arg_type])
        before = -offset % size
        offset += before + size
        is_last = index + 1 == len(arg_types)
        after = 0 if is_last or not isinstance(arg_types[index + 1], types.Array) else -offset % 8
        offset += after
        scalars.append((index, struct.Struct(f"={before}x{_SCALARS[arg_type]}{after}x").pack))
    return scalars, offset
