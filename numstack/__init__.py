"""numstack: a training stack in pure Python.

Importing it touches no GPU and no MPI; rooms are imported by name (``from numstack import memory``).
"""

__version__ = "0.1.0"
