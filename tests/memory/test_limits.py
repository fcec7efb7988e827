"""Sizes as people write them, limits, and what OutOfMemory says."""

from __future__ import annotations

import gc
import inspect
import re

import numpy as np
import pytest

from numstack import memory
from numstack.errors import ConfigError, DeviceError, OutOfMemory
from numstack.memory import MemoryManager
from numstack.memory.report import N_HOLDERS
from numstack.memory.sizes import GIB, KIB, MIB, TIB, format_size, parse_size
from tests.memory.fake import FakeDevice, make


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("512MiB", 512 * MIB),
        ("2GiB", 2 * GIB),
        (" 1.5 gib ", 3 * GIB // 2),
        ("4194304", 4 * MIB),
        ("4194304B", 4 * MIB),
        ("9007199254740993", 9007199254740993),  # one more than a float can hold
        ("1TiB", TIB),
    ],
)
def test_sizes(text, nbytes):
    assert parse_size(text, "x") == nbytes


@pytest.mark.parametrize("text", ["12 bananas", "MiB", "-1MiB", "1e9", "512 M", "1,5GiB", "two"])
def test_bad_sizes_name_the_variable_and_the_value(text, monkeypatch):
    monkeypatch.setenv("NUMSTACK_MEMORY_LIMIT", text)
    message = f"NUMSTACK_MEMORY_LIMIT={text!r} is not a size; write a number of bytes, or one with KiB, MiB"
    with pytest.raises(ConfigError, match=re.escape(message)):
        MemoryManager(FakeDevice())  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["0", "1MiB", "2097151"])
def test_limits_below_a_region(text, monkeypatch):
    monkeypatch.setenv("NUMSTACK_MEMORY_LIMIT", text)
    with pytest.raises(ConfigError, match=r"NUMSTACK_MEMORY_LIMIT=\d+ bytes is less than one region; .* 2.0 MiB"):
        MemoryManager(FakeDevice())  # type: ignore[arg-type]


@pytest.mark.usefixtures("fresh")
def test_set_limit_below_a_region():
    with pytest.raises(ConfigError, match="set_limit: nbytes=-5 bytes is less than one region"):
        memory.set_limit(-5)


@pytest.mark.parametrize(("text", "limit"), [("", None), ("  ", None), ("512MiB", 512 * MIB)])
def test_the_variable_sets_the_limit(text, limit, monkeypatch):
    monkeypatch.setenv("NUMSTACK_MEMORY_LIMIT", text)
    assert MemoryManager(FakeDevice()).statistics().limit == limit  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * MIB, "5.0 MiB"), (3 * TIB, "3.0 TiB")]
)
def test_format(nbytes, text):
    assert format_size(nbytes) == text


@pytest.mark.usefixtures("fresh")
def test_a_limit_holds_and_can_be_raised():
    memory.set_limit(4 * MIB)
    held = [memory.empty(MIB, np.uint8) for _ in range(4)]
    with pytest.raises(OutOfMemory, match=r"the memory limit is 4.0 MiB, 4.0 MiB are reserved, and 2.0 MiB more"):
        memory.empty(1, np.uint8)
    assert memory.statistics().reserved == 4 * MIB
    memory.set_limit(None)
    held.append(memory.empty(1, np.uint8))
    held.clear()


@pytest.mark.usefixtures("fresh")
def test_a_limit_below_what_is_reserved_gives_unused_regions_back():
    keep, unused = memory.empty(2 * MIB, np.uint8), memory.empty(2 * MIB, np.uint8)
    del unused
    memory.set_limit(2 * MIB)
    assert memory.statistics().reserved == 2 * MIB
    del keep


@pytest.mark.usefixtures("fresh")
def test_near_the_limit_regions_grow_by_what_is_needed():
    memory.set_limit(10 * MIB)
    held = [memory.empty(2 * MIB, np.uint8) for _ in range(5)]  # doubling would ask for 2, 2, 4 and 8
    assert memory.statistics().reserved == 10 * MIB
    held.clear()


@pytest.mark.usefixtures("fresh")
def test_unused_regions_of_one_scope_serve_another():
    memory.set_limit(4 * MIB)
    unused = memory.empty(4 * MIB, np.uint8, scope="backward")
    del unused
    used = memory.empty(4 * MIB, np.uint8, scope="forward")
    assert memory.statistics().by_scope["backward"].reserved == 0
    del used


