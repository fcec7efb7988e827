"""Where the time of a training step goes: an observer at the door times every work with two events."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from numstack.device import Event, Work, current_device


class Row(NamedTuple):
    """Works of a step that belong together."""

    group: str
    name: str
    arrays: str
    n_works: int
    ms: float
    gflop: float
    gbytes: float

    @property
    def rate(self) -> str:
        """Arithmetic where there is much of it, else bytes: the least that the works can move."""
        if self.ms == 0:
            return ""
        if self.gflop > 20 * self.gbytes:
            return f"{self.gflop / self.ms:.3g} TFLOP/s"
        return f"{1e3 * self.gbytes / self.ms:.4g} GB/s"


@dataclass(slots=True)
class _Timed:
    group: str
    name: str
    arrays: str
    flops: int
    nbytes: int
    began: Event
    ended: Event


class StepProfile:
    """Times works by phase and operation::

        profile = StepProfile()
        with profile.phase("forward"):
            loss = model(inputs, targets)
        rows = profile.by_operation()

    On a GPU, works that the host submits too late seem longer than they are: profile a step that is submitted while the
    one before it still runs.
    """

    def __init__(self) -> None:
        self._phase = ""
        self._began: Event | None = None
        self._works: list[_Timed] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is submitted inside the ``with`` block."""
        self._phase = name
        with current_device().observe(self):
            yield

    def before(self, work: Work) -> None:
        """Mark where the work starts."""
        self._began = work.stream.record()

    def after(self, work: Work) -> None:
        """Mark where it ends."""
        assert self._began is not None
        ended = work.stream.record()
        group = f"{_operation(work)} {self._phase}" if self._phase else _operation(work)
        self._works.append(
            _Timed(_GROUPS.get(group, group), work.name, _arrays(work), work.flops, _nbytes(work), self._began, ended)
        )

    def by_operation(self) -> list[Row]:
        """One row an operation and phase, longest first. Waits for the device."""
        return sorted(self._rows(lambda timed: timed.group), key=lambda row: -row.ms)

    def by_work(self) -> list[Row]:
        """One row a name of a work, longest first. Waits for the device."""
        return sorted(self._rows(lambda timed: timed.name), key=lambda row: -row.ms)

    def by_shapes(self) -> list[Row]:
        """One row for works of one name on arrays of the same shapes, in the order of the first. Waits."""
        return self._rows(lambda timed: (timed.group, timed.name, timed.arrays))

    def _rows(self, key: Callable[[_Timed], Any]) -> list[Row]:
        current_device().synchronize()
        grouped: dict[Any, list[_Timed]] = {}
        for timed in self._works:
            grouped.setdefault(key(timed), []).append(timed)
        return [
            Row(
                works[0].group,
                works[0].name,
                works[0].arrays,
                len(works),
                1e3 * sum(w.began.elapsed_s(w.ended) for w in works),
                1e-9 * sum(w.flops for w in works),
                1e-9 * sum(w.nbytes for w in works),
            )
            for works in grouped.values()
        ]


# What is called by another name in the table, or belongs to another operation.
_GROUPS = {
    "gemm TN backward": "gemm, weight gradients",
    "gemm backward": "gemm, input gradients",
    "gemm forward": "gemm, forward",
    "reduce backward": "bias gradients",
    "reduce forward": "loss",
    "elementwise forward": "loss",
    "elementwise backward": "loss",
    "cross_entropy forward": "cross-entropy",
    "cross_entropy backward": "cross-entropy",
    "reduce optimiser": "gradient norm",
    "adamw optimiser": "adamw",
}


def _operation(work: Work) -> str:
    """The first part of its name, such as ``gemm``; which product it is, as far as the layout says."""
    operation = work.name.partition(".")[0].removesuffix("_vectors")
    return f"{operation} TN" if operation == "gemm" and "TN" in work.name.split() else operation


def _arrays(work: Work) -> str:
    """Shapes and dtypes of the arrays it reads and writes, in words."""
    reads, writes = (
        ", ".join(f"{'x'.join(map(str, array.shape))} {array.dtype.str[1:]}" for array in arrays)
        for arrays in (work.reads, work.writes)
    )
    return f"{reads} -> {writes}"


def _nbytes(work: Work) -> int:
    """Bytes of the arrays it reads and of those it writes; one that stands in for others counts once."""
    return sum(sum({id(array): array.nbytes for array in arrays}.values()) for arrays in (work.reads, work.writes))
