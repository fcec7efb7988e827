"""GELU, the Gaussian error linear unit, forward and backward: y = x g(x) for a gate g between 0 and 1.

=============  =========================  ===========================================================================
form           gate g(x)                  computed as
=============  =========================  ===========================================================================
erf            (1 + erf(x / sqrt 2)) / 2  ``math.erf``
tanh_library   (1 + tanh u) / 2           ``math.tanh``
tanh_rational  the same                   tanh as an odd polynomial of degree 13 over an even one of degree 6
tanh_exp       the same                   1 / (1 + exp(-2u)): one exponential, one division
tanh           the same                   what GPT-2 uses: ``tanh_exp``, see below
=============  =========================  ===========================================================================

with u = sqrt(2 / pi) (x + 0.044715 x^3). The gradient is dx = dy (g + x g'), where g' = 2 g (1 - g) u' for all the tanh
forms and exp(-x^2 / 2) / sqrt(2 pi) for erf. A backward pass needs x only, so nothing but x is kept between the passes,
and :func:`forward_backward` gives y and dx of one reading of x.

Ladder: ``thread_per_element`` is the formula. ``vectors_in_registers``, for GPUs, moves 16 bytes a lane, with several
vectors of each array on their way before the first is waited for. Results of 16 bits it computes by instructions that
a GPU has for exponential and reciprocal (right to 2^-17 at least, where 2^-12 would do), or the arithmetic would take
longer than the memory.

LARGEST_ERROR holds the measured error of each form in float32; ``benchmarks/gelu.py`` measures what each costs. The
default is ``tanh_exp``, because it has the least error and costs little more than ``tanh_rational``, the cheapest: it
gives g where g is small, and 1 - g where that is small, without subtracting from 1.

Sources: Hendrycks and Gimpel 2016; the rational tanh is that of Eigen's ``ptanh_float``.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda, float32

from numstack.device import Array, Kernel, Stream, kernel, narrow, ptx, widen
from numstack.kernels.launch import (
    are_aligned,
    ceil_div,
    check_contiguous,
    check_floats,
    check_option,
    check_shape,
    flat,
)
from numstack.kernels.variants import Variant, Variants

BLOCK = 256
VECTOR = 8  # elements of a vector
VECTORS = 2  # vectors of each array that a thread has on their way at once
VECTOR_BLOCK = 128  # threads of a block that moves vectors
TILE = VECTOR * VECTORS * VECTOR_BLOCK  # elements of such a block

SQRT_2_OVER_PI = float32(math.sqrt(2 / math.pi))
CUBIC = float32(0.044715)
SQRT_HALF = float32(math.sqrt(0.5))
MINUS_2_LOG2_E = float32(-2 / math.log(2))
INV_SQRT_2PI = float32(1 / math.sqrt(2 * math.pi))
TANH_IS_ONE = float32(
    7.99881172
)  # beyond, in float32; here the quotient of polynomials is 1 too, by fused multiply-adds
FAR = float32(10)  # beyond, the tanh gates are 0 or 1 in float32, and exp(2u) and x^3 would overflow in time


def reference(x: np.ndarray, form: str = "tanh") -> tuple[np.ndarray, np.ndarray]:
    """GELU and its derivative at x, in float64.

    Returns
    -------
    y, slope : ndarray of float64, shaped as x
    """
    x = np.asarray(x, np.float64)
    if form == "erf":
        gate = 0.5 * np.vectorize(math.erfc, otypes=[np.float64])(-x * math.sqrt(0.5))
        gate_slope = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    else:
        scale = math.sqrt(2 / math.pi)
        u = np.clip(scale * (x + 0.044715 * x**3), -300, 300)
        gate = 1 / (1 + np.exp(-2 * u))
        gate_slope = 0.5 * scale * (1 + 3 * 0.044715 * x * x) / np.cosh(u) ** 2
    return x * gate, gate + x * gate_slope


@cuda.jit(device=True)
def _inner(x):
    x = min(max(x, -FAR), FAR)
    return SQRT_2_OVER_PI * (x + CUBIC * x * x * x)


@cuda.jit(device=True)
def tanh_rational(u):
    """tanh(u) to about 4 units in the last place, by multiplications and one division."""
    u = min(max(u, -TANH_IS_ONE), TANH_IS_ONE)
    s = u * u
    p = float32(-2.76076847742355e-16)
    p = p * s + float32(2.00018790482477e-13)
    p = p * s + float32(-8.60467152213735e-11)
    p = p * s + float32(5.12229709037114e-08)
    p = p * s + float32(1.48572235717979e-05)
    p = p * s + float32(6.37261928875436e-04)
    p = p * s + float32(4.89352455891786e-03)
    q = float32(1.19825839466702e-06)
    q = q * s + float32(1.18534705686654e-04)
    q = q * s + float32(2.26843463243900e-03)
    q = q * s + float32(4.89352518554385e-03)
    return u * p / q


# What a form is made of: gates(x) gives the gate and 1 - gate; gate_slope(x, gate, 1 - gate) the gate's derivative.


@cuda.jit(device=True)
def _gates_tanh_library(x):
    half_tanh = float32(0.5) * math.tanh(_inner(x))
    return float32(0.5) + half_tanh, float32(0.5) - half_tanh


@cuda.jit(device=True)
def _gates_tanh_rational(x):
    half_tanh = float32(0.5) * tanh_rational(_inner(x))
    return float32(0.5) + half_tanh, float32(0.5) - half_tanh


@cuda.jit(device=True)
def _gates_tanh_exp(x):
    e = math.exp(float32(-2) * _inner(x))
    gate = float32(1) / (float32(1) + e)
    return gate, e * gate


@cuda.jit(device=True)
def _gates_tanh_approximate(x):
    e = ptx.exp2(MINUS_2_LOG2_E * _inner(x))
    gate = ptx.reciprocal(float32(1) + e)
    return gate, e * gate


@cuda.jit(device=True)
def _gates_erf(x):
    half_erf = float32(0.5) * math.erf(x * SQRT_HALF)
    return float32(0.5) + half_erf, float32(0.5) - half_erf


@cuda.jit(device=True)
def _gate_slope_tanh(x, gate, complement):
    x = min(max(x, -FAR), FAR)
    inner_slope = SQRT_2_OVER_PI * (float32(1) + float32(3) * CUBIC * x * x)
    return float32(2) * gate * complement * inner_slope


@cuda.jit(device=True)
def _gate_slope_erf(x, gate, complement):
    return INV_SQRT_2PI * math.exp(float32(-0.5) * x * x)


# For other kernels' epilogues; the approximate ones where results have 16 bits, on a GPU.


@cuda.jit(device=True)
def gelu_tanh(x):
    """GELU in the tanh form."""
    gate, _ = _gates_tanh_exp(x)
    return x * gate


@cuda.jit(device=True)
def gelu_tanh_approximate(x):
    """The same by one exponential and one reciprocal of the hardware."""
    gate, _ = _gates_tanh_approximate(x)
    return x * gate


@cuda.jit(device=True)
def gelu_tanh_slope(x):
    """Its derivative."""
    gate, complement = _gates_tanh_exp(x)
    return gate + x * _gate_slope_tanh(x, gate, complement)


@cuda.jit(device=True)
def gelu_tanh_slope_approximate(x):
    """The same by one exponential and one reciprocal of the hardware."""
    gate, complement = _gates_tanh_approximate(x)
    return gate + x * _gate_slope_tanh(x, gate, complement)


def _make_kernels(
    form: str, gates: Callable[..., Any], gate_slope: Callable[..., Any]
) -> tuple[Kernel, Kernel, Kernel]:
    """The three kernels of one form."""

    @kernel(name=f"gelu.forward {form}")
    def forward(x_N, y_N):
        i = cuda.grid(1)
        if i < x_N.size:
            x = widen(x_N[i])
            gate, _ = gates(x)
            y_N[i] = narrow(x * gate, y_N.dtype)

    @kernel(name=f"gelu.backward {form}")
    def backward(dy_N, x_N, dx_N):
        i = cuda.grid(1)
        if i < x_N.size:
            x = widen(x_N[i])
            gate, complement = gates(x)
            dx_N[i] = narrow(widen(dy_N[i]) * (gate + x * gate_slope(x, gate, complement)), dx_N.dtype)

    @kernel(name=f"gelu.forward_backward {form}")
    def forward_backward(x_N, dy_N, y_N, dx_N):
        i = cuda.grid(1)
        if i < x_N.size:
            x = widen(x_N[i])
            gate, complement = gates(x)
            dy = widen(dy_N[i])
            y_N[i] = narrow(x * gate, y_N.dtype)
            dx_N[i] = narrow(dy * (gate + x * gate_slope(x, gate, complement)), dx_N.dtype)

    return forward, backward, forward_backward


@functools.cache
def _vector_kernels(
    form: str, gates: Callable[..., Any], gate_slope: Callable[..., Any]
) -> tuple[Kernel, Kernel, Kernel]:
    """The three kernels of one form, a block a tile: whole tiles by vectors, the rest of the last by elements."""
    elements = VECTOR * VECTORS

    @cuda.jit(device=True)
    def load(x_N, start, x):
        for v in range(VECTORS):
            ptx.load8(x_N, start + v * VECTOR * VECTOR_BLOCK, x, VECTOR * v)

    @cuda.jit(device=True)
    def store(y_N, start, y):
        for v in range(VECTORS):
            ptx.store8(y_N, start + v * VECTOR * VECTOR_BLOCK, y, VECTOR * v)

    @cuda.jit(device=True)
    def slope(x):
        gate, complement = gates(x)
        return gate + x * gate_slope(x, gate, complement)

    @kernel(name=f"gelu.forward {form} vectors", starts_early=True)
    def forward(x_N, y_N):
        x = cuda.local.array(elements, float32)
        first = cuda.blockIdx.x * TILE
        if first + TILE <= x_N.size:
            start = first + VECTOR * cuda.threadIdx.x
            load(x_N, start, x)
            for k in range(elements):
                gate, _ = gates(x[k])
                x[k] *= gate
            store(y_N, start, x)
        else:
            for i in range(first + cuda.threadIdx.x, x_N.size, VECTOR_BLOCK):
                gate, _ = gates(widen(x_N[i]))
                y_N[i] = narrow(widen(x_N[i]) * gate, y_N.dtype)

    @kernel(name=f"gelu.backward {form} vectors", starts_early=True)
    def backward(dy_N, x_N, dx_N):
        x = cuda.local.array(elements, float32)
        dy = cuda.local.array(elements, float32)
        first = cuda.blockIdx.x * TILE
        if first + TILE <= x_N.size:
            start = first + VECTOR * cuda.threadIdx.x
            load(x_N, start, x)
            load(dy_N, start, dy)
            for k in range(elements):
                dy[k] *= slope(x[k])
            store(dx_N, start, dy)
        else:
            for i in range(first + cuda.threadIdx.x, x_N.size, VECTOR_BLOCK):
                dx_N[i] = narrow(widen(dy_N[i]) * slope(widen(x_N[i])), dx_N.dtype)

    @kernel(name=f"gelu.forward_backward {form} vectors", starts_early=True)
    def forward_backward(x_N, dy_N, y_N, dx_N):
        x = cuda.local.array(elements, float32)
        dy = cuda.local.array(elements, float32)
        first = cuda.blockIdx.x * TILE
        if first + TILE <= x_N.size:
            start = first + VECTOR * cuda.threadIdx.x
            load(x_N, start, x)
            load(dy_N, start, dy)
            for k in range(elements):
                gate, complement = gates(x[k])
                dy[k] *= gate + x[k] * gate_slope(x[k], gate, complement)
                x[k] *= gate
            store(y_N, start, x)
            store(dx_N, start, dy)
        else:
            for i in range(first + cuda.threadIdx.x, x_N.size, VECTOR_BLOCK):
                xi = widen(x_N[i])
                dyi = widen(dy_N[i])
                gate, complement = gates(xi)
                y_N[i] = narrow(xi * gate, y_N.dtype)
                dx_N[i] = narrow(dyi * (gate + xi * gate_slope(xi, gate, complement)), dx_N.dtype)

    return forward, backward, forward_backward


_PARTS = {
    "erf": (_gates_erf, _gate_slope_erf),
    "tanh_library": (_gates_tanh_library, _gate_slope_tanh),
    "tanh_rational": (_gates_tanh_rational, _gate_slope_tanh),
    "tanh_exp": (_gates_tanh_exp, _gate_slope_tanh),
}
_KERNELS = {form: _make_kernels(form, *parts) for form, parts in _PARTS.items()}
FORMS = (*_PARTS, "tanh")
DEFAULT_FORM = "tanh_exp"  # of tanh

# Of y and of the derivative, for x from -12 to 12, on CPUs and GPUs, against float64; in parts of |x| where that is
# more than 1, since rounding y to float32 alone is an error of 6e-8 |x|.
LARGEST_ERROR = {
    "erf": (1.3e-7, 1.6e-7),
    "tanh_library": (1.3e-7, 1.5e-7),
    "tanh_rational": (2.5e-7, 1.0e-6),
    "tanh_exp": (1.5e-7, 2.1e-7),
    "tanh": (1.5e-7, 2.1e-7),
}


def _launch_elements(which: int, form: str, arrays: list[Array], stream: Stream | None) -> None:
    _KERNELS[form][which][ceil_div(arrays[0].size, BLOCK), BLOCK, stream](*arrays)


def _launch_vectors(which: int, form: str, arrays: list[Array], stream: Stream | None) -> None:
    gates, gate_slope = _PARTS[form]
    if form == "tanh_exp" and all(array.itemsize == 2 for array in arrays):
        gates = _gates_tanh_approximate
    grid = ceil_div(arrays[0].size, TILE)
    _vector_kernels(form, gates, gate_slope)[which][grid, VECTOR_BLOCK, stream](*arrays)


VARIANTS = Variants(
    "gelu",
    [
        Variant(
            "thread_per_element", _launch_elements, note="The formula, neighbouring threads on neighbouring elements."
        ),
        Variant(
            "vectors_in_registers",
            _launch_vectors,
            note="16 bytes a lane, several times: enough bytes on their way to keep the memory busy.",
            supports=lambda aligned: aligned,
            made_for="gpu",
        ),
    ],
)


def _launch(
    which: int, operation: str, form: str, variant: str | None, stream: Stream | None, arrays: dict[str, Array]
) -> None:
    check_option(operation, "form", form, FORMS)
    check_floats(operation, **arrays)
    check_contiguous(operation, **arrays)
    first = next(iter(arrays.values()))
    check_shape(operation, first.shape, **arrays)
    chosen = VARIANTS.pick(variant, are_aligned(*arrays.values()))
    chosen.launch(which, DEFAULT_FORM if form == "tanh" else form, [flat(array) for array in arrays.values()], stream)


def forward(
    x: Array, y: Array, *, form: str = "tanh", variant: str | None = None, stream: Stream | None = None
) -> None:
    """y = GELU(x).

    Parameters
    ----------
    x, y : array of any one shape, float32, float16 or bfloat16 as uint16 bits, C-contiguous
        y may be x.
    form : {"tanh", "erf", "tanh_library", "tanh_rational", "tanh_exp"}
    variant : str, optional
        A name of ``VARIANTS``.

    Raises
    ------
    ShapeError, DTypeError, ConfigError
        If the arrays differ in shape, hold no floating numbers, or there is no such form.

    Notes
    -----
    Workspace: none. Deterministic: yes.
    """
    _launch(0, "gelu.forward", form, variant, stream, {"x": x, "y": y})


def backward(
    dy: Array, x: Array, dx: Array, *, form: str = "tanh", variant: str | None = None, stream: Stream | None = None
) -> None:
    """dx = dy GELU'(x).

    Parameters
    ----------
    dy, x, dx : array of any one shape, float32, float16 or bfloat16 as uint16 bits, C-contiguous
        dx may be dy or x.
    form : {"tanh", "erf", "tanh_library", "tanh_rational", "tanh_exp"}
    variant : str, optional
        A name of ``VARIANTS``.

    Raises
    ------
    ShapeError, DTypeError, ConfigError
        If the arrays differ in shape, hold no floating numbers, or there is no such form.

    Notes
    -----
    Workspace: none. Deterministic: yes.
    """
    _launch(1, "gelu.backward", form, variant, stream, {"dy": dy, "x": x, "dx": dx})


def forward_backward(
    x: Array,
    dy: Array,
    y: Array,
    dx: Array,
    *,
    form: str = "tanh",
    variant: str | None = None,
    stream: Stream | None = None,
) -> None:
    """y = GELU(x) and dx = dy GELU'(x) in one pass: four arrays moved, where the two passes move five.

    Parameters
    ----------
    x, dy, y, dx : array of any one shape, float32, float16 or bfloat16 as uint16 bits, C-contiguous
        y or dx may be x or dy.
    form : {"tanh", "erf", "tanh_library", "tanh_rational", "tanh_exp"}
    variant : str, optional
        A name of ``VARIANTS``.

    Raises
    ------
    ShapeError, DTypeError, ConfigError
        If the arrays differ in shape, hold no floating numbers, or there is no such form.

    Notes
    -----
    Workspace: none. Deterministic: yes.
    """
    _launch(2, "gelu.forward_backward", form, variant, stream, {"x": x, "dy": dy, "y": y, "dx": dx})
