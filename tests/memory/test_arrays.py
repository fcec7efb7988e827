"""The functions of numstack.memory, on the device under test."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from numstack import memory
from numstack.device import current_device
from numstack.errors import ConfigError, DTypeError, ShapeError
from numstack.memory.sizes import BLOCK_NBYTES, MIB
from numstack.memory.staging import N_BUFFERS
from tests.support import poisoned

pytestmark = pytest.mark.usefixtures("fresh")


# arrays


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (128,), (7, 5, 3)])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.int32, np.bool_])
def test_empty_has_shape_and_dtype(shape, dtype):
    array = memory.empty(shape, dtype)
    assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
    assert array.flags.c_contiguous
    assert current_device().address(array) % BLOCK_NBYTES == 0


@pytest.mark.parametrize("shape", [5, [5], (np.int64(5),)])
def test_empty_takes_what_numpy_takes_for_a_shape(shape):
    assert memory.empty(shape, "float32").shape == (5,)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, -1), r"memory.empty: shape is \(2, -1\); sizes cannot be negative"),
        ((-2, -1), "sizes cannot be negative"),
        ((2.0, 3), r"memory.empty: shape is \(2.0, 3\); pass an integer or a tuple of integers"),
        ("abc", "pass an integer or a tuple of integers"),
        (None, "pass an integer or a tuple of integers"),
    ],
)
def test_bad_shapes(shape, message):
    with pytest.raises(ShapeError, match=message):
        memory.empty(shape, np.float32)


@pytest.mark.parametrize("dtype", [object, np.complex64, "S3", "V2"])
def test_bad_dtypes(dtype):
    with pytest.raises(DTypeError, match="use a boolean, integer or floating one"):
        memory.empty((2,), dtype)


def test_zeros_over_used_memory():
    used = memory.from_host(poisoned(1000))
    address = current_device().address(used)
    del used
    zeros = memory.zeros(1000, np.float32)
    assert current_device().address(zeros) == address
    np.testing.assert_array_equal(memory.to_host(zeros), np.zeros(1000, np.float32))


@pytest.mark.parametrize(
    "host",
    [
        np.float32(3.5),
        np.zeros((0, 4), np.int32),
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.arange(12, dtype=np.uint16).reshape(3, 4).T,
        np.arange(60, dtype=np.float64).reshape(3, 4, 5)[::-1, 1::2],
    ],
    ids=["scalar", "empty", "plain", "transposed", "strided"],
)
def test_to_the_device_and_back(host):
    array = memory.from_host(host)
    assert array.shape == np.shape(host) and array.flags.c_contiguous
    back = memory.to_host(array)
    np.testing.assert_array_equal(back, host)
    assert back.dtype == host.dtype


def test_copies_are_copies():
    host = np.arange(4, dtype=np.float32)
    array = memory.from_host(host)
    host[:] = -1
    back = memory.to_host(array)
    back[:] = -2
    np.testing.assert_array_equal(memory.to_host(array), [0, 1, 2, 3])


# lifetimes


def test_memory_stays_until_the_last_view_is_gone():
    whole = memory.from_host(np.arange(1000, dtype=np.float32))
    view = whole[10:20]
    view_of_view = view.reshape(2, 5)[1]
    del whole, view
    assert memory.statistics().live == 4096
    other = memory.from_host(poisoned(1000))
    np.testing.assert_array_equal(memory.to_host(view_of_view), np.arange(15, 20))
    del view_of_view
    assert memory.statistics().live == 4096
    del other
    assert memory.statistics().live == 0


def test_memory_in_a_cycle_comes_back_with_the_collector():
    cycle: list[object] = [memory.empty(1000, np.float32)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert memory.statistics().live == 0


def test_a_request_that_fails_holds_nothing(monkeypatch):
    device = current_device()
    monkeypatch.setattr(device, "view", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        memory.empty(1000, np.float32)
    assert memory.statistics().live == 0


# scopes and statistics


def test_statistics_by_scope():
    forward = memory.empty(1000, np.float32)
    with memory.scope("backward"):
        backward = memory.empty((3, 512), np.uint8)
        with memory.scope("comm"):
            comm = memory.empty(1, np.uint8)
        persistent = memory.empty(513, np.uint8, scope="persistent")
        more = memory.empty(1, np.uint8)
    statistics = memory.statistics()
    assert {name: row.live for name, row in statistics.by_scope.items()} == {
        "forward": 4096,
        "backward": 2048,
        "comm": 512,
        "persistent": 1024,
    }
    assert statistics.live == 4096 + 2048 + 512 + 1024
    assert (statistics.n_blocks, statistics.n_regions, statistics.reserved) == (5, 4, 8 * MIB)
    del forward, backward, comm, persistent, more


def test_the_scope_ends_with_an_exception():
    with pytest.raises(ZeroDivisionError), memory.scope("comm"):
        raise ZeroDivisionError
    assert memory.manager().default_scope == "forward"


def test_the_scope_is_of_one_thread():
    seen = []
    with memory.scope("comm"):
        thread = threading.Thread(target=lambda: seen.append(memory.manager().default_scope))
        thread.start()
        thread.join()
    assert seen == ["forward"]


def test_unknown_scopes():
    message = "scope='gradients' is no memory scope; use one of persistent, forward, backward, workspace, comm"
    with pytest.raises(ConfigError, match=message):
        memory.empty(1, np.float32, scope="gradients")
    with pytest.raises(ConfigError, match=message):
        memory.scope("gradients").__enter__()


def test_peak():
    array = memory.empty(10_000, np.uint8)
    del array
    array = memory.empty(100, np.uint8)
    assert memory.statistics().peak == 10_240
    memory.reset_peak()
    assert memory.statistics().peak == memory.statistics().by_scope["forward"].peak == 512
    del array


def test_fragmentation():
    blocks = [memory.empty(MIB // 4, np.uint8) for _ in range(8)]
    assert memory.statistics().fragmentation == 0  # nothing is free
    del blocks[5:]  # a stretch of three quarters of a MiB
    assert memory.statistics().fragmentation == 0
    assert memory.statistics().largest_free == 3 * MIB // 4
    blocks.pop(0)  # and one of a quarter
    assert memory.statistics().fragmentation == 0.25
    assert memory.statistics().largest_free == 3 * MIB // 4
    blocks.clear()
    assert memory.statistics().fragmentation == 0


def test_statistics_print_as_a_table():
    array = memory.empty(3 * MIB, np.uint8, scope="persistent")
    memory.set_limit(8 * MIB)
    rows = str(memory.statistics()).splitlines()
    assert rows[0].split() == ["scope", "live", "free", "reserved", "peak", "fragmented", "blocks"]
    assert rows[1].split() == ["persistent", "3.0", "MiB", "1.0", "MiB", "4.0", "MiB", "3.0", "MiB", "0%", "1"]
    assert rows[2].split()[0] == "all"
    assert rows[3] == "limit: 8.0 MiB"
    del array


# regions


def test_regions_double():
    blocks, reserved = [], []
    for _ in range(9):
        blocks.append(memory.empty(MIB, np.uint8))
        reserved.append(memory.statistics().reserved // MIB)
    assert reserved == [2, 2, 4, 4, 8, 8, 8, 8, 16]


def test_large_requests_have_their_own_regions():
    large = memory.empty(33 * MIB, np.uint8)
    assert memory.statistics().reserved == 34 * MIB
    del large


def test_release_unused():
    first = [memory.empty(MIB, np.uint8) for _ in range(4)]
    other = memory.empty(1, np.uint8, scope="comm")
    assert memory.release_unused() == 0
    del first[2:]
    assert memory.release_unused() == 2 * MIB
    assert memory.statistics().reserved == 4 * MIB
    del first, other
    assert memory.release_unused() == 4 * MIB
    assert memory.statistics().reserved == 0


# threads


def test_threads_allocate_check_and_free():
    device = current_device()
    errors: list[BaseException] = []
    handed_over: list[object] = []

    def hammer(seed: int) -> None:
        rng = np.random.default_rng(seed)
        mine = []
        try:
            for i in range(300):
                n = int(rng.integers(0, 3000))
                array = memory.from_host(np.full(n, seed, np.int32), scope=memory.SCOPES[i % 2])
                mine.append((array, n))
                if len(mine) > 10:
                    old, n_old = mine.pop(int(rng.integers(0, 10)))
                    got = device.to_host(old)
                    assert got.size == n_old and (got == seed).all()
                    handed_over.append(old)  # freed by whichever thread clears the list
                    del old
                if i % 50 == 0:
                    handed_over.clear()
                    memory.statistics()
                if i % 100 == 0:
                    memory.release_unused()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    handed_over.clear()
    assert memory.statistics().live == 0


# host data that is sent


def test_what_is_sent_arrives_though_the_host_has_changed_it(monkeypatch):
    """More buffers than may be on their way at once, in two sizes, and one that is not contiguous."""
    n_pinned = 0
    pinned = current_device().pinned

    def counted(*args):
        nonlocal n_pinned
        n_pinned += 1
        return pinned(*args)

    monkeypatch.setattr(current_device(), "pinned", counted)
    stream = current_device().create_stream()
    host = np.empty((3, 5000), np.int32)
    sent = []
    for number in range(2 * N_BUFFERS):
        host[...] = number
        part = host[:, :: 2 if number % 2 else 1000]
        sent.append((number, part.shape, memory.send(part, scope="forward", stream=stream)))
    host[...] = -1
    stream.synchronize()
    for number, shape, array in sent:
        assert np.array_equal(memory.to_host(array), np.full(shape, number, np.int32))
    assert n_pinned <= 2 * N_BUFFERS


@pytest.mark.parametrize("values", [np.zeros((0, 3), np.float32), np.float32(2.5)])
def test_nothing_and_a_number_can_be_sent(values):
    array = memory.send(values)
    assert array.shape == np.shape(values)
    assert np.array_equal(memory.to_host(array), values)


def test_what_is_fetched_is_as_it_was_then(monkeypatch):
    """Later works of the stream change the array; buffers come back, and one that nobody waits for does not."""
    n_pinned, pinned = 0, current_device().pinned

    def counted(*args):
        nonlocal n_pinned
        n_pinned += 1
        return pinned(*args)

    monkeypatch.setattr(current_device(), "pinned", counted)
    stream = current_device().create_stream()
    array = memory.empty((3, 50), np.float32, stream=stream)
    for _ in range(4):
        readings = []
        for number in range(3):
            current_device().fill(array, number, stream)
            readings.append(memory.fetch(array, stream))
        readings.pop()
        current_device().fill(array, np.nan, stream)
        for number, reading in enumerate(readings):
            first = reading.wait()
            assert np.array_equal(first, np.full((3, 50), number, np.float32))
            assert reading.wait() is first
    assert n_pinned <= 2 + 4


def test_nothing_and_a_number_can_be_fetched():
    for values in (np.zeros((0, 3), np.float32), np.float32(2.5)):
        assert np.array_equal(memory.fetch(memory.from_host(values)).wait(), values)
