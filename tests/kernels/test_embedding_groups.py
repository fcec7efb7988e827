"""numstack.kernels.embedding_groups: every variant against groups made by NumPy."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from numstack.device import current_device, offline
from numstack.errors import ConfigError, DTypeError, ShapeError
from numstack.kernels import embedding_groups as groups
from numstack.kernels.embedding_groups import cluster_lists as lists
from numstack.kernels.embedding_groups import counting_sort
from numstack.kernels.embedding_groups import format as form
from numstack.kernels.embedding_groups.cluster_lists import COMPARED
from numstack.kernels.embedding_groups.format import FEW, MANY, ROWS
from tests.support import poisoned, to_device, to_host


class Row(NamedTuple):
    """Of a plan, and what the order has from its start on."""

    token: int
    row: int
    positions: list[int]


class Tile(NamedTuple):
    few: list[Row]
    many: list[Row]


class Groups(NamedTuple):
    tiles: list[Tile]
    frequent: dict[int, list[int]]


# B, T, V
SHAPES = {
    "one of everything": (1, 1, 1),
    "one text": (1, 43, 20),
    "one time": (37, 1, 9),
    "a tile and a text, positions past a plain block's": (ROWS + 1, counting_sort.BLOCK // 2 + 1, 500),
    "one row of the table": (3, 50, 1),
    "rows that have few, many and more positions": (33, 40, 70),
    "more rows of the table than tokens": (2, 9, 300),
    "texts of three tiles": (2 * ROWS + 3, 11, 100),
    "a row of the table past a cluster's threads": (5, 301, lists.CLUSTER * lists.THREADS + 3),
    "tiles past a window": (2, lists.WINDOW + 7, 3000),
    "keys past a bitmap": (2, lists.KEYS // 2 + 5, 40),
    "more tokens that have bitmaps than there are at once": (16, 512, 40),
}


def expected(tokens_BT, V) -> Groups:
    B, T = tokens_BT.shape
    by_place = tokens_BT.T.reshape(-1)
    sorted_places = np.argsort(by_place, kind="stable")
    sorted_tokens = by_place[sorted_places]
    starts = np.flatnonzero(np.r_[True, sorted_tokens[1:] != sorted_tokens[:-1]])
    tiles_of_time = -(-B // ROWS)
    tiles = [Tile([], []) for _ in range(T * tiles_of_time)]
    frequent = {}
    for places in np.split(sorted_places, starts[1:]):
        token = int(by_place[places[0]])
        if not 0 <= token < V:
            continue
        first_t, first_b = divmod(int(places[0]), B)
        positions = [b * T + t for t, b in (divmod(place, B) for place in places.tolist())]
        if len(places) > MANY:
            frequent[token] = positions
        else:
            tile = tiles[first_t * tiles_of_time + first_b // ROWS]
            (tile.few if len(places) <= FEW else tile.many).append(Row(token, first_b % ROWS, positions))
    for tile in tiles:
        tile.few.sort(key=lambda row: row.row)
        tile.many.sort(key=lambda row: row.row)
    return Groups(tiles, frequent)


def read(array, B, T, V) -> Groups:
    """What ``groups`` says, rows of a plan in order; no word of the order is of two groups."""
    header, order, frequent, plans = form.parts(array, B, T, V)
    is_taken = np.zeros(B * T, bool)

    def positions(start, count):
        assert 0 <= start <= start + count <= B * T and not is_taken[start : start + count].any()
        is_taken[start : start + count] = True
        return order[start : start + count].tolist()

    def row(words):
        token, count, start, member = words.tolist()
        found = positions(start, count // ROWS)
        assert member == (found[1] if len(found) > 1 else 0)
        return Row(token, count % ROWS, found)

    tiles = []
    for plan in plans[: T * -(-B // ROWS) * form.PLAN].reshape(-1, form.PLAN):
        n_few, n_many = plan[[form.N_FEW, form.N_MANY]].tolist()
        rows = plan[form.HEAD_OF_TILE :].reshape(ROWS, form.WORDS_OF_ROW)
        few, many = rows[:n_few], rows[::-1][:n_many]
        tiles.append(Tile(*(sorted(map(row, words), key=lambda row: row.row) for words in (few, many))))
    n_frequent = int(header[form.N_FREQUENT])
    listed = frequent[: form.OF_FREQUENT * n_frequent].reshape(-1, form.OF_FREQUENT)[:, :3].tolist()
    assert len({token for token, *_ in listed}) == n_frequent
    assert header[form.NEXT_ITEM] == header[form.NEXT_FREQUENT] == 0
    return Groups(tiles, {token: positions(start, count) for token, start, count in listed})


def group(tokens_BT, V, **options) -> Groups:
    B, T = tokens_BT.shape
    array = to_device(poisoned(form.layout(B, T, V).size, np.int32))
    groups.group(to_device(tokens_BT), array, V, **options)
    return read(to_host(array), B, T, V)


def drawn(B, T, V, *, like_words=False) -> np.ndarray:
    """Tokens, the first and the last of the table among them, and some that it does not have."""
    rng = np.random.default_rng(B + 100 * T + 10000 * V)
    tokens = rng.integers(0, V, (B, T)).astype(np.int32)
    if like_words:
        tokens = np.minimum(rng.exponential(V / 8, (B, T)), V - 1).astype(np.int32)
    if tokens.size > 20:
        tokens.flat[:5] = 0, V - 1, -1, V, 2**31 - 1
        tokens.flat[-1] = -(2**31)
    return tokens


@pytest.mark.parametrize("variant", groups.GROUP.runnable())
@pytest.mark.parametrize("like_words", [False, True], ids=["even", "words"])
def test_every_shape(variant, like_words):
    for what, (B, T, V) in SHAPES.items():
        tokens = drawn(B, T, V, like_words=like_words)
        assert group(tokens, V, variant=variant) == expected(tokens, V), what


@pytest.mark.parametrize("variant", groups.GROUP.runnable())
@settings(max_examples=60)
@given(st.data())
def test_any_tokens(variant, data):
    B, T, V = data.draw(st.tuples(*(st.integers(1, n) for n in (70, 40, 300))))
    most = data.draw(st.integers(0, V))  # few different tokens have many positions each
    tokens = np.random.default_rng(data.draw(st.integers(0, 99))).integers(-1, most + 1, (B, T)).astype(np.int32)
    assert group(tokens, V, variant=variant) == expected(tokens, V)


@pytest.mark.parametrize("variant", groups.GROUP.runnable())
@given(count=st.integers(1, 2 * COMPARED))
@example(count=FEW)
@example(count=FEW + 1)
@example(count=MANY)
@example(count=MANY + 1)
@example(count=COMPARED)
@example(count=COMPARED + 1)
def test_a_token_of_so_many_positions(variant, count):
    tokens = np.full((9, 30), -1, np.int32)
    tokens.flat[np.random.default_rng(count).permutation(tokens.size)[:count]] = 5
    assert group(tokens, 7, variant=variant) == expected(tokens, 7)


@pytest.mark.parametrize("variant", groups.GROUP.runnable())
def test_all_tokens_are_one(variant):
    tokens = np.full((32, 64), 2, np.int32)
    assert group(tokens, 3, variant=variant) == expected(tokens, 3)


@pytest.mark.parametrize("variant", groups.GROUP.runnable())
def test_no_token_is_of_the_table(variant):
    tokens = np.full((3, 5), 7, np.int32)
    assert group(tokens, 7, variant=variant) == Groups([Tile([], [])] * 5, {})


@pytest.mark.parametrize("variant", groups.GROUP.runnable())
def test_a_row_of_the_last_text_of_a_tile(variant):
    """Its bit is the sign's."""
    tokens = np.arange(2 * ROWS, dtype=np.int32).reshape(2, ROWS).T.copy()
    tokens[ROWS - 1] = 5
    assert group(tokens, 2 * ROWS, variant=variant) == expected(tokens, 2 * ROWS)


