"""The machine code of a cubin as a list of instructions: what the GPU will really execute.

Wide loads, tensor cores and copies by TMA are promises of the source; SASS shows whether the compiler kept them:

========================  =======================================================================
opcode                    what it is
========================  =======================================================================
HGMMA                     wgmma: a warpgroup's matrix product out of shared memory (sm_90a)
HMMA                      mma.sync: a warp's matrix product out of registers
LDSM, STSM                ldmatrix, stmatrix
UTMALDG, UTMASTG, UTMAREDG  a TMA load, store, reduction of a tile
LDG.E.128, STG.E.128      global loads and stores of 16 bytes a lane
LDL, STL                  local memory: spilled registers, or an array that did not fit them
DADD, DMUL, DFMA          float64 arithmetic
MUFU                      exponentials, reciprocals, roots, tanh: a quarter of the rate of a multiply-add, or less
========================  =======================================================================

Source: CUDA Binary Utilities, nvdisasm and the instruction set reference for Hopper.
"""

from __future__ import annotations

import collections
import functools
import importlib.util
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from numstack.errors import DeviceError

LOCAL_MEMORY = ("LDL", "STL")
FLOAT64 = ("DADD", "DMUL", "DFMA", "DSETP", "DMNMX")
#: What a summary of a kernel counts, from tensor cores down to what should not be there.
TELLING = (
    *("HGMMA", "HMMA", "LDSM", "STSM", "UTMALDG", "UTMASTG", "UTMAREDG", "LDGSTS"),
    *("LDG.E.128", "LDG", "STG.E.128", "STG", "LDS.128", "LDS", "STS.128", "STS"),
    *("FFMA", "FMUL", "FADD", "HFMA2", "MUFU", "SHFL", "IMAD", "BAR", "SYNCS", "BRA"),
    *("LDL", "STL", "DADD", "DMUL", "DFMA"),
)

_LINE = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<predicate>@!?U?P\w+\s+)?(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>.*?)\s*;"
)
_LABEL = re.compile(r"^(?P<label>\.L_\w+):")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One machine instruction.

    Attributes
    ----------
    address : int
        In bytes, from the kernel's start.
    predicate : str
        ``@P0`` or ``@!P0``: executed only where it holds; empty if always.
    opcode : str
        With its modifiers: ``LDG.E.128.CONSTANT``.
    operands : str
    labels : tuple of str
        Those that branches jump to.
    """

    address: int
    predicate: str
    opcode: str
    operands: str
    labels: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The opcode without modifiers: ``LDG``."""
        return self.opcode.partition(".")[0]

    def __str__(self) -> str:
        text = f"  {self.address:05x}  {self.predicate:<6}{self.opcode:<28}{self.operands}".rstrip()
        return "\n".join([*(f"{label}:" for label in self.labels), text])


def disassemble(cubin: bytes) -> list[Instruction]:
    """The instructions of a cubin in the order of their addresses.

    Raises
    ------
    DeviceError
        If nvdisasm is not installed, or cannot read the cubin.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # The analysis of what flows where adds nothing to the text and takes a quarter of the time.
        command = [nvdisasm(), "-c", "--no-dataflow", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DeviceError(f"nvdisasm could not read a cubin of {len(cubin)} bytes: {done.stderr.strip()}")
    return parse(done.stdout)


def parse(text: str) -> list[Instruction]:
    """What ``nvdisasm -c`` printed, as instructions."""
    found: list[Instruction] = []
    labels: list[str] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels.append(label["label"])
        elif match := _LINE.match(line):
            predicate = (match["predicate"] or "").strip()
            found.append(
                Instruction(int(match["address"], 16), predicate, match["opcode"], match["operands"], tuple(labels))
            )
            labels = []
    while found and found[-1].opcode == "NOP":  # which only fill up what is fetched together
        found.pop()
    return found


def count(instructions: list[Instruction]) -> collections.Counter[str]:
    """How often each opcode occurs, with all, some and none of its modifiers: LDG.E.128.CONSTANT, LDG.E.128, LDG."""
    counts: collections.Counter[str] = collections.Counter()
    for instruction in instructions:
        parts = instruction.opcode.split(".")
        counts.update(".".join(parts[: n + 1]) for n in range(len(parts)))
    return counts


@functools.cache
def nvdisasm() -> str:
    """Where the disassembler is: of the wheel, or of a toolkit on the PATH.

    Raises
    ------
    DeviceError
        If there is none.
    """
    nvidia = importlib.util.find_spec("nvidia")
    for folder in (nvidia.submodule_search_locations or ()) if nvidia else ():
        for program in sorted(Path(folder).glob("cu*/bin/nvdisasm"), reverse=True):
            return str(program)
    program_on_path = shutil.which("nvdisasm")
    if program_on_path is None:
        raise DeviceError("there is no nvdisasm, which reads machine code; pip install nvidia-cuda-nvdisasm")
    return program_on_path
