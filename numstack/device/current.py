"""Which device this process uses: the only module-level state in numstack."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from numstack.device.base import Device
from numstack.device.ranks import local_rank, ranks_per_gpu
from numstack.errors import ConfigError

_current: Device | None = None


def current_device() -> Device:
    """The device of this process, opened at the first call.

    ``NUMSTACK_DEVICE=cpu`` or ``cuda`` chooses; without it, a GPU if there is one, else the CPU.

    Raises
    ------
    ConfigError
        If ``NUMSTACK_DEVICE`` names no device.
    DeviceError
        If ``cuda`` is asked for and there is no usable GPU.
    """
    global _current
    if _current is None:
        _current = _open(os.environ.get("NUMSTACK_DEVICE", "").lower())
    return _current


@contextlib.contextmanager
def using(device: Device) -> Iterator[Device]:
    """Let ``device`` be the current one inside the ``with`` block: to build kernels for a GPU that is not here."""
    global _current
    previous, _current = _current, device
    try:
        yield device
    finally:
        _current = previous


def _open(kind: str) -> Device:
    if kind not in ("", "cpu", "cuda"):
        raise ConfigError(f"NUMSTACK_DEVICE={kind!r} is no device; set it to cpu or cuda, or leave it unset")
    if kind != "cpu":
        from numstack.device.cuda.driver import n_devices

        if kind == "cuda" or n_devices():
            from numstack.device.cuda.device import CudaDevice

            return CudaDevice(local_rank() // ranks_per_gpu())
    from numstack.device.cpu import CpuDevice

    return CpuDevice()
