"""numstack.device.cuda.sass: the disassembler's text as instructions."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from numba import cuda, float32

from numstack.device import kernel, offline
from numstack.device.cuda import sass
from numstack.errors import DeviceError

# As nvdisasm 13 prints it.
TEXT = """
\t.target\tsm_90a
.text.name:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P3 LDG.E.128.CONSTANT R4, desc[UR4][R2.64+0x10] ;
.L_x_0:
.L_x_1:
        /*0020*/             @UP0 UIADD3 UR13, UP1, UR13, UR4, URZ ;
        /*0030*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0040*/              @P0 BRA `(.L_x_0) ;
        /*0050*/                   EXIT ;
        /*0060*/                   NOP ;
        /*0070*/                   NOP ;
"""


def test_the_text_as_instructions() -> None:
    found = sass.parse(TEXT)
    assert [i.opcode for i in found] == [
        "LDC",
        "LDG.E.128.CONSTANT",
        "UIADD3",
        "HGMMA.64x256x16.F32.BF16",
        "BRA",
        "EXIT",
    ]
    assert [i.address for i in found] == [0, 16, 32, 48, 64, 80]
    assert [i.predicate for i in found] == ["", "@!P3", "@UP0", "", "@P0", ""]
    assert found[1].operands == "R4, desc[UR4][R2.64+0x10]"
    assert found[2].labels == (".L_x_0", ".L_x_1")
    assert str(found[2]).splitlines()[:2] == [".L_x_0:", ".L_x_1:"]


def test_counts_with_and_without_modifiers() -> None:
    counts = sass.count(sass.parse(TEXT))
    assert counts["LDG"] == counts["LDG.E.128"] == counts["LDG.E.128.CONSTANT"] == 1
    assert counts["EXIT"] == 1 and counts["LDL"] == 0


def test_a_kernel_disassembled() -> None:
    @kernel
    def fused(x_N):
        i = cuda.grid(1)
        x_N[i] = x_N[i] * float32(2) + float32(1)

    with offline.device("sm_80") as device:
        fused[1, 32](device.array((32,), np.float32))
    (built,) = device.builds.values()
    counts = sass.count(sass.disassemble(built.code))
    assert counts["FFMA"] == 1 and counts["LDG"] == 1 and counts["STG"] == 1 and counts["EXIT"] >= 1
    assert not any(counts[opcode] for opcode in sass.LOCAL_MEMORY + sass.FLOAT64)


def test_what_is_no_cubin_is_refused() -> None:
    with pytest.raises(DeviceError, match="nvdisasm could not read a cubin of 4 bytes"):
        sass.disassemble(b"nope")


def test_a_missing_disassembler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    sass.nvdisasm.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    try:
        with pytest.raises(DeviceError, match="pip install nvidia-cuda-nvdisasm"):
            sass.disassemble(b"")
    finally:
        sass.nvdisasm.cache_clear()
