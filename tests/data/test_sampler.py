"""The batch of a step depends on the seed and the step only, and every epoch shows every window once."""

from pathlib import Path

import numpy as np
import pytest

from numstack.data import Sampler, TokenFile, evenly_spaced_windows, write_tokens
from numstack.errors import ConfigError, DataError


@pytest.fixture
def counting(tmp_path: Path) -> TokenFile:
    """Tokens 0, 1, 2, ..., so that a window tells where it was cut."""
    write_tokens(tmp_path / "counting.bin", np.arange(1000))
    return TokenFile(tmp_path / "counting.bin")


def inputs(sampler: Sampler, step: int) -> np.ndarray:
    return np.concatenate([x for x, _ in sampler.micro_batches(step)])


def test_targets_are_inputs_one_later(counting: TokenFile) -> None:
    [(x_BT, y_BT)] = Sampler(counting, batch=6, context=8, seed=1).micro_batches(0)
    assert x_BT.shape == y_BT.shape == (6, 8)
    assert x_BT.dtype == y_BT.dtype == np.int32
    assert x_BT.flags.c_contiguous and y_BT.flags.c_contiguous
    np.testing.assert_array_equal(y_BT, x_BT + 1)
    np.testing.assert_array_equal(x_BT - x_BT[:, :1], np.tile(np.arange(8), (6, 1)))


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("n_micro_batches", [1, 2])
def test_same_global_batch_for_any_number_of_ranks(counting: TokenFile, n_ranks: int, n_micro_batches: int) -> None:
    one = Sampler(counting, batch=24, context=8, seed=7)
    many = [
        Sampler(counting, batch=24, context=8, seed=7, rank=rank, n_ranks=n_ranks, n_micro_batches=n_micro_batches)
        for rank in range(n_ranks)
    ]
    for step in (0, 3, 4, 5, 100):  # steps 4 and 5 straddle the epoch's end: 124 windows
        assert all(len(list(sampler.micro_batches(step))) == n_micro_batches for sampler in many)
        np.testing.assert_array_equal(np.concatenate([inputs(s, step) for s in many]), inputs(one, step))


def test_any_step_without_the_ones_before(counting: TokenFile) -> None:
    walked = Sampler(counting, batch=10, context=16, seed=3)
    history = [inputs(walked, step) for step in range(30)]
    for step in (29, 0, 17):
        fresh = Sampler(counting, batch=10, context=16, seed=3)
        np.testing.assert_array_equal(inputs(fresh, step), history[step])
        np.testing.assert_array_equal(inputs(walked, step), history[step])


def test_an_epoch_visits_every_window_once_in_another_order_and_cut(counting: TokenFile) -> None:
    sampler = Sampler(counting, batch=1, context=10, seed=5)
    assert sampler.n_windows == 99
    epochs = [[int(inputs(sampler, 99 * epoch + i)[0, 0]) for i in range(99)] for epoch in range(3)]
    for starts in epochs:
        assert len({start % 10 for start in starts}) == 1
        assert len(set(starts)) == 99
    assert sorted(epochs[0]) != epochs[0]
    assert len({starts[0] % 10 for starts in epochs}) > 1
    assert [s // 10 for s in epochs[0]] != [s // 10 for s in epochs[1]]


def test_seeds_differ(counting: TokenFile) -> None:
    batches = [inputs(Sampler(counting, batch=8, context=8, seed=seed), 0) for seed in (0, 1, 2**40)]
    assert not np.array_equal(batches[0], batches[1])
    assert not np.array_equal(batches[0], batches[2])


def test_order_is_pinned(counting: TokenFile) -> None:
    """A change of these numbers breaks the promise that a resumed run sees the batches that it would have seen."""
    assert inputs(Sampler(counting, batch=6, context=8, seed=1337), 2)[:, 0].tolist() == [825, 289, 633, 953, 673, 417]


def test_smallest_file(tmp_path: Path) -> None:
    write_tokens(tmp_path / "small.bin", np.arange(16))
    sampler = Sampler(TokenFile(tmp_path / "small.bin"), batch=2, context=8, seed=0)
    assert sampler.n_windows == 1
    assert max(int(y.max()) for step in range(50) for _, y in sampler.micro_batches(step)) <= 15


def test_too_short(tmp_path: Path) -> None:
    write_tokens(tmp_path / "short.bin", np.arange(15))
    with pytest.raises(DataError, match=r"short.bin: too short: 15 tokens, .* context of 8 needs at least 16"):
        Sampler(TokenFile(tmp_path / "short.bin"), batch=2, context=8, seed=0)


@pytest.mark.parametrize(
    ("batch", "n_ranks", "n_micro_batches", "message"),
    [
        (12, 5, 1, "batch of 12 sequences cannot be shared equally by 5 ranks; give a multiple of 5"),
        (12, 2, 4, r"by 2 ranks x 4 micro-batches; give a multiple of 8"),
        (0, 1, 1, "batch of 0 sequences"),
    ],
)
def test_batch_that_cannot_be_shared(
    counting: TokenFile, batch: int, n_ranks: int, n_micro_batches: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampler(counting, batch=batch, context=8, seed=0, n_ranks=n_ranks, n_micro_batches=n_micro_batches)


def test_evenly_spaced_windows(counting: TokenFile) -> None:
    starts = evenly_spaced_windows(counting, n_windows=7, context=8)
    assert starts[0] == 0 and starts[-1] + 8 < 1000 and len(starts) == 7
    assert np.all(starts % 8 == 0)
    gaps = np.diff(starts)
    assert gaps.max() - gaps.min() <= 8
    all_windows = evenly_spaced_windows(counting, n_windows=10**6, context=8)
    np.testing.assert_array_equal(all_windows, np.arange(124) * 8)


def test_validation_too_short(tmp_path: Path) -> None:
    write_tokens(tmp_path / "short.bin", np.arange(8))
    with pytest.raises(DataError, match="validation with a context of 8 needs at least 9"):
        evenly_spaced_windows(TokenFile(tmp_path / "short.bin"), n_windows=1, context=8)
