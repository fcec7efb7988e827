"""Set before anything of numstack is imported: what every test process needs."""

import os

# Tests share two cores with mpirun's ranks and with each other; a kernel's blocks stay on two threads.
os.environ.setdefault("NUMSTACK_THREADS", "2")

pytest_plugins = ["tests.gpu_records"]
