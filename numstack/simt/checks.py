"""What a kernel may not do, and who did it: the rules that ``interpret`` holds every access of memory to.

Two accesses of one address, at least one of them a write, must be ordered. Between threads of a block the block's
barriers order them, and within a warp also ``syncwarp``, shuffles and votes; between blocks nothing does, unless
the kernel uses ``threadfence`` (then blocks are taken to know what they do, and only threads of a block are compared).
Atomics do not race with one another, nor do writes of equal values.

A non-finite value written to a floating array in global memory is a fault of the kernel only if the kernel made it:
once a block has read a NaN or infinity from global memory, or was passed one as an argument, its non-finite results
are its caller's doing. A store that means it (the log-sum-exp of an empty row is -inf) says so in a comment on its
line: ``# non-finite: meant``. bfloat16 arrays are seen as their 16 bits, so they are not checked for this.
"""

import linecache
from math import isfinite
from typing import Any, NamedTuple, Protocol

import numpy as np

from numstack.errors import KernelError

MEANT = "# non-finite: meant"


class Site(NamedTuple):
    """A place in a kernel's source."""

    file: str
    line: int

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class KernelFault(KernelError):
    """A rule that a kernel broke while it was run under checks.

    Attributes
    ----------
    kind : str
        "out of bounds", "race", "uninitialised", "divergence", "non-finite", "undefined", or "error" (an exception
        of Python's in the kernel's own code).
    kernel : str
    file, line : str, int
        Where the running thread was; for a race the later of the two accesses.
    block : tuple of int
    threads : tuple of tuples of int
        The thread that broke the rule; for a race the later and the earlier one, for a divergence one of each place.
    """

    def __init__(
        self,
        kind: str,
        text: str,
        kernel: str,
        site: Site,
        block: tuple[int, ...],
        threads: tuple[tuple[int, ...], ...],
    ) -> None:
        super().__init__(f"{kernel}: {kind}: {text}\n  {site}, block {block}, thread {threads[0]}\n    {site.source}")
        self.kind = kind
        self.kernel = kernel
        self.file, self.line = site
        self.block = block
        self.threads = threads


class Fault(Exception):
    """A broken rule, raised where it is noticed; the interpreter adds kernel, place, block and thread."""

    def __init__(self, kind: str, text: str, others: "tuple[tuple[int, ...], ...]" = ()) -> None:
        super().__init__(text)
        self.kind = kind
        self.others = others


class Actor(Protocol):
    """What the rules need to know of a thread.

    ``clock`` counts its synchronisations within its warp; ``seen[lane]`` is the clock of each lane when this thread
    last synchronised with it, directly or through others.
    """

    block: tuple[int, int, int]
    index: tuple[int, int, int]
    warp: Any
    clock: int
    seen: list[int]

    @property
    def lane(self) -> int: ...


class Running(Protocol):
    """What the rules need to know of the launch: which thread is running."""

    @property
    def thread(self) -> Actor: ...


class Element(Protocol):
    """What the rules need to know of an array: its elements, and how to call one of them in a message."""

    data: np.ndarray
    itemsize: int

    def describe(self, index: Any) -> str: ...


# Who touched an address: thread, its clock, where in the source, and how ("reads", "writes", "updates atomically").
Event = tuple[Any, int, tuple[str, int], str]


def _ordered(event: Event, thread: Actor) -> bool:
    """Whether what ``thread`` does now comes after ``event``, both since the block's last barrier."""
    first = event[0]
    return first is thread or (first.warp is thread.warp and thread.seen[first.lane] > event[1])


def _first_unordered(events: dict[Actor, Event] | None, thread: Actor) -> Event | None:
    return next((e for e in events.values() if not _ordered(e, thread)), None) if events else None


