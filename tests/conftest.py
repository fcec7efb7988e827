"""Set before anything of numstack is imported: what every test process needs."""

import os

from hypothesis import HealthCheck, settings

# Tests share two cores with mpirun's ranks and with each other; a kernel's blocks stay on two threads.
os.environ.setdefault("NUMSTACK_THREADS", "2")

# How long an example takes says how busy the machine is.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

pytest_plugins = ["tests.gpu_records"]
