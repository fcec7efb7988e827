"""The ring's arithmetic without MPI: n ranks in one process that hand arrays to their right neighbour."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from numstack.comm import ring
from numstack.comm.ring import Exchange
from tests.support import poisoned

Ring = Callable[[int], Iterator[Exchange]]


def simulate(size: int, steps: Ring) -> list[int]:
    """Run the steps of every rank; return the bytes that each rank sent.

    A send ends when its receiver has taken the data straight from the sender's array, as with MPI's large messages: an
    array that is changed too early, or two ranks that wait for each other, would show.
    """
    running = {rank: steps(rank) for rank in range(size)}
    sending: dict[int, np.ndarray] = {}
    receiving: dict[int, np.ndarray] = {}
    sent = [0] * size
    while running:
        moved = False
        for rank, exchanges in list(running.items()):
            if rank in sending or rank in receiving:
                continue
            moved = True
            exchange = next(exchanges, None)
            if exchange is None:
                del running[rank]
                continue
            if exchange.send is not None:
                sending[rank] = exchange.send
                sent[rank] += exchange.send.nbytes
            if exchange.recv is not None:
                receiving[rank] = exchange.recv
        for rank in list(receiving):
            left = (rank - 1) % size
            if left in sending:
                message, place = sending.pop(left), receiving.pop(rank)
                assert message.size == place.size, "sent and expected sizes differ"
                place[...] = message
                moved = True
        assert moved, f"ranks {list(running)} wait for one another"
    assert not sending and not receiving
    return sent


def all_chunks(
    parts: list[np.ndarray], chunk: int, steps: Callable[[list[np.ndarray]], Iterator[Exchange]]
) -> Iterator[Exchange]:
    """The steps of one chunk after the other."""
    for pieces in ring.chunks(parts, chunk):
        yield from steps(pieces)


shapes = st.tuples(st.integers(1, 9), st.integers(1, 200), st.integers(1, 50))


@given(shapes)
def test_every_contribution_counts_exactly_once(shape: tuple[int, int, int]) -> None:
    size, n, chunk = shape
    # Rank r brings 2^r everywhere: any contribution lost or counted twice changes the sum of these.
    arrays = [np.full(n, 1 << rank, np.int64) for rank in range(size)]
    scratch = [poisoned((2, chunk), np.int64) for _ in range(size)]

    def steps(rank: int) -> Iterator[Exchange]:
        parts = ring.segments(arrays[rank], size)
        return all_chunks(parts, chunk, lambda pieces: ring.all_reduce(rank, pieces, scratch[rank], "sum"))

    sent = simulate(size, steps)
    for array in arrays:
        assert (array == (1 << size) - 1).all()
    assert sum(sent) == 2 * (size - 1) * n * 8  # 2 (n - 1) / n of the array from each rank, on average
    assert max(sent) <= 2 * (size - 1) * -(-n // size) * 8  # and no rank more than its longest segments


@given(shapes)
def test_all_ranks_get_the_bits_of_one_sum(shape: tuple[int, int, int]) -> None:
    size, n, chunk = shape
    arrays = [np.random.default_rng(rank).standard_normal(n).astype(np.float32) for rank in range(size)]
    whole = [array.copy() for array in arrays]

    def steps(of: list[np.ndarray], chunk: int) -> Ring:
        scratch = [poisoned((2, chunk)) for _ in range(size)]
        return lambda rank: all_chunks(
            ring.segments(of[rank], size), chunk, lambda pieces: ring.all_reduce(rank, pieces, scratch[rank], "sum")
        )

    simulate(size, steps(arrays, chunk))
    simulate(size, steps(whole, n))
    for array in arrays:
        assert array.tobytes() == arrays[0].tobytes() == whole[0].tobytes()  # however it is cut into chunks


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 20))
def test_reduce_scatter_leaves_its_input_alone(size: int, n: int, chunk: int) -> None:
    sends = [np.arange(size * n, dtype=np.int64) * 10**rank for rank in range(size)]
    before = [send.copy() for send in sends]
    recvs = [poisoned(n, np.int64) for _ in range(size)]
    scratch = [poisoned((2, chunk), np.int64) for _ in range(size)]

    def steps(rank: int) -> Iterator[Exchange]:
        parts = [*ring.segments(sends[rank], size), recvs[rank]]
        return all_chunks(
            parts,
            chunk,
            lambda pieces: ring.reduce_scatter(rank, pieces[:-1], pieces[-1], scratch[rank], "sum"),
        )

    simulate(size, steps)
    for rank in range(size):
        assert (recvs[rank] == sum(before)[rank * n : (rank + 1) * n]).all()  # type: ignore[index]
        assert (sends[rank] == before[rank]).all()


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 20))
def test_all_gather(size: int, n: int, chunk: int) -> None:
    arrays = [poisoned((size, n)) for _ in range(size)]
    for rank, array in enumerate(arrays):
        array[rank] = rank

    def steps(rank: int) -> Iterator[Exchange]:
        parts = ring.segments(arrays[rank].reshape(-1), size)
        return all_chunks(parts, chunk, lambda pieces: ring.all_gather(rank, pieces))

    simulate(size, steps)
    for array in arrays:
        assert (array == np.arange(size)[:, None]).all()


@given(st.integers(1, 9), st.integers(0, 8), st.integers(1, 40), st.integers(1, 20))
def test_broadcast(size: int, root: int, n: int, chunk: int) -> None:
    root %= size
    arrays = [np.arange(n) if rank == root else poisoned(n, np.int64) for rank in range(size)]

    def steps(rank: int) -> Iterator[Exchange]:
        return all_chunks([arrays[rank]], chunk, lambda pieces: ring.broadcast(rank, size, root, pieces[0]))

    simulate(size, steps)
    for array in arrays:
        assert (array == np.arange(n)).all()


@given(st.integers(0, 300), st.integers(1, 16))
def test_segments_cover_the_array_evenly(n: int, size: int) -> None:
    array = np.arange(n)
    parts = ring.segments(array, size)
    assert len(parts) == size
    assert np.concatenate(parts).tolist() == array.tolist()
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