class PhaseLog:
    """Accesses by the threads of one block since its last barrier. Each method returns an event that it races with."""

    __slots__ = ("atomics", "reads", "writes")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.reads: dict[int, dict[Actor, Event]] = {}
        self.atomics: dict[int, dict[Actor, Event]] = {}
        self.writes: dict[int, Event] = {}

    def _unordered_write(self, thread: Actor, address: int) -> Event | None:
        event = self.writes.get(address)
        return None if event is None or _ordered(event, thread) else event

    def read(self, thread: Actor, address: int, site: Any) -> Event | None:
        event = self.writes.get(address)
        if event is not None and event[0] is not thread and not _ordered(event, thread):
            return event
        if self.atomics and (event := _first_unordered(self.atomics.get(address), thread)) is not None:
            return event
        readers = self.reads.get(address)
        if readers is None:
            self.reads[address] = {thread: (thread, thread.clock, site, "reads")}
        else:
            readers[thread] = (thread, thread.clock, site, "reads")
        return None

    def atomic(self, thread: Actor, address: int, site: Any) -> Event | None:
        event = self._unordered_write(thread, address) or _first_unordered(self.reads.get(address), thread)
        if event is None:
            self.atomics.setdefault(address, {})[thread] = (thread, thread.clock, site, "updates atomically")
        return event

    def write(self, thread: Actor, address: int, site: Any) -> Event | None:
        # What was ordered before this write is ordered before all that is ordered after it: no need to keep it.
        event = _first_unordered(self.reads.pop(address, None), thread)
        if self.atomics:
            event = event or _first_unordered(self.atomics.pop(address, None), thread)
        event = event or self._unordered_write(thread, address)
        self.writes[address] = (thread, thread.clock, site, "writes")
        return event


class BlockLog:
    """Accesses by all blocks of a launch so far: for each address the first of each kind, and one by another block."""

    __slots__ = ("atomics", "reads", "writes")

    def __init__(self) -> None:
        self.reads: dict[int, tuple[Event, Event | None]] = {}
        self.atomics: dict[int, tuple[Event, Event | None]] = {}
        self.writes: dict[int, Event] = {}

    @staticmethod
    def _by_another(events: tuple[Event, Event | None] | None, thread: Actor) -> Event | None:
        if events is None:
            return None
        return events[0] if events[0][0].block != thread.block else events[1]

    @staticmethod
    def _add(log: dict[int, tuple[Event, Event | None]], thread: Actor, address: int, site: Any, how: str) -> None:
        events = log.get(address)
        if events is None:
            log[address] = ((thread, 0, site, how), None)
        elif events[1] is None and events[0][0].block != thread.block:
            log[address] = (events[0], (thread, 0, site, how))

    def _other_write(self, thread: Actor, address: int) -> Event | None:
        event = self.writes.get(address)
        return None if event is None or event[0].block == thread.block else event

    def read(self, thread: Actor, address: int, site: Any) -> Event | None:
        self._add(self.reads, thread, address, site, "reads")
        return self._other_write(thread, address) or self._by_another(self.atomics.get(address), thread)

    def atomic(self, thread: Actor, address: int, site: Any) -> Event | None:
        self._add(self.atomics, thread, address, site, "updates atomically")
        return self._other_write(thread, address) or self._by_another(self.reads.get(address), thread)

    def write(self, thread: Actor, address: int, site: Any) -> Event | None:
        event = (
            self._by_another(self.reads.get(address), thread)
            or self._by_another(self.atomics.get(address), thread)
            or self._other_write(thread, address)
        )
        self.writes[address] = (thread, 0, site, "writes")
        return event


def _race(name: str, how: str, event: Event, thread: Actor) -> Fault:
    first, _, site, did = event
    place = Site(*site)
    if first.block == thread.block:
        who, missing = f"thread {first.index}", "with no barrier between them"
    else:
        who, missing = f"thread {first.index} of block {first.block}", "and nothing orders two blocks of a launch"
    text = f"{how} {name}, which {who} {did} at {place} ({place.source}), {missing}"
    return Fault("race", text, (first.index,))


def _same(a: Any, b: Any) -> bool:
    return bool(a == b or (a != a and b != b))


class LocalMemory:
    """Bytes that only one thread sees; it knows the addresses of the elements that were written."""

    where = "local memory"

    def __init__(self, running: Running, n_bytes: int) -> None:
        self.running = running
        # Poison (NaN, -1), for when nothing checks.
        self.bytes = np.full(n_bytes, 0xFF, np.uint8)
        self.written: set[int] = set()

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """The first bytes as an array; no shape: as many elements of ``dtype`` as fit."""
        size = int(np.prod(shape)) if shape else self.bytes.nbytes // dtype.itemsize
        flat = self.bytes[: size * dtype.itemsize].view(dtype)
        return flat.reshape(shape) if shape else flat

    def read(self, array: Element, index: Any, address: int, site: Any, value: Any) -> None:
        """Check a read of one element."""
        if address not in self.written:
            raise Fault("uninitialised", f"reads {array.describe(index)}, which nothing has written ({self.where})")

    def write(self, array: Element, index: Any, address: int, site: Any, new: Any) -> None:
        """Check a write of one element that is about to become ``new``."""
        self.written.add(address)

    def atomic(self, array: Element, index: Any, address: int, site: Any, old: Any, new: Any) -> None:
        self.read(array, index, address, site, old)
        self.write(array, index, address, site, new)


