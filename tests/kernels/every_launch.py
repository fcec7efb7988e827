"""Launches every kernel of the catalogue once, on small arrays: what compute-sanitizer runs.

usage: compute-sanitizer --tool memcheck python -m tests.kernels.every_launch bf16 [WORD ...] [--share 0/8]

pytest would run each kernel hundreds of times, which the sanitizer makes a hundred times slower. Variants that are made
for GPUs are launched, and with ``--portable`` the others too; WORDs choose operations whose name has one of them, and
``--share 0/8`` every eighth launch, for eight processes at once: what takes a sanitizer long is not the GPU's work.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from numstack import memory
from numstack.device import current_device
from numstack.errors import ConfigError
from numstack.kernels import catalogue
from tests.kernels.portable import portable_variants

DTYPES = {"bf16": np.uint16, "fp16": np.float16, "fp32": np.float32}
N_RANDOM = 1 << 20


def random_array(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Any:
    """Normal numbers, repeated after a million, or indices below 20,000."""
    values = np.random.default_rng(seed).standard_normal(min(int(np.prod(shape)), N_RANDOM), dtype=np.float32)
    if dtype == np.int32:
        values = np.abs(values * 4000) if values.size > 3 else np.ones_like(values)
    elif dtype == np.uint16:
        values = values.view(np.uint32) >> 16
    return memory.from_host(np.resize(values.astype(dtype), shape))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dtype", choices=DTYPES)
    parser.add_argument("words", nargs="*", default=[""], metavar="WORD")  # the default is in every name
    parser.add_argument("--portable", action="store_true", help="also the variants that run on any device")
    parser.add_argument("--share", default="0/1", metavar="I/N", help="every N-th launch, from number I (default: all)")
    options = parser.parse_args()
    share, n_shares = map(int, options.share.split("/"))
    launches = (launch for launch in every_launch(options) if any(word in launch.operation for word in options.words))
    n_launches = 0
    for operation, variant, run, _scratch, prepare in itertools.islice(launches, share, None, n_shares):
        try:
            prepare()
            run()
        except ConfigError as error:  # a variant that needs larger arrays
            print(f"{operation} {variant}: {error}")
            continue
        current_device().synchronize()
        print(operation, variant, flush=True)  # what the sanitizer complains about stands before it
        n_launches += 1
    print(f"{n_launches} launches")


def every_launch(options: argparse.Namespace) -> Iterator[catalogue.Launch]:
    """Of variants that are made for GPUs, then of the others on smaller arrays: they take racecheck minutes."""
    portable = portable_variants()
    for is_portable in (False, True) if options.portable else (False,):
        catalogue.B, catalogue.T, catalogue.H = (1, 32, 2) if is_portable else (1, 256, 12)
        catalogue.R, catalogue.C = catalogue.B * catalogue.T, catalogue.H * catalogue.D
        for launch in catalogue.launches(random_array, DTYPES[options.dtype]):
            if (launch.variant in portable) == is_portable:
                yield launch


if __name__ == "__main__":
    main()
