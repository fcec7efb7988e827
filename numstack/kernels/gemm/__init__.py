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

Sources: the ladder follows Simon Boehm, "How to optimize a CUDA matmul kernel" (2022).
"""

from numstack.device import Array, Stream
from numstack.errors import ConfigError, ShapeError
from numstack.kernels.gemm import portable
from numstack.kernels.gemm.problem import EPILOGUES, LAYOUTS, Problem, Spec, make, reference
from numstack.kernels.launch import check_contiguous, check_floats, check_ndim, check_option, check_shape
from numstack.kernels.variants import Variants

__all__ = ["EPILOGUES", "LAYOUTS", "VARIANTS", "Problem", "Spec", "gemm", "reference"]

VARIANTS = Variants("gemm", portable.LADDER)


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
    variant: str | None = None,
    stream: Stream | None = None,
) -> None:
    """c = alpha op(a) op(b), then the epilogue.

    Parameters
    ----------
    a : array, shape (M, K), or (K, M) in layout TN
    b : array, shape (K, N), or (N, K) in layout NT
    c : array, shape (M, N)
        Written; must not overlap a or b. Any size may be 0; with K = 0 the product is 0.
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
    variant : str, optional
        A name in ``VARIANTS``.

    All arrays are float32, float16 or bfloat16 as uint16 bits, in any mixture, and C-contiguous; sums are float32.

    Raises
    ------
    ShapeError, DTypeError, ConfigError
        If the shapes, dtypes or options do not fit one another.

    Notes
    -----
    Workspace: none. Deterministic: yes.
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
    check_ndim("gemm", 2, **arrays)
    m, k = a.shape if layout[0] == "N" else a.shape[::-1]
    n = _check_sizes(layout, arrays, m, k)
    for name, array in extras.items():
        check_shape("gemm", (n,) if name == "bias" else (m, n), **{name: array})
    arrays |= extras
    check_floats("gemm", **arrays)
    check_contiguous("gemm", **arrays)

    if accumulate:
        residual = c
    problem = make(
        a, b, c, layout=layout, alpha=float(alpha), bias=bias, has_gelu=epilogue == "bias_gelu", residual=residual,
        preactivation=preactivation,
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


def _check_sizes(layout: str, arrays: dict[str, Array], m: int, k: int) -> int:
    """N, or ShapeError if the sizes of a, b and c do not fit one another."""
    (a_name, _), (b_name, b), (_, c) = arrays.items()
    b_k, n = b.shape if layout[1] == "N" else b.shape[::-1]
    if b_k != k:
        other = {"NN": "NT", "NT": "NN"}.get(layout)
        advice = f'pass b transposed (layout="{other}") or fix the shape' if other and n == k else "fix the shape"
        raise ShapeError(f"gemm: {a_name} has K={k} but {b_name} has K={b_k}; {advice}")
    if c.shape != (m, n):
        raise ShapeError(
            f"gemm: c_MN has shape {c.shape} but layout {layout} of {a_name} and {b_name} gives ({m}, {n})"
        )
    return n