@pytest.mark.parametrize("variant", groups.GROUP.runnable())
def test_positions_for_which_a_block_has_no_room(variant):
    """As large a table as a cluster takes; more positions of one block than its shared memory has room for."""
    V = 8 * 37_000
    rng = np.random.default_rng(0)
    tokens = np.where(rng.random((6, 2500)) < 0.3, 8 * 1900, 8 * rng.integers(0, 2000, (6, 2500))).astype(np.int32)
    assert group(tokens, V, variant=variant) == expected(tokens, V)


@pytest.mark.parametrize("variant", groups.GROUP.runnable())
def test_equal_on_every_run(variant):
    """But for where a token's positions begin, which ``read`` does not say."""
    on_gpu = current_device().kind != "cpu"
    tokens = drawn(33, 200 if on_gpu else 20, 1000, like_words=True)
    first = group(tokens, 1000, variant=variant)
    assert all(group(tokens, 1000, variant=variant) == first for _ in range(100 if on_gpu else 3))


def test_under_checks(under_checks):
    tokens = drawn(33, 9, 20)
    assert group(tokens, 20, variant="counting_sort") == expected(tokens, 20)


def test_without_positions_nothing_is_written():
    for shape in ((0, 3), (3, 0)):
        array = to_device(poisoned(form.layout(*shape, 5).size, np.int32))
        groups.group(to_device(np.empty(shape, np.int32)), array, 5)
        np.testing.assert_array_equal(to_host(array), poisoned(array.size, np.int32))


def test_plans_begin_at_16_bytes():
    for shape in SHAPES.values():
        at = form.layout(*shape)
        assert at.plans % 4 == at.frequent % 4 == form.PLAN % 4 == 0


def test_a_cluster_is_the_default_on_hopper():
    with offline.device("sm_90a") as device:
        for V, name in ((50_304, "cluster"), (128_256, "cluster"), (400_000, "counting_sort")):
            array = device.array((form.layout(8, 64, V).size,), np.int32)
            assert groups.GROUP.pick(None, array, 8, 64, V).name == name


def test_bad_arguments():
    tokens = np.zeros((3, 7), np.int32)
    array = np.zeros(form.layout(3, 7, 5).size, np.int32)
    with pytest.raises(DTypeError, match=r"embedding.group: tokens_BT has dtype int64; expected int32"):
        groups.group(tokens.astype(np.int64), array, 5)
    with pytest.raises(ShapeError, match=r"embedding.group: tokens_BT has 1 axes"):
        groups.group(tokens[0], array, 5)
    with pytest.raises(DTypeError, match=r"embedding.group: tokens_BT is not C-contiguous"):
        groups.group(tokens.T, array, 5)
    with pytest.raises(ShapeError, match=rf"embedding.group: groups has shape .* at least {array.size} elements"):
        groups.group(tokens, array[:-1], 5)
    with pytest.raises(ConfigError, match=r"embedding.group: V=0; give the number of the table's rows"):
        groups.group(tokens, array, 0)
