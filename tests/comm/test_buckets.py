"""How gradients are grouped, when a bucket goes, and misuse; the averages themselves are in body.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numstack import comm
from numstack.comm import Communicator, GradientBuckets, World
from numstack.comm.buckets import _merged
from numstack.device import Array, Work, current_device
from numstack.errors import CommError, ShapeError
from tests.support import to_device


class Sent:
    """The pieces that were all-reduced, as (first element, end) in the buffer."""

    def __init__(self, buffer: Array) -> None:
        self._buffer = buffer
        self.pieces: list[tuple[int, int]] = []

    def before(self, work: Work) -> None:
        assert work.kind == "collective" and work.name == "alone.allreduce"
        (piece,) = work.writes
        first = (current_device().address(piece) - current_device().address(self._buffer)) // piece.itemsize
        self.pieces.append((first, first + piece.size))

    def after(self, work: Work) -> None:
        pass


@pytest.fixture(scope="module")
def alone() -> Communicator:
    return comm.create(World())


def make(
    communicator: Communicator, ranges: Sequence[tuple[int, int]], n: int, bucket: int
) -> tuple[GradientBuckets, Sent]:
    buffer = to_device(np.zeros(n, np.float32))
    return GradientBuckets(buffer, ranges, communicator, bucket_bytes=bucket * 4), Sent(buffer)


def test_a_bucket_goes_as_soon_as_it_and_those_before_it_are_complete(alone: Communicator) -> None:
    buckets, sent = make(alone, [(90, 100), (80, 90), (50, 80), (20, 50), (0, 20)], 100, bucket=20)
    assert buckets.n_buckets == 4
    with current_device().observe(sent):  # type: ignore[arg-type]
        buckets.ready(2)  # the second bucket, before the first
        buckets.ready(0)
        assert sent.pieces == []
        buckets.ready(1)
        assert sent.pieces == [(80, 100), (50, 80)]
        buckets.ready(4)
        assert len(sent.pieces) == 2
        buckets.finish()
        assert sent.pieces == [(80, 100), (50, 80), (20, 50), (0, 20)]


def test_it_starts_again_after_finish(alone: Communicator) -> None:
    buckets, sent = make(alone, [(5, 10), (0, 5)], 10, bucket=1)
    with current_device().observe(sent):  # type: ignore[arg-type]
        for _ in range(2):
            buckets.ready(0)
            buckets.ready(1)
            buckets.finish()
    assert sent.pieces == [(5, 10), (0, 5)] * 2


def test_members_that_touch_go_as_one_piece_whatever_their_order(alone: Communicator) -> None:
    # As a model has them: weight and bias in the order of memory, layers from the last to the first; a tied embedding.
    ranges = [(70, 80), (80, 90), (40, 60), (60, 70), (0, 30)]
    buckets, sent = make(alone, ranges, 90, bucket=1000)
    with current_device().observe(sent):  # type: ignore[arg-type]
        buckets.finish()
    assert sent.pieces == [(0, 30), (40, 90)]


@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=12),
    random=st.randoms(use_true_random=False),
    bucket=st.integers(1, 100),
)
def test_every_element_is_sent_exactly_once(
    alone: Communicator, lengths: list[int], random: object, bucket: int
) -> None:
    ends = np.cumsum(lengths).tolist()
    ranges = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    random.shuffle(ranges)  # type: ignore[attr-defined]
    buckets, sent = make(alone, ranges, ends[-1], bucket)
    order = list(range(len(ranges)))
    random.shuffle(order)  # type: ignore[attr-defined]
    with current_device().observe(sent):  # type: ignore[arg-type]
        for index in order:
            buckets.ready(index)
    assert sum(end - start for start, end in sent.pieces) == ends[-1]
    assert _merged(piece for piece in sent.pieces if piece[0] < piece[1]) == ([(0, ends[-1])] if ends[-1] else [])


def test_no_parameters(alone: Communicator) -> None:
    buckets, _ = make(alone, [], 0, bucket=1)
    assert buckets.n_buckets == 0
    buckets.finish()


def test_ready_twice(alone: Communicator) -> None:
    buckets, _ = make(alone, [(0, 5)], 5, bucket=1)
    buckets.ready(0)
    with pytest.raises(CommError, match=r"ready: parameter 0 was ready already; call ready\(\) in the last backward"):
        buckets.ready(0)


def test_ready_for_no_parameter(alone: Communicator) -> None:
    buckets, _ = make(alone, [(0, 5)], 5, bucket=1)
    with pytest.raises(CommError, match="ready: index=1 is none of the 1 parameters"):
        buckets.ready(1)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(0, 6)], r"the range \(0, 6\) is not within the 5 elements"),
        ([(3, 2)], r"the range \(3, 2\) is not within"),
        ([(2, 5), (0, 3)], r"the range \(2, 5\) overlaps the one that ends at 3"),
    ],
)
def test_ranges_that_make_no_sense(alone: Communicator, ranges: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        make(alone, ranges, 5, bucket=1)


def test_a_buffer_that_is_not_flat(alone: Communicator) -> None:
    with pytest.raises(ShapeError, match=r"buffer has shape \(2, 3\); give one flat buffer"):
        GradientBuckets(to_device(np.zeros((2, 3), np.float32)), [(0, 6)], alone)
