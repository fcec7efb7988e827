"""Gradients grouped into buckets, each averaged over the ranks while the rest of backward goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from numstack.comm.protocol import Communicator
from numstack.device import Array, Event, Stream
from numstack.errors import CommError, ShapeError

# NCCL reaches two thirds of its best rate at 16 MiB between two H200; larger buckets leave less to overlap with.
BUCKET_BYTES = 16 * 2**20


@dataclass(slots=True)
class _Bucket:
    """Parameters whose gradients are sent together, as pieces of the buffer that are as long as possible."""

    members: list[int]
    pieces: list[Array]
    missing: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.missing = set(self.members)


class GradientBuckets:
    """Average a flat gradient buffer over the ranks, bucket by bucket, as backward makes it.

    Buckets are sent in one order on all ranks whatever order gradients become final in: a bucket goes once it and all
    before it are complete. So the order of ``ranges`` should be that of backward, but nothing breaks if it is not.

    Parameters
    ----------
    buffer : Array, one-dimensional, floating
        All gradients.
    ranges : sequence of (int, int)
        First element and end of each parameter's gradient in ``buffer``, in the order in which backward makes them
        final. Ranges that touch can be sent as one piece: let a range include the padding behind it.
    communicator : Communicator
    bucket_bytes : int
        A bucket is full once it holds at least as many bytes.

    Raises
    ------
    ShapeError
        If a range lies outside ``buffer``, or two overlap.

    Examples
    --------
    >>> buckets = GradientBuckets(gradients, [(768, 1024), (0, 768)], communicator)  # doctest: +SKIP
    >>> buckets.ready(0)   # in backward, when the gradient of the last layer is final  # doctest: +SKIP
    >>> buckets.finish()   # before the optimiser  # doctest: +SKIP
    """

    def __init__(
        self,
        buffer: Array,
        ranges: Sequence[tuple[int, int]],
        communicator: Communicator,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        _check_ranges(buffer, ranges)
        self._communicator = communicator
        self._buckets: list[_Bucket] = []
        members: list[int] = []
        for index in range(len(ranges)):
            members.append(index)
            n_elements = sum(ranges[i][1] - ranges[i][0] for i in members)
            if n_elements * buffer.itemsize >= bucket_bytes or index == len(ranges) - 1:
                pieces = [buffer[start:end] for start, end in _merged(ranges[i] for i in members)]
                self._buckets.append(_Bucket(members, pieces))
                members = []
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.members}
        self._n_sent = 0
        self._last: Event | None = None

    @property
    def n_buckets(self) -> int:
        """How many buckets the buffer is cut into."""
        return len(self._buckets)

    def ready(self, index: int, *, stream: Stream | None = None) -> None:
        """Say that the gradient of ``ranges[index]`` is final once ``stream`` has come here.

        Raises
        ------
        CommError
            If there is no such parameter, or it was ready before: a gradient that is still added to would be sent
            unfinished.
        """
        bucket = self._bucket_of.get(index)
        if bucket is None:
            raise CommError(f"ready: index={index} is none of the {len(self._bucket_of)} parameters")
        if index not in bucket.missing:
            raise CommError(
                f"ready: parameter {index} was ready already; call ready() in the last backward before finish() only"
            )
        bucket.missing.remove(index)
        while self._n_sent < len(self._buckets) and not self._buckets[self._n_sent].missing:
            self._send(stream)

    def finish(self, *, stream: Stream | None = None) -> None:
        """Send what is left, and let ``stream`` wait until all is averaged. Collective: all ranks must call.

        Parameters that were never ready are sent as well: they were not used, and others may have used them.

        Parameters
        ----------
        stream : Stream, optional
            What made the gradients and uses them next; by default the device's default stream.
        """
        while self._n_sent < len(self._buckets):
            self._send(stream)
        last, self._n_sent, self._last = self._last, 0, None
        for bucket in self._buckets:
            bucket.missing = set(bucket.members)
        if last is not None:
            (stream or self._communicator.device.default_stream).wait(last)

    def _send(self, stream: Stream | None) -> None:
        for piece in self._buckets[self._n_sent].pieces:
            self._last = self._communicator.allreduce(piece, op="mean", stream=stream)
        self._n_sent += 1


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in the order of memory, those that touch joined."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def _check_ranges(buffer: Array, ranges: Sequence[tuple[int, int]]) -> None:
    if buffer.ndim != 1:
        raise ShapeError(f"GradientBuckets: buffer has shape {buffer.shape}; give one flat buffer")
    last_end = 0
    for start, end in sorted(ranges):
        if not 0 <= start <= end <= buffer.size:
            raise ShapeError(f"GradientBuckets: the range ({start}, {end}) is not within the {buffer.size} elements")
        if start < last_end:
            raise ShapeError(f"GradientBuckets: the range ({start}, {end}) overlaps the one that ends at {last_end}")
        last_end = end
