"""The memory manager of a device: finds a block for each request and takes it back when the last array is gone.

Finalisers and threads
----------------------
The last reference to an array may vanish anywhere: on a communication thread, or in the middle of the manager's own
code when Python's garbage collector happens to run there. So a finaliser does one thing only, and takes no lock: it
appends the block to a queue (``deque.append`` is atomic). Whoever calls the manager next, under its lock, works the
queue off first, so that counters are exact whenever anyone looks.
"""

from __future__ import annotations

import gc
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from numstack.errors import ConfigError, OutOfMemory
from numstack.memory.block import Block, State, Where
from numstack.memory.guard import Guard
from numstack.memory.region import LimitedSource, Region
from numstack.memory.report import describe_full
from numstack.memory.scope import DEFAULT_SCOPE, SCOPES, Pool, Scope, check_scope
from numstack.memory.sizes import BLOCK_NBYTES, REGION_NBYTES, format_size, parse_size, region_nbytes, round_up
from numstack.memory.statistics import Statistics, gather

if TYPE_CHECKING:
    from numstack.device import Array, Device, Event, Stream

LIMIT_VARIABLE = "NUMSTACK_MEMORY_LIMIT"


class Lease:
    """What an array over a block refers to, and all its views with it: when the last is gone, the block comes back."""

    __slots__ = ("_give_back", "block")

    def __init__(self, block: Block, give_back: Callable[[Block], None]) -> None:
        self.block = block
        self._give_back = give_back

    def __del__(self) -> None:
        self._give_back(self.block)


class _Chosen(threading.local):
    """What ``scope`` has chosen, for each thread."""

    scope = DEFAULT_SCOPE


