"""A kernel's place in the cache depends on the text of the PTX instructions it calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from numba import cuda
from numba.types import int32, uint32

from numstack import simt
from numstack.device.ptx.assembly import SharedArray, ptx


def gpu_only(text: str) -> Callable[..., Any]:
    @ptx(text, touches_memory=True)
    def store(target: SharedArray, x: uint32) -> None:
        """Has no body."""

    def kernel(y_N):
        shared = cuda.shared.array(4, int32)
        store(shared, uint32(1))
        y_N[0] = shared[0]

    return kernel


def by_warp(text: str) -> Callable[..., Any]:
    @ptx(text, by_warp=True)
    def shuffle(x: uint32) -> uint32:
        """Has a body that numba does not see."""
        return x

    def kernel(y_N):
        y_N[0] = shuffle(uint32(1))

    return kernel


def with_twin(text: str) -> Callable[..., Any]:
    @ptx(text)
    def same(x: uint32) -> uint32:
        """Has a body that runs on a CPU."""
        return x

    def kernel(y_N):
        y_N[0] = same(uint32(1))

    return kernel


@pytest.mark.parametrize("make", [gpu_only, by_warp, with_twin])
def test_another_text_is_another_kernel(make: Callable[[str], Callable[..., Any]]) -> None:
    assert simt.source_digest(make("one $x;")) == simt.source_digest(make("one $x;"))
    assert simt.source_digest(make("one $x;")) != simt.source_digest(make("two $x;"))
