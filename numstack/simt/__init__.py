"""numba.cuda kernels on the CPU: compiled from their source, or stepped through in Python under checks."""

from numstack.simt.accesses import Accesses, accesses
from numstack.simt.prototype import CompiledKernel, compile_kernel

__all__ = ["Accesses", "CompiledKernel", "accesses", "compile_kernel"]