class MemoryManager:
    """All memory of a device.

    Usually reached through the functions of ``numstack.memory``. May be called from any thread, but not from within a
    ``Work``: a captured work runs again without asking for memory, and one that waited for its own stream would hang.

    Parameters
    ----------
    device : Device
        The environment variable ``NUMSTACK_MEMORY_LIMIT`` sets the first limit.

    Raises
    ------
    ConfigError
        If ``NUMSTACK_MEMORY_LIMIT`` is no size, or less than a region.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._source = LimitedSource(device)
        self._granule = max(BLOCK_NBYTES, device.properties.alignment)
        self._scopes = {name: Scope(name) for name in SCOPES}
        self._returned: deque[Block] = deque()
        self._waiting: deque[tuple[Block, list[Event]]] = deque()
        self._live = 0
        self._peak = 0
        self._guard = Guard()
        self._chosen = _Chosen()
        limit = os.environ.get(LIMIT_VARIABLE, "").strip()
        if limit:
            self._source.limit = _checked_limit(parse_size(limit, LIMIT_VARIABLE), LIMIT_VARIABLE)

    # requests

    @property
    def default_scope(self) -> str:
        """The scope of requests of this thread that name none."""
        return self._chosen.scope

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Inside the ``with`` block, requests of this thread that name no scope are in this one."""
        check_scope(name)
        before = self._chosen.scope
        self._chosen.scope = name
        try:
            yield
        finally:
            self._chosen.scope = before

    def allocate(self, nbytes: int, scope: str, stream: Stream | None = None, where: Where | None = None) -> Lease:
        """A block of at least ``nbytes``, for works on ``stream`` (``None``: the default stream).

        Raises
        ------
        ConfigError
            If there is no such scope.
        OutOfMemory
            If neither free blocks nor the device have room, even after unused regions went back.
        """
        if scope not in self._scopes:
            check_scope(scope)
        if stream is None:
            stream = self._device.default_stream
        need = -(-nbytes // self._granule) * self._granule or self._granule
        with self._guard:
            if self._returned:
                self._take_back()
            pool = self._scopes[scope].pool(stream)
            same_size = pool.recent.get(need)
            if same_size:
                return self._hand_out(same_size.pop(), pool, where)
            try:
                return self._hand_out(self._find(need, pool), pool, where)
            except OutOfMemory:
                pass
        # Outside the guard: both run other people's code, or wait for streams.
        gc.collect()
        self.release_unused()
        with self._guard:
            self._take_back()
            try:
                return self._hand_out(self._find(need, pool), pool, where)
            except OutOfMemory as error:
                message = describe_full(need, scope, where, str(error), self._scopes, self._gather())
        raise OutOfMemory(message)

    def _hand_out(self, block: Block, pool: Pool, where: Where | None) -> Lease:
        block.pool = pool
        block.state = State.LIVE
        block.where = where
        nbytes = block.nbytes
        scope = pool.scope
        scope.live += nbytes
        if scope.live > scope.peak:
            scope.peak = scope.live
        self._live += nbytes
        if self._live > self._peak:
            self._peak = self._live
        return Lease(block, self._returned.append)

    def _find(self, nbytes: int, pool: Pool) -> Block:
        """A free block of exactly ``nbytes``: one of the pool, one that is idle, a new one, or one worth a wait."""
        self._settle()
        block = pool.take(nbytes)
        for other in pool.scope.others(pool):
            block = block or other.take_idle(nbytes)
        if block is None:
            try:
                block = self._grow(pool, nbytes)
            except OutOfMemory:
                block = self._take_after_wait(pool, nbytes)
                if block is None:
                    raise
        if block.nbytes > nbytes:
            rest = block.split(nbytes)
            rest.pool.free.add(rest)
        return block

    def _grow(self, pool: Pool, nbytes: int) -> Block:
        scope = pool.scope
        least = round_up(nbytes, REGION_NBYTES)
        wanted = region_nbytes(nbytes, scope.reserved)
        try:
            granted = self._source.allocate(wanted)
        except OutOfMemory:
            if wanted == least:
                raise
            granted = self._source.allocate(least)
        region = Region(granted, pool)
        scope.regions.append(region)
        return region.first

    def _take_after_wait(self, pool: Pool, nbytes: int) -> Block | None:
        """A block that other streams of the scope may still be using; the pool's stream waits for them."""
        waiting, self._waiting = self._waiting, deque()
        for block, events in waiting:
            if block.pool.scope is pool.scope:
                for event in events:
                    block.pool.stream.wait(event)
                block.pool.stamp(block)
                self._put_after_wait(block)
            else:
                self._waiting.append((block, events))
        for other in pool.scope.others(pool):
            pool.adopt(other)
        return pool.take(nbytes)

    # returns

    def _take_back(self) -> None:
        """Work off the blocks whose last array is gone."""
        returned = self._returned
        while returned:
            block = returned.popleft()
            pool = block.pool
            pool.scope.live -= block.nbytes
            self._live -= block.nbytes
            pool.stamp(block)
            if block.users is None:
                pool.put(block)
            else:
                block.state = State.WAITING
                pool.scope.waiting += block.nbytes
                self._waiting.append((block, [user.record() for user in block.users]))
                block.users = None

    def _settle(self) -> None:
        """Free the blocks whose other streams are done with them, oldest first."""
        while self._waiting and all(event.done() for event in self._waiting[0][1]):
            self._put_after_wait(self._waiting.popleft()[0])

    @staticmethod
    def _put_after_wait(block: Block) -> None:
        block.pool.scope.waiting -= block.nbytes
        block.pool.put(block)

    def record_use(self, array: Array, stream: Stream) -> None:
        """Say that works on ``stream`` use ``array``, which was made for another stream.

        When its last reference is gone, its memory is not used again before those works are done.
        """
        if array.nbytes == 0:
            return  # its address may be the end of its block
        address = self._device.address(array)
        with self._guard:
            regions = (region for scope in self._scopes.values() for region in scope.regions)
            region = next((region for region in regions if address in region), None)
            if region is None:
                raise ConfigError(
                    f"record_use: the array at {address:#x} is not of numstack.memory; pass one made by memory.empty, "
                    "or a view of it"
                )
            block = region.block_at(address)
            if stream is not block.pool.stream:
                block.users = (block.users or set()) | {stream}

    def release_unused(self) -> int:
        """Give regions without live arrays back to the device, once all streams are done with them; returns bytes."""
        with self._guard:
            self._take_back()
            fences = [(pool, *pool.fence()) for scope in self._scopes.values() for pool in scope.pools.values()]
            events = [event for _, event, _ in fences] + [event for _, waits in self._waiting for event in waits]
        for event in events:  # without the guard, since those works may end in a thread that frees or allocates
            event.synchronize()
        with self._guard:
            for pool, _, stamp in fences:
                pool.confirm(stamp)
            self._settle()
            for scope in self._scopes.values():
                for pool in scope.pools.values():
                    pool.join()
            return sum(self._release_idle(scope) for scope in self._scopes.values())

    def _release_idle(self, scope: Scope) -> int:
        idle = [region for region in scope.regions if region.is_idle()]
        for region in idle:
            for block in region.blocks():
                block.pool.free.remove(block)
            scope.regions.remove(region)
            self._source.release(region.granted)
        return sum(region.nbytes for region in idle)

    # figures

    def set_limit(self, limit: int | None) -> None:
        """Let regions hold at most ``limit`` bytes; those beyond it stay until they are unused.

        Raises
        ------
        ConfigError
            If the limit is less than one region.
        """
        self._source.limit = None if limit is None else _checked_limit(limit, "set_limit: nbytes")
        if limit is not None and self._source.reserved > limit:
            self.release_unused()

    def statistics(self) -> Statistics:
        """What memory is used for at present. Takes time in proportion to the number of blocks."""
        with self._guard:
            self._take_back()
            self._settle()
            return self._gather()

    def _gather(self) -> Statistics:
        return gather(self._scopes, self._peak, self._source.limit)

    def reset_peak(self) -> None:
        """Start ``peak`` again from what is live now."""
        with self._guard:
            self._take_back()
            self._peak = self._live
            for scope in self._scopes.values():
                scope.peak = scope.live


def _checked_limit(limit: int, name: str) -> int:
    if limit < REGION_NBYTES:
        raise ConfigError(f"{name}={limit} bytes is less than one region; allow at least {format_size(REGION_NBYTES)}")
    return limit
