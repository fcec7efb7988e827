"""What watchdogs compare: the calls of all ranks, as they become known."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from numstack.comm.calls import CallLog
from numstack.comm.header import Header

A = Header("allreduce", "sum", "float32", 10, 40)
B = Header("allreduce", "sum", "float32", 20, 80)
BARRIER = Header("barrier")


def pair(*calls: tuple[Header, bool]) -> tuple[CallLog, CallLog]:
    """Two ranks that have made the same calls and told each other."""
    logs = CallLog(0, 2), CallLog(1, 2)
    for number, (call, asked) in enumerate(calls):
        for log in logs:
            log.called(call.numbered(number), asked=asked)
    tell(*logs)
    return logs


def tell(*logs: CallLog) -> None:
    news = [log.take_new() for log in logs]
    for rank, log in enumerate(logs):
        for other, new in enumerate(news):
            if other != rank:
                log.heard(other, new)


def test_calls_that_agree_are_forgotten() -> None:
    logs = pair((A, False), (BARRIER, True), (B, False))
    for rank, log in enumerate(logs):
        assert log.compare() is None
        assert log.n_called == 3 and log.n_heard(1 - rank) == 3
        assert log.last_heard(1 - rank) == B.numbered(2)
        assert not log._own


def test_a_difference_is_named_by_both() -> None:
    first, second = pair((A, False))
    first.called(A.numbered(1), asked=False)
    second.called(B.numbered(1), asked=False)
    assert first.compare() is None  # not known yet
    tell(first, second)
    expected = (
        "collective #1: rank 0 called allreduce(sum) of float32[10] (40 bytes), but rank 1 called allreduce(sum) of "
        "float32[20] (80 bytes); all ranks must call"
    )
    for log in (first, second):
        assert str(log.compare()).startswith(expected)


def test_what_all_ask_about_is_for_them_to_refuse() -> None:
    first, second = pair()
    first.called(A.numbered(0), asked=True)
    second.called(B.numbered(0), asked=True)
    tell(first, second)
    assert first.compare() is None and second.compare() is None


def test_asking_while_another_goes_ahead_is_a_difference() -> None:
    first, second = pair()
    first.called(A.numbered(0), asked=True)
    second.called(B.numbered(0), asked=False)
    tell(first, second)
    assert "float32[10]" in str(first.compare()) and "float32[20]" in str(second.compare())


def test_asking_about_the_same_call_on_some_ranks_only() -> None:
    first, second = pair()
    first.called(A.numbered(0), asked=True)
    second.called(A.numbered(0), asked=False)
    tell(first, second)
    assert "give NUMSTACK_COMM_CHECK one value" in str(first.compare())


def test_a_third_rank_that_is_behind_is_not_accused() -> None:
    log = CallLog(0, 3)
    for rank, call in ((1, B), (2, A)):
        other = CallLog(rank, 3)
        if rank == 1:
            other.called(call.numbered(0), asked=False)
        log.heard(rank, other.take_new())
    log.called(A.numbered(0), asked=False)
    problem = log.compare()
    assert problem is not None and "rank 0 called" in problem and "rank 1 called" in problem
    assert "rank 2" not in problem
    assert log.last_heard(2) is None


@given(st.integers(2, 4), st.lists(st.booleans(), max_size=30), st.integers(0, 10_000))
def test_ranks_that_run_at_their_own_pace(size: int, kinds: list[bool], seed: int) -> None:
    """Whatever the order in which calls are made and heard, ranks that call alike have nothing to complain of."""
    logs = [CallLog(rank, size) for rank in range(size)]
    shuffle = random.Random(seed)
    steps = [rank for rank in range(size) for _ in kinds]
    shuffle.shuffle(steps)
    for rank in steps:
        number = logs[rank].n_called
        logs[rank].called((A if kinds[number] else B).numbered(number), asked=False)
        if shuffle.random() < 0.3:
            new = logs[rank].take_new()
            for other in range(size):
                if other != rank:
                    logs[other].heard(rank, new)
        assert logs[shuffle.randrange(size)].compare() is None
    tell(*logs)
    for log in logs:
        assert log.compare() is None
        log.take_new()
        assert log.compare() is None and not log._own
