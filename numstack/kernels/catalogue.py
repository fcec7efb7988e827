"""Every kernel, as launches: each operation in each of its variants, layouts and forms.

``numstack kernels build`` compiles them all for GPUs that are not here; a test does, so that a kernel that spills, uses
local memory or slips into float64 never lands. A new kernel joins by a line here; the test says if one is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from numstack.kernels import (
    adamw,
    attention,
    cross_entropy,
    dropout,
    elementwise,
    embedding,
    embedding_groups,
    gelu,
    gemm,
    layernorm,
    layernorm_residual,
    loss_scale,
    reduce,
    rmsnorm,
    softmax,
)
from numstack.kernels.rows import row_of

# Sizes of GPT-2 124M on a small batch: large enough that every launcher takes its main road.
B, T, H, D, V = 4, 1024, 12, 64, 50304
C = H * D
R = B * T
N = 1 << 20  # parameters that an optimiser updates

# ``array(shape, dtype)`` makes an array to launch on: with memory on a real device, without on an offline one.
MakeArray = Callable[..., Any]


def _nothing() -> None:
    """What most launches need before."""


class Launch(NamedTuple):
    """One way to call an operation: its name, the variant (empty if there is only one), and the call.

    ``scratch``: arrays that it may leave in one way or another. ``prepare``: to be called before.
    """

    operation: str
    variant: str
    run: Callable[[], None]
    scratch: tuple[Any, ...] = ()
    prepare: Callable[[], None] = _nothing


def launches(array: MakeArray, dtype: np.dtype | type) -> Iterator[Launch]:
    """Every launch with activations and weights stored as ``dtype`` (uint16 for bfloat16).

    Norms' gains, statistics, losses, parameter gradients and optimiser state are float32, as in training.
    """
    for family in FAMILIES:
        yield from family(array, np.dtype(dtype))


def _gemm(array: MakeArray, dtype: np.dtype) -> Iterator[Launch]:
    x, w, y = array((R, C), dtype), array((C, 4 * C), dtype), array((R, 4 * C), dtype)
    bias, other = array((4 * C,), dtype), array((R, 4 * C), dtype)
    forward: tuple[dict[str, Any], ...] = (
        {},
        {"epilogue": "bias", "bias": bias},
        {"epilogue": "bias_gelu", "bias": bias, "preactivation": other},
        {"epilogue": "bias_gelu", "bias": bias},
        {"epilogue": "residual", "residual": other, "bias": bias},
    )
    for rung in (v for v in gemm.VARIANTS if v.runs_here() and (v.made_for == "any" or dtype.itemsize == 2)):
        # Kernels for sm_80 take seconds each to compile: no two that differ in little.
        variant, is_slow = rung.name, rung.made_for == "sm_80"
        for options in forward[::2] if is_slow else forward:
            yield Launch("gemm NN", variant, partial(gemm.gemm, x, w, y, layout="NN", variant=variant, **options))
        if rung.made_for == "sm_90a":
            sums = array((R, 4 * C), np.float32)
            yield Launch("gemm NN", variant, partial(gemm.gemm, x, w, sums, variant=variant, accumulate=True))
            # Where k is long, no tile is stored while another is multiplied.
            long_x, long_w, few_y = (
                array((R // 4, 8 * C), dtype),
                array((8 * C, 4 * C), dtype),
                array((R // 4, 4 * C), dtype),
            )
            few_other = array((R // 4, 4 * C), dtype)
            for options in forward:
                same = {name: few_other if value is other else value for name, value in options.items()}
                yield Launch("gemm NN", variant, partial(gemm.gemm, long_x, long_w, few_y, variant=variant, **same))
            wide, wide_dw = array((R, 1600), dtype), array((C, 1600), dtype)  # ten columns of tiles, in pairs
            yield Launch("gemm TN", variant, partial(gemm.gemm, x, wide, wide_dw, layout="TN", variant=variant))
        for accumulate in (False, True):
            chosen: dict[str, Any] = {"variant": variant, "accumulate": accumulate}
            if not (is_slow and accumulate):
                yield Launch("gemm NT", variant, partial(gemm.gemm, y, w, x, layout="NT", **chosen))
            dw = array((C, 4 * C), np.float32)
            yield Launch("gemm TN", variant, partial(gemm.gemm, x, y, dw, layout="TN", **chosen))
            few, room = array((C, C), np.float32), array((gemm.workspace_size(C, C, R, layout="TN"),), np.float32)
            yield Launch("gemm TN", variant, partial(gemm.gemm, x, x, few, layout="TN", workspace=room, **chosen))
        through_gelu: dict[str, Any] = {
            "epilogue": "gelu_backward",
            "preactivation": other,
            "column_sums": array((4 * C,), np.float32),
            "nonfinite": array((1,), np.int32),
            "workspace": array((gemm.workspace_size(R, 4 * C, C, layout="NT", column_sums=True),), np.float32),
        }
        turned = w.reshape(4 * C, C)
        yield Launch("gemm NT", variant, partial(gemm.gemm, x, turned, y, layout="NT", variant=variant, **through_gelu))
        batch = x.reshape(B, T, C), array((B, C, C), dtype), array((B, T, C), dtype)
        yield Launch("gemm NN", variant, partial(gemm.gemm, *batch, variant=variant))


def _gelu(array: MakeArray, dtype: np.dtype) -> Iterator[Launch]:
    x, y, dy, dx = (array((R, 4 * C), dtype) for _ in range(4))
    for form in gelu.FORMS:
        for variant in gelu.VARIANTS.runnable():
            chosen: dict[str, Any] = {"form": form, "variant": variant}
            name = f"{variant} {form}"
            yield Launch("gelu.forward", name, partial(gelu.forward, x, y, **chosen))
            yield Launch("gelu.backward", name, partial(gelu.backward, dy, x, dx, **chosen))
            yield Launch("gelu.forward_backward", name, partial(gelu.forward_backward, x, dy, y, dx, **chosen))


def _rows(array: MakeArray, dtype: np.dtype) -> Iterator[Launch]:
    for columns in (C, 1600, 4 * C):  # other layouts of a row over threads
        yield from _rows_of(columns, array, dtype)


def _norm_of_float32_stream(columns: int, array: MakeArray, dtype: np.dtype) -> Iterator[Launch]:
    """Between a residual stream in float32 and a branch of ``dtype``."""
    if dtype == np.float32:
        return
    stream, dstream = (array((R, columns), np.float32) for _ in range(2))
    kept, y, dy = (array((R, columns), dtype) for _ in range(3))
    weight, bias, dweight, dbias = (array((columns,), np.float32) for _ in range(4))
    mean, rstd = array((R,), np.float32), array((R,), np.float32)
    workspace = array((layernorm.workspace_size(R, columns),), np.float32)
    yield from _each(
        "layernorm.forward",
        layernorm.FORWARD,
        partial(layernorm.forward, stream, weight, bias, y, mean, rstd, eps=1e-5, kept_RC=kept),
    )
    backward = partial(layernorm.backward, dy, kept, weight, mean, rstd, dstream, dweight, dbias, workspace)
    for add in (False, True):
        yield from _each("layernorm.backward", layernorm.BACKWARD, partial(backward, accumulate_dx=add))


def _rows_of(columns: int, array: MakeArray, dtype: np.dtype) -> Iterator[Launch]:
    x, y, dy, dx = (array((R, columns), dtype) for _ in range(4))
    weight, bias, dweight, dbias = (array((columns,), np.float32) for _ in range(4))
    mean, rstd = array((R,), np.float32), array((R,), np.float32)
    workspace = array((layernorm.workspace_size(R, columns),), np.float32)
    forward = partial(layernorm.forward, x, weight, bias, y, mean, rstd, eps=1e-5)
    backward = partial(layernorm.backward, dy, x, weight, mean, rstd, dx, dweight, dbias, workspace)
    yield from _each("layernorm.forward", layernorm.FORWARD, forward)
    for add in (False, True):
        yield from _each("layernorm.backward", layernorm.BACKWARD, partial(backward, accumulate_dx=add))
    yield from _norm_of_float32_stream(columns, array, dtype)
    residual = partial(layernorm_residual.forward, x, dx, weight, bias, dx, y, mean, rstd, eps=1e-5)
    yield from _each("layernorm_residual.forward", layernorm_residual.FORWARD, residual)
    forward = partial(rmsnorm.forward, x, weight, y, rstd, eps=1e-5)
    backward = partial(rmsnorm.backward, dy, x, weight, rstd, dx, dweight, workspace)
    yield from _each("rmsnorm.forward", rmsnorm.FORWARD, forward)
    for add in (False, True):
        yield from _each("rmsnorm.backward", rmsnorm.BACKWARD, partial(backward, accumulate_dx=add))
    yield from _each("softmax.forward", softmax.FORWARD, partial(softmax.forward, x, y))
    yield from _each("softmax.backward", softmax.BACKWARD, partial(softmax.backward, dy, y, dx))


def _losses(array: MakeArray, dtype: np.dtype) -> Iterator[Launch]:
    logits, targets = array((R, V), dtype), array((R,), np.int32)
    loss, lse, scale = array((R,), np.float32), array((R,), np.float32), array((1,), np.float32)
    forward = partial(cross_entropy.forward, logits, targets, loss, lse)
    yield from _each("cross_entropy.forward", cross_entropy.FORWARD, forward)
    for variant in cross_entropy.FORWARD_BACKWARD.runnable():
        # Of the longest rows two do not fit in shared memory.
        x = array((R, 16384), dtype) if variant == "rows_in_turn" else logits
        both = partial(cross_entropy.forward_backward, x, targets, loss, x, scale, variant=variant)
        yield Launch("cross_entropy.forward_backward", variant, both)
        if variant == "rows_in_clusters":  # which share rows of that length if four are left over, 132 at a time
            x, few = array((136, 131072), dtype), array((136,), np.int32)
            both = partial(cross_entropy.forward_backward, x, few, loss[:136], x, scale, variant=variant)
            yield Launch("cross_entropy.forward_backward", variant, both)
    backward = partial(cross_entropy.backward, logits, targets, lse, logits, scale)
    yield from _each("cross_entropy.backward", cross_entropy.BACKWARD, backward)


def _attention(array: MakeArray, dtype: np.dtype) -> Iterator[Launch]:
    # As the model calls it: q, k and v are views of one packed array, the output lies by time first.
    for width in (D, 128):
        packed, dpacked = (array((B, T, 3, H, width), dtype).transpose(2, 0, 3, 1, 4) for _ in range(2))
        out, dout = (array((B, T, H, width), dtype).transpose(0, 2, 1, 3) for _ in range(2))
        lse = array((B, H, T), np.float32)
        q, k, v = (packed[i] for i in range(3))
        workspace = array((attention.workspace_size(q),), np.float32)
        dq, dk, dv = (dpacked[i] for i in range(3))
        for causal in (True, False):
            forward = partial(attention.forward, q, k, v, out, lse, causal=causal)
            backward = partial(attention.backward, q, k, v, out, dout, lse, dq, dk, dv, workspace, causal=causal)
            for name, ladder, run in (
                ("forward", attention.FORWARD, forward),
                ("backward", attention.BACKWARD, backward),
            ):
                for variant in ladder:
                    if variant.runs_here() and (variant.made_for == "any" or dtype.itemsize == 2):
                        yield Launch(f"attention.{name} D={width}", variant.name, partial(run, variant=variant.name))


def _embedding(array: MakeArray, dtype: np.dtype) -> Iterator[Launch]:
    tokens, out = array((B, T), np.int32), array((B, T, C), dtype)
    table, positions = array((V, C), dtype), array((T, C), dtype)
    dtable, dpositions = array((V, C), np.float32), array((T, C), np.float32)
    groups = array((embedding.groups_size(B, T, V),), np.int32)
    for launch in _each("embedding.group", embedding_groups.GROUP, partial(embedding_groups.group, tokens, groups, V)):
        yield launch._replace(scratch=(groups,))
    for of_positions, of_groups in ((positions, None), (None, None), (positions, groups)):
        forward = partial(embedding.forward, tokens, table, of_positions, out, of_groups)
        for launch in _each("embedding.forward", embedding.FORWARD, forward):
            yield launch._replace(scratch=(groups,))
    group = partial(embedding_groups.group, tokens, groups, V)
    for of_table, of_positions in ((dtable, dpositions), (dtable, None), (table, positions)):
        backward = partial(embedding.backward, tokens, out, of_table, of_positions, groups)
        needs = row_of(C, out, of_table), of_positions is not None
        for variant in embedding.BACKWARD:
            if variant.runs_here() and variant.supports(*needs):
                run = partial(backward, variant=variant.name)
                yield Launch("embedding.backward", variant.name, run, prepare=group)


def _optimiser(array: MakeArray, dtype: np.dtype) -> Iterator[Launch]:
    param, grad, m, v = (array((N,), np.float32) for _ in range(4))
    decay, scale = array((N // adamw.SEGMENT,), np.float32), array((1,), np.float32)
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "grad_scale_1": scale}
    stored = param if dtype == np.float32 else array((N,), dtype)
    master = None if dtype == np.float32 else param
    for step in (1, array((1,), np.int32)):  # counted on the host, or by loss scaling on the device
        run = partial(adamw.step, stored, grad, m, v, decay, master=master, step=step, **options)
        yield from _each("adamw.step", adamw.VARIANTS, run)
    counts = array((3,), np.int32)
    scaling: dict[str, Any] = {
        "max_norm": 1.0,
        "growth": 2.0,
        "backoff": 0.5,
        "window": 2000,
        "smallest": 1.0,
        "largest": 2.0**24,
    }
    yield Launch("loss_scale.update", "", partial(loss_scale.update, scale, scale, counts, scale, **scaling))


def _reductions(array: MakeArray, dtype: np.dtype) -> Iterator[Launch]:
    x, one, count = array((R, C), dtype), array((1,), np.float32), array((1,), np.int32)
    workspace = array((reduce.workspace_size(R * C),), np.float32)
    for operation, out in ((reduce.sum, one), (reduce.max, one), (reduce.norm, one), (reduce.count_nonfinite, count)):
        run = partial(operation, x, out, workspace)
        yield from _each(f"reduce.{operation.__name__}", reduce.VARIANTS, run)
    yield Launch("reduce.clip_scale", "", partial(reduce.clip_scale, one, one, max_norm=1.0))
    columns = array((reduce.sum_rows_workspace_size(R, C),), np.float32)
    for accumulate in (False, True):
        sums = partial(reduce.sum_rows, x, array((C,), np.float32), columns, accumulate=accumulate)
        yield from _each("reduce.sum_rows", reduce.SUM_ROWS_VARIANTS, sums)
    dy = array((R, C), np.float32)
    sums = partial(reduce.sum_rows, dy, array((C,), np.float32), columns, copy_RC=array((R, C), dtype))
    yield from _each("reduce.sum_rows", reduce.SUM_ROWS_VARIANTS, sums)


def _elementwise(array: MakeArray, dtype: np.dtype) -> Iterator[Launch]:
    x, y, out = (array((R, C), dtype) for _ in range(3))
    wide = array((R, C), np.float32)
    for name, run in (
        ("add", partial(elementwise.add, x, y, out)),
        ("scale", partial(elementwise.scale, x, out, 0.5)),
        ("cast", partial(elementwise.cast, x, wide)),
        ("cast", partial(elementwise.cast, wide, x)),
        ("fill", partial(elementwise.fill, x, 1.0)),
    ):
        yield from _each(f"elementwise.{name}", elementwise.VARIANTS, run)
    yield Launch("elementwise.fill", "", partial(elementwise.fill, array((R,), np.int32), 1))
    for shape in ((R,), (R, C), (B, T, C), (B, T, H, D)):
        source, target = array(shape, dtype), array(shape, dtype)
        turned = source.T if len(shape) > 1 else source[::2]
        to = target.T if len(shape) > 1 else target[::2]
        yield Launch("elementwise.copy", "", partial(elementwise.copy, turned, to))
    yield from _each(
        "elementwise.transpose", elementwise.TRANSPOSE_VARIANTS, partial(elementwise.transpose, x, array((C, R), dtype))
    )
    yield from _each("dropout.forward", dropout.VARIANTS, partial(dropout.forward, x, y, p=0.1, seed=1, offset=0))


def _each(operation: str, variants: Any, run: Callable[..., None]) -> Iterator[Launch]:
    for variant in variants.runnable():
        yield Launch(operation, variant, partial(run, variant=variant))


FAMILIES = (_gemm, _gelu, _rows, _losses, _attention, _embedding, _optimiser, _reductions, _elementwise)
