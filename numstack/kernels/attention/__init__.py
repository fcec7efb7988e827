"""Scaled dot-product attention: each query takes the average of the values, weighted by how well their keys match.

Forward, for each batch b and head h, query i and key j (only j <= i when causal)::

    s_ij  = scale q_i . k_j
    lse_i = log sum_j exp(s_ij)
    p_ij  = exp(s_ij - lse_i)
    out_i = sum_j p_ij v_j

Backward, from lse and the gradient do of out; p is computed again::

    delta_i = do_i . out_i                  ds_ij = p_ij (do_i . v_j - delta_i)
    dv_j    = sum_i p_ij do_i               dq_i  = scale sum_j ds_ij k_j
                                            dk_j  = scale sum_i ds_ij q_i

No array of T x T is ever stored. Ladder: ``three_pass`` has a block for each row and walks over the keys for the
maximum, for the sum and for the result; ``online_tiles`` has a block for 32 rows, which takes a tile of keys at a time
into shared memory and corrects what it has summed when the maximum grows, so that q, k and v are read once and every
element loaded is used 32 times. Tiles above the diagonal are skipped. Forward, ``mma_sync`` gives the products to
tensor cores: scores and result stay in registers, 128 queries a block share what is copied. ``wgmma``, for Hopper, has
the copy engine bring tiles to warpgroups of 64 queries, which compute exponentials while the tensor cores multiply the
tile before. Backward is deterministic: dq loops over keys in one kernel, dk and dv over queries in another (seven
matrix products instead of five), with no atomics. ``wgmma`` makes all three in one kernel with five products: dq is
summed in global memory, block of keys after block of keys in a fixed order, with the work arranged so that no block
waits for its turn.

Arrays are [batch, head, time, width] and may be strided views, so that q, k and v may be parts of one packed projection
(B, T, 3, H, D) and out a part of (B, T, H, D). The width D is at most 128; sums are float32.

Sources: Milakov, Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022, "FlashAttention",
algorithms 1 and 4; Dao 2023, "FlashAttention-2"; Shah et al. 2024, "FlashAttention-3".
"""

import math
from collections.abc import Callable

import numpy as np

from numstack.device import Array, Stream
from numstack.errors import ShapeError
from numstack.kernels.attention import mma_forward, online_tiles, three_pass, wgmma_backward, wgmma_forward
from numstack.kernels.attention.hopper import Operands
from numstack.kernels.launch import (
    check_contiguous,
    check_dtype,
    check_floats,
    check_ndim,
    check_shape,
    check_workspace,
)
from numstack.kernels.variants import Variant, Variants

MAX_WIDTH = 128
"""Largest D."""


