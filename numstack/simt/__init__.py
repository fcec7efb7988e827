"""numba.cuda kernels on the CPU: compiled from their source, or stepped through in Python under checks."""

from numstack.simt.accesses import Accesses, accesses
from numstack.simt.cache import cache_directory, write_atomically
from numstack.simt.checks import KernelFault
from numstack.simt.collective import collective
from numstack.simt.compile import CompiledKernel, compile_kernel
from numstack.simt.digest import functions_reached, source_digest
from numstack.simt.interpret import interpret
from numstack.simt.step import Stop, step

__all__ = [
    "Accesses",
    "CompiledKernel",
    "KernelFault",
    "Stop",
    "accesses",
    "cache_directory",
    "collective",
    "compile_kernel",
    "functions_reached",
    "interpret",
    "source_digest",
    "step",
    "write_atomically",
]
