"""Streams and events of the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cuda.bindings import driver

from numstack.device.base import Event, Stream
from numstack.device.cuda.driver import DriverError, call
from numstack.device.work import Work

if TYPE_CHECKING:
    from numstack.device.cuda.device import CudaDevice

_FLAGS = driver.CUevent_flags


class CudaEvent(Event):
    """A driver event; destroyed with its last reference."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self.handle = call(driver.cuEventCreate, _FLAGS.CU_EVENT_DEFAULT)

    def done(self) -> bool:
        result = driver.cuEventQuery(self.handle)[0]
        if result == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._device.check(result, "cuEventQuery")
        return True

    def synchronize(self) -> None:
        self._device.check_wait(driver.cuEventSynchronize(self.handle)[0], "cuEventSynchronize")

    def elapsed_s(self, later: Event) -> float:
        assert isinstance(later, CudaEvent)
        return float(call(driver.cuEventElapsedTime, self.handle, later.handle)) / 1e3

    def __del__(self) -> None:
        if hasattr(self, "handle") and driver is not None:  # None at the interpreter's end
            driver.cuEventDestroy(self.handle)


class CudaStream(Stream):
    """A stream of the driver; ``handle`` is its CUstream as an int, for libraries that take one."""

    device: CudaDevice

    def __init__(self, device: CudaDevice, handle: int) -> None:
        self.device = device
        self.handle = handle
        # As the bindings take it without making an object at every call; None is the default stream.
        self.driver_handle = driver.CUstream(handle) if handle else None

    def execute(self, work: Work) -> None:
        try:
            work.run(self)
        except DriverError as error:
            if error.result != "CUDA_ERROR_INVALID_CONTEXT":
                raise self.device.explain(error) from None
            self.device.enter()  # the first work of this thread
            work.run(self)
        self.device.remember(work)

    def record(self) -> CudaEvent:
        event = CudaEvent(self.device)
        call(driver.cuEventRecord, event.handle, self.handle)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        call(driver.cuStreamWaitEvent, self.handle, event.handle, 0)

    def synchronize(self) -> None:
        self.device.check_wait(driver.cuStreamSynchronize(self.handle)[0], "cuStreamSynchronize")

    def __repr__(self) -> str:
        return f"CUDA stream {self.handle:#x}"