def reference(
    q_BHTD: np.ndarray, k_BHTD: np.ndarray, v_BHTD: np.ndarray, *, causal: bool = True, scale: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """``(out_BHTD, lse_BHT)`` in float64."""
    q, k, v = (np.asarray(a, np.float64) for a in (q_BHTD, k_BHTD, v_BHTD))
    s = _reference_scores(q, k, causal, scale)
    largest = s.max(axis=-1, keepdims=True)
    e = np.exp(s - largest)
    total = e.sum(axis=-1, keepdims=True)
    return e / total @ v, (largest + np.log(total))[..., 0]


def reference_backward(
    q_BHTD: np.ndarray,
    k_BHTD: np.ndarray,
    v_BHTD: np.ndarray,
    dout_BHTD: np.ndarray,
    *,
    causal: bool = True,
    scale: float | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(dq_BHTD, dk_BHTD, dv_BHTD)`` in float64."""
    q, k, v, dout = (np.asarray(a, np.float64) for a in (q_BHTD, k_BHTD, v_BHTD, dout_BHTD))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    s = _reference_scores(q, k, causal, scale)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    dp = dout @ v.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(axis=-1, keepdims=True))
    return scale * ds @ k, scale * ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout


def _reference_scores(q: np.ndarray, k: np.ndarray, causal: bool, scale: float | None) -> np.ndarray:
    s = (q @ k.swapaxes(-1, -2)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    return np.where(np.tri(*s.shape[-2:]) > 0, s, -np.inf) if causal else s


FORWARD = Variants(
    "attention.forward",
    [
        Variant(
            "three_pass",
            three_pass.forward,
            note="A block a query: maximum, sum, result, each from the scores anew.",
        ),
        Variant(
            "online_tiles",
            online_tiles.forward,
            note="32 queries share each tile of keys and values in shared memory, and pass over them once.",
        ),
        Variant(
            "mma_sync",
            mma_forward.forward,
            note="Tensor cores multiply; scores stay in registers; keys and values are copied in meanwhile.",
            supports=mma_forward.supports,
            made_for="sm_80",
        ),
        Variant(
            "wgmma",
            wgmma_forward.forward,
            note="Hopper's tensor cores multiply tiles that the copy engine brings, while exponentials are computed.",
            supports=wgmma_forward.supports,
            made_for="sm_90a",
        ),
    ],
)


def _with_delta(launch: Callable[..., None]) -> Callable[..., None]:
    """A launch that takes delta_BHT beside the other arrays, out of the workspace."""

    def launch_with_delta(
        arrays: tuple[Array, ...],
        workspace: Array,
        scale: float,
        causal: bool,
        product_flops: int,
        stream: Stream | None,
    ) -> None:
        lse_BHT = arrays[5]
        delta_BHT = workspace[: lse_BHT.size].reshape(*lse_BHT.shape)
        launch((*arrays, delta_BHT), scale, causal, product_flops, stream)

    return launch_with_delta


BACKWARD = Variants(
    "attention.backward",
    [
        Variant(
            "three_pass",
            _with_delta(three_pass.backward),
            note="A block a query for dq, then a block a key for dk and dv.",
        ),
        Variant(
            "online_tiles",
            _with_delta(online_tiles.backward),
            note="32 rows share each tile of the other side in shared memory.",
        ),
        Variant(
            "wgmma",
            wgmma_backward.backward,
            note="Tensor cores of Hopper; one kernel with five products instead of two with seven, dq summed in turns.",
            supports=wgmma_backward.supports,
            made_for="sm_90a",
        ),
    ],
)


def workspace_size(q_BHTD: Array) -> int:
    """Float32 elements of workspace that :func:`backward` needs for such queries on this device."""
    B, H, T, D = q_BHTD.shape
    if q_BHTD.itemsize == 2 and "wgmma" in BACKWARD.runnable():
        return wgmma_backward.workspace_size(B, H, T, D)
    return int(B * H * T)


def _flops_of_product(q: Array, k: Array, causal: bool) -> int:
    """Of one matrix product of T x T' x D for every head; causal skips half of it."""
    B, H, T, D = q.shape
    return int(2 * B * H * T * k.shape[2] * D // (2 if causal else 1))


def _check(q: Array, k: Array, queries: dict[str, Array], keys: dict[str, Array], rows: dict[str, Array]) -> None:
    """``queries`` have the shape of q, ``keys`` that of k, ``rows`` one float32 a query."""
    check_ndim("attention", 4, q_BHTD=q, k_BHTD=k)
    B, H, T, D = q.shape
    if k.shape[2] == 0:
        raise ShapeError(f"attention: k_BHTD has shape {k.shape}: no key; attention needs at least one")
    if not 1 <= D <= MAX_WIDTH:
        raise ShapeError(f"attention: q_BHTD has width D={D}; expected 1 to {MAX_WIDTH}: use more heads")
    check_shape("attention", (B, H, k.shape[2], D), k_BHTD=k, **keys)
    check_shape("attention", (B, H, T, D), **queries)
    check_shape("attention", (B, H, T), **rows)
    check_floats("attention", q_BHTD=q, k_BHTD=k, **queries, **keys)
    check_dtype("attention", np.float32, **rows)
    check_contiguous("attention", **rows)


def forward(
    q_BHTD: Array,
    k_BHTD: Array,
    v_BHTD: Array,
    out_BHTD: Array,
    lse_BHT: Array,
    *,
    causal: bool = True,
    scale: float | None = None,
    variant: str | None = None,
    stream: Stream | None = None,
) -> None:
    """Attention of every query, and the log-sum-exp of its scores.

    Parameters
    ----------
    q_BHTD, out_BHTD : array, shape (B, H, T, D), floating, any strides
        D is at most 128.
    k_BHTD, v_BHTD : array, shape (B, H, T', D), floating, any strides
    lse_BHT : array, shape (B, H, T), float32
        What :func:`backward` needs.
    causal : bool
        Query i sees keys 0 to i only.
    scale : float, optional
        Multiplied into the scores; by default 1 / sqrt(D).
    variant : str, optional
        A name of ``FORWARD``.

    Raises
    ------
    ShapeError, DTypeError
        If an array does not fit q, D is too large, or there is no key.

    Notes
    -----
    Workspace: none. Deterministic: yes.
    """
    _check(q_BHTD, k_BHTD, {"out_BHTD": out_BHTD}, {"v_BHTD": v_BHTD}, {"lse_BHT": lse_BHT})
    scale = 1 / math.sqrt(q_BHTD.shape[3]) if scale is None else float(scale)
    arrays = (q_BHTD, k_BHTD, v_BHTD, out_BHTD, lse_BHT)
    product = _flops_of_product(q_BHTD, k_BHTD, causal)
    FORWARD.pick(variant, Operands(arrays[:4], scale)).launch(arrays, scale, causal, product, stream)


def backward(
    q_BHTD: Array,
    k_BHTD: Array,
    v_BHTD: Array,
    out_BHTD: Array,
    dout_BHTD: Array,
    lse_BHT: Array,
    dq_BHTD: Array,
    dk_BHTD: Array,
    dv_BHTD: Array,
    workspace: Array,
    *,
    causal: bool = True,
    scale: float | None = None,
    variant: str | None = None,
    stream: Stream | None = None,
) -> None:
    """Gradients of :func:`forward` with respect to q, k and v.

    Parameters
    ----------
    q_BHTD, out_BHTD, dout_BHTD, dq_BHTD : array, shape (B, H, T, D), floating, any strides
    k_BHTD, v_BHTD, dk_BHTD, dv_BHTD : array, shape (B, H, T', D), floating, any strides
    lse_BHT : array, shape (B, H, T), float32
        From :func:`forward`.
    workspace : array, one axis, float32
        At least ``workspace_size(q_BHTD)`` elements.
    causal, scale
        As given to :func:`forward`.
    variant : str, optional
        A name of ``BACKWARD``.

    Raises
    ------
    ShapeError, DTypeError
        If an array does not fit q or k, or the workspace is too small.

    Notes
    -----
    Deterministic: yes.
    """
    _check(
        q_BHTD,
        k_BHTD,
        {"out_BHTD": out_BHTD, "dout_BHTD": dout_BHTD, "dq_BHTD": dq_BHTD},
        {"v_BHTD": v_BHTD, "dk_BHTD": dk_BHTD, "dv_BHTD": dv_BHTD},
        {"lse_BHT": lse_BHT},
    )
    check_workspace("attention", workspace, workspace_size(q_BHTD))
    scale = 1 / math.sqrt(q_BHTD.shape[3]) if scale is None else float(scale)
    arrays = (q_BHTD, k_BHTD, v_BHTD, out_BHTD, dout_BHTD, lse_BHT, dq_BHTD, dk_BHTD, dv_BHTD)
    product = _flops_of_product(q_BHTD, k_BHTD, causal)
    operands = Operands((q_BHTD, k_BHTD, v_BHTD, out_BHTD, dout_BHTD, dq_BHTD, dk_BHTD, dv_BHTD), scale)
    BACKWARD.pick(variant, operands).launch(arrays, workspace, scale, causal, product, stream)
