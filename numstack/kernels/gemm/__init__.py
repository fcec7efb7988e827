"""Matrix product: c = alpha op(a) op(b), with what usually follows it done before c is stored.

=======  ===========================  ===============================================================
layout   c_MN =                       in a linear layer y = x w (x: tokens by inputs, w: inputs by outputs)
=======  ===========================  ===============================================================
NN       alpha a_MK b_KN              forward, y = x w
NT       alpha a_MK b_NK^T            gradient of the input, dx = dy w^T
TN       alpha a_KM^T b_KN            gradient of the weight, dw = x^T dy
=======  ===========================  ===============================================================

No operand is ever transposed in memory. Epilogues, on ab = alpha op(a) op(b):

- ``bias``: c = ab + bias_N;
- ``bias_gelu``: p = ab + bias_N, c = gelu(p), tanh form; p is stored too where the backward pass will need it;
- ``residual``: c = ab + residual_MN, plus bias_N if given;
- ``gelu_backward``: c = ab gelu'(p), for the p that ``bias_gelu`` stored.

``accumulate`` adds into c (c = ab + c), for gradients that have several contributions.

The ladder, each block computing one tile of c:

- ``thread_per_element``: every thread walks along a row of op(a) and a column of op(b), all of it from global memory.
- ``shared_tile``: a block of 16 x 16 threads loads 16 x 16 elements of each operand into shared memory, and reads
  each of them 16 times there: 16 times less traffic from global memory.
- ``register_tile``: a thread computes 8 x 2 elements of c in registers, so that a value read from shared memory is
  used 2 or 8 times; shared memory, not arithmetic, was what ``shared_tile`` waited for.
- ``mma_sync``: tensor cores multiply tiles of 16-bit operands, which are copied in while earlier ones are worked on: by
  ``cp.async``, or by Hopper's copy engine.
- ``wgmma``: Hopper's copy engine moves tiles of operands and of c, four warps together multiply straight from shared
  memory, and blocks stay on their multiprocessors: no warp that computes ever loads.

Sources: the ladder follows Simon Boehm, "How to optimize a CUDA matmul kernel" (2022).
"""

import numpy as np

from numstack.device import Array, Stream
from numstack.errors import ConfigError, ShapeError
from numstack.kernels.gemm import mma_sync, portable, separate, wgmma
from numstack.kernels.gemm.problem import EPILOGUES, LAYOUTS, Problem, Spec, make, reference
from numstack.kernels.launch import (
    check_contiguous,
    check_dtype,
    check_floats,
    check_ndim,
    check_option,
    check_shape,
    check_workspace,
)
from numstack.kernels.variants import Variants

__all__ = ["EPILOGUES", "LAYOUTS", "VARIANTS", "Problem", "Spec", "gemm", "reference", "workspace_size"]

VARIANTS = Variants(
    "gemm", [*map(separate.separately, portable.LADDER), separate.separately(mma_sync.VARIANT), wgmma.VARIANT]
)


def gemm(
    a: Array,
    b: Array,
    c: Array,
    *,
    layout: str = "NN",
    alpha: float = 1.0,
    accumulate: bool = False,
    epilogue: str | None = None,
    bias: Array | None = None,
    residual: Array | None = None,
    preactivation: Array | None = None,
    column_sums: Array | None = None,
    accumulate_sums: bool = False,
    nonfinite: Array | None = None,
    workspace: Array | None = None,
    variant: str | None = None,
    stream: Stream | None = None,
) -> None:
    """c = alpha op(a) op(b), then the epilogue.

    Parameters
    ----------
    a : array, shape (M, K), or (K, M) in layout TN
    b : array, shape (K, N), or (N, K) in layout NT
    c : array, shape (M, N)
        Written; must not overlap a or b. Any size may be 0; with K = 0 the product is 0. All three, and what else has
        c's shape, may have a first axis more: a batch of as many products.
    layout : {"NN", "NT", "TN"}
    alpha : float
    accumulate : bool
        Add into c. Without an epilogue only.
    epilogue : {None, "bias", "bias_gelu", "residual", "gelu_backward"}
    bias : array, shape (N,)
        For bias and bias_gelu; optional for residual.
    residual : array, shape (M, N)
        For residual; may be c.
    preactivation : array, shape (M, N), optional
        For bias_gelu: gets what went into the GELU. For gelu_backward, which needs it: read.
    column_sums : array, shape (N,), optional
        Gets the sums of c's columns: the gradient of a bias, if c is that of what the bias was added to. Needs the
        workspace. No batches.
    accumulate_sums : bool
        Add into column_sums.
    nonfinite : array of one int32, optional
        Bit 0 is set if c holds an infinity or NaN, and left as it is if not.
    workspace : array of float32, optional
        As :func:`workspace_size` says. Without it a product with few tiles and large K, as the gradient of a weight is,
        keeps fewer multiprocessors busy.
    variant : str, optional
        A name in ``VARIANTS``.

    All other arrays are float32, float16 or bfloat16 as uint16 bits, in any mixture, and C-contiguous. Sums over k are
    float32.

    Raises
    ------
    ShapeError, DTypeError, ConfigError
        If the shapes, dtypes or options do not fit one another.

    Notes
    -----
    Deterministic: yes.
    """
    check_option("gemm", "layout", layout, LAYOUTS)
    check_option("gemm", "epilogue", epilogue, EPILOGUES)
    given = {"bias": bias, "residual": residual, "preactivation": preactivation}
    extras = {name: array for name, array in given.items() if array is not None}
    _check_extras(epilogue, accumulate, extras)
    arrays = {
        "a_KM" if layout[0] == "T" else "a_MK": a,
        "b_NK" if layout[1] == "T" else "b_KN": b,
        "c_MN": c,
    }
    check_ndim("gemm", 3 if c.ndim == 3 else 2, **arrays)
    _check_sizes(layout, arrays)
    m, n = c.shape[-2:]
    for name, array in extras.items():
        check_shape("gemm", (n,) if name == "bias" else c.shape, **{name: array})
    arrays |= extras
    if column_sums is not None:
        _check_sums(m, n, c, column_sums, workspace)
        arrays |= {"column_sums": column_sums}
    check_floats("gemm", **arrays)
    check_contiguous("gemm", **arrays)
    if nonfinite is not None:
        check_dtype("gemm", np.int32, nonfinite=nonfinite)
        check_shape("gemm", (1,), nonfinite=nonfinite)
    if workspace is not None:
        check_workspace("gemm", workspace, 0)

    if accumulate:
        residual = c
    problem = make(
        a, b, c, layout=layout, alpha=float(alpha), bias=bias, has_gelu=epilogue == "bias_gelu", residual=residual,
        preactivation=preactivation, column_sums=column_sums, accumulates_sums=accumulate_sums, nonfinite=nonfinite,
        workspace=workspace,
    )  # fmt: skip
    VARIANTS.pick(variant, problem).launch(problem, stream)


