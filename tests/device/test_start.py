"""How a kernel starts: it waits for the one ahead where it may be there early. Needs no GPU."""

from __future__ import annotations

import numpy as np
from numba import cuda, float32

from numstack.device import Kernel, kernel, offline, ptx
from numstack.device.cuda import sass

WAIT, LET_START = "ACQBULK", "PREEXIT"


@cuda.jit(device=True)
def _doubled(x):
    return x * float32(2)


@kernel(name="double", starts_early=True)
def _double(x_N):
    i = cuda.grid(1)
    if i < x_N.size:
        x_N[i] = _doubled(x_N[i])


@kernel
def _punctual(x_N):
    i = cuda.grid(1)
    if i < x_N.size:
        x_N[i] = _doubled(x_N[i])


@kernel(name="late", waits_itself=True)
def _late(x_N):
    i = cuda.grid(1)
    ptx.wait_for_kernel_before()
    if i < x_N.size:
        x_N[i] = _doubled(x_N[i])


def _instructions(launched: Kernel, architecture: str) -> list[sass.Instruction]:
    with offline.device(architecture) as device:
        launched[4, 64](device.array((256,), np.float32))
        [build] = device.builds.values()
    return sass.disassemble(build.code)


def test_one_that_starts_early_waits_before_it_touches_memory_and_lets_the_next_one_start() -> None:
    opcodes = [i.opcode.partition(".")[0] for i in _instructions(_double, "sm_90a")]
    assert opcodes.count(WAIT) == opcodes.count(LET_START) == 1
    assert opcodes.index(WAIT) < opcodes.index(LET_START) < opcodes.index("LDG")


def test_one_that_does_not_start_early_only_lets_the_next_one_start() -> None:
    opcodes = [i.opcode.partition(".")[0] for i in _instructions(_punctual, "sm_90a")]
    assert opcodes.count(LET_START) == 1 and WAIT not in opcodes


def test_one_that_waits_itself_gets_nothing() -> None:
    opcodes = [i.opcode.partition(".")[0] for i in _instructions(_late, "sm_90a")]
    assert opcodes.count(WAIT) == 1 and LET_START not in opcodes


def test_older_gpus_have_no_such_instructions() -> None:
    opcodes = {i.opcode for i in _instructions(_double, "sm_80")}
    assert not opcodes & {WAIT, LET_START} and "LDG.E" in opcodes
