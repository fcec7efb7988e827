"""numstack.kernels.attention in 16 bits, as tensor cores take it: sizes around tiles, padding, equal bits, the choice.

On a GPU every variant runs that it has, on a CPU the portable ones, with fewer sizes.
"""

from typing import Any

import numpy as np
import pytest

from numstack.device import current_device, offline
from numstack.errors import ConfigError
from numstack.kernels import attention
from numstack.kernels.attention import tile_order
from numstack.kernels.attention.hopper import Operands
from numstack.kernels.attention.wgmma_forward_layout import TILES
from tests.kernels.test_attention import Strided, inputs
from tests.support import BFLOAT16, assert_close, poisoned, to_device, to_host

# B, H, queries, keys, D. Widths are multiples of 8, so that rows begin at multiples of 16 bytes.
SHAPES = {
    "one query, one key": (1, 2, 1, 1, 64),
    "one past a warpgroup's rows": (2, 1, 65, 65, 64),
    "more keys than queries": (1, 2, 7, 70, 64),
    "more queries than keys": (1, 2, 70, 7, 64),
}
ON_A_GPU = {
    "one past a tile": (1, 3, 129, 129, 64),
    "one past a larger tile": (1, 3, 257, 257, 64),
    "one past a tile, wide": (1, 1, 129, 129, 128),
    "a width that is padded": (1, 2, 70, 70, 40),
    "a wide width that is padded": (1, 2, 333, 333, 104),
    "far more keys than queries": (1, 2, 7, 1000, 64),
    "far more queries than keys": (1, 2, 1000, 7, 128),
    "more tiles than multiprocessors": (3, 70, 200, 200, 64),
    "long": (1, 2, 2000, 2000, 128),
}
HAS_GPU = current_device().kind != "cpu"


def in_16_bits(*shape: int, dtype: np.dtype[Any] = BFLOAT16) -> list[np.ndarray]:
    return [a.astype(dtype) for a in inputs(*shape)]


