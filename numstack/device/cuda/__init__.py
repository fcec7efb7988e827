"""The CUDA back end: everything that knows the driver, numba's CUDA target, or the linker."""
