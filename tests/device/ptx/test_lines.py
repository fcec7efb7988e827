"""numstack.device.ptx.lines: values go in and out, and the hints reach the machine code."""

import numpy as np
import pytest
from numba import cuda, float32

from numstack.device import Kernel, kernel, offline
from numstack.device.cuda import sass
from numstack.device.ptx.lines import load4_kept, load8_kept, store4_released
from tests.support import poisoned, to_device, to_host


def doubling() -> Kernel:
    @kernel
    def double(x_N, y_N, z_N):
        values = cuda.local.array(8, float32)
        i = cuda.grid(1) * 8
        load8_kept(x_N, i, values, 0)
        for k in range(8):
            values[k] *= float32(2)
        store4_released(y_N, i, values, 0)
        store4_released(y_N, i + 4, values, 4)
        load4_kept(x_N, i + 4, values, 0)
        store4_released(z_N, i // 2, values, 0)

    return double


def test_elements_go_in_and_out() -> None:
    x = np.random.default_rng(0).standard_normal(512, dtype=np.float32)
    y, z = to_device(poisoned(x.shape)), to_device(poisoned((256,)))
    double = doubling()
    double[2, 32](to_device(x), y, z)
    np.testing.assert_array_equal(to_host(y), 2 * x)
    np.testing.assert_array_equal(to_host(z), x.reshape(-1, 2, 4)[:, 1].ravel())
    assert double.accesses.reads == (0,)
    assert double.accesses.writes == (1, 2)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_each_access_is_one_instruction_and_has_its_policy(architecture: str) -> None:
    with offline.device(architecture) as device:
        doubling()[2, 32](*(device.array((n,), np.float32) for n in (512, 512, 256)))
        [build] = device.builds.values()
    code = sass.disassemble(build.code)
    opcodes = [i.opcode for i in code]
    assert opcodes.count("LDG.E.128") == 3 and opcodes.count("STG.E.128") == 3
    # The policy is in the descriptor of an access, as a constant: of evict_last from 0x14 on, of evict_normal 0x16.
    constants = " ".join(i.operands for i in code if i.opcode == "UMOV")
    assert "0x14" in constants and "0x16" in constants
    assert not build.faults()
