"""A GPU that is not here: launches are compiled for it and recorded, and nothing runs.

``numstack kernels build`` sends every launcher through it, so that registers, shared memory, spills and float64
arithmetic of each kernel are known, and asserted, on a machine without a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from numstack.device.base import Array, Device, Event, Properties, Region, Stream
from numstack.device.cuda import cache
from numstack.device.cuda.array import CudaArray
from numstack.device.cuda.compiler import Architecture
from numstack.device.cuda.resources import LIMITS, Resources
from numstack.device.current import using
from numstack.device.door import submit
from numstack.device.launch_types import numba_types, type_key
from numstack.device.tensor_map import TensorMap, check
from numstack.device.work import Work
from numstack.errors import DeviceError, KernelError

if TYPE_CHECKING:
    from numstack.device.kernel import Kernel

# An address that no driver hands out; a multiple of every alignment that a kernel asks for.
NOWHERE = 1 << 40


@dataclass(frozen=True, slots=True)
class Build:
    """A kernel compiled for an architecture.

    Attributes
    ----------
    kernel : str
        Module and function.
    types : str
        Dtypes of its arrays, in the order of its parameters.
    threads : int
        Of a block.
    shared_bytes : int
        Dynamic shared memory of the launch, beside the static one in ``resources``.
    occupancy : float
        Resident threads as a fraction of the most a multiprocessor can hold.
    code : bytes
        The cubin; ``numstack.device.cuda.sass`` disassembles it.
    """

    kernel: str
    types: str
    threads: int
    shared_bytes: int
    resources: Resources
    occupancy: float
    code: bytes = field(repr=False)

    def faults(self) -> list[str]:
        """Why the kernel is not fit to be shipped; empty if it is."""
        return self.resources.faults()


@contextlib.contextmanager
def device(architecture: str, *, compiles: bool = True) -> Iterator[OfflineDevice]:
    """Inside the ``with`` block launches are compiled for ``architecture``, such as ``sm_90a``, instead of run.

    Parameters
    ----------
    architecture : str
    compiles : bool
        False: not even that; observers see what would be launched.

    Raises
    ------
    KernelError
        If there is no such architecture, or its limits are not known.
    """
    with using(OfflineDevice(Architecture.parse(architecture), compiles)) as opened:
        assert isinstance(opened, OfflineDevice)
        yield opened


class OfflineEvent(Event):
    """Nothing runs, so everything is done."""

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_s(self, later: Event) -> float:
        return 0.0


class OfflineStream(Stream):
    """Takes works and does nothing with them."""

    def __init__(self, device: OfflineDevice) -> None:
        self.device = device

    def execute(self, work: Work) -> None:
        pass

    def record(self) -> Event:
        return OfflineEvent()

    def wait(self, event: Event) -> None:
        pass

    def synchronize(self) -> None:
        pass


class OfflineDevice(Device):
    """Compiles for ``architecture`` what is launched on it; ``builds`` holds the results."""

    kind = "cuda"
    n_threads = 1

    def __init__(self, architecture: Architecture, compiles: bool = True) -> None:
        super().__init__()
        self.architecture = architecture
        self._compiles = compiles
        self._next_address = NOWHERE
        self.name = f"{architecture.name}, offline"
        if architecture.compute_capability not in LIMITS:
            known = ", ".join(f"sm_{major}{minor}" for major, minor in LIMITS)
            raise KernelError(f"{architecture.name}: its limits are not in the table of resources.py; known: {known}")
        self.properties = Properties(
            alignment=512,
            warp_size=32,
            multiprocessors=132,
            shared_bytes_per_block=LIMITS[architecture.compute_capability][2] - 1024,
            memory_bytes=80 << 30,
            compute_capability=architecture.compute_capability,
        )
        self.default_stream = OfflineStream(self)
        self.builds: dict[Any, Build] = {}

    def array(self, shape: tuple[int, ...], dtype: Any = np.float32) -> CudaArray:
        """An array that has a shape and a dtype, and no memory."""
        return CudaArray(NOWHERE, shape, dtype)

    def bind(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        args: tuple[Any, ...],
    ) -> Callable[[Stream], None]:
        threads = block[0] * block[1] * block[2]
        key = (kernel, threads, type_key(kernel, args))
        if self._compiles and key not in self.builds:
            arg_types = numba_types(kernel, args)
            cubin = cache.cubin(kernel.py_func, arg_types, threads, self.architecture, kernel.first_acts)
            capability = self.architecture.compute_capability
            self.builds[key] = Build(
                kernel=kernel.name,
                types=", ".join(str(a.dtype) for a in args if isinstance(a, CudaArray)),
                threads=threads,
                shared_bytes=shared_bytes,
                resources=cubin.resources,
                occupancy=cubin.resources.occupancy(threads, capability, shared_bytes),
                code=cubin.code,
            )
        return lambda _: None

    def tensor_map(self, array: Array, box: tuple[int, ...], *, swizzle_bytes: int = 128) -> TensorMap:
        check(array, self.address(array), box, swizzle_bytes)
        return TensorMap(array, NOWHERE)

    def copy(self, dst: Any, src: Any, stream: Stream | None = None) -> None:
        submit(Work("copy", "copy", lambda _: None, stream or self.default_stream, (src,), (dst,)))

    def fill(self, dst: Array, value: float, stream: Stream | None = None) -> None:
        submit(Work("fill", "fill", lambda _: None, stream or self.default_stream, (), (dst,)))

    def synchronize(self) -> None:
        pass

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
        assert isinstance(array, CudaArray)
        return array.address

    def create_stream(self, priority: int = 0) -> Stream:
        return OfflineStream(self)

    def allocate(self, nbytes: int) -> Region:
        region = Region(self._next_address, nbytes)
        self._next_address += -(-nbytes // self.properties.alignment) * self.properties.alignment
        return region

    def release(self, region: Region) -> None:
        pass

    def pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any] | type) -> np.ndarray:
        return np.empty(shape, dtype)

    def to_host(self, array: Array) -> np.ndarray:
        raise DeviceError("an offline device has no memory to copy from")