@pytest.mark.usefixtures("fresh")
def test_garbage_is_collected_before_giving_up():
    memory.set_limit(2 * MIB)
    gc.collect()
    gc.disable()
    try:
        cycle: list[object] = [memory.empty(2 * MIB, np.uint8)]
        cycle.append(cycle)
        del cycle
        array = memory.empty(2 * MIB, np.uint8)
    finally:
        gc.enable()
    del array


@pytest.mark.usefixtures("fresh")
def test_out_of_memory_says_who_holds_what_and_where():
    memory.set_limit(8 * MIB)
    line = inspect.currentframe().f_lineno
    weights = memory.empty(MIB, np.uint8, scope="persistent")
    activations = [memory.zeros(MIB, np.uint8) for _ in range(4)]
    with pytest.raises(OutOfMemory) as caught:
        memory.empty((2, MIB), np.float32, scope="backward")
    here = r"\S*test_limits.py"
    assert re.match(
        rf"memory: 8.0 MiB in scope 'backward' asked for at {here}:{line + 4}, but the memory limit is 8.0 MiB, "
        r"6.0 MiB are reserved, and 8.0 MiB more would be needed; 5.0 MiB are live and 1.0 MiB free in pieces of at "
        r"most 1.0 MiB\n",
        str(caught.value),
    )
    assert re.search(rf"^ +4.0 MiB +4  forward +{here}:{line + 2}$", str(caught.value), re.MULTILINE)
    assert re.search(rf"^ +1.0 MiB +1  persistent +{here}:{line + 1}$", str(caught.value), re.MULTILINE)
    assert re.search("What to do: raise the limit .*; 'forward' holds most: use a smaller batch", str(caught.value))
    del weights, activations


@pytest.mark.usefixtures("fresh")
def test_out_of_memory_shows_the_largest_and_counts_the_rest():
    memory.set_limit(2 * MIB)
    held = []
    for n in range(N_HOLDERS + 2):
        exec(
            compile(f"held.append(empty({(n + 1) * 512}, 'uint8'))", f"model{n}.py", "exec"),
            {"held": held, "empty": memory.empty},
        )
    with pytest.raises(OutOfMemory) as caught:
        memory.empty(2 * MIB, np.uint8)
    message = str(caught.value)
    assert message.index("model11.py:1") < message.index("model10.py:1") < message.index("model2.py:1")
    assert "model1.py" not in message
    assert re.search(r"1.5 KiB +2  in 2 other places", message)
    held.clear()


@pytest.mark.usefixtures("fresh")
def test_advice_when_memory_is_free_but_scattered():
    memory.set_limit(2 * MIB)
    blocks = [memory.empty(MIB // 4, np.uint8) for _ in range(8)]
    del blocks[::2]
    with pytest.raises(OutOfMemory, match=r"1.0 MiB are free but scattered or in other scopes"):
        memory.empty(MIB // 2, np.uint8)


@pytest.mark.usefixtures("fresh")
def test_a_request_that_no_device_can_serve():
    with pytest.raises(OutOfMemory, match=r"1048576.0 TiB in scope 'forward' asked for"):
        memory.empty((1 << 60,), np.uint8)


def test_a_finaliser_that_asks_for_memory_is_told_off_and_nothing_breaks():
    device = FakeDevice()
    manager = MemoryManager(device)  # type: ignore[arg-type]
    seen: list[str] = []

    def interrupted(nbytes: int):
        try:
            make(manager, device, 512)
        except DeviceError as error:
            seen.append(str(error))
        return FakeDevice.allocate(device, nbytes)

    device.allocate = interrupted  # type: ignore[method-assign]
    array = make(manager, device, 512)
    assert len(seen) == 1 and "from a finaliser or a signal handler" in seen[0]
    make(manager, device, 512)
    del array
    assert manager.statistics().live == 0


def test_arrays_dropped_inside_the_manager_come_back():
    device = FakeDevice()
    manager = MemoryManager(device)  # type: ignore[arg-type]
    held = [make(manager, device, 512 * KIB) for _ in range(3)]

    def interrupted(nbytes: int):
        held.clear()  # as the garbage collector may, at any allocation of Python's own
        return FakeDevice.allocate(device, nbytes)

    device.allocate = interrupted  # type: ignore[method-assign]
    array = make(manager, device, 3 * MIB)
    assert manager.statistics().live == 3 * MIB
    del array
    assert manager.statistics().live == 0
