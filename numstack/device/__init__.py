"""Devices: streams, events, memory regions, copies, and the one door that all work passes through.

A kernel is a plain ``numba.cuda`` function under ``@kernel``; ``current_device()`` says where it runs: on a GPU, or
compiled for this machine's CPU.
"""

from numstack.device.base import Array, Device, Event, Properties, Region, Stream
from numstack.device.conversions import narrow, widen
from numstack.device.current import current_device
from numstack.device.door import submit
from numstack.device.kernel import Kernel, kernel
from numstack.device.work import Observer, Work

__all__ = [
    "Array",
    "Device",
    "Event",
    "Kernel",
    "Observer",
    "Properties",
    "Region",
    "Stream",
    "Work",
    "current_device",
    "kernel",
    "narrow",
    "submit",
    "widen",
]