class SharedMemory(LocalMemory):
    """Bytes of one block, and who touched them since the last barrier.

    Arrays of several element sizes may lie over the same ``dynamic`` bytes; in a race they are compared by the first
    bytes of their elements only.
    """

    where = "shared memory"

    def __init__(self, running: Running, n_bytes: int, *, dynamic: bool = False) -> None:
        super().__init__(running, n_bytes)
        self.log = PhaseLog()
        self.dynamic = dynamic

    def read(self, array: Element, index: Any, address: int, site: Any, value: Any) -> None:
        if address not in self.written:
            raise Fault("uninitialised", f"reads {array.describe(index)}, which nothing has written ({self.where})")
        thread = self.running.thread
        if (event := self.log.read(thread, address, site)) is not None:
            raise _race(array.describe(index), "reads", event, thread)

    def write(self, array: Element, index: Any, address: int, site: Any, new: Any) -> None:
        thread = self.running.thread
        event = self.log.write(thread, address, site)
        if event is not None and not (event[3] == "writes" and _same(array.data[index], new)):
            raise _race(array.describe(index), "writes", event, thread)
        self.written.add(address)
        if self.dynamic:
            self.written.update(range(address, address + array.itemsize))

    def atomic(self, array: Element, index: Any, address: int, site: Any, old: Any, new: Any) -> None:
        if address not in self.written:
            raise Fault(
                "uninitialised", f"updates {array.describe(index)} atomically, which nothing has written ({self.where})"
            )
        thread = self.running.thread
        if (event := self.log.atomic(thread, address, site)) is not None:
            raise _race(array.describe(index), "updates atomically", event, thread)


class GlobalMemory:
    """The arrays that a launch was given."""

    where = "global memory"

    def __init__(self, running: Running, *, non_finite_arguments: bool, compare_blocks: bool) -> None:
        self.running = running
        self.log = PhaseLog()
        self.blocks = BlockLog() if compare_blocks else None
        self.non_finite_arguments = non_finite_arguments
        self.start_block()

    def start_block(self) -> None:
        self.log.clear()
        self.non_finite_input = self.non_finite_arguments

    def read(self, array: Element, index: Any, address: int, site: Any, value: Any) -> None:
        thread = self.running.thread
        event = self.log.read(thread, address, site)
        if event is None and self.blocks is not None:
            event = self.blocks.read(thread, address, site)
        if event is not None:
            raise _race(array.describe(index), "reads", event, thread)
        if not isfinite(value):
            self.non_finite_input = True

    def write(self, array: Element, index: Any, address: int, site: Any, new: Any) -> None:
        thread = self.running.thread
        event = self.log.write(thread, address, site)
        across = self.blocks.write(thread, address, site) if self.blocks is not None else None
        for race in (event, across):
            if race is not None and not (race[3] == "writes" and _same(array.data[index], new)):
                raise _race(array.describe(index), "writes", race, thread)
        self._check_finite(array, index, site, new)

    def atomic(self, array: Element, index: Any, address: int, site: Any, old: Any, new: Any) -> None:
        thread = self.running.thread
        event = self.log.atomic(thread, address, site)
        if event is None and self.blocks is not None:
            event = self.blocks.atomic(thread, address, site)
        if event is not None:
            raise _race(array.describe(index), "updates atomically", event, thread)
        if not isfinite(old):
            self.non_finite_input = True
        self._check_finite(array, index, site, new)

    def _check_finite(self, array: Element, index: Any, site: Any, value: Any) -> None:
        if not isfinite(value) and not self.non_finite_input and MEANT not in Site(*site).source:
            text = f"writes {value} to {array.describe(index)}, though no input that this block has read is non-finite"
            raise Fault("non-finite", f"{text}; if that is meant, end the line with `{MEANT}`")


Memory = LocalMemory | GlobalMemory