def _check_extras(epilogue: str | None, accumulate: bool, extras: dict[str, Array]) -> None:
    """Raise ConfigError unless the epilogue has the arrays it needs and no others."""
    if accumulate and epilogue is not None:
        raise ConfigError(
            f"gemm: accumulate=True with epilogue={epilogue!r}; accumulate takes no epilogue: add into c with "
            'epilogue="residual", residual=c, or leave one out'
        )
    needed, allowed = {
        None: ((), ()),
        "bias": (("bias",), ("bias",)),
        "bias_gelu": (("bias",), ("bias", "preactivation")),
        "residual": (("residual",), ("bias", "residual")),
        "gelu_backward": (("preactivation",), ("preactivation",)),
    }[epilogue]
    for name in needed:
        if name not in extras:
            raise ConfigError(f"gemm: epilogue={epilogue!r} needs {name}, which is missing; pass {name}=")
    for name in extras:
        if name not in allowed:
            raise ConfigError(f"gemm: {name} is given but epilogue={epilogue!r} does not use it; leave it out")


def _check_sizes(layout: str, arrays: dict[str, Array]) -> None:
    """Raise ShapeError if the sizes of a, b and c do not fit one another."""
    (a_name, a), (b_name, b), (_, c) = arrays.items()
    m, k = a.shape[-2:] if layout[0] == "N" else a.shape[:-3:-1]
    b_k, n = b.shape[-2:] if layout[1] == "N" else b.shape[:-3:-1]
    if b_k != k:
        other = {"NN": "NT", "NT": "NN"}.get(layout)
        advice = f'pass b transposed (layout="{other}") or fix the shape' if other and n == k else "fix the shape"
        raise ShapeError(f"gemm: {a_name} has K={k} but {b_name} has K={b_k}; {advice}")
    expected = (m, n) if c.ndim == 2 else (a.shape[0], m, n)
    if c.shape != expected or (c.ndim == 3 and b.shape[0] != a.shape[0]):
        raise ShapeError(
            f"gemm: c_MN has shape {c.shape} but layout {layout} of {a_name} {a.shape} and {b_name} {b.shape} gives "
            f"{expected}"
        )


def _check_sums(m: int, n: int, c: Array, column_sums: Array, workspace: Array | None) -> None:
    """Raise unless sums of columns can be made."""
    check_ndim("gemm", 2, c_MN=c)
    check_shape("gemm", (n,), column_sums=column_sums)
    if workspace is None:
        raise ConfigError("gemm: column_sums without a workspace; pass one as large as gemm.workspace_size says")
    check_workspace("gemm", workspace, separate.workspace_size(m, n))


def workspace_size(
    m: int, n: int, k: int, *, layout: str = "NN", column_sums: bool = False, variant: str | None = None
) -> int:
    """Elements (float32) of workspace with which a variant is at its best on this device; at least 1.

    Without a name: those that are chosen by default.
    """
    size = separate.workspace_size(m, n) if column_sums else 1
    if variant == wgmma.VARIANT.name or (variant is None and wgmma.VARIANT.is_default_here()):
        size = max(size, wgmma.most_workspace(m, n, k, layout, column_sums))
    elif variant == mma_sync.VARIANT.name or (variant is None and mma_sync.VARIANT.is_default_here()):
        size = max(size, mma_sync.most_workspace(m, n, k))
    return size
