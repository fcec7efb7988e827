"""Calls of the CUDA driver, each with its result checked."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

from numstack.device.current import current_device
from numstack.errors import DeviceError

# What a driver call says in a thread that has made no context current.
NO_CONTEXT = (driver.CUresult.CUDA_ERROR_INVALID_CONTEXT, driver.CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED)

# What a person can do about the errors that a correct program can meet.
ADVICE = {
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES, or set NUMSTACK_DEVICE=cpu",
    "CUDA_ERROR_INSUFFICIENT_DRIVER": "the driver is older than CUDA 13.0 needs (580); update it",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "a kernel went outside its arrays; run it with kernel.check or NUMSTACK_SYNC=1",
    "CUDA_ERROR_MISALIGNED_ADDRESS": "a kernel used an address that its access width does not divide",
    "CUDA_ERROR_LAUNCH_TIMEOUT": "a kernel ran longer than the display driver allows",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "the block needs more registers or shared memory than a multiprocessor has",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the kernel is for another architecture; clear the cache (NUMSTACK_CACHE)",
    "CUDA_ERROR_OUT_OF_MEMORY": "the GPU's memory is full; see nvidia-smi for other processes",
}


class DriverError(DeviceError):
    """A driver call failed; ``result`` is the driver's own name for why."""

    def __init__(self, call: str, result: str, context: str = "") -> None:
        advice = ADVICE.get(result)
        super().__init__(f"{call} failed with {result}" + (f": {advice}" if advice else "") + context)
        self.result = result


def call(function: Any, *args: Any) -> Any:
    """Call ``driver.function(*args)`` and return its values (None, the one, or a tuple).

    A thread that has not used the GPU before has no context; it then gets the process's, and the call is made again.

    Raises
    ------
    DriverError
        If its result is not CUDA_SUCCESS.
    """
    result, *values = function(*args)
    if result in NO_CONTEXT:
        current_device().enter()  # type: ignore[attr-defined]
        result, *values = function(*args)
    if result:
        raise DriverError(function.__name__, result.name)
    return values[0] if len(values) == 1 else tuple(values) or None


def n_devices() -> int:
    """How many GPUs the driver shows; 0 where there is no driver."""
    try:
        if driver.cuInit(0)[0]:
            return 0
        return int(call(driver.cuDeviceGetCount))
    except (RuntimeError, ImportError, OSError, DriverError):
        return 0
