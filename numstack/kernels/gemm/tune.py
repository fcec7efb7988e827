"""Which Config of the Hopper kernel is fastest for a product: measured once (``numstack tune``), kept on disk, found.

A product is a Spec (layout and epilogue), what else is asked of the epilogue, dtypes and sizes. What was found lies in
``$NUMSTACK_CACHE/tuned/gemm``, in a folder for each card and source of the kernel, one small file a product, written
beside its place and renamed: ranks that tune at the same time leave whole files, and a kernel that changed starts anew.
The launcher asks :func:`find` and has a table of its own for what was never tuned.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from numstack import simt
from numstack.device import Device, current_device
from numstack.errors import KernelError
from numstack.kernels.gemm.problem import Problem, Spec
from numstack.kernels.gemm.wgmma.config import Config

# A product as dictionaries know it, a plain tuple, since the launcher makes one at every call: Spec, dtypes of a and c,
# shape of c, K, and whether c is added to, its columns are summed, what is not finite is flagged.
Key = tuple[Spec, np.dtype, np.dtype, tuple[int, ...], int, bool, bool, bool]

HERE = Path(__file__).resolve().parent
PTX = HERE.parents[1] / "device" / "ptx"


class Timing(NamedTuple):
    """A Config and what it took."""

    config: Config
    seconds: float


def find(problem: Problem) -> Config | None:
    """The Config that was fastest for this product on this card; None if it was never tuned."""
    configs = current_device().state(Tuned).configs
    return configs.get(key_of(problem)) if configs else None


def key_of(problem: Problem) -> Key:
    """What of a problem its best Config depends on."""
    return (
        problem.spec,
        problem.a.dtype,
        problem.c.dtype,
        problem.c.shape,
        problem.k,
        problem.residual is problem.c,
        problem.column_sums is not None,
        problem.nonfinite is not None,
    )


class Tuned:
    """All that was found for one card and the kernel as it is now.

    Attributes
    ----------
    configs : dict
        Config by :data:`Key`, as read when the device was first asked, with what this process found since.
    """

    def __init__(self, device: Device) -> None:
        card = simt.cache_directory() / "tuned" / "gemm" / re.sub(r"\W+", "-", device.name)
        # The hash reads files: nobody pays for it who never tuned.
        self._card = card
        self.configs: dict[Key, Config] = dict(self._read()) if card.is_dir() else {}

    def _read(self) -> Iterable[tuple[Key, Config]]:
        for path in sorted((self._card / source_hash()).glob("*.json")):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # damaged: as if never tuned
                kept = json.loads(path.read_text())
                dtypes, flags = map(np.dtype, kept["dtypes"]), map(bool, kept["flags"])
                key = (Spec(**kept["spec"]), *dtypes, tuple(kept["shape"]), int(kept["k"]), *flags)
                yield cast(Key, key), Config(**kept["config"])

    def keep(self, key: Key, best: Timing) -> None:
        """Remember a Config here and on disk; a cache that cannot be written is no error."""
        spec, dtype, out_dtype, shape, k, *flags = key
        self.configs[key] = best.config
        kept = {
            "spec": spec._asdict(),
            "dtypes": [dtype.name, out_dtype.name],
            "shape": list(shape),
            "k": k,
            "flags": flags,
            "config": best.config._asdict(),
            "microseconds": round(best.seconds * 1e6, 2),
        }
        options = "".join(str(int(flag)) for flag in (*spec, *flags))
        name = f"{'x'.join(map(str, shape))}x{k}-{options}-{dtype.name}-{out_dtype.name}.json"
        simt.write_atomically(self._card / source_hash() / name, (json.dumps(kept, indent=1) + "\n").encode())


def tune(
    problem: Problem,
    candidates: Iterable[Config],
    run: Callable[[Problem, Config], None],
    time_s: Callable[[dict[Config, Callable[[], None]]], dict[Config, float]],
) -> list[Timing]:
    """Time the candidates, keep the fastest, and return all of them, fastest first.

    Parameters
    ----------
    problem : Problem
        Whose arrays are used; c is overwritten.
    candidates : iterable of Config
    run : callable
        Launches the product with a Config.
    time_s : callable
        From calls, by Config, to the seconds that each takes.

    Raises
    ------
    KernelError
        If no candidate compiles.
    """
    calls: dict[Config, Callable[[], None]] = {}
    refused: list[str] = []
    for config in dict.fromkeys(candidates):

        def call(config: Config = config) -> None:
            run(problem, config)

        try:
            call()
        except KernelError as error:  # this one does not compile, or does not fit the card
            refused.append(str(error).split("\n")[0])
        else:
            calls[config] = call
    if not calls:
        raise KernelError(f"gemm: no Config could be launched for {problem}: {'; '.join(refused) or 'none was given'}")
    seconds = time_s(calls)
    timings = sorted((Timing(config, seconds[config]) for config in calls), key=lambda timing: timing.seconds)
    current_device().state(Tuned).keep(key_of(problem), timings[0])
    return timings


def source_hash() -> str:
    """Of the files that the kernel is made of, this one left out."""
    digest = hashlib.sha256()
    for path in [*sorted(HERE.rglob("*.py")), *sorted(PTX.glob("*.py"))]:
        if path != Path(__file__).resolve():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
