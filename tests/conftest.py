"""Set before anything of numstack is imported: what every test process needs."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Tests share two cores with mpirun's ranks and with each other; a kernel's blocks stay on two threads.
os.environ.setdefault("NUMSTACK_THREADS", "2")

# How long an example takes says how busy the machine is.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# Files that take longest, in that order: they go first, so that no worker ends long after the others.
LONGEST = (
    "kernels/test_determinism.py",  # on a GPU: a hundred repetitions of all launches
    "kernels/test_machine_code_sm_90a.py",
    "kernels/test_cross_entropy.py",
    "kernels/test_machine_code_sm_80.py",
    "kernels/test_layernorm.py",
    "kernels/test_embedding.py",
    "train/test_ranks.py",
    "kernels/test_gemm_tensor_cores.py",
    "kernels/test_rmsnorm.py",
    "kernels/test_attention.py",
    "kernels/test_attention_tiles.py",
    "comm/test_ranks.py",
    "train/test_run.py",
    "kernels/test_gemm.py",
    "nn/test_precision.py",
    "comm/test_nccl_ranks.py",
    "device/ptx/test_wgmma.py",
    "kernels/test_elementwise.py",
    "kernels/test_layernorm_residual.py",
    "kernels/test_softmax.py",
    "simt/test_numba_cuda_atomics.py",
    "test_autograd.py",
    "test_bench.py",
)
PLACE = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: PLACE.get(item.path, len(PLACE)))


@pytest.fixture(scope="module", autouse=True)
def what_a_file_leaves_is_there_for_good() -> Iterator[None]:
    """Compiling leaves millions of objects, which tests that call ``gc.collect()`` would look through each time."""
    yield
    gc.collect()
    gc.freeze()


pytest_plugins = ["tests.gpu_records"]
