"""What a GEMM is asked for: its operands, and what a kernel is specialised for."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from numstack.device import Array
from numstack.kernels import gelu
from numstack.kernels.launch import dtype_name

LAYOUTS = ("NN", "NT", "TN")
EPILOGUES = (None, "bias", "bias_gelu", "residual", "gelu_backward")


class Spec(NamedTuple):
    """What a kernel is specialised for; constants in its source."""

    a_is_KM: bool
    b_is_NK: bool
    has_bias: bool
    has_gelu: bool
    has_residual: bool
    keeps_preactivation: bool
    has_gelu_backward: bool = False

    def name(self, variant: str) -> str:
        """What traces call the kernel: ``gemm.register_tile NT bias_gelu``."""
        layout = "TN" if self.a_is_KM else "NT" if self.b_is_NK else "NN"
        parts = {
            "bias": self.has_bias,
            "gelu": self.has_gelu,
            "residual": self.has_residual,
            "gelu_backward": self.has_gelu_backward,
        }
        return " ".join(["gemm." + variant, layout, "_".join(part for part in parts if parts[part])]).rstrip()


class Problem(NamedTuple):
    """One call of ``gemm``, checked; what its Spec does not use is None."""

    spec: Spec
    m: int
    n: int
    k: int
    a: Array
    b: Array
    c: Array
    bias: Array | None
    residual: Array | None
    preactivation: Array | None
    alpha: float
    workspace: Array | None = None
    column_sums: Array | None = None
    nonfinite: Array | None = None
    accumulates_sums: bool = False

    def matrices(self) -> "Iterator[Problem]":
        """The products of a batch, one by one; itself if it is one."""
        if self.c.ndim == 2:
            yield self
            return
        for i in range(self.c.shape[0]):
            c = self.c[i]
            yield self._replace(
                a=self.a[i],
                b=self.b[i],
                c=c,
                residual=c if self.residual is self.c else None if self.residual is None else self.residual[i],
                preactivation=None if self.preactivation is None else self.preactivation[i],
            )

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * (self.c.shape[0] if self.c.ndim == 3 else 1)

    def __repr__(self) -> str:
        dtypes = ", ".join(
            f"{name} {dtype_name(x.dtype)}" for name, x in zip("abc", (self.a, self.b, self.c), strict=True)
        )
        return f"M={self.m} N={self.n} K={self.k}, {dtypes}"


def make(
    a: Array,
    b: Array,
    c: Array,
    *,
    layout: str = "NN",
    alpha: float = 1.0,
    bias: Array | None = None,
    has_gelu: bool = False,
    residual: Array | None = None,
    preactivation: Array | None = None,
    workspace: Array | None = None,
    column_sums: Array | None = None,
    accumulates_sums: bool = False,
    nonfinite: Array | None = None,
) -> Problem:
    """The problem of these operands, whose shapes fit; a pre-activation is kept by a GELU, else it is that of one."""
    spec = Spec(
        a_is_KM=layout[0] == "T",
        b_is_NK=layout[1] == "T",
        has_bias=bias is not None,
        has_gelu=has_gelu,
        has_residual=residual is not None,
        keeps_preactivation=preactivation is not None and has_gelu,
        has_gelu_backward=preactivation is not None and not has_gelu,
    )
    m, n = c.shape[-2:]
    k = a.shape[-2] if layout[0] == "T" else a.shape[-1]
    return Problem(
        spec, m, n, k, a, b, c, bias, residual, preactivation, alpha, workspace, column_sums, nonfinite,
        accumulates_sums,
    )  # fmt: skip


def reference(
    a: np.ndarray,
    b: np.ndarray,
    *,
    layout: str = "NN",
    alpha: float = 1.0,
    epilogue: str | None = None,
    bias: np.ndarray | None = None,
    residual: np.ndarray | None = None,
    preactivation: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """c and, for ``bias_gelu``, the value before the GELU (else c again), in float64.

    ``accumulate`` is ``residual=c``.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    c = alpha * ((a.T if layout[0] == "T" else a) @ (b.T if layout[1] == "T" else b))
    if bias is not None:
        c = c + np.asarray(bias, np.float64)
    if epilogue == "gelu_backward":
        c = c * gelu.reference(np.asarray(preactivation, np.float64), "tanh")[1]
    if epilogue == "bias_gelu":
        return gelu.reference(c, "tanh")[0], c
    if residual is not None:
        c = c + np.asarray(residual, np.float64)
    return c, c
