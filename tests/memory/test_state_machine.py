"""Random programs against the memory manager, beside a model that only knows intervals and counters."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from numstack.errors import OutOfMemory
from numstack.memory import SCOPES, MemoryManager
from numstack.memory.block import State
from numstack.memory.scope import DEFAULT_SCOPE
from numstack.memory.sizes import BLOCK_NBYTES, MIB, REGION_NBYTES, round_up
from tests.memory.fake import FakeDevice, FakeStream, make

# Nothing, one byte, around the granule, odd, around a region, and what no device has.
SIZES = [
    0,
    1,
    511,
    512,
    513,
    100_000,
    MIB // 2,
    MIB,
    MIB,
    2 * MIB - 512,
    2 * MIB,
    2 * MIB + 1,
    3 * MIB,
    5 * MIB,
    1 << 50,
]
# Little, so that streams soon want what others have freed.
CAPACITY = 12 * MIB
# Bytes written and checked at both ends of a block.
EDGE = 4096
LIMITS = [None, 2 * MIB, 4 * MIB, 6 * MIB, 10 * MIB]


@dataclass
class Held:
    """What the model knows of one live block."""

    number: int
    address: int
    nbytes: int
    rounded: int
    scope: str
    stream: FakeStream
    references: list[Any]
    users: set[FakeStream] = field(default_factory=set)

    def write(self, array: np.ndarray) -> None:
        """Mark both ends: whatever overlaps a block reaches over one of its ends, or starts or ends in it."""
        array[:EDGE] = array[-EDGE:] = self.number % 255 + 1

    def intact(self, array: np.ndarray) -> bool:
        """``array`` is the whole block or a view that reaches its end."""
        head = array[:EDGE] if array.size == self.nbytes else array[:0]
        return bool((head == self.number % 255 + 1).all() and (array[-EDGE:] == self.number % 255 + 1).all())


class MemoryMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        gc.freeze()  # the manager collects before it gives up; nothing from before this test is worth another look
        self.device = FakeDevice(capacity=CAPACITY)
        self.device.on_release = self.check_released
        self.streams = [self.device.default_stream, FakeStream("second")]
        self.manager = MemoryManager(self.device)  # type: ignore[arg-type]
        self.held: dict[int, Held] = {}
        self.used: list[tuple[int, int, FakeStream, int]] = []  # first byte, end, stream, its last work there
        self.count = 0
        self.peak = 0
        self.limit: int | None = None
        self.chosen: list[tuple[str, ExitStack]] = []

    # the program

    @rule(
        nbytes=st.sampled_from(SIZES),
        scope=st.sampled_from(["forward", "forward", "comm", None, *SCOPES]),
        stream=st.integers(0, 1),
        copies=st.integers(1, 4),
    )
    def allocate(self, nbytes: int, scope: str | None, stream: int, copies: int) -> None:
        for _ in range(copies):
            self.allocate_one(nbytes, scope or self.manager.default_scope, self.streams[stream])

    def allocate_one(self, nbytes: int, scope: str, stream: FakeStream) -> None:
        rounded = max(BLOCK_NBYTES, round_up(nbytes, BLOCK_NBYTES))
        try:
            array = make(self.manager, self.device, nbytes, scope, stream)
        except OutOfMemory:
            capacity = self.device.capacity if self.limit is None else min(self.limit, self.device.capacity)
            assert self.device.reserved + round_up(rounded, REGION_NBYTES) > capacity
            return
        address = self.device.address(array)
        assert address % BLOCK_NBYTES == 0
        end = address + rounded
        assert any(r.address <= address and end <= r.address + r.nbytes for r in self.device.granted.values())
        for other in self.held.values():
            assert end <= other.address or other.address + other.rounded <= address, "two live blocks overlap"
        for used_first, used_end, user, work in self.used:
            if used_first < end and address < used_end:
                assert stream.comes_after(user, work), f"handed to {stream} while {user} may still use it"
        self.count += 1
        self.held[self.count] = Held(self.count, address, nbytes, rounded, scope, stream, [array])
        self.held[self.count].write(array)
        self.peak = max(self.peak, self.live())

    @precondition(lambda self: self.held)
    @rule(data=st.data(), cut=st.floats(0, 1))
    def view(self, data: st.DataObject, cut: float) -> None:
        held = self.choose(data)
        whole = held.references[0]
        held.references.append(whole[int(cut * whole.size) :])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), first=st.booleans(), in_cycle=st.booleans())
    def drop(self, data: st.DataObject, first: bool, in_cycle: bool) -> None:
        self.drop_one(self.choose(data), first, in_cycle)

    @precondition(lambda self: len(self.held) > 3)
    @rule(every=st.integers(1, 3), stream=st.integers(0, 1))
    def drop_many(self, every: int, stream: int) -> None:
        """As the end of a step does: all, every second or every third block of a stream."""
        for held in [held for held in self.held.values() if held.stream is self.streams[stream]][::every]:
            while held.references:
                self.drop_one(held, True, False)

    def drop_one(self, held: Held, first: bool, in_cycle: bool) -> None:
        array = held.references.pop(0 if first else -1)
        assert held.intact(array)
        if not held.references:
            for stream in {held.stream, *held.users}:
                self.used.append((held.address, held.address + held.rounded, stream, stream.work()))
            del self.held[held.number]
        if in_cycle:
            cycle: list[Any] = [array]
            cycle.append(cycle)
            del array, cycle
            gc.collect()

    @precondition(lambda self: self.held)
    @rule(every=st.integers(1, 3), stream=st.integers(0, 1))
    def use_on(self, every: int, stream: int) -> None:
        for held in list(self.held.values())[::every]:
            array = held.references[-1]
            self.manager.record_use(array, self.streams[stream])
            if array.size:
                held.users.add(self.streams[stream])

    @rule(stream=st.integers(0, 1))
    def complete(self, stream: int) -> None:
        self.streams[stream].complete()

    @rule(limit=st.sampled_from(LIMITS))
    def set_limit(self, limit: int | None) -> None:
        self.manager.set_limit(limit)
        self.limit = limit

    @rule()
    def release_unused(self) -> None:
        before = self.device.reserved
        assert self.manager.release_unused() == before - self.device.reserved
        for region in self.device.granted.values():
            assert any(region.address <= held.address < region.address + region.nbytes for held in self.held.values())

    @rule(scope=st.sampled_from(SCOPES))
    def enter_scope(self, scope: str) -> None:
        stack = ExitStack()
        stack.enter_context(self.manager.scope(scope))
        self.chosen.append((scope, stack))

    @precondition(lambda self: self.chosen)
    @rule()
    def leave_scope(self) -> None:
        self.chosen.pop()[1].close()

    # what must hold

    @invariant()
    def counters_equal_the_model(self) -> None:
        statistics = self.manager.statistics()
        assert statistics.live == self.live()
        assert statistics.n_blocks == len(self.held)
        assert statistics.peak == self.peak
        assert statistics.reserved == self.device.reserved
        assert statistics.limit == self.limit
        assert statistics.free >= 0 and 0 <= statistics.fragmentation <= 1
        assert statistics.largest_free <= statistics.free
        for name in SCOPES:
            live = sum(held.rounded for held in self.held.values() if held.scope == name)
            assert (statistics.by_scope[name].live if name in statistics.by_scope else 0) == live
        assert self.manager.default_scope == (self.chosen[-1][0] if self.chosen else DEFAULT_SCOPE)

    @invariant()
    def contents_are_intact(self) -> None:
        for held in self.held.values():
            assert all(held.intact(array) for array in held.references)

    @invariant()
    def blocks_tile_their_regions(self) -> None:
        for scope in self.manager._scopes.values():
            listed = {entry[2] for pool in scope.pools.values() for entry in pool.free._sorted}
            recent = {block for pool in scope.pools.values() for blocks in pool.recent.values() for block in blocks}
            for region in scope.regions:
                end = region.granted.address
                previous = None
                for block in region.blocks():
                    assert block.address == end and block.previous is previous and block.nbytes > 0
                    assert (block.state is State.FREE) == (block in listed)
                    assert (block.state is State.RECENT) == (block in recent)
                    end, previous = block.address + block.nbytes, block
                assert end == region.granted.address + region.nbytes

    def check_released(self, region: Any) -> None:
        for first, _, stream, work in self.used:
            if region.address <= first < region.address + region.nbytes:
                assert stream.completed >= work, f"released while {stream} may still use it"

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        while self.chosen:
            self.leave_scope()
        self.held.clear()
        self.manager.set_limit(None)
        self.manager.release_unused()
        statistics = self.manager.statistics()
        assert (statistics.live, statistics.waiting, statistics.reserved, statistics.n_regions) == (0, 0, 0, 0)
        assert not self.device.granted
        self.device.close()
        gc.unfreeze()

    # helpers

    def live(self) -> int:
        return sum(held.rounded for held in self.held.values())

    def choose(self, data: st.DataObject) -> Held:
        return self.held[data.draw(st.sampled_from(sorted(self.held)))]


TestMemory = MemoryMachine.TestCase
# A failing program is shown as it was found: shrinking it and explaining it take minutes.
TestMemory.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, phases=[Phase.generate]
)