def forward(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """out and lse, of views with 8 columns of NaN beside them, which nothing may read or write."""
    out, lse = Strided(np.full_like(q, np.nan), beside=8), to_device(poisoned(q.shape[:3]))
    attention.forward(*(Strided(a, beside=8).view for a in (q, k, v)), out.view, lse, **options)
    return out.to_host(q.dtype), to_host(lse)


@pytest.mark.parametrize("variant", attention.FORWARD.runnable())
@pytest.mark.parametrize("causal", [False, True])
def test_forward_at_every_shape(variant: str, causal: bool) -> None:
    for what, shape in (SHAPES | ON_A_GPU if HAS_GPU else SHAPES).items():
        q, k, v, _ = in_16_bits(*shape)
        out, lse = forward(q, k, v, causal=causal, variant=variant)
        expected_out, expected_lse = attention.reference(q, k, v, causal=causal)
        assert_close(out, expected_out, dtype="bfloat16", what=f"out of {what}")
        assert_close(lse, expected_lse, rtol=1e-5, atol=1e-4, what=f"lse of {what}")


@pytest.mark.parametrize("variant", attention.FORWARD.runnable())
def test_float16(variant: str) -> None:
    q, k, v, _ = in_16_bits(1, 2, 65, 65, 64, dtype=np.dtype(np.float16))
    assert_close(forward(q, k, v, variant=variant)[0], attention.reference(q, k, v)[0], dtype="float16")


@pytest.mark.parametrize("variant", attention.FORWARD.runnable())
def test_scores_that_would_overflow_and_a_maximum_that_grows_late(variant: str) -> None:
    """Keys come from the last to the first in some variants, so the largest scores are in the middle."""
    q, k, v, _ = in_16_bits(1, 2, 200, 200, 64) if HAS_GPU else in_16_bits(1, 1, 70, 70, 64)
    size = 1 + 30 * np.exp(-(np.linspace(-3, 3, k.shape[2], dtype=np.float32) ** 2))
    k = (k.astype(np.float32) * size[:, None]).astype(BFLOAT16)
    out, lse = forward(q, k, v, causal=False, scale=1.0, variant=variant)
    expected_out, expected_lse = attention.reference(q, k, v, causal=False, scale=1.0)
    assert np.abs(expected_lse).max() > 500
    assert_close(out, expected_out, rtol=2**-6, atol=2**-6)
    assert_close(lse, expected_lse, rtol=1e-5)


@pytest.mark.parametrize("variant", attention.FORWARD.runnable())
def test_equal_bits_on_every_run(variant: str) -> None:
    arrays = [
        Strided(a, beside=8).view for a in in_16_bits(*((4, 40, 300, 300, 64) if HAS_GPU else (1, 2, 65, 65, 64)))
    ]
    q, k, v, out = arrays
    lse = to_device(poisoned(q.shape[:3]))
    first: tuple[bytes, bytes] | None = None
    for _ in range(100 if variant not in ("three_pass", "online_tiles") else 2):
        attention.forward(q, k, v, out, lse, variant=variant)
        bits = to_host(out).tobytes(), to_host(lse).tobytes()
        first = first or bits
        assert bits == first


def operands(dtype: Any, width: int = 64, beside: int = 0, scale: float = 0.125, turned: bool = False) -> Operands:
    """Of a device that is not here."""
    whole = current_device().array((2, 100, 3, width + beside), dtype)  # type: ignore[attr-defined]
    view = whole[..., :width].transpose(0, 2, 1, 3)
    return Operands((view[:, :, ::-1] if turned else view,) * 4, scale)


def test_what_tensor_maps_cannot_address_is_left_to_portable_variants() -> None:
    def chosen(*args: Any, **options: Any) -> str:
        return attention.FORWARD.pick(None, operands(*args, **options)).name

    with offline.device("sm_90a"):
        assert chosen(np.uint16) == chosen(np.float16) == chosen(np.uint16, width=40) == "wgmma"
        assert chosen(np.float32) == "online_tiles"
        assert chosen(np.uint16, beside=3) != "wgmma"  # a pitch of 134 bytes
        assert chosen(np.uint16, scale=-1.0) != "wgmma"
        assert chosen(np.uint16, turned=True) == "online_tiles"
        with pytest.raises(ConfigError, match=r"variant 'wgmma' does not support .* float32 strides .* choose one of"):
            attention.FORWARD.pick("wgmma", operands(np.float32))
    with offline.device("sm_80"):
        assert chosen(np.uint16) != "wgmma"


@pytest.mark.parametrize(
    ("heads", "heads_of_batch", "q_tiles", "heads_of_group", "blocks"),
    [(10, 5, 3, 4, 7), (6, 2, 1, 6, 6), (3, 3, 5, 1, 2)],
)
def test_blocks_take_every_tile_once(
    heads: int, heads_of_batch: int, q_tiles: int, heads_of_group: int, blocks: int
) -> None:
    position = tile_order.position.py_func
    taken = []
    for block in range(blocks):
        tile, step = block, 2 * (blocks - block) - 1  # first_step and next_step
        while tile < heads * q_tiles:
            taken.append(
                tuple(int(x) for x in position(*map(np.uint32, (tile, heads, heads_of_batch, q_tiles, heads_of_group))))
            )
            tile, step = tile + step, 2 * blocks - step
    wanted = {(t, b, h) for t in range(q_tiles) for b in range(heads // heads_of_batch) for h in range(heads_of_batch)}
    assert len(taken) == len(wanted) and set(taken) == wanted


def test_groups_of_heads_keep_blocks_busy() -> None:
    """GPT-2's sizes on 132 multiprocessors; keys and values of a group are at most 32 MiB."""
    for heads in (768, 400, 384, 96, 12):
        group = tile_order.choose_heads_of_group(heads, 1024, 1024, 64, 256, 64, True, 132)
        assert 1 <= group <= min(heads, 128)
    assert tile_order.choose_heads_of_group(64, 8192, 8192, 128, 128, 128, True, 132) <= 8
    assert tile_order.choose_heads_of_group(1, 1 << 20, 1 << 20, 128, 128, 128, True, 132) == 1


def test_a_block_has_the_registers_that_its_warpgroups_take() -> None:
    """With fewer at entry, consumers would wait for registers for ever."""
    for width, tiles in TILES.items():
        with offline.device("sm_90a") as device:
            view = device.array((2, 100, 3, width), np.uint16).transpose(0, 2, 1, 3)
            lse = device.array((2, 3, 100), np.float32)
            attention.forward(view, view, view, view, lse, variant="wgmma")
            (built,) = device.builds.values()
        gives, takes = tiles.registers
        assert built.threads == tiles.threads
        assert built.resources.registers * tiles.threads >= 128 * (gives + takes * tiles.consumers)
        assert built.faults() == []
