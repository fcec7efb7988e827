"""What goes over the wire before data, what ranks are told, and what is kept for a failure."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numstack.comm.header import ANYONE, NBYTES, Header, disagreement, name_ranks
from numstack.comm.record import CAPACITY, FlightRecorder

ALLREDUCE = Header("allreduce", "sum", "float32", 1000, 4000, sequence=12)


@given(
    st.builds(
        Header,
        st.sampled_from(["allreduce", "reduce_scatter", "barrier"]),
        st.sampled_from(["", "sum", "mean"]),
        st.sampled_from(["", "float32", "complex128"]),
        st.integers(0, 2**62),
        st.integers(0, 2**62),
        st.integers(-1, 2**31 - 1),
        st.integers(0, 2**62),
    )
)
def test_a_header_survives_the_wire(header: Header) -> None:
    assert len(header.pack()) == NBYTES == 64
    assert Header.unpack(header.pack()) == header


def test_how_a_call_reads() -> None:
    assert ALLREDUCE.title == "#12 allreduce(sum) of float32[1000] (4000 bytes)"
    assert (
        str(Header("broadcast", dtype="int32", count=2, nbytes=8, root=0)) == "broadcast(root 0) of int32[2] (8 bytes)"
    )
    assert str(Header("barrier")) == "barrier()"


def test_ranks_that_agree() -> None:
    assert disagreement({0: ALLREDUCE, 1: ALLREDUCE}) is None


def test_ranks_that_do_not() -> None:
    barrier = Header("barrier", sequence=12)
    assert disagreement({0: ALLREDUCE, 1: barrier, 2: ALLREDUCE}) == (
        "collective #12: ranks 0, 2 called allreduce(sum) of float32[1000] (4000 bytes), but rank 1 called barrier(); "
        "all ranks must call the same operations in the same order, with the same size, dtype and options"
    )


def test_ranks_that_are_not_at_the_same_call() -> None:
    problem = disagreement({0: ALLREDUCE, 1: ALLREDUCE.numbered(13)})
    assert problem is not None
    assert "(4000 bytes) as #12, but rank 1 called" in problem and "as #13" in problem


def test_names_of_ranks() -> None:
    assert [name_ranks(ranks) for ranks in ([3], [0, 2], [ANYONE])] == ["rank 3", "ranks 0, 2", "another rank"]


def test_the_recorder_keeps_the_last_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMSTACK_COMM_RECORD_DIR", str(tmp_path))
    recorder = FlightRecorder(rank=3)
    for sequence in range(CAPACITY + 10):
        recorder.begin(ALLREDUCE.numbered(sequence))
        recorder.reached("done")
    recorder.begin(Header("barrier", sequence=CAPACITY + 10))
    assert recorder.dump("the reason").startswith(f"last calls in {tmp_path}/numstack-collectives-rank3-")
    (file,) = tmp_path.iterdir()
    lines = file.read_text().splitlines()
    assert lines[0] == "the reason" and len(lines) == 2 + CAPACITY
    assert "#11 allreduce(sum) of float32[1000] (4000 bytes) done after" in lines[2]
    assert "barrier() waiting for the other ranks" in lines[-1]


def test_a_record_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMSTACK_COMM_RECORD_DIR", str(tmp_path / "missing"))
    recorder = FlightRecorder(rank=0)
    recorder.begin(ALLREDUCE)
    message = recorder.dump("the reason")
    assert "not written to" in message and "No such file" in message and ALLREDUCE.title in message
