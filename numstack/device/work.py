"""What is submitted to a device: one operation with what it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from numstack.device.tensor_map import TensorMap

if TYPE_CHECKING:
    from numstack.device.base import Array, Stream
    from numstack.device.kernel import Kernel

Kind = Literal["kernel", "copy", "fill", "collective", "host"]


class Work:
    """One operation for a stream: a kernel launch, a copy, a fill, a collective or a host call.

    Parameters
    ----------
    name : str
        Operation and variant, such as ``gemm.register_tile``.
    kind : {"kernel", "copy", "fill", "collective", "host"}
    run : callable
        ``run(stream)`` enqueues the operation on a CUDA stream, or does it on a CPU stream. May be called again: a
        captured step replays it.
    stream : Stream
        Where it runs.
    reads, writes : sequence of Array
        What it depends on and what it changes. For a kernel they are derived from its source, on demand.
    flops : int
        Floating-point operations, as the launcher counts them; 0 when it does not.
    kernel, grid, block, shared_bytes, args
        Of a kernel launch; ``None``, ``()`` or 0 otherwise.
    """

    __slots__ = (
        "_reads",
        "_writes",
        "args",
        "block",
        "flops",
        "grid",
        "kernel",
        "kind",
        "name",
        "run",
        "shared_bytes",
        "stream",
    )

    def __init__(
        self,
        name: str,
        kind: Kind,
        run: Callable[[Stream], None],
        stream: Stream,
        reads: Sequence[Array] = (),
        writes: Sequence[Array] = (),
        flops: int = 0,
        kernel: Kernel | None = None,
        grid: tuple[int, int, int] = (0, 0, 0),
        block: tuple[int, int, int] = (0, 0, 0),
        shared_bytes: int = 0,
        args: tuple[Any, ...] = (),
    ) -> None:
        self.name = name
        self.kind = kind
        self.run = run
        self.stream = stream
        self._reads = reads
        self._writes = writes
        self.flops = flops
        self.kernel = kernel
        self.grid = grid
        self.block = block
        self.shared_bytes = shared_bytes
        self.args = args

    @property
    def reads(self) -> Sequence[Array]:
        """Arrays whose contents the operation uses."""
        if self.kernel is None:
            return self._reads
        return [_array_of(self.args[i]) for i in self.kernel.accesses.reads]

    @property
    def writes(self) -> Sequence[Array]:
        """Arrays whose contents the operation changes."""
        if self.kernel is None:
            return self._writes
        return [_array_of(self.args[i]) for i in self.kernel.accesses.writes]

    @property
    def nbytes(self) -> int:
        """Least bytes the operation can move: each array read once and each written once."""
        return sum(a.nbytes for a in self.reads) + sum(a.nbytes for a in self.writes)

    def __repr__(self) -> str:
        shape = f" grid={self.grid} block={self.block}" if self.kernel is not None else ""
        return f"<Work {self.kind} {self.name}{shape} on {self.stream}>"


def _array_of(arg: Any) -> Array:
    """The array of an argument: itself, or what a tensor map describes."""
    return arg.array if isinstance(arg, TensorMap) else arg  # type: ignore[no-any-return]


class Observer(Protocol):
    """Something that watches the door: a trace, a NaN watch, a ledger, a planted fault."""

    def before(self, work: Work) -> None:
        """Called before ``work`` is handed to its stream; an exception keeps it from running."""

    def after(self, work: Work) -> None:
        """Called once ``work`` is handed to its stream; it may still be running."""
